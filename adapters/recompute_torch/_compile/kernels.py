"""A joint graph as inductor runs it: which operators live inside of kernels.

Inductor fuses an operator that computes each element by itself into the kernels that read it, once in each. Such a node
is *inside*: it is made wherever it is used, as a view is. Every other operator, with all that is inside of it, is a
kernel, and only what kernels write is memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

import torch
from torch import fx
from torch._functorch.compile_utils import get_aten_target
from torch._functorch.partitioners import get_default_op_list
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.inductor_prims import randint, random

from recompute.planners import ProgramBuilder
from recompute_torch._compile.costs import CHANNELS_LAST, elements
from recompute_torch._compile.program import (
    COPIED,
    Joint,
    Price,
    Value,
    read,
    repeatable,
    seeded,
)

_MARK: Final = "recompute: inside of kernels"
ROOM: Final = "recompute: room"  # in the meta of a node: bytes that it needs beside its results while it runs
_MORE: Final = 1.1  # times its own bytes, that an inside node may be made from: statistics of rows come on top
_OPERATORS: Final = get_default_op_list()
_DRAWS: Final = (random, randint)  # inductor's random operators: from the same seed they draw the same


def mark(module: fx.GraphModule, results: int, price: Callable[[fx.Node], Price]) -> None:
    """Find the nodes of a joint graph that live inside of kernels; copies of the graph know them too."""
    _mark_channels_last(module)
    joint = read(module.graph, results)
    returned = {value for output in joint.outputs() if isinstance(output, fx.Node) for value in joint.holds[output]}
    inside: dict[fx.Node, set[Value]] = {}  # node -> the memory that it is made from
    drawing: set[fx.Node] = set()  # of these, those that random numbers are drawn for
    for node in joint.order:
        sources: set[Value] = set()
        for source in node.all_input_nodes:
            sources |= inside.get(source, {value for value in joint.holds[source] if value})
        draws = node.target in _DRAWS or any(source in drawing for source in node.all_input_nodes)
        if joint.kinds[node] in ("view", "item"):
            lives = any(source in inside for source in node.all_input_nodes)
        else:
            lives = (node, 0) not in returned and _lives(joint, node, sources, draws=draws)
        node.meta[_MARK] = lives
        if joint.kinds[node] == "call" and not lives:
            node.meta[ROOM] = price(node).room
        if lives:
            inside[node] = sources
            drawing.update([node] if draws else [])


def read_fused(
    graph: fx.Graph, results: int, price: Callable[[fx.Node], Price], kept: Collection[fx.Node] = ()
) -> Joint:
    """As `read`, of a marked graph: its calls are kernels, and each takes as long as the slowest operator in it.

    `kept` are in memory although they could be inside.
    """
    joint = read(graph, results)
    inside = {node for node in joint.order if node.meta.get(_MARK) and node not in kept}
    kernels, origin, slowest = _kernels(joint, inside, price)
    fused = read(kernels, results, slowest)
    joint.kinds.update(dict.fromkeys(inside, "view"))
    joint.calls = [origin[node] for node in fused.calls]
    joint.turn = fused.turn
    values = {(origin[node], number): value for (node, number), value in fused.builder.values.items()}
    joint.builder = ProgramBuilder(fused.program, values)
    return joint


def _mark_channels_last(module: fx.GraphModule) -> None:
    """Find the convolutions that inductor runs on pictures with their channels last, and the weights and images that it
    copies for that, once for forward and backward.
    """
    if not GraphLowering.decide_layout_opt(module, is_inference=False):
        return
    for target in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
        for node in module.graph.find_nodes(op="call_function", target=target):
            node.meta[CHANNELS_LAST] = True
            for source in node.all_input_nodes:
                value = source.meta["val"]
                if source.op == "placeholder" and value.dim() == 4:
                    source.meta[COPIED] = not value.is_contiguous(memory_format=torch.channels_last)


def _lives(joint: Joint, node: fx.Node, sources: set[Value], *, draws: bool) -> bool:
    """Whether a call is inside of the kernels that use it.

    It is where keeping it, rather than what it is made from, would never save memory. Where it might, it still is if
    there is nothing to choose: if the forward uses it once, or if it belongs to the backward.
    """
    if joint.kinds[node] != "call" or not _each_by_itself(node) or not repeatable(joint, node):
        return False
    users = _users(joint, node)
    if not users or not all(_fuses(user) for user in users):
        return False
    size = {value: joint.builder.nbytes(value) for value in [*sources, (node, 0)]}
    if not draws and sum(size[value] for value in sources) <= _MORE * size[node, 0]:
        return True
    if len(sources) > config.realize_reads_threshold:  # inductor keeps what takes so much reading
        return False
    return node in joint.backward or (len(users) == 1 and users[0] not in joint.backward)


def _each_by_itself(node: fx.Node) -> bool:
    """Whether inductor computes its elements one by one wherever they are read: no reduction does."""
    made = node.meta["val"]
    if not isinstance(made, torch.Tensor) or seeded(node):
        return False
    given = [source.meta.get("val") for source in node.all_input_nodes]
    if any(elements(source) > elements(made) for source in given if isinstance(source, torch.Tensor)):
        return False
    return node.target in _DRAWS or _OPERATORS.is_fusible(node)


def _fuses(node: fx.Node) -> bool:
    """Whether what it reads may be computed as it is read."""
    return get_aten_target(node) is torch.ops.aten.cat or _OPERATORS.is_fusible(node)


def _users(joint: Joint, node: fx.Node) -> list[fx.Node]:
    """What reads a node, or a view of it."""
    users: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if joint.kinds.get(user) in ("view", "item"):
                stack.append(user)
            else:
                users[user] = None
    return list(users)


def _kernels(
    joint: Joint, inside: set[fx.Node], price: Callable[[fx.Node], Price]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], Callable[[fx.Node], Price]]:
    """A graph of the kernels alone, each of which uses what is in memory; whose image a node is, and its price."""
    graph = fx.Graph()
    image: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, list[fx.Node]] = {}  # inside -> in memory
    slowest: dict[fx.Node, float] = {}
    for node in [*joint.order, joint.graph.output_node()]:
        given = node.all_input_nodes
        used = list(dict.fromkeys(source for argument in given for source in reads.get(argument, [argument])))
        slow = max((slowest.get(source, 0.0) for source in given), default=0.0)
        if node in inside:
            cost = price(node).cost if joint.kinds[node] == "call" else 0.0
            reads[node], slowest[node] = used, max(slow, cost)
            continue
        slowest[node] = 0.0
        if inside.isdisjoint(given):
            new = graph.node_copy(node, image.__getitem__)
        else:
            new = graph.create_node(node.op, node.target, tuple(image[source] for source in used))
        tag = "is_backward" if node in joint.backward else "is_forward"
        new.meta = {**node.meta, "partitioner_tag": tag}
        image[node] = new
    origin = {new: node for node, new in image.items()}

    def kernel(new: fx.Node) -> Price:
        alone = price(origin[new])
        inner = max((slowest[source] for source in origin[new].all_input_nodes if source in inside), default=0.0)
        return replace(alone, cost=max(alone.cost, inner))

    return graph, origin, kernel
