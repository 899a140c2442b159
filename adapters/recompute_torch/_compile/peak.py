"""What memory inductor's kernels of a step take: read from the code around them, before any is compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config, memory
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.wrapper import (
    AllocateLine,
    ExternKernelAllocLine,
    ExternKernelOutLine,
    FreeIfNotReusedLine,
    FreeLine,
    MultiOutputLine,
    ReuseLine,
)
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.exc import InductorError
from torch._inductor.graph import SubgraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from recompute_torch._compile.kernels import ROOM
from recompute_torch._compile.partition import Parts
from recompute_torch._compile.program import COPIED, nbytes, storage_key

SPANS: Final = (8, 2)
"""Places in the order of a graph, from the first node of a kernel to its last, that are tried. With the least, kernels
take hardly more than was planned, and each does less.
"""


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
    # the handler first: it notes the one of before, which inductor makes of the configuration if there is none yet
    with V.set_choices_handler(_Nearby(span)), config.patch(inductor_choices_class=partial(_Nearby, span)):
        yield


def estimate(parts: Parts, results: int, span: int | None) -> int | None:
    """Bytes at the peak of a step, by the code that inductor would write around its kernels; none is compiled.

    `span`: as of `fused_nearby`. None: it cannot be told. It takes as long as making that code, a small part of
    compiling.
    """
    forward, backward = parts
    between = _Between(parts, results)
    with fused_nearby(span):
        early = _Stop(between.elsewhere, {})
        given = [node.meta.get("val") for node in between.inputs]
        early.schedule(forward, given, late=False)
        if early.peak is None:
            return None
        late = _Stop(between.elsewhere, between.arrive)
        with _may_be_overwritten(between.writable):
            late.schedule(backward, between.laid_out(early.strides), late=True)
    return None if late.peak is None else max(early.peak, between.held + late.peak)


class _Between:
    """Values that go from the forward to the backward, and those that are in memory meanwhile."""

    def __init__(self, parts: Parts, results: int) -> None:
        forward, backward = parts
        self._outputs = tree_leaves(forward.graph.output_node().args)
        self._given = backward.graph.find_nodes(op="placeholder")
        self.inputs = forward.graph.find_nodes(op="placeholder")
        saved = self._saved = {node.name: node for node in self._outputs[results:] if isinstance(node, fx.Node)}
        there = _storages([node for node in self.inputs if not node.meta.get(COPIED)])
        kept, self.elsewhere = dict[int, int](), set[str]()  # names of what takes no memory of its own
        for node in self._outputs:
            for storage, size in _storages([node]).items():
                if storage in there or storage in kept:
                    self.elsewhere.add(node.name)
                else:
                    kept[storage] = size
        used = _storages([saved[node.name] for node in self._given if node.name in saved])
        self.held = sum([kept[storage] for storage in kept.keys() - used.keys()])
        """Bytes of results that the backward does not use."""
        new = [node for node in self._given if node.name not in saved or saved[node.name].meta.get(COPIED)]
        self.arrive = {node.name: sum(_storages([node]).values()) for node in new}
        """Bytes of what inductor does not count: gradients that come in, and copies of parameters."""
        gradients = tree_leaves(backward.graph.output_node().args)
        shown = _storages([*self.inputs, *self._outputs[:results], *gradients]).keys()
        self.writable = [
            number
            for number, node in enumerate(self._given)
            if node.name in saved and shown.isdisjoint(_storages([saved[node.name]]) or shown)
        ]
        """Which arguments of the backward are nothing but what the forward saved."""

    def laid_out(self, strides: Sequence[Sequence[int] | None]) -> list[Any]:
        """The arguments of the backward, if the forward returns tensors with these strides."""
        of = {
            node.name: stride for node, stride in zip(self._outputs, strides, strict=True) if isinstance(node, fx.Node)
        }
        values = []
        for node in self._given:
            value, stride = node.meta.get("val"), of.get(node.name) if node.name in self._saved else None
            values.append(value if stride is None else value.as_strided(value.size(), stride))
        return values


@contextmanager
def _may_be_overwritten(arguments: list[int]) -> Iterator[None]:
    """Inductor may write over these arguments of a backward, which AOTAutograd tells it when the parts are compiled."""
    context: Any = TracingContext.try_get()
    if context is None or not functorch_config.donated_buffer:
        yield
        return
    before = context.fw_metadata
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=arguments, static_input_indices=[])
    try:
        yield
    finally:
        context.fw_metadata = before


class _Scheduled(Exception):
    """Ends a compilation when the peak is known."""


class _Stop(CustomSchedulerPass):
    """Ends a compilation where it is known which kernels run, in what memory, and none is compiled yet."""

    def __init__(self, elsewhere: Collection[str], others: Mapping[str, int]) -> None:
        self._elsewhere = elsewhere
        self._others = others
        self.peak: int | None = None
        self.strides: list[list[int] | None] = []
        """Of what the part returns, which inductor may lay out in its own way."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Inductor hands in its kernels: what it does last with the code around them is to end there."""
        if not isinstance(V.graph, SubgraphLowering):
            wrapper: Any = V.graph.wrapper_code
            wrapper.run_wrapper_ir_passes = self._stop
        config.cpp.simdlen = 1  # to vectorize loops takes most of the time, and no memory
        return nodes

    def _stop(self, is_inference: bool) -> None:
        """Raises _Scheduled, which inductor wraps."""
        wrapper = V.graph.wrapper_code
        type(wrapper).run_wrapper_ir_passes(wrapper, is_inference)
        use = _Memory(self._elsewhere, self._others)
        for line in wrapper.lines:
            use.run(line)
        self.peak = use.peak
        self.strides = list(map(_strides, V.graph.graph_outputs))
        raise _Scheduled

    def uuid(self) -> None:
        """Nothing that comes of it is to be cached."""
        return

    def schedule(self, module: fx.GraphModule, given: Sequence[Any], *, late: bool) -> None:
        """Let inductor compile a copy of a part, and end it."""
        patch = {"fx_graph_cache": False, "_post_fusion_custom_pass": self, "cpp.simdlen": config.cpp.simdlen}
        with config.patch(patch):  # the last one is changed on the way
            try:
                compile_fx_inner(copied(module), given, is_backward=late, is_inference=False)
            except InductorError:
                if self.peak is None:
                    raise


