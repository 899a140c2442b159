"""Graphs as kernels: inductor compiles them as always, but for how they are split.

That is as torch's own partitioner does it if it fits, else by the plan.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from recompute import planners
from recompute.text import format_bytes
from recompute_torch._compile.costs import Allocations, Part, Prices, Rehearsal
from recompute_torch._compile.emit import Emission, crossing
from recompute_torch._compile.kernels import mark, read_fused
from recompute_torch._compile.partition import (
    Amount,
    Partitioner,
    Parts,
    Scheduled,
    TooSmall,
    Watched,
    as_before,
    extracted,
    keep_scheduled,
    saved,
    scheduled,
)
from recompute_torch._compile.peak import SPANS, copied, estimate, fused_nearby
from recompute_torch._compile.program import Price, describe, read, repeatable, seeded
from recompute_torch._compile.report import PLANNED, GraphPlan, floor, repeated

_RATIOS: Final = (0.5, 0.25, 0.13)  # of torch's partitioner, where no plan was found; each takes as long as a plan
_PROBES: Final = 4  # plans, for less or for more, until what inductor makes of one fits and fills
_FULL: Final = 0.95  # of the bytes allowed: a plan that takes less leaves much unused
_AIM: Final = 0.98  # of the bytes allowed, for the next plan: kernels of similar plans differ by some per cent
_SLOWEST: Final = 0.25  # bytes of kernels, for one byte less of a plan
_OFF: Final = 1.25  # times the peak of the kernels that inductor makes of a plan, that the plan's own may be, or less


@dataclass
class Choice:
    """A way to split a step, and what it takes as kernels."""

    name: str
    peak: int
    saved: int
    cost: float
    parts: Parts
    again: Counter[str] = field(default_factory=Counter)
    right: bool = True
    """Whether its gradients are those of the forward."""
    span: int | None = None
    """Over which inductor may fuse; see `fused_nearby`."""
    order: tuple[int, ...] = ()
    """Of a plan."""


class _Splits:
    """The ways to split one joint graph, which is marked."""

    def __init__(self, by: Inductor, module: fx.GraphModule, results: int, lasting: Sequence[int] | None) -> None:
        self._by = by
        self._module = module
        self._lasting = lasting
        self.least: int | None = None
        """Bytes that the kernels of some plan take."""
        self.joint = read_fused(module.graph, results, by.prices)

    def choices(self, default: Choice, allowed: int, *, whole: bool) -> Iterator[Choice]:
        """From the best on, as far as is asked for. `whole`: as much is allowed as the default is said to take."""
        if default.right and not whole and allowed / _OFF < default.peak <= _OFF * allowed:
            self._schedule(default, None)
        yield default
        program, effort = self.joint.program, self._by.effort
        known = scheduled(program, cache_dir())
        again = next((plan for plan in known if (plan.budget, plan.effort) == (allowed, effort)), None)
        if again is not None:
            yield self._remembered(again)
        new = self._scheduled(allowed)
        for choice in new:  # of one that does not fit an error says the peak, which the user may allow next
            self._keep(choice, max(allowed, choice.peak))
        self.least = min([*(plan.peak for plan in known), *(choice.peak for choice in new)], default=None)
        fitting = [plan for plan in known if plan.peak <= allowed]
        if fitting:
            new.append(self._remembered(min(fitting, key=lambda plan: self.joint.program.cost_of(plan.order))))
        yield from sorted(new, key=lambda choice: choice.cost)
        if allowed >= floor(self.joint, repeats=False).nbytes:
            for ratio in _RATIOS:
                with suppress(RuntimeError):  # there is no such cut
                    choice = self.cut(ratio)
                    if choice.right and choice.peak <= _OFF * allowed:
                        self._schedule(choice, None)
                    yield choice

    def cut(self, ratio: float) -> Choice:
        """By torch, which may run again what draws other numbers then, or reads what was overwritten."""
        results = self.joint.results
        parts = min_cut(self._module, results, ratio, self._lasting)
        first, second = ({node.name for node in part.graph.nodes if node.op == "call_function"} for part in parts)
        again = [node for node in self.joint.calls if node.name in first & second]
        right = not any(seeded(node) or not repeatable(self.joint, node) for node in again)
        joined = _joined(*parts, results, self._module.graph.output_node())
        choice = self._choice(f"min-cut at {ratio:g}", joined, self._by.prices, parts)
        choice.again, choice.right = Counter([describe(node) for node in again]), right
        return choice

    def _scheduled(self, allowed: int) -> list[Choice]:
        """Plans for so many bytes, with the peak of the kernels that inductor makes of them.

        When one fits and leaves much unused, there are more for more, until another one fits.
        """
        given, choices = allowed, list[Choice]()
        fits = exceeds = 0  # bytes that the last plan was made for which fits, and which does not
        spans: Sequence[int | None] = SPANS
        before: tuple[int, int] | None = None  # bytes by the last plan, and by its kernels
        for _ in range(_PROBES):
            choice = self._planned(given)
            if choice is None:
                break
            planned, choice = choice.peak, self._fused(choice, spans, allowed)
            choices.append(choice)
            if choice.peak > allowed:
                exceeds = given
            elif fits or choice.peak >= _FULL * allowed:
                break
            else:
                fits = given
            given = corrected(int(_AIM * allowed), (planned, choice.peak), before)
            before, spans = (planned, choice.peak), (choice.span,)
            if fits and exceeds:
                given = (fits + exceeds) // 2
        return choices

    def _fused(self, choice: Choice, spans: Sequence[int | None], allowed: int) -> Choice:
        """By the first span whose kernels fit, or else by that whose kernels take least."""
        tried: list[Choice] = []
        for span in spans:
            tried.append(replace(choice))
            self._schedule(tried[-1], span)
            if tried[-1].peak <= allowed:
                return tried[-1]
        return min(tried, key=lambda way: way.peak)

    def enough(self, allowed: int) -> int:
        """Bytes in which the kernels of a plan fit, where no plan was found whose kernels fit in the bytes allowed."""
        if self.least is None:
            self.least = self._by.planner.least(self.joint, allowed)
            choice = self._planned(self.least)
            if choice is not None:
                self._schedule(choice, min(SPANS))
                self._keep(choice, choice.peak)
                self.least = choice.peak
        return self.least

    def _keep(self, choice: Choice, allowed: int) -> None:
        """For later calls, and other processes."""
        kept = Scheduled(allowed, self._by.effort, choice.order, choice.span or 0, choice.peak)
        keep_scheduled(self.joint.program, cache_dir(), kept)

    def _schedule(self, choice: Choice, span: int | None) -> None:
        """Let the peak be that of the kernels of inductor, in their order."""
        choice.span = span
        peak = estimate(choice.parts, self.joint.results, span)
        if peak is not None:
            choice.peak = peak

    def _planned(self, budget: int) -> Choice | None:
        """By the planner, if it finds a way."""
        order = self._by.planner.fitted(self.joint, budget)
        return None if order is None else self._ordered(order)

    def _remembered(self, plan: Scheduled) -> Choice:
        """As it was chosen before."""
        choice = self._ordered(plan.order)
        choice.span, choice.peak = plan.span, plan.peak
        return choice

    def _ordered(self, order: tuple[int, ...]) -> Choice:
        emission = Emission(self.joint, order)
        parts = extracted(self._module, emission.graph, self.joint.results)
        choice = self._choice(PLANNED, emission.graph, as_before(self._by.prices, emission), parts)
        choice.again, choice.order = repeated(self.joint, order), order
        return choice

    def _choice(self, name: str, graph: fx.Graph, price: Callable[[fx.Node], Price], parts: Parts) -> Choice:
        program = read_fused(graph, self.joint.results, price, frozenset(crossing(graph, self.joint.results))).program
        return Choice(
            name, planners.peak(program), saved(read(graph, self.joint.results, price)), program.model_time, parts
        )


def corrected(aim: int, last: tuple[int, int], before: tuple[int, int] | None) -> int:
    """Bytes to plan for next, so that kernels take `aim`: by the secant through two pairs of planned and taken."""
    slope = 1.0
    if before is not None and last[0] != before[0]:
        slope = min(1.0, max(_SLOWEST, (last[1] - before[1]) / (last[0] - before[0])))
    return int(last[0] + (aim - last[1]) / slope)


def min_cut(module: fx.GraphModule, results: int, ratio: float, lasting: Sequence[int] | None) -> Parts:
    """Split a copy of a joint graph; `lasting` are the numbers of the inputs that are parameters.

    Raises RuntimeError where torch finds no cut. Some seconds for some thousand nodes, more for a ratio below 1.
    """
    static = None if lasting is None else list(lasting)
    with functorch_config.patch(activation_memory_budget=ratio):
        return min_cut_rematerialization_partition(
            copied(module), None, num_fwd_outputs=results, static_lifetime_input_indices=static
        )


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
    first, second = (tree_leaves(part.graph.output_node().args) for part in (forward, backward))
    returned = [*first[:results], *second]
    graph.output([image[node] if isinstance(node, fx.Node) else node for node in returned]).meta = dict(output.meta)
    return graph


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
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]  # all are functions


def _views(leaf: fx.Node) -> dict[fx.Node, None]:
    """The views of a node, and the views of these, in order."""
    views: dict[fx.Node, None] = {}
    for node in leaf.graph.nodes:
        target = node.target
        is_view = target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)
        if is_view and any(source is leaf or source in views for source in node.all_input_nodes):
            views[node] = None
    return views


_TRIES: Final = 4  # compilations, until kernels fit


class Inductor:
    """A compiler: see `Boxed`, which has the same methods."""

    meter = Allocations

    def __init__(self, prices: Prices, effort: float) -> None:
        self.prices = prices
        self.effort = effort
        self.planner = Partitioner(prices, effort, read_fused)

    def split(
        self, module: fx.GraphModule, results: int, budget: Amount, plan: GraphPlan, lasting: Sequence[int] | None
    ) -> Parts:
        """The forward and the backward; `plan` is filled. Raises TooSmall.

        What torch does by default is taken if it fits, else the plan, and where there is none, what torch does at some
        ratio. Of what torch does, what would change gradients is not taken.
        """
        start = perf_counter()
        module.graph = fx_graph_cse(module.graph)  # as torch's partitioner does
        module.graph.eliminate_dead_code()
        keep_overwritten(module.graph, results)
        mark(module, results, self.prices)
        splits = _Splits(self, module, results, lasting)
        joint, default = splits.joint, splits.cut(1.0)
        plan.plain, plan.saved_plain = default.peak, default.saved
        if not default.right:
            plan.plain = max(plan.plain, planners.peak(joint.program))
        plan.budget = budget(plan.plain)
        allowed = int(plan.share * plan.budget)
        choices = splits.choices(default, allowed, whole=plan.whole)
        best = next((choice for choice in choices if choice.right and choice.peak <= allowed), None)
        if best is None:
            share = plan.share
            raise TooSmall(lambda: self.planner.advice(joint, allowed, splits.enough(allowed), share))
        plan.split, plan.planned, plan.saved, plan.again = best.name, best.peak, best.saved, best.again
        plan.span, plan.operators = best.span, len(joint.calls)
        plan.overhead = best.cost / (joint.program.model_time or 1.0)
        plan.work = best.cost * joint.program.unit
        plan.seconds = perf_counter() - start
        return best.parts

    def compile(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        plan: GraphPlan,
        partition: Callable[..., Parts],
        watched: Watched,
    ) -> Any:
        """As `backend="inductor"` does.

        If the kernels take more than the budget, there is less to plan for.

        Raises TooSmall if they do in the end.
        """
        rehearsal = Rehearsal()

        def inner(graph: fx.GraphModule, given: Any, **options: Any) -> Any:
            part, late = Part(graph.graph), bool(options.get("is_backward"))
            with fused_nearby(plan.span):
                run = compile_fx_inner(graph, given, **options)
            if options.get("is_inference"):
                return run
            rehearsal.knows(part, run, late=late)
            return watched(late, run, part.names)

        least = inf
        # what AOTAutograd caches does not know of the plan; kernels are cached by their code
        both = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        for _ in range(_TRIES):
            rehearsal = Rehearsal()
            with config.patch(custom_partitioner_fn=_By(partition)), functorch_config.patch(both):
                compiled = compile_fx(copied(module), inputs, inner_compile=inner)
            peak = rehearsal.peak() or plan.planned
            if plan.whole or peak <= plan.budget:
                return compiled
            least = min(least, peak)
            plan.share *= plan.budget / peak
        said = (
            f"the budget of {format_bytes(plan.budget)} is too small: kernels took more, however they were planned; "
            f"the least was {format_bytes(least)} ({least} bytes); give at least that, or make the batch "
            "smaller"
        )
        raise TooSmall(lambda: said)


class _By(CustomPartitionerFn):
    """How inductor takes a partitioner."""

    def __init__(self, partition: Callable[..., Parts]) -> None:
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Parts:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """One for all: graphs are cached by what came of the split, and by how they may be fused."""
        return "recompute"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Inductor's cache pickles all of its configuration as a key."""
        return str, (self.uuid(),)
