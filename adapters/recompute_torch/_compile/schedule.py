"""What inductor makes of a split: which kernels it fuses, and how much memory its order of kernels needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Final

from torch import fx
from torch._inductor import config, memory
from torch._inductor.choices import InductorChoices
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.exc import InductorError
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from recompute_torch._compile.program import is_tensor, nbytes, storage_key

SPANS: Final = (8, 2)
"""Places in the order of a graph, from the first node of a kernel to its last, that are tried. With the least, kernels
take hardly more than was planned, and each does less.
"""

Parts = tuple[fx.GraphModule, fx.GraphModule]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same parameters, and a graph that passes may change."""
    copy = fx.GraphModule(module, deepcopy(module.graph))
    copy.meta = dict(module.meta)
    return copy


@contextmanager
def fused_nearby(span: int | None) -> Iterator[None]:
    """Inductor fuses only what lies within a span in here, unless that is None or the user has chosen how it fuses.

    By default it also fuses what is far apart: results come before they are needed, and operands stay until then. In a
    T5 planned for half of its memory that took 15.3 MB instead of 9.7, and 10.6 within 8 places; steps took as long.
    """
    if config.inductor_choices_class is not None or span is None:
        yield
        return
    with config.patch(inductor_choices_class=partial(_Nearby, span)), V.set_choices_handler(_Nearby(span)):
        yield


def estimate(parts: Parts, results: int, span: int | None, compile_inner: Callable[..., Any]) -> int | None:
    """Bytes at the peak of a step, by the order in which inductor would run its kernels; no code is made.

    `span`: as of `fused_nearby`; `compile_inner` is inductor's. None: it cannot be told. It takes as long as lowering
    and scheduling, a small part of compiling.
    """
    forward, backward = parts
    returned = [each for each in tree_leaves(forward.graph.output_node().args) if isinstance(each, fx.Node)]
    saved = {node.name: node for node in returned[results:]}
    inputs = {storage for node in forward.graph.find_nodes(op="placeholder") for storage in _storages(node)}
    given = backward.graph.find_nodes(op="placeholder")
    used = {storage for node in given if node.name in saved for storage in _storages(saved[node.name])}
    kept, elsewhere = dict[int, int](), set[str]()  # storage -> bytes; names of what takes no memory of its own
    for node in returned:
        for storage, size in _storages(node).items():
            if storage in inputs or storage in kept:
                elsewhere.add(node.name)
            else:
                kept[storage] = size
    held = sum(size for storage, size in kept.items() if storage not in used)
    with fused_nearby(span):
        early = _part(forward, elsewhere, compile_inner, late=False)
        late = _part(backward, elsewhere, compile_inner, late=True)
    return None if early is None or late is None else max(early, held + late)


def _part(
    module: fx.GraphModule, elsewhere: Collection[str], compile_inner: Callable[..., Any], *, late: bool
) -> int | None:
    given = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    stop = _Stop(elsewhere)
    with config.patch(fx_graph_cache=False, _post_fusion_custom_pass=stop):
        try:
            compile_inner(copied(module), given, is_backward=late, is_inference=False)
        except InductorError:
            if stop.peak is None:
                raise
    return stop.peak


class _Scheduled(Exception):
    """All that was to be known is known."""


class _Stop(CustomSchedulerPass):
    """Ends a compilation where kernels are fused."""

    def __init__(self, elsewhere: Collection[str]) -> None:
        self._elsewhere = elsewhere
        self.peak: int | None = None

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Raises _Scheduled, which inductor wraps."""
        self.peak = _peak(nodes, self._elsewhere) if nodes else 0
        raise _Scheduled

    def uuid(self) -> None:
        """Nothing that comes of it is to be cached."""
        return


def _peak(nodes: list[Any], elsewhere: Collection[str]) -> int:
    """At the worst kernel. Inductor reuses buffers as long as that adds nothing to this, so that it takes no more."""
    scheduler = nodes[0].scheduler
    inputs, outputs = OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names())
    known = scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    order = memory.reorder_for_peak_memory(nodes, *known)
    _, freeable = memory.prepare_planning_info(order, *known)
    for name in freeable.keys() & elsewhere:
        freeable[name].mpi_buffer.size_free = 0
    return int(memory.estimate_peak_memory(order, freeable, outputs)[0])


def _storages(node: fx.Node) -> dict[int, int]:
    """The memory of a node, and its bytes."""
    return {storage_key(each): nbytes(each) for each in tree_leaves(node.meta.get("val")) if is_tensor(each)}


class _Nearby(InductorChoices):
    """The choices of inductor, but for fusion."""

    def __init__(self, span: int) -> None:
        self._span = span

    def can_fuse(  # type: ignore[override]  # static there, and called by an instance
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """What inductor asks for each pair of kernels."""
        span = max(abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order))
        return span <= self._span and bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))

    def uuid(self) -> str:
        """What distinguishes kernels in inductor's cache."""
        return f"recompute: {self._span}"
