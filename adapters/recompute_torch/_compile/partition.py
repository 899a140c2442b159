"""What AOTAutograd asks for: a joint graph goes in, a forward and a backward within the budget come out.

Plans are remembered by program: more memory never costs more, and the next process need not plan again. A plan that
fits a budget fits every larger one. So it is a candidate there; and what is chosen takes neither more time nor more
floating-point operations than any plan that was chosen for less in this process. What inductor has compiled is kept
beside its own cache, for the next one. The first step through a graph is measured.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch._aot_autograd.graph_compile import is_opaque_node
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.fx.experimental.proxy_tensor import is_sym_node

from recompute import planners
from recompute.text import format_bytes
from recompute.traces import Program
from recompute_torch._compile.costs import Allocations, Meter, Prices, Run
from recompute_torch._compile.emit import Emission, crossing
from recompute_torch._compile.program import Joint, Price, read, with_states
from recompute_torch._compile.report import GraphPlan, floor, holders, repeated

_PROBES: Final = 8  # budgets that are tried to say which works
_PROBE: Final = 0.25  # of the effort, for each plan that only tells which budget works
_OVER: Final = 1.05  # times the budget that a peak may be
_FORWARDS: Final = 8  # of a graph that are watched until one of their backwards runs
_BATCH_NORM_BACKWARD: Final = torch.ops.aten.native_batch_norm_backward.default
_FORMAT: Final = 3  # of the files; since 3 saved tensors that are read in part count whole
_MAX_PLANS: Final = 64
"""Plans that are remembered, of all programs: some hundred kilobytes for some thousand operators."""

Parts = tuple[fx.GraphModule, fx.GraphModule]
Amount = Callable[[int], int]
"""Bytes of the peak without a plan -> those that are allowed."""
Reader = Callable[[fx.Graph, int, Callable[[fx.Node], Price]], Joint]


class TooSmall(Exception):
    """The budget holds no plan: what would, and what is in the way, which is found out when it is read."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def __str__(self) -> str:
        return self._text()


