"""What was planned for each graph of a compiled step, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from recompute.extend import format_bytes
from recompute_torch._compile.meter import Allocations, Meter

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
    """Whether the budget is a share that is all that a step takes without a plan, or more."""
    share: float = 1.0
    """Of the budget, that was planned for: less than 1 if kernels took more than was planned."""
    span: int | None = None
    """Places in a graph over which inductor may fuse, so that kernels keep to the order of the plan; None: any."""
    meter: Meter | Allocations | None = None

    @property
    def peak(self) -> int | None:
        """Bytes at the peak of the first step, as they were; None: none has run yet."""
        return self.meter.peak if self.meter is not None and self.meter.peak else None

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
        if len(lines) > 1:
            parts = " + ".join(format_bytes(graph.budget) for graph in self.graphs)
            whole = format_bytes(sum(graph.budget for graph in self.graphs))
            lines.append(
                f"{len(lines)} graphs share a budget: {parts} = {whole}, since what one keeps for its backward pass is "
                "in memory while the others run"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<plans of {len(self.graphs)} graphs>"
