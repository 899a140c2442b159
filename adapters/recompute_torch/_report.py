"""What a block says of itself: what holds memory, what its last steps took, and what more memory would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any, Literal

import recompute as rc
from recompute.text import List, Table, format_bytes, seconds
from recompute_torch._holders import KINDS, Held


@dataclass(frozen=True)
class Stats(rc.Stats):
    """`recompute.Stats` of a block."""

    path: Literal["python", "native"] = "python"
    """Which one tracked the operators: a dispatch mode, or C++ below it."""


_COLUMNS = ("step", "peak", "evicted", "operators", "repeated", "in", "overhead", "took")
_MAX_STEPS = 5
_MAX_FUNCTIONS = 5


@dataclass(frozen=True)
class Step:
    """One step of the first optimizer. Bytes; seconds of operators, and `seconds` by the clock on the wall."""

    number: int
    """Counted from 1."""
    peak: int
    evictions: int
    operations: int
    repeated: int
    """Operators that ran again."""
    compute: float
    """Of all operators, the repeated ones included."""
    repeated_compute: float
    """Of the repeated ones, and of moving bytes."""
    seconds: float

    @property
    def overhead(self) -> float:
        """All compute over that of the first runs."""
        first = self.compute - self.repeated_compute
        return self.compute / first if first > 0 else 1.0

    @property
    def repeated_share(self) -> float:
        """Of the compute."""
        return self.repeated_compute / self.compute if self.compute > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """What loggers of a training take."""
        return {
            "memory/peak_bytes": float(self.peak),
            "memory/repeated_share": self.repeated_share,
            "memory/overhead": self.overhead,
        }


class Watched:
    """The steps of a block since they were last asked for, as loggers take them; `on_step` as of the block."""

    def __init__(self, on_step: Callable[[Callable[[Step], Any]], Any]) -> None:
        self._steps: list[Step] = []
        on_step(self._steps.append)

    def metrics(self) -> dict[str, float]:
        """Of all of them together: the highest peak, and the sums of the rest; empty if there was none."""
        steps, self._steps[:] = tuple(self._steps), []
        if not steps:
            return {}
        sums = {field.name: sum(getattr(step, field.name) for step in steps) for field in fields(Step)}
        return Step(**sums | {"peak": max(step.peak for step in steps)}).metrics()


@dataclass(frozen=True)
class Report:
    """What holds memory now, and what the last steps took; it prints as a table."""

    held: dict[str, Held]
    """By kind: parameters, gradients, optimizer, inputs and others, activations. In memory, and evicted."""
    handed_out: int
    """Bytes of tensors whose memory the program refers to: they are not in the budget."""
    whole: int
    """Bytes that were alive at most, evicted or not: about the peak without a limit."""
    steps: tuple[Step, ...]
    """The last ones."""
    stats: rc.Stats

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        stats = self.stats
        of = "" if stats.budget is None else f" of {format_bytes(stats.budget)}"
        above = f", {format_bytes(stats.overshoot)} above the budget" if stats.overshoot else ""
        pairs = [
            ("used", format_bytes(stats.used) + of),
            ("peak", format_bytes(stats.peak) + above),
            ("operators", f"{stats.operations:,}"),
            ("repeated", f"{stats.rematerializations:,} in {seconds(stats.remat_time)}"),
            ("overhead", f"{stats.overhead:.2f}"),
        ]
        if self.handed_out:
            pairs.append(("handed out", f"{format_bytes(self.handed_out)}, which are not in the budget"))
        if self.more_memory():
            pairs.append(("without eviction", self.more_memory()))
        return Table("recompute_torch.budget", pairs, self._lists())

    def _lists(self) -> list[List]:
        rows = [(kind, format_bytes(self.held[kind].here), format_bytes(self.held[kind].gone)) for kind in KINDS]
        lists = [List(("held by", "in memory", "evicted"), rows, "<>>")]
        if self.steps:
            steps = [
                (
                    *(f"{step.number}", format_bytes(step.peak), f"{step.evictions:,}", f"{step.operations:,}"),
                    *(f"{step.repeated:,}", seconds(step.repeated_compute), f"{step.overhead:.2f}"),
                    seconds(step.seconds),
                )
                for step in self.steps[-_MAX_STEPS:]
            ]
            lists.append(List(_COLUMNS, steps, "<" + 7 * ">"))
        if self.stats.recomputed:
            most = self.stats.recomputed[:_MAX_FUNCTIONS]
            often = [(run.function, f"{run.times:,}", seconds(run.seconds)) for run in most]
            lists.append(List(("repeated most", "times", "in"), often, "<>>"))
        return lists

    def more_memory(self) -> str:
        """What a budget in which nothing is evicted would take and give; empty if nothing was repeated."""
        if not self.stats.rematerializations:
            return ""
        spared = mean([step.repeated_compute for step in self.steps]) if self.steps else self.stats.remat_time
        period = "a step" if self.steps else "so far"
        return f"about {format_bytes(max(self.whole, self.stats.peak))}, {seconds(spared)} less {period}"