class Partitioner:
    """Splits joint graphs."""

    def __init__(self, prices: Prices, effort: float, read: Reader = read) -> None:
        self._prices = prices
        self._effort = effort
        self._read = read

    def split(self, module: fx.GraphModule, results: int, budget: Amount, plan: GraphPlan, _: object = None) -> Parts:
        """The forward, whose first outputs are the `results`, and the backward; `plan` is filled. Raises TooSmall."""
        start = perf_counter()
        _without_statistics(module.graph)
        module.graph.eliminate_dead_code()
        joint = self._read(module.graph, results, self._prices)
        plan.plain = planners.peak(joint.program)
        plan.budget = budget(plan.plain)
        order: Sequence[int] = range(len(joint.calls))
        emission = Emission(joint, order)
        emitted = self._emitted(joint, emission)
        plan.saved_plain = saved(emitted)
        if planners.peak(emitted.program) > plan.budget:
            fitted = self.fitted(joint, plan.budget)
            if fitted is None:
                allowed = plan.budget
                raise TooSmall(lambda: self.advice(joint, allowed, self.least(joint, allowed)))
            order, emission = fitted, Emission(joint, fitted)
            emitted = self._emitted(joint, emission)
        plan.planned, plan.saved = planners.peak(emitted.program), saved(emitted)
        plan.operators = len(joint.calls)
        plan.again = repeated(joint, order)
        took = joint.program.cost_of(order)
        plan.overhead = took / (joint.program.model_time or 1.0)
        plan.work = took * joint.program.unit
        plan.flops = self.flops(joint, order)
        parts = extracted(module, emission.graph, results)
        plan.seconds = perf_counter() - start
        return parts

    def fitted(self, joint: Joint, budget: int) -> tuple[int, ...] | None:
        """The cheapest order that was found; the peak of the graph that follows it is within the budget.

        With more memory it never costs more than it did with less in this process.
        """
        if budget < floor(joint).nbytes:
            return None
        program, effort = identity(joint.program), self._effort
        chosen = _known_plans.get((program, budget, effort))
        if chosen is None:
            known = [plan for (of, _, _), plan in _known_plans.items() if of == program and plan.peak <= budget]
            starts = [(), best(known, []).order] if known else [()]
            new = [plan for start in starts if (plan := self._searched(joint, budget, effort, start)) is not None]
            if not known and not new:
                return None
            chosen = _known_plans[program, budget, effort] = best(known, new)
            while len(_known_plans) > _MAX_PLANS:
                del _known_plans[next(iter(_known_plans))]
        return chosen.order

    def flops(self, joint: Joint, order: Iterable[int]) -> float:
        """Of all runs."""
        flops = [self._prices(node).flops for node in joint.calls]
        return sum(flops[number] for number in order)

    def _searched(self, joint: Joint, budget: int, effort: float, start: Sequence[int] = ()) -> KnownPlan | None:
        """A plan that fits once it is emitted, from an order of runs if there is one. None: none was found.

        If the states of generators are too much for it, they are planned for, too.
        """
        for program in (joint.program, with_states(joint)):
            with suppress(planners.PlanError):
                if start:
                    plan = planners.replan(program, budget, start, effort)
                else:
                    plan = planners.plan(program, budget, effort=effort)
                if plan is None:
                    continue
                peak = planners.peak(self._emitted(joint, Emission(joint, plan.order)).program)
                if peak <= budget:
                    return KnownPlan(
                        tuple(plan.order), peak, joint.program.cost_of(plan.order), self.flops(joint, plan.order)
                    )
        return None

    def least(self, joint: Joint, allowed: int) -> int:
        """About the least bytes that a plan is found for where none fits those allowed: of some, always the same."""

        def fits(given: int) -> bool:
            return given > allowed and self._searched(joint, given, _PROBE * self._effort) is not None

        low, once = floor(joint).nbytes - 1, floor(joint, repeats=False).nbytes - 1
        high = planners.peak(joint.program)
        if once > low:  # mostly making gradients again is no help
            low, high = (low, once) if fits(once) else (once, high)
        return planners.smallest(fits, low, high, tries=_PROBES)

    def advice(self, joint: Joint, allowed: int, least: int, share: float = 1.0) -> str:
        """What to say where no plan fits the bytes allowed, which are a share of the budget, but one for the least."""
        peak, enough = planners.peak(joint.program), ceil(least / share)
        return (
            f"the budget of {format_bytes(round(allowed / share))} is too small: the least that a plan was found for "
            f"is {format_bytes(enough)} ({enough} bytes); without a plan the peak is "
            f"{format_bytes(peak)}; {holders(joint)}; give at least that, or make the batch "
            "smaller"
        )

    def _emitted(self, joint: Joint, emission: Emission) -> Joint:
        """What was emitted, read again."""
        return self._read(emission.graph, joint.results, as_before(self._prices, emission))


def as_before(prices: Prices, emission: Emission) -> Callable[[fx.Node], Price]:
    """The prices of what was emitted: those of the nodes that it runs."""
    return lambda node: prices(emission.origin.get(node, node))


def _without_statistics(graph: fx.Graph) -> None:
    """In training the backward of a batch norm does not read the running statistics: it need not keep them."""
    for node in graph.find_nodes(op="call_function", target=_BATCH_NORM_BACKWARD):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def saved(joint: Joint) -> int:
    """Bytes of what the forward of a split graph makes and its backward uses."""
    held = {value for node in crossing(joint.graph, joint.results) for value in joint.holds[node] if value}
    return sum(map(joint.builder.nbytes, held))


def extracted(module: fx.GraphModule, graph: fx.Graph, results: int) -> Parts:
    """Torch's own extraction, with all that crosses saved."""
    crossed = crossing(graph, results)
    symbols = [node for node in crossed if is_sym_node(node)]
    opaque = [node for node in crossed if is_opaque_node(node)]
    tensors = [node for node in crossed if node not in symbols and node not in opaque]
    joint = fx.GraphModule(module, graph)
    parts = _extract_fwd_bwd_modules(joint, tensors, symbols, opaque, num_fwd_outputs=results)
    return parts[0], parts[1]


Watched = Callable[[bool, Run, Sequence[str]], Run]
"""Takes a part: whether it is the backward, how it runs, and the names of its arguments. How it runs, watched."""


