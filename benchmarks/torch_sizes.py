"""Training at realistic sizes with every way to save memory, at equal memory.

`block` and the number of bytes is `rt.budget` with that budget, on the native path, `Python` the same on the Python
path. `checkpoint` is `torch.utils.checkpoint` around each block of the model, `selective` a checkpoint that keeps
matrix products, `files` writes saved tensors to files, `compile` is `torch.compile` at that `activation_memory_budget`.
After `checkpoint` and `selective` come blocks with as many bytes as these allocated, and on the Python path, which
counts storages alone, with as many bytes of these.

Each way is a process of its own, on one thread: a few timed steps (a block on the Python path has made its plan by
then), then two under torch's profiler. Memory is measured in three ways: storages, as a block on the Python path counts
them; allocations, by the profiler, but for a native block, which counts them itself; resident memory of the process, in
addition to what it was before the first step. Times are of the processor, the fastest of three steps, as ratios to
plain torch in the same run.

`python benchmarks/torch_sizes.py --into docs/results` writes torch_sizes.md and torch_sizes.json there.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import apart, arguments, facts, page, publish, say, section
from _torch_measures import allocated, files
from _torch_models import TO_TRAIN, Training, checkpointed, straight
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recompute as rc
import recompute_torch as rt

STEPS: Final = 5
WARM: Final = 2
THREADS: Final = 1
LEARNING: Final = 15
"""Steps of a block, at most, before it is timed: by then it has a plan, or will have none."""
SHARES: Final = (0.8, 0.65, 0.5)
"""Of the difference between what has to stay and the peak."""


@dataclass
class Taken:
    """What one way took. Bytes; seconds of the processor in the fastest step."""

    way: str
    seconds: float
    counted: int = 0
    """Storages; on the native path, what a block counts: all allocations."""
    allocated: int = 0
    resident: int = 0
    repeated_share: float = 0.0
    loss: float = 0.0
    failed: str = ""


_PRODUCTS: Final = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Matrix products and convolutions are kept, all else is recomputed."""
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block: Any, *given: Any) -> Any:
    """As `checkpointed`, but matrix products are kept."""
    return torch.utils.checkpoint.checkpoint(
        block, *given, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(products)
    )


RUNS: Final[dict[str, Callable[..., Any]]] = {"checkpoint": checkpointed, "selective": selective}
"""How a way runs the blocks of a model; the others run them as they are."""

BLOCKS: Final = ("block", "Python")
"""A block on the native path, and one on the Python path."""

OTHERS: Final = ("checkpoint", "selective", "files", "compile 0.5")


def ways(model: str, way: str, small: bool, folder: str) -> tuple[Training, AbstractContextManager[Any]]:
    """A training and the context of its steps."""
    torch.manual_seed(0)
    kind, _, amount = way.partition(" ")
    training = Training(TO_TRAIN[model](RUNS.get(kind, straight), small))
    if kind == "files":
        return training, files(folder)
    if kind == "compile":
        torch._functorch.config.activation_memory_budget = float(amount)
        training.module = torch.compile(training.module, backend="aot_eager")
    if kind in BLOCKS:
        return training, rt.budget(None if amount == "none" else int(amount), native=kind == "block")
    return training, nullcontext()


