"""What the benchmark of PyTorch measures of a training: bytes, seconds, bits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any, Final

import torch
from _common import ROOT
from torch import Tensor
from torch._C import _autograd, _profiler

import recompute as rc
import recompute_torch as rt

sys.path.append(str(ROOT / "docs" / "examples"))

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


FORWARD_IS_OVER: Final = "the forward is over"
"""What a step records there (`torch.profiler.record_function`), for `allocated`."""


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes in use at the end of the forward, and at most, beyond those before, by the allocator's own account."""
    state, options = _profiler.ProfilerState.CPU, _profiler._ExperimentalConfig()
    _autograd._enable_profiler_legacy(_profiler.ProfilerConfig(state, False, True, False, False, False, options))
    try:
        run()
    finally:
        threads = _autograd._disable_profiler_legacy()
    used = most = kept = 0
    for event in threads[0]:
        if str(event.kind()) == "memory_alloc":
            used += event.cpu_memory_usage()
            most = max(most, used)
        elif event.name() == FORWARD_IS_OVER:
            kept = used
    return kept, most


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

    return allocated(steps)[1]


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


def within(make: Make, budget: int | None, plain: Reference | None, steps: int, most: float = 60.0) -> Taken:
    """The same steps in a block. What finds no room, or takes longer than `most` seconds, says so in `failed`.

    `plain`: what the bits should be; None: that is not looked at.
    """
    taken = Taken(budget)
    try:
        task = begin(make)
        with rt.budget(budget, native=True) as block, patience(most):
            taken.seconds, losses = timed(task, steps)
            stats = block.stats()
        if plain is not None:
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
