"""What the backward reads of an input that the forward overwrites is a copy from before that.

Such reads come about where somebody has removed a copy as one that changes nothing, as inductor does in joint graphs.
"""

from __future__ import annotations

import torch
from torch import fx

from recompute_torch._compile.program import Price, read

_NOTHING = Price(0.0)


def keep_overwritten(graph: fx.Graph, results: int) -> None:
    """Let the backward of a joint graph read copies; see `read`. O(nodes)."""
    joint = read(graph, results, lambda node: _NOTHING)
    memories = {(node, 0) for node in joint.overwritten}
    first = next((node for node in graph.nodes if node.op != "placeholder"), graph.output_node())
    for node in joint.order:
        if (
            node in joint.backward
            or joint.kinds[node] not in ("leaf", "view")
            or memories.isdisjoint(joint.holds[node])
        ):
            continue
        late = [user for user in node.users if user in joint.backward]
        if late:
            with graph.inserting_before(first) if node.op == "placeholder" else graph.inserting_after(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            value = node.meta["val"]
            with value.fake_mode:
                copy.meta = {"val": value.clone(), "partitioner_tag": "is_forward"}
            for user in late:
                user.replace_input_with(node, copy)
