"""Compiled steps within a budget, compared with every other way to save memory that torch has, at equal measured peaks.

Memory is what torch's allocator holds in addition to what there was before the step, by torch's profiler. *Kept* is
measured at the end of the forward pass, *peak* is the maximum, with gradients and with what operators need while they
run. *Extra FLOPs* are those in excess of eager mode, by torch's formulas, which count only matrix products and
convolutions. Steps are timed in turns, and the fastest of a few counts. Compare times only within a table, and ignore
small differences if the machine was busy.

*min-cut* is torch's default partitioner at the given `activation_memory_budget`. For each other way, `rt.compile` was
given the measured peak of that way as its budget. So was a block (`rt.budget`, on the Python path), in addition to
parameters and batch; a block does not count what operators need while they run. With `torch.utils.checkpoint` batch
norm updates its statistics twice, which is why its bits differ.

With `--inductor` everything is compiled by inductor, and results are compared with its own. There a *no* may come from
kernels that round differently or from different random numbers; the number after it is the largest difference of a
gradient, as a share of the largest gradient of that parameter. The note gives the split that was chosen, and the
estimates of the plan: *planned* is its peak.

`python benchmarks/torch_compile.py --into docs/results` writes torch_compile.md there, with `--inductor --models
gpt2,unet,resnet18,vit` torch_inductor.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import FunctionType
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch  # after the number of threads
import torch._dynamo.backends.debugging as debugging
from _common import arguments, facts, page, say, section, write
from _torch_measures import FORWARD_IS_OVER, allocated
from _torch_models import TO_COMPILE, Step, checkpointed, straight
from _torch_modules import Run
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import recompute as rc
import recompute_torch as rt


class Counter(TorchDispatchMode):
    """Adds up floating-point operations by torch's formulas.

    Torch's own counter refuses higher-order operators, such as those in the graph of a compiled checkpoint.
    """

    supports_higher_order_operators = True
    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=found)
        return found


plainly = debugging.boxed_nop
counted: list[float] | None = None
"""Floating-point operations inside of compiled graphs; None: they are not counted now."""


def counting(module: Any, inputs: Any) -> Any:
    """What runs every compiled graph here; a mode around the step would have it run in eager mode instead."""
    inner = plainly(module, inputs)

    def run(args: Any) -> Any:
        if counted is None:
            return inner(args)
        with Counter() as counter:
            found = inner(args)
        counted.append(counter.total)
        return found

    run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows it
    return run


debugging.boxed_nop = counting

RATIOS: Final = (0.5, 0.25, 0.0)
"""Of `activation_memory_budget`; 1 is the default."""
SHARES: Final = (0.6, 0.4)
"""Of the plain peak, for `rt.compile` by itself."""
ROUNDS: Final = 3
ROUNDS_INDUCTOR: Final = 10  # there are fewer ways

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Way:
    """One way to run the step, and what it took."""

    name: str
    step: Step
    loss: Loss
    """The step as it runs."""
    run: Callable[[], Tensor] | None
    first: float = 0.0
    """Seconds of the first call: compiling and planning."""
    kept: int = 0
    """Bytes at the end of the forward."""
    peak: int = 0
    flops: float = 0.0
    seconds: float = float("inf")
    same: bool = True
    off: float = 0.0
    """The largest difference of a result, as a share of the largest of its elements."""
    failed: str = ""
    note: str = ""


@dataclass
class Bench:
    """One model, and every way to run it."""

    make: Callable[[Run, bool], Step]
    quick: bool
    counts: bool = True
    """Whether operators are counted: those inside of kernels are not seen."""
    ways: list[Way] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)

    def add(self, name: str, loss_of: Callable[[Step], Loss] = lambda step: step, *, blocks: Run = straight) -> Way:
        """Run a new step three times: to compile, for bytes, for operations. `blocks`: how those of the model run."""
        torch.manual_seed(0)
        step = self.make(blocks, self.quick)
        loss = loss_of(step)

        def run() -> Tensor:
            step.module.zero_grad()
            found = loss(step.x, step.y)
            with record_function(FORWARD_IS_OVER):
                pass
            found.backward()  # type: ignore[no-untyped-call]  # as it is in torch
            return found.detach()

        say(f"  {name}")
        way = Way(name, step, loss, run)
        self.ways.append(way)
        torch.manual_seed(1)
        start = perf_counter()
        try:
            with nullcontext() if self.counts else fresh_cache():
                found = run()
        except Exception as error:  # some cannot compile some models
            way.run, way.failed = None, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
            return way
        way.first = perf_counter() - start
        state = [
            found,
            *[parameter.grad.clone() for parameter in step.module.parameters() if parameter.grad is not None],
        ]
        state += [buffer.clone() for buffer in step.module.buffers()]
        self.expected = self.expected or state
        way.same = all(torch.equal(one, two) for one, two in zip(state, self.expected, strict=True))
        way.off = max(
            float((one - two).abs().max() / two.abs().max().clamp(min=1e-8))
            for one, two in zip(state, self.expected, strict=True)
        )
        step.module.zero_grad()
        way.kept, way.peak = allocated(run)
        way.flops = flops(run) if self.counts else 0.0
        return way

    def time(self, rounds: int) -> None:
        """All ways in turns."""
        for _ in range(2 if self.quick else rounds):
            for way in self.ways:
                if way.run is not None:
                    start = perf_counter()
                    way.run()
                    way.seconds = min(way.seconds, perf_counter() - start)


def flops(run: Callable[[], Any]) -> float:
    """Floating-point operations of a step, in compiled graphs or, if it has none, altogether."""
    global counted
    counted = []
    run()
    inside, counted = sum(counted), None
    if inside:
        return inside
    with Counter() as counter:
        run()
    return counter.total


@contextmanager
def ratio(share: float) -> Iterator[None]:
    with torch._functorch.config.patch(activation_memory_budget=share):
        yield


def ours(bench: Bench, name: str, budget: int | float, compiler: str = "boxed") -> None:
    """`rt.compile` with a budget: bytes, or a float for a share of the plain peak."""
    named: dict[str, Any] = {"of_peak" if isinstance(budget, float) else "budget": budget}
    way = bench.add(name, lambda step: rt.compile(alone(step), **named, compiler=compiler))
    for plan in rt.plans(way.loss):
        way.note = f"planned {plan.planned / 1e6:.1f} MB in {plan.seconds:.1f} s, {sum(plan.again.values())} reruns"
        if compiler == "inductor":
            way.note = f"{plan.split}: {way.note}, overhead {plan.overhead:.3f}"


def measure(make: Callable[[Run, bool], Step], quick: bool) -> Bench:
    bench = Bench(make, quick)
    plain = bench.add("eager")
    bench.add("aot_eager (min-cut at 1)", by("aot_eager"))
    for share in RATIOS:
        with ratio(share):
            bench.add(f"min-cut at {share}", by("aot_eager"))
    bench.add("checkpoint per block", blocks=checkpointed)
    rivals = [way for way in bench.ways if way.run is not None and way is not plain]
    for share in SHARES:
        ours(bench, f"**rt.compile** at {share:.0%}", share)
    seen: set[int] = set()
    for way in rivals:
        if way.peak < 0.98 * plain.peak and way.peak not in seen:
            seen.add(way.peak)
            ours(bench, f"**rt.compile** at the peak of {way.name}", way.peak)
            block(bench, f"rt.budget at the peak of {way.name}", way.peak)
    bench.time(ROUNDS)
    return bench


def measure_inductor(make: Callable[[Run, bool], Step], quick: bool) -> Bench:
    bench = Bench(make, quick, counts=False)
    plain = bench.add("inductor (min-cut at 1)", by("inductor"))
    bench.add("eager")
    ours(bench, "**rt.compile** at 100%", 1.0, compiler="inductor")
    for share in RATIOS[:2]:
        with ratio(share):
            rival = bench.add(f"min-cut at {share}", by("inductor"))
        if rival.run is not None and rival.peak < 0.98 * plain.peak:
            ours(bench, f"**rt.compile** at the peak of {rival.name}", rival.peak, compiler="inductor")
    bench.time(ROUNDS_INDUCTOR)
    return bench


def by(backend: str) -> Callable[[Step], Loss]:
    """Has a step compiled."""
    return lambda step: torch.compile(alone(step), backend=backend)


def alone(step: Step) -> Loss:
    """A function with code of its own: what dynamo compiles belongs to code, and there are many ways here."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return step(x, y)

    return FunctionType(loss.__code__.replace(co_name="loss_of"), globals(), "loss_of", None, loss.__closure__)


