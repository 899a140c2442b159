"""A plan as a joint graph: one node for each planned run; views are made where they are used."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from recompute_torch._compile.program import BATCH_NORM, STATISTICS, Joint, seeded, state_bytes

Node = fx.Node

_NORM_AGAIN: Final = torch.ops.aten._native_batch_norm_legit.no_stats
_TAGS: Final = "is_forward", "is_backward"


class Emission:
    """A graph that runs the calls of a joint graph in a given order, and returns what that returns.

    Nodes from the end of the forward on are tagged as the backward's. A random operator that runs more than once keeps
    the state of its generator from the first run, and draws from it again; a batch norm that runs again makes no
    statistics. O(runs).
    """

    def __init__(self, joint: Joint, sequence: Sequence[int]) -> None:
        self.graph = fx.Graph()
        self.origin: dict[Node, Node] = {}
        """Run -> the node of the joint graph that it is a run of."""
        self._joint = joint
        self._late = False  # the forward is over
        self._now: dict[Node, Node] = {}  # leaf, call or result of a call -> what its latest run is called
        self._views: dict[Node, tuple[list[Node], bool, Node]] = {}  # view -> made from what, in which part; its name
        self._states: dict[Node, Node] = {}
        self._place = {node: place for place, node in enumerate(joint.order)}
        self._results: dict[Node, list[Node]] = {}  # call -> the items of what it returns
        for node in joint.order:
            source = node
            while joint.kinds[source] == "item":
                source = source.all_input_nodes[0]
            if source is not node and joint.kinds[source] == "call":
                self._results.setdefault(source, []).append(node)
        self._write(sequence)

    def _write(self, sequence: Sequence[int]) -> None:
        joint = self._joint
        for node in joint.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                new = self._now[node] = self.graph.node_copy(node)
                new.meta = {**node.meta, "partitioner_tag": _TAGS[node in joint.backward]}
        outputs = joint.outputs()
        runs, done = Counter(sequence), set[int]()
        returned: list[Any] = []
        for number in sequence:
            if len(done) == joint.turn and not self._late:
                returned = self._finish(outputs[: joint.results])
            self._run(joint.calls[number], again=number in done, repeated=runs[number] > 1)
            done.add(number)
        if not self._late:
            returned = self._finish(outputs[: joint.results])
        returned += self._finish(outputs[joint.results :])
        self.graph.output(returned).meta = dict(joint.graph.output_node().meta)

    def _finish(self, outputs: Sequence[Any]) -> list[Any]:
        """Write what the part writes at its end, where the backward begins if it is the forward; what it returns."""
        for node in self._joint.order:
            if self._joint.kinds[node] == "effect" and (node in self._joint.backward) is self._late:
                self._copy(node)
        returned = [self._named(output) if isinstance(output, Node) else output for output in outputs]
        self._late = True
        return returned

    def _run(self, node: Node, *, again: bool, repeated: bool) -> None:
        if again and node.target is BATCH_NORM:
            image, weight, bias, _, _, *rest = node.args
            self._store(node, self._call(_NORM_AGAIN, (image, weight, bias, *rest), {}, node), skip=STATISTICS)
        elif not repeated or not seeded(node):
            self._store(node, self._copy(node))
        elif again:
            given = (self._states[node], node.target, *node.args)
            self._store(node, self._call(run_with_rng_state, given, node.kwargs, node))
        else:
            both = self._call(run_and_save_rng_state, (node.target, *node.args), node.kwargs, node)
            both.meta["val"] = (_state(node), node.meta["val"])
            self._states[node] = self._item(both, 0)
            self._store(node, self._item(both, 1))

    def _store(self, node: Node, run: Node, skip: Sequence[int] = ()) -> None:
        """The results of a run get their names, so that those that are not needed can go."""
        self.origin[run] = node
        self._now[node] = run
        for item in self._results.get(node, ()):
            if item.args[0] is not node or item.args[1] not in skip:
                self._now[item] = self._tagged(self.graph.node_copy(item, self._now.__getitem__), item)

    def _item(self, node: Node, number: int) -> Node:
        item = self.graph.call_function(operator.getitem, (node, number))
        item.meta = {"val": node.meta["val"][number], "partitioner_tag": node.meta["partitioner_tag"]}
        return item

    def _call(self, target: Any, args: Any, kwargs: Any, like: Node) -> Node:
        given = fx.map_arg(
            (args, kwargs), lambda argument: self._named(argument) if argument.graph is like.graph else argument
        )
        return self._tagged(self.graph.call_function(target, *given), like)

    def _copy(self, node: Node) -> Node:
        names = {source: self._named(source) for source in node.all_input_nodes}
        return self._tagged(self.graph.node_copy(node, names.__getitem__), node)

    def _tagged(self, new: Node, old: Node) -> Node:
        new.meta = {**old.meta, "partitioner_tag": _TAGS[self._late]}
        new.meta.pop("recompute", None)  # whether it runs again is decided
        return new

    def _named(self, node: Node) -> Node:
        """What a node is called now. Views are made anew if what they are on was, and for the backward."""
        if node in self._now:
            return self._now[node]
        seen, stack = {node}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in self._now and source not in seen:
                    seen.add(source)
                    stack.append(source)
        for view in sorted(seen, key=self._place.__getitem__):
            known = self._views.get(view)
            names = [
                self._now[given] if given in self._now else self._views[given][2] for given in view.all_input_nodes
            ]
            if known is None or (self._joint.kinds[view] != "scalar" and known[:2] != (names, self._late)):
                named = dict(zip(view.all_input_nodes, names, strict=True))
                new = self._tagged(self.graph.node_copy(view, named.__getitem__), view)
                self._views[view] = names, self._late, new
        return self._views[node][2]


def crossing(graph: fx.Graph, results: int) -> list[Node]:
    """The nodes of the forward, which has so many `results`, that the backward uses or returns as they are."""
    late = {node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_backward"}
    late_uses = {source for node in late for source in node.all_input_nodes}
    late_uses.update(leaf for leaf in tree_leaves(graph.output_node().args)[results:] if isinstance(leaf, Node))
    return [node for node in graph.nodes if node in late_uses and node not in late and node.op != "get_attr"]


def _state(node: Node) -> Any:
    """What stands for the state of the generator that an operator draws from."""
    like = next(leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, FakeTensor))
    with like.fake_mode:
        return torch.empty(state_bytes(node), dtype=torch.uint8)
