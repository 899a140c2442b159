"""What compiled kernels really take: forward and backward run once before training, on made-up tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx
from torch._higher_order_ops.effects import has_effects
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils._pytree import tree_leaves

from recompute_torch._compile.costs import elsewhere, made_up
from recompute_torch._compile.meter import Allocations

Run = Callable[[list[Any]], Any]

_PLAIN: Final = (operator.getitem, run_and_save_rng_state, run_with_rng_state)
_FAR: Final = ("_c10d_functional", "c10d")  # other processes take part


class Rehearsal:
    """Of one compiled graph, whose two parts it is told of."""

    def __init__(self) -> None:
        self._parts: dict[bool, tuple[fx.Graph, Run]] = {}

    def knows(self, late: bool, graph: fx.Graph, run: Run) -> None:
        """How a part runs: the backward if `late`, else the forward."""
        self._parts[late] = graph, run

    def peak(self) -> int | None:
        """Bytes at the worst moment of a step, beside inputs and parameters, which are made up in one piece of memory.

        None: it cannot be told, since the backward is compiled later, something happens beside the results, or made-up
        values are not accepted.
        """
        nodes = [node for graph, _ in self._parts.values() for node in graph.nodes]
        if len(self._parts) < 2 or not all(map(_harmless, nodes)):
            return None
        meter = Allocations()
        try:
            with elsewhere():
                self._step(meter)
        except Exception:  # whatever kernels say of such values
            return None
        return meter.peak or None

    def _step(self, meter: Allocations) -> None:
        (forward, run), (backward, run_back) = self._parts[False], self._parts[True]
        inputs = made_up([node.meta["val"] for node in forward.find_nodes(op="placeholder")], together=True)
        made = list(meter.watch(run, list(inputs), []))
        names = [getattr(each, "name", "") for each in tree_leaves(forward.output_node().args)]
        saved = dict(zip(names, made, strict=True))
        wanted = backward.find_nodes(op="placeholder")
        results = len(made) - sum(node.name in saved for node in wanted)
        del made[results:]  # the results are the caller's
        tangents = iter(meter.watch(made_up, [node.meta["val"] for node in wanted if node.name not in saved], []))
        given = [saved[node.name] if node.name in saved else next(tangents) for node in wanted]
        del saved, tangents
        meter.watch(run_back, given, [])


def _harmless(node: fx.Node) -> bool:
    """Whether running it once more does nothing but compute."""
    target = node.target
    if node.op != "call_function" or target in _PLAIN or is_sym_node(node):
        return node.op != "call_module"
    return isinstance(target, torch._ops.OpOverload) and not has_effects(target) and target.namespace not in _FAR
