"""A step as torch's own partitioner splits it: a minimum cut, at some `activation_memory_budget`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class MinCut:
    """Forward and backward, and both as one graph."""

    parts: tuple[fx.GraphModule, fx.GraphModule]
    graph: fx.Graph
    again: frozenset[str]
    """The names of the nodes that both compute."""


def min_cut(module: fx.GraphModule, results: int, ratio: float, lasting: Sequence[int] | None) -> MinCut:
    """Split a copy of a joint graph; `lasting` are the numbers of the inputs that are parameters.

    Raises RuntimeError where torch finds no cut. Some seconds for some thousand nodes, more for a ratio below 1.
    """
    graph = fx.Graph()
    image: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        image[node] = graph.node_copy(node, image.__getitem__)
    copy = fx.GraphModule(module, graph)
    static = None if lasting is None else list(lasting)
    with config.patch(activation_memory_budget=ratio):
        parts = min_cut_rematerialization_partition(
            copy, None, num_fwd_outputs=results, static_lifetime_input_indices=static
        )
    first, second = ({node.name for node in part.graph.nodes if node.op == "call_function"} for part in parts)
    return MinCut(parts, _joined(*parts, results, module.graph.output_node()), frozenset(first & second))


def _joined(forward: fx.GraphModule, backward: fx.GraphModule, results: int, output: fx.Node) -> fx.Graph:
    """What is saved goes by the same name in both."""
    graph = fx.Graph()
    image: dict[fx.Node, fx.Node] = {}
    saved: dict[str, fx.Node] = {}
    for part, tag in ((forward, "is_forward"), (backward, "is_backward")):
        for node in part.graph.nodes:
            if node.op == "placeholder" and node.name in saved:
                image[node] = saved[node.name]
            elif node.op != "output":
                image[node] = graph.node_copy(node, image.__getitem__)
                image[node].meta["partitioner_tag"] = tag
        if part is forward:
            saved = {node.name: new for node, new in image.items()}
    returned = [*_returned(forward)[:results], *_returned(backward)]
    graph.output([image[each] if isinstance(each, fx.Node) else each for each in returned]).meta = dict(output.meta)
    return graph


def _returned(part: fx.GraphModule) -> list[Any]:
    return tree_leaves(part.graph.output_node().args)
