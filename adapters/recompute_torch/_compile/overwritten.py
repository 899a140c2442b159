"""What the backward reads of an input that the forward overwrites is a copy from before that.

Such reads come about where somebody has removed a copy as one that changes nothing, as inductor does in joint graphs.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses import FakeTensor

from recompute_torch._compile.program import read


def keep_overwritten(graph: fx.Graph, results: int) -> None:
    """Let the views that the backward reads be of copies; see `read`. O(nodes)."""
    joint = read(graph, results)
    first = next((node for node in graph.nodes if node.op != "placeholder"), graph.output_node())
    for leaf in joint.overwritten:
        if leaf.op != "placeholder" or not isinstance(leaf.meta["val"], FakeTensor):
            continue
        views = _views(leaf)
        readers = {user for view in (leaf, *views) for user in view.users}
        if readers.isdisjoint(joint.backward):
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (leaf,))
        copy.meta["partitioner_tag"] = "is_forward"
        for user in list(leaf.users):
            if user in views or user in joint.backward:
                user.replace_input_with(leaf, copy)
        with leaf.meta["val"].fake_mode:
            for node in (copy, *views):  # what their metadata says is of before the removal
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]  # all are functions


def _views(leaf: fx.Node) -> dict[fx.Node, None]:
    """The views of a node, and the views of these, in order."""
    found: dict[fx.Node, None] = {}
    for node in leaf.graph.nodes:
        if _is_view(node) and any(each is leaf or each in found for each in node.all_input_nodes):
            found[node] = None
    return found


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)
