"""The plan in torch's own partitioner: a solver for `torch._functorch.config.activation_memory_budget_solver`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from torch import fx
from torch._functorch.partitioners import NodeInfo
from torch._inductor.custom_graph_pass import CustomKnapsackSolver, get_hash_for_files
from torch.utils._pytree import tree_leaves

from recompute import planners
from recompute.text import bytes_or_peak, parse_budget
from recompute_torch._compile import costs as costs_file
from recompute_torch._compile import emit, program
from recompute_torch._compile.costs import Costs, Prices, check
from recompute_torch._compile.emit import Emission, crossing
from recompute_torch._compile.program import Joint, read, repeatable, seeded
from recompute_torch._compile.report import floor

_PROBES: Final = 5  # budgets that are tried for the largest within torch's own limit


class KnapsackSolver(CustomKnapsackSolver):
    """Which values torch's partitioner saves: those that the plan for a budget keeps for the backward.

    Torch calls a solver only if `activation_memory_budget` is below 1, and, for some graphs, far below:

        from torch._functorch import config

        config.activation_memory_budget = 0.01
        config.activation_memory_budget_solver = rt.KnapsackSolver("2GB")

    It is for those who cannot change the backend. What is lost, compared with `rt.compile`:

    * No peak is promised. A partitioner asks only which values to save. Torch's minimum cut then decides what is really
      saved, and torch's order decides when the rest is recomputed.
    * A value is recomputed once at most, and stays from then on: recomputing it again at a late use cannot be said.
    * Fusion is not known, so by inductor the plan keeps more than it needs to.
    * Too small a budget is no error: the plan for the least that works is taken.

    What is kept: a random operator, and whatever else must not run twice, is always saved, so that gradients are those
    of the forward, which torch's own solvers do not see to (pytorch 190758).

    Parameters
    ----------
    budget
        Bytes at the peak of a step, as of `rt.planned`, by the metadata of the graph; torch's ratio is then not used.
    of_peak
        Instead: a share of the peak without a plan. If neither is given, torch's limit on what is saved holds, in its
        own measure; only what must be saved may exceed it.
    costs, effort
        As of `rt.planned`; costs are estimated by default, so that what is cached holds for other machines, too.

    Raises ValueError or TypeError for wrong arguments.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        of_peak: float | str | None = None,
        costs: Costs = "estimated",
        effort: float = 0.1,
    ) -> None:
        by_torch = budget is None and of_peak is None
        self._budget = None if by_torch else bytes_or_peak(budget, of_peak)
        check(costs, effort)
        self._costs, self._effort = costs, effort

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: NodeInfo,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """The numbers of the nodes that are saved, and of those that may be recomputed. O(some plans)."""
        choice = _Choice(joint_graph, _results(joint_graph, node_info), self._costs, self._effort)
        nodes = all_recomputable_banned_nodes
        always = choice.once(nodes)
        if self._budget is not None:
            allowed = parse_budget(self._budget, whole=choice.peak)
            kept = choice.kept(nodes, allowed if choice.fits(allowed) else choice.least)
        else:
            kept = choice.within(nodes, memory, max_memory, always)
        saved = always | kept
        return sorted(saved), [number for number in range(len(nodes)) if number not in saved]

    def uuid(self) -> Any:
        """What AOTAutograd's cache tells solvers apart by: the code, and what it was made with."""
        files = tuple(str(module.__file__) for module in (costs_file, emit, program))
        return (get_hash_for_files((__file__, *files)), self._budget, self._costs, self._effort)


class _Choice:
    """Of one joint graph: what plans keep."""

    def __init__(self, graph: fx.Graph, results: int, costs: Costs, effort: float) -> None:
        self._joint: Joint = read(graph, results, Prices(costs))
        self._effort = effort
        self.peak = planners.peak(self._joint.program)
        self._floor = floor(self._joint, repeats=False).nbytes
        self._orders: dict[int, list[int] | None] = {}

    @cached_property
    def least(self) -> int:
        """About the least that a plan is found for."""
        return planners.smallest(self.fits, self._floor - 1, self.peak, tries=_PROBES)

    def fits(self, budget: int) -> bool:
        """Whether there is a plan."""
        return self._order(budget) is not None

    def once(self, nodes: Sequence[fx.Node]) -> set[int]:
        """The numbers of those that must not run twice, or draw random numbers: torch keeps no state for them."""
        made = [{value[0] for value in self._joint.holds[node] if value} or {node} for node in nodes]
        return {
            number
            for number, calls in enumerate(made)
            if any(
                self._joint.kinds[call] == "call" and (seeded(call) or not repeatable(self._joint, call))
                for call in calls
            )
        }

    def kept(self, nodes: Sequence[fx.Node], budget: int) -> set[int]:
        """The numbers of those that the plan for a budget keeps for the backward; none if there is no plan."""
        order = self._order(budget)
        if order is None:
            return set()
        emission = Emission(self._joint, order)
        again = read(emission.graph, self._joint.results)
        held = {
            (emission.origin.get(value[0], value[0]).name, value[1])
            for node in crossing(emission.graph, self._joint.results)
            for value in again.holds[node]
            if value
        }
        return {
            number
            for number, node in enumerate(nodes)
            if any((value[0].name, value[1]) in held for value in self._joint.holds[node] if value)
        }

    def within(
        self, nodes: Sequence[fx.Node], memory: Sequence[float], most: float, always: Collection[int]
    ) -> set[int]:
        """What the plan for the largest budget keeps, of those tried, that keeps no more than torch allows."""
        best: set[int] = set()
        left = most - sum(memory[number] for number in always)

        def exceeds(budget: int) -> bool:
            nonlocal best
            kept = self.kept(nodes, budget) - set(always)
            taken = sum(memory[number] for number in kept)
            if taken <= left and taken >= sum(memory[number] for number in best):
                best = kept
            return taken > left

        if left > 0 and exceeds(self.peak):
            planners.smallest(exceeds, self._floor - 1, self.peak, tries=_PROBES)
        return best

    def _order(self, budget: int) -> list[int] | None:
        if budget not in self._orders:
            self._orders[budget] = None
            if budget >= self._floor:
                with suppress(planners.PlanError):
                    self._orders[budget] = planners.plan(self._joint.program, budget, effort=self._effort).order
        return self._orders[budget]


def _results(graph: fx.Graph, info: NodeInfo) -> int:
    """How many outputs belong to the forward: they come first."""
    needed = set(info.required_fw_nodes)
    places = [
        number
        for number, output in enumerate(tree_leaves(graph.output_node().args))
        if isinstance(output, fx.Node) and output in needed
    ]
    return max(places, default=-1) + 1