class _Memory:
    """Memory in use while the code around kernels runs, line by line.

    What the forward saved is there from the beginning, but for names in `elsewhere`; so are `others`: gradients that
    arrive, and copies of parameters.
    """

    def __init__(self, elsewhere: Collection[str], others: Mapping[str, int]) -> None:
        scheduler = V.graph.scheduler
        given = memory.get_freeable_input_buf(scheduler.nodes, OrderedSet(V.graph.graph_inputs))
        # inductor counts only the part of a tensor that is read
        held = {name: _allocated(V.graph.graph_inputs_original[name]) for name in given if name not in elsewhere}
        self._held = {**held, **others}  # name -> bytes
        self._used = self.peak = sum(self._held.values())
        self._sizes = memory.compute_size_for_scheduler_buffer(scheduler.name_to_buf)

    def run(self, line: Any) -> None:
        """The next line."""
        if isinstance(line, AllocateLine):
            self._add(line.node.get_name(), _allocated(line.node))
        elif isinstance(line, ReuseLine):
            self._held[line.reused_as.get_name()] = self._held.pop(line.node.get_name(), 0)
        elif isinstance(line, FreeLine) or (isinstance(line, FreeIfNotReusedLine) and not line.is_reused):
            self._used -= self._held.pop(line.node.get_name(), 0)
        elif isinstance(line, ExternKernelAllocLine):  # with several results, these take it over
            self._add(line.node.get_name(), self._sizes.get(line.node.get_name(), (0, 0))[0], _room(line.node))
        elif isinstance(line, ExternKernelOutLine):
            self._add(line.node.get_name(), 0, _room(line.node))
        elif isinstance(line, MultiOutputLine):
            size = self._sizes.get(line.result_name, (0, 0))[1]
            self._used -= min(size, self._held.get(line.arg_name, 0))
            self._held[line.arg_name] = max(0, self._held.get(line.arg_name, 0) - size)
            self._add(line.result_name, size)

    def _add(self, name: str, size: int, room: int = 0) -> None:
        self._held[name] = self._held.get(name, 0) + size
        self._used += size
        self.peak = max(self.peak, self._used + room)


def _strides(output: Any) -> list[int] | None:
    """None: it is no tensor. Symbols count as their hints."""
    if not isinstance(output, IRNode) or not output.has_tensor_output():
        return None
    return [int(V.graph.sizevars.optimization_hint(stride, fallback=1)) for stride in output.get_layout().stride]


def _allocated(buffer: Any) -> int:
    """Bytes of its memory, which strides may make more than its elements take."""
    elements = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(buffer), fallback=0)
    return int(elements) * int(buffer.get_dtype().itemsize)


def _room(operator: Any) -> int:
    """Bytes that an operator of a library needs beside its results while it runs."""
    return max([node.meta.get(ROOM, 0) for node in operator.get_origins()], default=0)


def _storages(nodes: Sequence[Any]) -> dict[int, int]:
    """The memory of nodes, and its bytes; other outputs, such as numbers, have none."""
    leaves = tree_leaves([node.meta.get("val") for node in nodes if isinstance(node, fx.Node)])
    return {storage_key(leaf): nbytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


class _Nearby(InductorChoices):
    """The choices of inductor, but for fusion."""

    def __init__(self, span: int) -> None:
        self._span = span

    def can_fuse(  # type: ignore[override]  # static there, and called by an instance
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Asked by inductor for every pair of kernels."""
        span = max(abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order))
        return span <= self._span and bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))

    def uuid(self) -> str:
        """What distinguishes kernels in inductor's cache."""
        return f"recompute: {self._span}"
