"""What was planned for each graph of a compiled step, what came of it, and what is said where no plan fits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from recompute.text import format_bytes
from recompute_torch._compile.program import Joint

_LINES: Final = 12

PLANNED: Final = "planned"


@dataclass(repr=False)
class GraphPlan:
    """One joint graph: bytes beside parameters and inputs."""

    name: str
    """Where dynamo has it from."""
    budget: int
    plain: int
    """Bytes at the peak if each operator runs once."""
    saved_plain: int
    """Bytes that are then kept from the forward for the backward."""
    planned: int = 0
    """Bytes at the peak of what runs."""
    saved: int = 0
    overhead: float = 1.0
    """The cost of all runs, divided by the cost of each operator once."""
    work: float = 0.0
    """Seconds that all runs take, by what each operator was found to cost."""
    flops: float = 0.0
    """Floating-point operations of all runs, by torch's formulas; of a plan alone."""
    operators: int = 0
    again: Counter[str] = field(default_factory=Counter)
    """Which operators run again, and how often."""
    seconds: float = 0.0
    """What planning took, prices included."""
    split: str = PLANNED
    """By inductor it may be "min-cut at 1", which fits as it is, or at less, which costs less than the plan."""
    whole: bool = False
    """Whether the budget is all that the graph takes without a plan."""
    share: float = 1.0
    """Of the budget, that was planned for: less than 1 if kernels took more than was planned."""
    span: int | None = None
    """Places in a graph over which inductor may fuse, so that kernels keep to the order of the plan; None: any."""
    code: Hashable = None
    """Which code it is of: other plans of the same code are for other shapes, say."""
    peak: int | None = None
    """Bytes at the peak of the first step, as they were; None: no backward has run yet."""

    def to_json(self) -> str:
        """All figures as one JSON object."""
        return json.dumps(self._figures())

    def _figures(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "code"}

    def __str__(self) -> str:
        measured = "not run yet" if self.peak is None else format_bytes(self.peak)
        saved, saved_plain = format_bytes(self.saved), format_bytes(self.saved_plain)
        lines = [
            f"{self.name}: {self.operators} operators, {sum(self.again.values())} recomputed, overhead "
            f"{self.overhead:.3f}; planned in {self.seconds:.1f} s",
            f"  peak: budget {format_bytes(self.budget)}, planned {format_bytes(self.planned)}, measured {measured}, "
            f"without a plan {format_bytes(self.plain)}",
            f"  saved for the backward pass: {saved}, without a plan {saved_plain}",
        ]
        if self.split != PLANNED:
            lines.append(f"  split by torch's own partitioner: {self.split}")
        if self.share < 1:
            lines.append(f"  planned for {self.share:.0%} of the budget, since kernels take more memory than planned")
        most = self.again.most_common(_LINES)
        if most:
            more = "" if len(self.again) <= _LINES else f", and {len(self.again) - _LINES} others"
            lines.append("  recomputed: " + ", ".join(f"{name} x {count}" for name, count in most) + more)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<plan of {self.name}: {format_bytes(self.planned)} of {format_bytes(self.budget)}>"


MakeInputs = Callable[[int], Any]
"""Batch size -> what the step is called with: a tuple, a mapping of keywords, or its only argument."""


