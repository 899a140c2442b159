"""Which split of a graph inductor gets: the plan's or one of torch's own partitioner, whichever costs less and fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final

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
from recompute_torch._compile.telling import repeated

_RATIOS: Final = (0.75, 0.5, 0.25)  # of torch's partitioner, if what it does by default does not fit


@dataclass
class Choice:
    """A way to split a step, and what it takes as kernels."""

    name: str
    peak: int
    saved: int
    cost: float
    again: Counter[str]
    parts: Callable[[], Parts]
    right: bool
    """Whether its gradients are those of the forward."""


class FusedPartitioner:
    """Splits joint graphs for inductor."""

    def __init__(self, prices: Prices, effort: float) -> None:
        self._prices = prices
        self._effort = effort
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

        What torch does by default is taken if it fits; else the cheapest of the plan and of what torch does at some
        ratios, and the first of those that cost the same. Of what torch does, what would change gradients is not taken.
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
        best = default
        if default.peak > allowed or not default.right:
            choices = [*self._cuts(module, joint, lasting), *self._planned(module, joint, allowed)]
            fitting = [each for each in choices if each.right and each.peak <= allowed]
            if not fitting:
                raise TooSmall(partial(self._ours.advice, joint, allowed, plan.share))
            best = min(fitting, key=lambda each: each.cost)
        plan.split, plan.planned, plan.saved, plan.again = best.name, best.peak, best.saved, best.again
        plan.operators = len(joint.calls)
        plan.overhead = best.cost / (joint.program.model_time or 1.0)
        plan.work = best.cost * joint.program.unit
        parts = best.parts()
        plan.seconds = perf_counter() - start
        return parts

    def _planned(self, module: fx.GraphModule, joint: Joint, budget: int) -> list[Choice]:
        """By the planner, if it finds a way."""
        found = self._ours.fitted(joint, budget, self._effort)
        if found is None:
            return []
        order, emission = found
        parts = partial(extracted, module, emission.graph, joint.results)
        prices = as_before(self._prices, emission)
        return [self._choice(PLANNED, emission.graph, joint, prices, repeated(joint, order), parts, True)]

    def _cuts(self, module: fx.GraphModule, joint: Joint, lasting: Sequence[int] | None) -> list[Choice]:
        found = []
        for ratio in _RATIOS:
            try:
                found.append(self._cut(module, joint, ratio, lasting))
            except RuntimeError:
                continue  # there is no such cut
        return found

    def _cut(self, module: fx.GraphModule, joint: Joint, ratio: float, lasting: Sequence[int] | None) -> Choice:
        """By torch, which may run again what draws other numbers then, or reads what was overwritten."""
        cut = min_cut(module, joint.results, ratio, lasting)
        again = [node for node in joint.calls if node.name in cut.again]
        right = not any(seeded(node) or not repeatable(joint, node) for node in again)
        name, names = f"min-cut at {ratio:g}", Counter([describe(node) for node in again])
        return self._choice(name, cut.graph, joint, self._prices, names, lambda: cut.parts, right)

    def _choice(
        self,
        name: str,
        graph: fx.Graph,
        joint: Joint,
        price: Callable[[fx.Node], Price],
        again: Counter[str],
        parts: Callable[[], Parts],
        right: bool,
    ) -> Choice:
        program = read_fused(graph, joint.results, price, frozenset(crossing(graph))).program
        cost = sum(call.cost for call in program.calls)
        return Choice(name, planners.peak(program), saved(graph, joint.results), cost, again, parts, right)
