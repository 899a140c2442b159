"""Which split of a graph inductor gets: that of torch's own partitioner if it fits, else the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from recompute import planners
from recompute_torch._compile.costs import Prices
from recompute_torch._compile.emit import crossing
from recompute_torch._compile.fusion import mark, read_fused
from recompute_torch._compile.mincut import min_cut
from recompute_torch._compile.overwritten import keep_overwritten
from recompute_torch._compile.partition import Partitioner, Parts, TooSmall, as_before, extracted, saved
from recompute_torch._compile.program import Joint, Price, describe, repeatable, seeded
from recompute_torch._compile.report import PLANNED, GraphPlan
from recompute_torch._compile.schedule import SPANS, estimate
from recompute_torch._compile.telling import floor, repeated

_RATIOS: Final = (0.5, 0.25, 0.13)  # of torch's partitioner, where no plan was found; each takes as long as a plan
_PROBES: Final = 2  # plans, each for less, until what inductor makes of one fits
_SPARE: Final = 0.005  # of what is allowed: for what kernels need beside their results
_HIGH: Final = 1.25  # times what it really is, that the peak of kernels may be taken for


@dataclass
class Choice:
    """A way to split a step, and what it takes as kernels."""

    name: str
    peak: int
    saved: int
    cost: float
    again: Counter[str]
    parts: Parts
    right: bool
    """Whether its gradients are those of the forward."""
    span: int | None = None
    """Over which inductor may fuse; see `fused_nearby`."""


class FusedPartitioner:
    """Splits joint graphs for inductor."""

    def __init__(self, prices: Prices, effort: float, compile_inner: Callable[..., Any]) -> None:
        self._prices = prices
        self._effort = effort
        self._compile_inner = compile_inner
        self._ours = Partitioner(prices, effort, read_fused)

    def split(
        self,
        module: fx.GraphModule,
        results: int,
        budget: Callable[[int], int],
        plan: GraphPlan,
        lasting: Sequence[int] | None,
    ) -> Parts:
        """The forward and the backward; `plan` hears of them. Raises TooSmall.

        What torch does by default is taken if it fits, else the plan, and where there is none, what torch does at some
        ratio. Of what torch does, what would change gradients is not taken.
        """
        start = perf_counter()
        module.graph = fx_graph_cse(module.graph)  # as torch's partitioner does
        module.graph.eliminate_dead_code()
        keep_overwritten(module.graph, results)
        mark(module, results)
        joint = read_fused(module.graph, results, self._prices)
        default = self._cut(module, joint, 1.0, lasting)
        plan.plain, plan.saved_plain = default.peak, default.saved
        if not default.right:
            plan.plain = max(plan.plain, planners.peak(joint.program))
        plan.budget = budget(plan.plain)
        allowed = int(plan.share * plan.budget)
        choices = self._choices(module, joint, default, allowed, lasting)
        best = next((each for each in choices if each.right and each.peak <= allowed), None)
        if best is None and default.right and plan.share == 1 and default.peak <= _HIGH * allowed:
            best = default  # it takes less than it seems to, perhaps: what was compiled is run before training
        if best is None:
            share = (1 - _SPARE) * plan.share
            raise TooSmall(partial(self._ours.advice, joint, int(share * plan.budget), share))
        plan.split, plan.planned, plan.saved, plan.again = best.name, best.peak, best.saved, best.again
        plan.span, plan.operators = best.span, len(joint.calls)
        plan.overhead = best.cost / (joint.program.model_time or 1.0)
        plan.work = best.cost * joint.program.unit
        plan.seconds = perf_counter() - start
        return best.parts

    def _choices(
        self, module: fx.GraphModule, joint: Joint, default: Choice, allowed: int, lasting: Sequence[int] | None
    ) -> Iterator[Choice]:
        """From the best on, as far as is asked for."""
        if default.right and allowed < default.peak <= _HIGH * allowed:
            self._schedule(default, joint, None)
        yield default
        given = enough = int((1 - _SPARE) * allowed)
        for _ in range(_PROBES):
            choice = self._planned(module, joint, given)
            if choice is None:
                break
            for span in SPANS:
                self._schedule(choice, joint, span)
                if choice.peak <= enough:
                    yield choice
            given -= choice.peak - enough
        if allowed >= floor(joint).nbytes:
            for ratio in _RATIOS:
                with suppress(RuntimeError):  # there is no such cut
                    yield self._cut(module, joint, ratio, lasting)

    def _schedule(self, choice: Choice, joint: Joint, span: int | None) -> None:
        """Let the peak be that of the kernels of inductor, in their order."""
        choice.span = span
        peak = estimate(choice.parts, joint.results, span, self._compile_inner)
        if peak is not None:
            choice.peak = peak

    def _planned(self, module: fx.GraphModule, joint: Joint, budget: int) -> Choice | None:
        """By the planner, if it finds a way."""
        planned = self._ours.fitted(joint, budget, self._effort)
        if planned is None:
            return None
        order, emission = planned
        parts = extracted(module, emission.graph, joint.results)
        prices = as_before(self._prices, emission)
        return self._choice(PLANNED, emission.graph, joint, prices, repeated(joint, order), parts, True)

    def _cut(self, module: fx.GraphModule, joint: Joint, ratio: float, lasting: Sequence[int] | None) -> Choice:
        """By torch, which may run again what draws other numbers then, or reads what was overwritten."""
        cut = min_cut(module, joint.results, ratio, lasting)
        again = [node for node in joint.calls if node.name in cut.again]
        right = not any(seeded(node) or not repeatable(joint, node) for node in again)
        name, names = f"min-cut at {ratio:g}", Counter([describe(node) for node in again])
        return self._choice(name, cut.graph, joint, self._prices, names, cut.parts, right)

    def _choice(
        self,
        name: str,
        graph: fx.Graph,
        joint: Joint,
        price: Callable[[fx.Node], Price],
        again: Counter[str],
        parts: Parts,
        right: bool,
    ) -> Choice:
        program = read_fused(graph, joint.results, price, frozenset(crossing(graph))).program
        cost = sum(call.cost for call in program.calls)
        return Choice(name, planners.peak(program), saved(graph, joint.results), cost, again, parts, right)