def block(bench: Bench, name: str, peak: int) -> None:
    """A block whose budget leaves as many bytes in addition to parameters and batch."""
    way = bench.add(name)
    step, inner = way.step, way.run
    assert inner is not None, "in plain torch it runs"

    def run() -> Tensor:
        step.module.zero_grad()
        with rt.budget(peak + step.stays, native=False) as given:
            found = inner()
            stats = given.stats()
            way.note = f"{stats.rematerializations} reruns, {stats.overhead - 1:.1%} of the compute"
            return found

    way.run = run
    start = perf_counter()
    try:
        torch.manual_seed(1)
        run()
        way.first = perf_counter() - start
        step.module.zero_grad()
        way.kept, way.peak = allocated(run)
        way.flops = 0.0
    except rc.BudgetError:
        way.run, way.failed = None, "does not fit"


def table(title: str, bench: Bench) -> str:
    """A line for each way: its name, what it took, and a note."""
    plain, base = bench.ways[:2] if bench.counts else bench.ways[:1] * 2
    first, second = (way.name.partition(" ")[0] for way in (plain, base))
    cells: dict[str, Callable[[Way], str]] = {
        "kept, MB": lambda way: f"{way.kept / 1e6:.1f}",
        "peak, MB": lambda way: f"{way.peak / 1e6:.1f}",
        "extra FLOPs": lambda way: f"{way.flops / plain.flops - 1:+.1%}" if way.flops else "",
        f"step / {second}": lambda way: f"{way.seconds / base.seconds:.2f}",
        "first call, s": lambda way: f"{way.first:.1f}",
        f"same bits as {first}": lambda way: "yes" if way.same else "**no**" if bench.counts else f"no, {way.off:.0e}",
    }
    if not bench.counts:
        del cells["extra FLOPs"]
    lines = []
    for way in bench.ways:
        told = ["-"] * len(cells) if way.run is None else [cell(way) for cell in cells.values()]
        lines.append([way.name, *told, way.failed if way.run is None else way.note])
    return section(title, f"A step of {second}: {base.seconds:.3f} s.", ["way", *cells, "note"], lines)


def main() -> None:
    parser = arguments(__doc__, into=None, quick=True)
    parser.add_argument("--models", default=",".join(TO_COMPILE))
    parser.add_argument("--inductor", action="store_true")
    given = parser.parse_args()
    name, title, measured = "torch_compile", "torch.compile within a budget", measure
    if given.inductor:
        name, title, measured = "torch_inductor", "torch.compile with inductor, within a budget", measure_inductor
    torch.set_num_threads(2)
    machine = facts("torch")
    parts: list[str] = []
    for model in given.models.split(","):
        say(model)
        torch.compiler.reset()  # else shapes that differ between models count as shapes that change
        parts.append(table(TO_COMPILE[model].title, measured(TO_COMPILE[model], given.quick)))
        print(parts[-1], flush=True)
        write(given.into, name, page(title, __doc__, *parts, machine=machine))  # after each, since they take minutes


if __name__ == "__main__":
    main()