def measure(model: str, way: str, small: bool, steps: int) -> Taken:
    """In a process of its own: time and resident memory first, then storages and allocations."""
    torch.set_num_threads(THREADS)
    with TemporaryDirectory() as folder:
        training, around = ways(model, way, small, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        taken = Taken(way, 0.0)
        seconds = []
        losses = []
        try:
            with around as block:
                for _ in range(LEARNING if isinstance(block, rt.budget) else 0):
                    losses.append(training.step().item())
                    if not block.stats().foresight.startswith(("recording", "planning")):
                        break
                for _ in range(steps):
                    began = process_time()
                    losses.append(training.step().item())
                    seconds.append(process_time() - began)
                taken.loss = losses[steps - 1]  # others take no more steps
                if isinstance(block, rt.budget):
                    stats = block.stats()
                    taken.counted = stats.peak
                    recent = block.report().steps[WARM - steps :]
                    total = sum(step.compute for step in recent) or 1.0
                    taken.repeated_share = sum(step.repeated_compute for step in recent) / total
        except (rc.BudgetError, RuntimeError) as error:
            taken.failed = type(error).__name__
            return taken
        taken.seconds = min(seconds[WARM:] or seconds)
        taken.resident = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if not taken.counted and not way.startswith(("compile", "files")):
            again, _ = ways(model, way, small, folder)
            with rt.budget(native=False) as counting:
                for _ in range(2):
                    again.step()
                taken.counted = counting.stats().peak
        if way.startswith("block"):
            taken.allocated = taken.counted
            return taken
        again, around = ways(model, way, small, folder)

        def two() -> None:
            with around:
                for _ in range(2):
                    again.step()

        taken.allocated = allocated(two)[1] + sum(parameter.nbytes for parameter in again.module.parameters())
    return taken


def alone(model: str, way: str, small: bool, steps: int) -> Taken:
    """The same, from outside."""
    try:
        taken = apart(measure, model, way, small, steps)
    except Exception as error:  # what one way cannot do says nothing about the next
        taken = Taken(way, 0.0, failed=f"{type(error).__name__}: {error}"[:80])
    say(f"{model}, {way}: {taken.failed or f'{taken.seconds:.3f} s, {taken.counted / 1e6:.0f} MB counted'}")
    return taken


def all_of(model: str, small: bool, steps: int) -> list[Taken]:
    """Plain, shares of its activations, and every other way, each with blocks of as much memory."""
    plain = alone(model, "plain", small, steps)
    found = [plain, *(alone(model, f"{kind} none", small, steps) for kind in BLOCKS)]
    stays = Training(TO_TRAIN[model](straight, small)).stays
    for share in SHARES:
        budget = int(stays + share * (plain.allocated - stays))
        found.append(alone(model, f"block {budget}", small, steps))
    for other in OTHERS:
        theirs = alone(model, other, small, steps)
        found.append(theirs)
        if theirs.failed or not theirs.counted:
            continue
        for kind, budget in zip(BLOCKS, (theirs.allocated, theirs.counted), strict=True):
            found.append(alone(model, f"{kind} {budget}", small, steps))
    return found


def parts(found: dict[str, list[Taken]]) -> list[str]:
    """A table for each model, times as multiples of plain torch."""
    parts = []
    for model, runs in found.items():
        plain = runs[0]
        rows = [
            (
                run.way, f"{run.counted / 1e6:.0f}", f"{run.allocated / 1e6:.0f}", f"{run.resident / 1e6:.0f}",
                run.failed or f"{run.seconds / plain.seconds:.2f}", f"{run.repeated_share:.0%}",
                "" if run.failed else "yes" if run.loss == plain.loss else "no",
            )
            for run in runs
        ]  # fmt: skip
        head = " | storages, MB | allocated, MB | resident, MB | time | repeated | same loss"
        parts.append(section(TO_TRAIN[model].title, f"Plain torch: {plain.seconds:.3f} s a step.", head, rows))
    return parts


def main() -> None:
    parser = arguments(__doc__, into=None)
    parser.add_argument("--models", default=",".join(TO_TRAIN), help="some of these, separated by commas; %(default)s")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    machine = facts("torch", threads=str(THREADS))
    found = {name: all_of(name, options.small, options.steps) for name in options.models.split(",")}
    text = page("PyTorch at realistic sizes", __doc__, *parts(found), machine=machine)
    figures = {"machine": machine, "models": {name: [asdict(run) for run in runs] for name, runs in found.items()}}
    publish(options.into, "torch_sizes", text, figures)


if __name__ == "__main__":
    main()
