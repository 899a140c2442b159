"""What the benchmark of PyTorch measures of a training: bytes, seconds, bits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import recompute as rc
import recompute_torch as rt

sys.path.append(str(Path(__file__).resolve().parent.parent / "docs" / "examples"))

from _torch_training import Task  # it lies in the examples

Make = Callable[[], Task]


@dataclass
class Taken:
    """What a few steps took. Bytes, seconds of the processor."""

    budget: int | None = None
    peak: int = 0
    """The most that the block's allocator had given out, what kernels needed for a moment included."""
    overshoot: int = 0
    seconds: float = 0.0
    """Of one step; the least of those that were timed."""
    operations: int = 0
    again: int = 0
    overhead: float = 1.0
    """Compute of all runs of operators over that of the first ones."""
    same: bool = True
    """Losses, parameters, buffers, gradients and the optimizer's memory are those of plain torch, to the last bit."""
    failed: str | None = None


@dataclass
class Reference:
    """Plain torch."""

    seconds: float
    allocated: int
    state: dict[str, Tensor] = field(repr=False)


def files(folder: str) -> AbstractContextManager[Any]:
    """What autograd saves lies in files of a folder until it is needed."""
    count = 0

    def pack(tensor: torch.Tensor) -> Path:
        nonlocal count
        count += 1
        path = Path(folder) / str(count)
        torch.save(tensor, path)
        return path

    def unpack(path: Path) -> torch.Tensor:
        found: torch.Tensor = torch.load(path)
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Late(KeyboardInterrupt):
    """It took longer than it may. As an interrupt it is raised anywhere, in the middle of an operator, too."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Gives up after some seconds."""

    def late(*given: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def allocated(run: Callable[[], None]) -> int:
    """The most bytes that were allocated at once during a run, beyond what there was before, by torch's profiler."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = list(found.profiler.kineto_results.experimental_event_tree())
    changes: list[tuple[int, int]] = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    total = most = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        total += size
        most = max(most, total)
    return most


@contextmanager
def quiet() -> Iterator[None]:
    """Without the lines that the profiler writes on standard error from C++."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def begin(make: Make) -> Task:
    """The same task each time, and the same random numbers in its steps."""
    torch.manual_seed(0)
    task = make()
    torch.manual_seed(1)
    return task


def reference(make: Make, steps: int) -> Reference:
    """Plain torch: time and bits of a run, allocations of another."""
    task = begin(make)
    seconds, losses = timed(task, steps)
    state = losses | {name: tensor.detach().clone() for name, tensor in task.state().items()}
    return Reference(seconds, peak(make), state)


def peak(make: Make) -> int:
    """The most bytes that two steps of a training have allocated, the making of the model included."""

    def steps() -> None:
        task = begin(make)
        for _ in range(2):
            task.step()

    return allocated(steps)


def timed(task: Task, steps: int) -> tuple[float, dict[str, Tensor]]:
    """Seconds of the fastest step but the first, and the losses of all."""
    losses: dict[str, Tensor] = {}
    best = float("inf")
    for number in range(steps):
        began = process_time()
        losses[f"loss {number}"] = task.step()
        if number:
            best = min(best, process_time() - began)
    return best, losses


def within(make: Make, budget: int | None, plain: Reference, steps: int, most: float = 60.0) -> Taken:
    """The same steps in a block. What finds no room, or takes longer than `most` seconds, says so in `failed`."""
    taken = Taken(budget)
    try:
        task = begin(make)
        with rt.budget(budget, native=True) as block, patience(most):
            taken.seconds, losses = timed(task, steps)
            stats = block.stats()
        state = losses | task.state()
        taken.same = list(state) == list(plain.state) and all(
            torch.equal(tensor, plain.state[name]) for name, tensor in state.items()
        )
        taken.peak, taken.overshoot = stats.peak, stats.overshoot
        taken.operations, taken.again, taken.overhead = stats.operations, stats.rematerializations, stats.overhead
    except rc.BudgetError:
        taken.failed = "no room"
    except Late:
        taken.failed = "too slow"
    return taken


def fits(make: Make, budget: int, most: float) -> Taken | None:
    """Three steps within a budget, if there is room and patience for them."""
    task = begin(make)
    try:
        with rt.budget(budget, native=True) as block, patience(most):
            seconds, _ = timed(task, 3)
            stats = block.stats()
    except (rc.BudgetError, Late):
        return None
    return Taken(
        *(budget, stats.peak, stats.overshoot, seconds, stats.operations, stats.rematerializations, stats.overhead)
    )