class Plans:
    """The plans of the graphs of a step, in order; prints as a report."""

    def __init__(self, graphs: list[GraphPlan], largest: Callable[[MakeInputs, int, int | None], int]) -> None:
        self.graphs = graphs
        self._largest = largest

    def largest_batch(self, make_inputs: MakeInputs, low: int = 1, high: int | None = None) -> int:
        """The largest batch, from `low` to `high`, that a plan is found for within the budget. The step does not run.

        For each batch size that is tried, the inputs are made, the step is traced, and its operators are timed and
        planned as when it is compiled. So a step that is compiled next with such inputs is planned within the budget.
        By inductor that is an estimate: its kernels may take more.

        Parameters
        ----------
        make_inputs
            Batch size -> what the step is called with: a tuple, a mapping of keywords, or its only argument. Random
            numbers that it draws do not count.
        high
            None: batches are doubled until one does not fit.

        Raises `recompute.BudgetError` if `low` does not fit; ValueError if the budget is a share, which each batch
        would fit alike, if the step breaks into several graphs or has no gradients, or if what it takes does not depend
        on the batch. O(log(batch)) compilations without code, and plans.
        """
        return self._largest(make_inputs, low, high)

    @property
    def budget(self) -> int | None:
        """Bytes that all graphs together were planned for; None: none has been compiled yet.

        Of the plans of one graph, for other shapes say, the largest counts.
        """
        return sum(self._largest_of([graph.budget for graph in self.graphs])) or None

    @property
    def peak(self) -> int | None:
        """Bytes at the peak of the first step; of several graphs the sum. None: they have not all run yet.

        Of the plans of one graph the largest counts.
        """
        peaks = [graph.peak for graph in self.graphs]
        return None if None in peaks or not peaks else sum(self._largest_of([peak or 0 for peak in peaks]))

    def _largest_of(self, figures: Sequence[int]) -> list[int]:
        """One figure for each plan -> the largest one for each graph, in order."""
        largest: dict[Hashable, int] = {}
        for graph, figure in zip(self.graphs, figures, strict=True):
            code = graph.code or graph.name
            largest[code] = max(largest.get(code, 0), figure)
        return list(largest.values())

    @property
    def overhead(self) -> float:
        """The cost of all runs of all graphs, divided by the cost of each operator once."""
        once = sum(graph.work / graph.overhead for graph in self.graphs)
        return sum(graph.work for graph in self.graphs) / once if once else 1.0

    def to_json(self) -> str:
        """These figures, and those of each graph, as one JSON object."""
        told = {"budget": self.budget, "peak": self.peak, "overhead": self.overhead}
        return json.dumps({**told, "graphs": [graph._figures() for graph in self.graphs]})

    def __iter__(self) -> Iterator[GraphPlan]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, number: int) -> GraphPlan:
        return self.graphs[number]

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph with gradients was compiled yet: run a step"
        lines = [str(graph) for graph in self.graphs]
        budgets = self._largest_of([graph.budget for graph in self.graphs])
        if len(budgets) > 1:
            parts = " + ".join(map(format_bytes, budgets))
            whole = format_bytes(sum(budgets))
            lines.append(
                f"{len(budgets)} graphs share a budget: {parts} = {whole}, since what one keeps for its backward pass "
                "is in memory while the others run"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<plans of {len(self.graphs)} graphs>"


_NAMED: Final = 4  # of what is in memory at the worst moment


@dataclass(frozen=True)
class Floor:
    """Where a step needs most, if nothing is kept that can be made again."""

    call: int
    """The operator."""
    own: int
    """Bytes of what it takes and makes."""
    there: int
    """Bytes of other results and gradients that are there by then: they were made, and cannot be made again."""
    lasting: int
    """Bytes of all results and gradients: in the end they are there together."""

    @property
    def nbytes(self) -> int:
        """No plan does with less."""
        return max(self.own + self.there, self.lasting)


def floor(joint: Joint, *, repeats: bool = True) -> Floor:
    """The worst moment that no plan can avoid. O(program). Without `repeats`: if each gradient is made once."""
    program = joint.program
    lasting = {program.storages[value] for value in program.outputs}
    there: set[int] = set()
    held = 0
    worst = Floor(0, 0, 0, sum([program.sizes[storage] for storage in lasting]))
    for kind, which in program.steps:
        stay: set[int] = set()
        if kind == "call":
            call = program.calls[which]
            made = {program.storages[value] for value in call.results}
            own = made.union(program.storages[value] for value in call.arguments)
            taken = sum([program.sizes[storage] for storage in own])
            beside = held - sum([program.sizes[storage] for storage in own & there])
            if taken + beside > worst.own + worst.there:
                worst = replace(worst, call=which, own=taken, there=beside)
            stay = set() if repeats else made
        elif kind == "detach":
            stay = {program.storages[which]}
        stay &= lasting - there
        there |= stay
        held += sum([program.sizes[storage] for storage in stay])
    return worst


def holders(joint: Joint) -> str:
    """The operator that sets the floor, what it holds, and the results and gradients that are there by then."""
    program, worst = joint.program, floor(joint)
    call = program.calls[worst.call]
    own = dict.fromkeys(program.storages[value] for value in (*call.arguments, *call.results))
    largest = sorted(own, key=lambda storage: -program.sizes[storage])[:_NAMED]
    held = ", ".join(
        f"{joint.name(storage)} {format_bytes(program.sizes[storage])}" for storage in largest if program.sizes[storage]
    )
    beside = f" beside {format_bytes(worst.there)} of results and gradients" if worst.there else ""
    return (
        f"nothing below {format_bytes(worst.nbytes)} can work: {call.name} holds {format_bytes(worst.own)} while it "
        f"runs ({held}){beside}; all results and gradients, which stay, are {format_bytes(worst.lasting)}"
    )


def repeated(joint: Joint, order: Sequence[int]) -> Counter[str]:
    """Which operators run again, and how often."""
    runs = Counter([joint.program.calls[number].name for number in order])
    runs.subtract(call.name for call in joint.program.calls)
    return +runs
