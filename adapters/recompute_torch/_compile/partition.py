"""What AOTAutograd asks for: a joint graph goes in, a forward and a backward within the budget come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil
from time import perf_counter
from typing import Final

import torch
from torch import fx
from torch._functorch._aot_autograd.graph_compile import is_opaque_node
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.fx.experimental.proxy_tensor import is_sym_node

from recompute import planners
from recompute.text import format_bytes
from recompute_torch._compile import remembered
from recompute_torch._compile.costs import Prices
from recompute_torch._compile.emit import Emission, crossing
from recompute_torch._compile.program import Joint, Price, read
from recompute_torch._compile.remembered import Found
from recompute_torch._compile.report import GraphPlan, floor, holders, least, repeated

OVER: Final = 1.05
"""Times the budget that a peak may be."""
_TRIES: Final = 4  # plans, each for less, until what is emitted fits
_PROBE: Final = 0.25  # of the effort, for each plan that only tells which budget works
_BATCH_NORM_BACKWARD: Final = torch.ops.aten.native_batch_norm_backward.default


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

    def split(self, module: fx.GraphModule, results: int, budget: Callable[[int], int], plan: GraphPlan) -> Parts:
        """The forward, whose first outputs are the `results`, and the backward; `plan` hears of them. Raises TooSmall.

        `budget`: a function from the bytes of the peak without a plan to those that are allowed.
        """
        start = perf_counter()
        _without_statistics(module.graph)
        module.graph.eliminate_dead_code()
        joint = self._read(module.graph, results, self._prices)
        plan.plain = planners.peak(joint.program)
        plan.budget = budget(plan.plain)
        plain = Emission(joint, range(len(joint.calls)))
        plan.saved_plain = saved(plain.graph, results)
        once = list(range(len(joint.calls)))
        found = (
            (once, plain) if self._peak(joint, plain) <= plan.budget else self.fitted(joint, plan.budget, self._effort)
        )
        if found is None:
            raise TooSmall(partial(self.advice, joint, plan.budget))
        order, emission = found
        plan.planned = self._peak(joint, emission)
        plan.saved = saved(emission.graph, results)
        plan.operators = len(joint.calls)
        plan.again = repeated(joint, order)
        took = cost(joint, order)
        plan.overhead = took / (joint.program.model_time or 1.0)
        plan.work = took * joint.program.unit
        plan.flops = self.flops(joint, order)
        parts = extracted(module, emission.graph, results)
        plan.seconds = perf_counter() - start
        return parts

    def fitted(self, joint: Joint, budget: int, effort: float) -> tuple[list[int], Emission] | None:
        """The cheapest order that was found, and the graph that follows it, whose peak is within the budget.

        With more memory it never costs more than it did with less in this process; see `remembered`.
        """
        if budget < floor(joint).nbytes:
            return None
        program = remembered.identity(joint.program)
        same = remembered.chosen(program, budget, effort)
        if same is None:
            known = remembered.smaller(program, budget)
            new = [self._searched(joint, budget, effort)]
            if known:
                cheapest = remembered.best(known, [])
                new.append(self._searched(joint, budget, effort, cheapest.order))
            usable = [plan for plan in new if plan is not None]
            if not known and not usable:
                return None
            same = remembered.best(known, usable)
            remembered.keep(program, budget, effort, same)
        order = list(same.order)
        return order, Emission(joint, order)

    def flops(self, joint: Joint, order: Iterable[int]) -> float:
        """Of all runs."""
        flops = [self._prices(node).flops for node in joint.calls]
        return sum(flops[number] for number in order)

    def _searched(self, joint: Joint, budget: int, effort: float, start: Sequence[int] = ()) -> Found | None:
        """A plan that fits once it is emitted, from an order of runs if there is one. None: none was found.

        What is emitted may need a little more than was planned: the states of generators.
        """
        given = budget
        for _ in range(_TRIES):
            try:
                if start:
                    plan = planners.replan(joint.program, given, start, effort)
                else:
                    plan = planners.plan(joint.program, given, effort=effort)
            except planners.PlanError:
                return None
            if plan is None:
                return None
            order = plan.order
            peak = self._peak(joint, Emission(joint, order))
            if peak <= budget:
                return Found(tuple(order), peak, cost(joint, order), self.flops(joint, order))
            given = max(1, given - (peak - budget))
        return None

    def advice(self, joint: Joint, allowed: int, share: float = 1.0) -> str:
        """What to say where no plan fits what is allowed, which is a share of the budget. O(some plans).

        Whatever was planned before, it is the same.
        """
        effort = _PROBE * self._effort
        enough = ceil(least(joint, allowed, lambda given: self._searched(joint, given, effort) is not None) / share)
        return (
            f"the budget of {format_bytes(round(allowed / share))} is too small: the least that a plan was found for "
            f"is {format_bytes(enough)} ({enough} bytes); without a plan the peak is "
            f"{format_bytes(planners.peak(joint.program))}; {holders(joint)}; give at least that, or make the batch "
            "smaller"
        )

    def _peak(self, joint: Joint, emission: Emission) -> int:
        """Of what was emitted, read again."""
        again = self._read(emission.graph, joint.results, as_before(self._prices, emission))
        return planners.peak(again.program)


def cost(joint: Joint, order: Iterable[int]) -> float:
    """Of all runs, in the unit of the program."""
    return sum([joint.program.calls[number].cost for number in order])


def as_before(prices: Prices, emission: Emission) -> Callable[[fx.Node], Price]:
    """The prices of what was emitted: those of the nodes that it runs."""
    return lambda node: prices(emission.origin.get(node, node))


def _without_statistics(graph: fx.Graph) -> None:
    """In training the backward of a batch norm does not read the running statistics: it need not keep them."""
    for node in graph.find_nodes(op="call_function", target=_BATCH_NORM_BACKWARD):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def saved(graph: fx.Graph, results: int) -> int:
    """Bytes of what the forward of a split graph makes and its backward uses."""
    joint = read(graph, results)
    held = {value for node in crossing(graph) for value in joint.holds[node] if value}
    return sum(map(joint.builder.nbytes, held))


def extracted(module: fx.GraphModule, graph: fx.Graph, results: int) -> Parts:
    """Torch's own extraction, with all that crosses saved."""
    crossed = crossing(graph)
    symbols = [node for node in crossed if is_sym_node(node)]
    opaque = [node for node in crossed if is_opaque_node(node)]
    tensors = [node for node in crossed if node not in symbols and node not in opaque]
    joint = fx.GraphModule(module, graph)
    parts = _extract_fwd_bwd_modules(joint, tensors, symbols, opaque, num_fwd_outputs=results)
    return parts[0], parts[1]