def watching(plan: GraphPlan, meter_of_step: type[Meter | Allocations]) -> Watched:
    """Measures one step through a graph: a forward, and the backward that takes what it saved."""
    forwards: deque[Meter | Allocations] = deque(maxlen=_FORWARDS)

    def watched(late: bool, run: Run, placeholders: Sequence[str]) -> Run:
        new = [number for number, name in enumerate(placeholders) if "tangents" in name]
        saved = [number for number, name in enumerate(placeholders) if not name.startswith(("tangents", "primals"))]

        def boxed(args: list[Any]) -> Any:
            if plan.peak is not None or (late and not forwards):
                return run(args)
            if not late:
                forwards.append(meter_of_step())
                return forwards[-1].watch(run, args, [])
            kept = [args[number] for number in saved]
            meter = next((meter for meter in reversed(forwards) if meter.made(kept)), forwards[-1])
            forwards.clear()
            del kept
            result = meter.watch(run, args, new)
            plan.peak = meter.peak or None
            if meter.peak > _OVER * plan.budget:
                warnings.warn(
                    f"{plan.name} took {format_bytes(meter.peak)}, more than its budget of "
                    f"{format_bytes(plan.budget)}; planned were {format_bytes(plan.planned)}, for the shapes that it "
                    "was compiled with",
                    stacklevel=2,
                )
            return result

        boxed._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows it
        return boxed

    return watched


class Boxed(Partitioner):
    """A compiler: how joint graphs are split, what becomes of the parts, and how a step is watched."""

    meter = Meter

    def compile(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        _: GraphPlan,
        partition: Callable[..., Parts],
        watched: Watched,
    ) -> Any:
        """The graph, split by `partition`."""

        def part(late: bool, graph: fx.GraphModule, given: Any) -> Run:
            names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
            return watched(late, boxed_nop(graph, given), names)

        compiled = aot_autograd(
            fw_compiler=partial(part, False),
            bw_compiler=partial(part, True),
            inference_compiler=boxed_nop,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        return compiled(module, inputs)


@dataclass(frozen=True)
class KnownPlan:
    """A plan that fits."""

    order: tuple[int, ...]
    peak: int
    """Bytes of what was emitted."""
    cost: float
    flops: float


_known_plans: Final[dict[tuple[str, int, float], KnownPlan]] = {}
"""(identity of the program, bytes that were allowed, effort) -> what was chosen, oldest first."""


def identity(program: Program) -> str:
    """Programs are the same if nothing that a planner reads differs. O(program)."""
    calls = [(call.name, call.arguments, call.results, call.cost) for call in program.calls]
    return sha256(repr((calls, program.sizes, program.storages, program.steps, program.outputs)).encode()).hexdigest()


def best(known: Sequence[KnownPlan], new: Sequence[KnownPlan]) -> KnownPlan:
    """The cheapest that takes no more time and operations than any known one; if there is none, the cheapest."""
    cost, flops = min([plan.cost for plan in known], default=inf), min([plan.flops for plan in known], default=inf)
    plans = [*new, *known]
    good = [plan for plan in plans if plan.cost <= cost and plan.flops <= flops]
    return min(good or plans, key=lambda plan: (plan.cost, plan.flops))


@dataclass(frozen=True)
class Scheduled:
    """A plan as inductor has scheduled it, for kernels that fuse within a span."""

    budget: int
    effort: float
    order: tuple[int, ...]
    span: int
    peak: int
    """Bytes at the worst kernel."""


def scheduled(program: Program, folder: str) -> list[Scheduled]:
    """What was kept of a program, whatever its operators cost: they are timed anew in each process. Oldest first."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # none, or none that this version reads
        text = _file(program, folder).read_text(encoding="utf-8")
        return [Scheduled(**{**plan, "order": tuple(plan["order"])}) for plan in json.loads(text)]
    return []


def keep_scheduled(program: Program, folder: str, plan: Scheduled) -> None:
    """For the next question, in this process or another. Where the folder cannot be written to, nothing is kept."""
    plans = [old for old in scheduled(program, folder) if (old.budget, old.effort) != (plan.budget, plan.effort)]
    with suppress(OSError):
        file = _file(program, folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent, prefix=file.stem) as work:  # so that half a file is never seen
            new = Path(work, file.name)
            new.write_text(json.dumps([asdict(one) for one in [*plans, plan][-_MAX_PLANS:]]), encoding="utf-8")
            os.replace(new, file)


def _file(program: Program, folder: str) -> Path:
    calls = [(call.name, call.arguments, call.results) for call in program.calls]
    read = (torch.__version__, _FORMAT, calls, program.sizes, program.storages, program.steps, program.outputs)
    return Path(folder, "recompute", sha256(repr(read).encode()).hexdigest() + ".json")
