"""Graphs operator by operator, in the order of the plan, with arguments that are let go of as early as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from recompute_torch._compile.costs import Prices
from recompute_torch._compile.meter import Meter
from recompute_torch._compile.partition import Partitioner, Parts
from recompute_torch._compile.report import GraphPlan

Watched = Callable[[bool, Callable[[list[Any]], Any], Sequence[str]], Callable[[list[Any]], Any]]
"""Takes a part: whether it is the backward, how it runs, and the names of its arguments. How it runs, watched."""


class Boxed:
    """A compiler: how joint graphs are split, what becomes of the parts, and how a step is watched."""

    meter = Meter

    def __init__(self, prices: Prices, effort: float) -> None:
        self._partitioner = Partitioner(prices, effort)

    def split(
        self, module: fx.GraphModule, results: int, budget: Callable[[int], int], plan: GraphPlan, _: object
    ) -> Parts:
        """The forward and the backward; `plan` hears of them. Raises TooSmall."""
        return self._partitioner.split(module, results, budget, plan)

    def compile(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        _: GraphPlan,
        partition: Callable[..., Parts],
        watched: Watched,
    ) -> Any:
        """The graph, split by `partition`."""

        def part(late: bool, graph: fx.GraphModule, given: Any) -> Callable[[list[Any]], Any]:
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
