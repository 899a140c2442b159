"""Graphs as kernels: inductor compiles them as always, but for how they are split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from recompute_torch._compile.boxed import Watched
from recompute_torch._compile.choosing import FusedPartitioner
from recompute_torch._compile.costs import Prices
from recompute_torch._compile.meter import Allocations
from recompute_torch._compile.partition import Parts


class Inductor:
    """A compiler: see `Boxed`, which has the same methods."""

    meter = Allocations

    def __init__(self, prices: Prices, effort: float) -> None:
        self.split = FusedPartitioner(prices, effort).split

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Parts], watched: Watched
    ) -> Any:
        """As `backend="inductor"` does."""

        def inner(graph: fx.GraphModule, given: Any, **options: Any) -> Any:
            if options.get("is_inference"):
                return compile_fx_inner(graph, given, **options)
            names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
            run = compile_fx_inner(graph, given, **options)
            return watched(bool(options.get("is_backward")), run, names)

        # what AOTAutograd caches does not know of the plan; kernels are cached by their code
        with config.patch(custom_partitioner_fn=_By(partition)), functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=inner)


class _By(CustomPartitionerFn):
    """How inductor takes a partitioner."""

    def __init__(self, partition: Callable[..., Parts]) -> None:
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Parts:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """One for all: what is cached is what came of the split."""
        return "recompute"
