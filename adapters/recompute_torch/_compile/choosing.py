"""Which split of a graph inductor gets: that of torch's own partitioner if it fits, else the plan."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from recompute import planners
from recompute_torch._compile import remembered
from recompute_torch._compile.costs import Prices
from recompute_torch._compile.emit import Emission, crossing
from recompute_torch._compile.fusion import mark, read_fused
from recompute_torch._compile.partition import Partitioner, Parts, TooSmall, as_before, cost, extracted, saved
from recompute_torch._compile.program import Joint, Price, describe, read, repeatable, seeded
from recompute_torch._compile.remembered import Scheduled
from recompute_torch._compile.report import PLANNED, GraphPlan, floor, repeated
from recompute_torch._compile.schedule import SPANS, estimate

_RATIOS: Final = (0.5, 0.25, 0.13)  # of torch's partitioner, where no plan was found; each takes as long as a plan
_PROBES: Final = 3  # plans, each for less, until what inductor makes of one fits
_SPARE: Final = 0.005  # of what is allowed, if possible: for what kernels need beside their results
_HIGH: Final = 1.25  # times what it really is, that the peak of kernels may be taken for


@dataclass
class Choice:
    """A way to split a step, and what it takes as kernels."""

    name: str
    peak: int
    saved: int
    cost: float
    again: Counter[str]
    parts: Parts
    right: bool
    """Whether its gradients are those of the forward."""
    span: int | None = None
    """Over which inductor may fuse; see `fused_nearby`."""
    order: tuple[int, ...] = ()
    """Of a plan."""


class FusedPartitioner:
    """Splits joint graphs for inductor."""

    def __init__(self, prices: Prices, effort: float, compile_inner: Callable[..., Any]) -> None:
        self._prices = prices
        self._effort = effort
        self._compile_inner = compile_inner
        self._ours = Partitioner(prices, effort, read_fused)

    def split(
        self,
        module: fx.GraphModule,
        results: int,
        budget: Callable[[int], int],
        plan: GraphPlan,
        lasting: Sequence[int] | None,
    ) -> Parts:
        """The forward and the backward; `plan` hears of them. Raises TooSmall.

        What torch does by default is taken if it fits, else the plan, and where there is none, what torch does at some
        ratio. Of what torch does, what would change gradients is not taken.
        """
        start = perf_counter()
        module.graph = fx_graph_cse(module.graph)  # as torch's partitioner does
        module.graph.eliminate_dead_code()
        keep_overwritten(module.graph, results)
        mark(module, results)
        joint = read_fused(module.graph, results, self._prices)
        default = self._cut(module, joint, 1.0, lasting)
        plan.plain, plan.saved_plain = default.peak, default.saved
        if not default.right:
            plan.plain = max(plan.plain, planners.peak(joint.program))
        plan.budget = budget(plan.plain)
        allowed = int(plan.share * plan.budget)
        choices = self._choices(module, joint, default, allowed, lasting)
        best = next((each for each in choices if each.right and each.peak <= allowed), None)
        if best is None:
            best = self._tried(module, joint, default, plan)
        if best is None:
            raise TooSmall(partial(self._ours.advice, joint, allowed, plan.share))
        plan.split, plan.planned, plan.saved, plan.again = best.name, best.peak, best.saved, best.again
        plan.span, plan.operators = best.span, len(joint.calls)
        plan.overhead = best.cost / (joint.program.model_time or 1.0)
        plan.work = best.cost * joint.program.unit
        plan.seconds = perf_counter() - start
        return best.parts

    def _choices(
        self, module: fx.GraphModule, joint: Joint, default: Choice, allowed: int, lasting: Sequence[int] | None
    ) -> Iterator[Choice]:
        """From the best on, as far as is asked for."""
        if default.right and allowed < default.peak <= _HIGH * allowed:
            self._schedule(default, joint, None)
        yield default
        enough = int((1 - _SPARE) * allowed)
        known = remembered.scheduled(joint.program, cache_dir())
        again = next((plan for plan in known if (plan.budget, plan.effort) == (allowed, self._effort)), None)
        if again is not None:
            yield self._remembered(module, joint, again)
        new = self._scheduled(module, joint, enough) or self._scheduled(module, joint, allowed)
        fitting = [plan for plan in known if plan.peak <= enough]
        if fitting:
            cheapest = min(fitting, key=lambda plan: cost(joint, plan.order))
            new.append(self._remembered(module, joint, cheapest))
        for choice in sorted(new, key=lambda choice: choice.cost):
            kept = Scheduled(allowed, self._effort, choice.order, choice.span or 0, choice.peak)
            remembered.keep_scheduled(joint.program, cache_dir(), kept)
            yield choice
        if allowed >= floor(joint).nbytes:
            for ratio in _RATIOS:
                with suppress(RuntimeError):  # there is no such cut
                    yield self._cut(module, joint, ratio, lasting)

    def _scheduled(self, module: fx.GraphModule, joint: Joint, enough: int) -> list[Choice]:
        """A plan of whose kernels inductor says that they fit, if one is found."""
        given = enough
        for number in range(_PROBES):
            choice = self._planned(module, joint, given)
            if choice is None:
                break
            planned = choice.peak
            for span in SPANS if not number else SPANS[-1:]:
                self._schedule(choice, joint, span)
                if choice.peak <= enough:
                    return [choice]
            given = planned - (choice.peak - enough)
        return []

    def _tried(self, module: fx.GraphModule, joint: Joint, default: Choice, plan: GraphPlan) -> Choice | None:
        """What may take less than inductor's account says, since kernels write over what they have just read.

        What is compiled is run before training, so this is seen then; what has taken too much is not tried again.
        """
        if PLANNED not in plan.missed and (choice := self._planned(module, joint, plan.budget)) is not None:
            choice.span = SPANS[-1]
            return choice
        fits = default.right and default.peak <= _HIGH * plan.budget
        return default if fits and default.name not in plan.missed else None

    def _schedule(self, choice: Choice, joint: Joint, span: int | None) -> None:
        """Let the peak be that of the kernels of inductor, in their order."""
        choice.span = span
        peak = estimate(choice.parts, joint.results, span, self._compile_inner)
        if peak is not None:
            choice.peak = peak

    def _planned(self, module: fx.GraphModule, joint: Joint, budget: int) -> Choice | None:
        """By the planner, if it finds a way."""
        planned = self._ours.fitted(joint, budget, self._effort)
        return None if planned is None else self._ordered(module, joint, *planned)

    def _remembered(self, module: fx.GraphModule, joint: Joint, plan: Scheduled) -> Choice:
        """As it was chosen before."""
        choice = self._ordered(module, joint, list(plan.order), Emission(joint, plan.order))
        choice.span, choice.peak = plan.span, plan.peak
        return choice

    def _ordered(self, module: fx.GraphModule, joint: Joint, order: Sequence[int], emission: Emission) -> Choice:
        parts = extracted(module, emission.graph, joint.results)
        prices = as_before(self._prices, emission)
        choice = self._choice(PLANNED, emission.graph, joint, prices, repeated(joint, order), parts, True)
        choice.order = tuple(order)
        return choice

    def _cut(self, module: fx.GraphModule, joint: Joint, ratio: float, lasting: Sequence[int] | None) -> Choice:
        """By torch, which may run again what draws other numbers then, or reads what was overwritten."""
        cut = min_cut(module, joint.results, ratio, lasting)
        again = [node for node in joint.calls if node.name in cut.again]
        right = not any(seeded(node) or not repeatable(joint, node) for node in again)
        name, names = f"min-cut at {ratio:g}", Counter([describe(node) for node in again])
        return self._choice(name, cut.graph, joint, self._prices, names, cut.parts, right)

    def _choice(
        self,
        name: str,
        graph: fx.Graph,
        joint: Joint,
        price: Callable[[fx.Node], Price],
        again: Counter[str],
        parts: Parts,
        right: bool,
    ) -> Choice:
        program = read_fused(graph, joint.results, price, frozenset(crossing(graph))).program
        took = sum(call.cost for call in program.calls)
        return Choice(name, planners.peak(program), saved(graph, joint.results), took, again, parts, right)


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
