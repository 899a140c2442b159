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

from recompute import extend
from recompute_torch._compile.made_up import elsewhere, made_up
from recompute_torch._compile.meter import Allocations

Run = Callable[[list[Any]], Any]

_PLAIN: Final = (operator.getitem, run_and_save_rng_state, run_with_rng_state)
_FAR: Final = ("_c10d_functional", "c10d")  # other processes take part


class Part:
    """What is to be known of a graph to run it: it is read before passes change it."""

    def __init__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.names = [node.name for node in inputs]
        self.values = [node.meta.get("val") for node in inputs]
        self.returned = [getattr(each, "name", "") for each in tree_leaves(graph.output_node().args)]
        self.harmless = all(map(_harmless, graph.nodes))


class Rehearsal:
    """Of one compiled graph, whose two parts it is told of."""

    def __init__(self) -> None:
        self._parts: dict[bool, tuple[Part, Run]] = {}

    def knows(self, late: bool, part: Part, run: Run) -> None:
        """How a part runs: the backward if `late`, else the forward."""
        self._parts[late] = part, run

    def peak(self) -> int | None:
        """Bytes at the worst moment of a step, beside inputs and parameters, which are made up in one piece of memory.

        None: it cannot be told, since the backward is compiled later, something happens beside the results, or made-up
        values are not accepted.
        """
        if len(self._parts) < 2 or not all(part.harmless for part, _ in self._parts.values()):
            return None
        meter = Allocations()
        try:
            with elsewhere():
                self._step(meter)
        except Exception as error:  # whatever kernels say of such values
            if extend.is_interrupt(error):
                raise
            return None
        return meter.peak or None

    def _step(self, meter: Allocations) -> None:
        (forward, run), (backward, run_back) = self._parts[False], self._parts[True]
        inputs = made_up(forward.values, together=True)
        made = list(meter.watch(run, list(inputs), []))
        saved = dict(zip(forward.returned, made, strict=True))
        results = len(made) - sum(name in saved for name in backward.names)
        del made[results:]  # the results are the caller's
        wanted = list(zip(backward.names, backward.values, strict=True))
        tangents = iter(meter.watch(made_up, [value for name, value in wanted if name not in saved], []))
        given = [saved[name] if name in saved else next(tangents) for name in backward.names]
        del saved, tangents
        meter.watch(run_back, given, [])


def _harmless(node: fx.Node) -> bool:
    """Whether running it once more does nothing but compute."""
    target = node.target
    if node.op != "call_function" or target in _PLAIN or is_sym_node(node):
        return node.op != "call_module"
    return isinstance(target, torch._ops.OpOverload) and not has_effects(target) and target.namespace not in _FAR
