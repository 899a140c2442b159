"""Graphs as kernels: inductor compiles them as always, but for how they are split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from recompute.text import format_bytes
from recompute_torch._compile.boxed import Watched
from recompute_torch._compile.choosing import FusedPartitioner
from recompute_torch._compile.costs import Prices
from recompute_torch._compile.meter import Allocations, Part, Rehearsal
from recompute_torch._compile.partition import Parts, TooSmall
from recompute_torch._compile.report import GraphPlan
from recompute_torch._compile.schedule import copied, fused_nearby

_TRIES: Final = 4  # compilations, until kernels fit


class Inductor:
    """A compiler: see `Boxed`, which has the same methods."""

    meter = Allocations

    def __init__(self, prices: Prices, effort: float) -> None:
        self.split = FusedPartitioner(prices, effort, _compile_inner).split

    def compile(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        plan: GraphPlan,
        partition: Callable[..., Parts],
        watched: Watched,
    ) -> Any:
        """As `backend="inductor"` does.

        If the kernels take more than the budget, there is less to plan for.

        Raises TooSmall if they do in the end.
        """
        least = inf
        for _ in range(_TRIES):
            rehearsal = Rehearsal()
            compiled = self._compiled(copied(module), inputs, plan, partition, watched, rehearsal)
            peak = rehearsal.peak() or plan.planned
            if plan.whole or peak <= plan.budget:
                return compiled
            least = min(least, peak)
            plan.share *= plan.budget / peak
            plan.missed.add(plan.split)
        said = (
            f"the budget of {format_bytes(plan.budget)} is too small: kernels took more, however they were planned; "
            f"the least was {format_bytes(least)} ({least} bytes); give at least that, or make the batch "
            "smaller"
        )
        raise TooSmall(lambda: said)

    def _compiled(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        plan: GraphPlan,
        partition: Callable[..., Parts],
        watched: Watched,
        rehearsal: Rehearsal,
    ) -> Any:
        def inner(graph: fx.GraphModule, given: Any, **options: Any) -> Any:
            part, late = Part(graph.graph), bool(options.get("is_backward"))
            with fused_nearby(plan.span):
                run = _compile_inner(graph, given, **options)
            if options.get("is_inference"):
                return run
            rehearsal.knows(late, part, run)
            return watched(late, run, part.names)

        # what AOTAutograd caches does not know of the plan; kernels are cached by their code
        both = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
        with config.patch(custom_partitioner_fn=_By(partition)), both:
            return compile_fx(module, inputs, inner_compile=inner)


def _compile_inner(graph: fx.GraphModule, given: Any, **options: Any) -> Any:
    """Kernels of one graph."""
    return compile_fx_inner(graph, given, **options)


class _By(CustomPartitionerFn):
    """How inductor takes a partitioner."""

    def __init__(self, partition: Callable[..., Parts]) -> None:
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Parts:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """One for all: graphs are cached by what came of the split, and by how they may be fused."""
        return "recompute"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Inductor's cache pickles all of its configuration as a key."""
        return str, (self.uuid(),)
