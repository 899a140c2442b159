"""The causes of recomputation: the functions that take most of that time, why they were evicted, and cures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from recompute._budget import format_bytes
from recompute.events import Step
from recompute.text import List, Table, seconds

_MOST: Final = 10
_ENOUGH: Final = 0.4
"""Of the time of a function: a hint that saves less is none."""


@dataclass(frozen=True)
class Reason:
    """The recomputations of one function, called at one place. Bytes and seconds."""

    function: str
    place: str
    """`file:line`; empty if it is not known."""
    times: int
    seconds: float
    share: float
    """Of all recomputation in the log."""
    evicted_for: str
    """The operation that mostly needed the room, or else the cause of the eviction."""
    asked_by: str
    """The cause of most recomputations: "get", or a function."""
    keep_bytes: int
    """So much more memory, if these values had stayed, and"""
    keep_share: float
    """so much of this would not have been computed again: the runs that made just these. What else would have been
    evicted then only a replay can tell: see `recompute report`."""
    keep: tuple[int, ...]
    """The numbers of their storages."""

    @property
    def hint(self) -> str:
        """The cure."""
        values = "value" if len(self.keep) == 1 else "values"
        return (
            f"keep {format_bytes(self.keep_bytes)} more ({len(self.keep):,} {values}), and up to {self.keep_share:.0%} "
            "of this goes"
        )

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return (
            f"{self.function}{where}: {self.times:,} times, {seconds(self.seconds)}, {self.share:.0%} of all "
            f"recomputing; evicted {self.evicted_for}, needed again by {self.asked_by}; {self.hint}"
        )


class Why(list[Reason]):
    """The reasons, the most expensive first. Prints as a line each, and as a table in a notebook."""

    def __init__(self, steps: Iterable[Step]) -> None:
        super().__init__(_reasons(steps))

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing was recomputed, as far as the log goes back"

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{one.function} {one.place}",
                f"{one.times:,}",
                seconds(one.seconds),
                f"{one.share:.0%}",
                one.evicted_for,
                one.asked_by,
                one.hint,
            )
            for one in self
        ]
        names = ["function", "times", "time", "share", "evicted", "needed by", "hint"]
        return Table("why things were recomputed", [], [List(names, rows, "<>>><<<")]).html()

    def as_dicts(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [{**asdict(one), "hint": one.hint} for one in self]


def _reasons(steps: Iterable[Step]) -> list[Reason]:
    gone: dict[int, Step] = {}  # storage -> its newest eviction
    spent: defaultdict[tuple[str, str], list[tuple[Step, Step | None]]] = defaultdict(list)
    for step in steps:
        if step.why.startswith("made again"):
            spent[step.function, step.place].append((step, gone.get(step.number)))
        elif step.state not in ("resident", "source", "movable", "forgotten") and step.why != "destroyed":
            gone[step.number] = step
    whole = sum(step.seconds for pairs in spent.values() for step, _ in pairs)
    reasons = [_reason(place, pairs, whole) for place, pairs in spent.items()]
    return sorted(reasons, key=lambda one: (-one.seconds, -one.times, one.function))[:_MOST]


def _reason(place: tuple[str, str], pairs: list[tuple[Step, Step | None]], whole: float) -> Reason:
    causes: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    cost: defaultdict[int, float] = defaultdict(float)
    size: dict[int, int] = {}
    for step, before in pairs:
        asked[step.why.partition(" for ")[2].partition(",")[0]] += 1
        cost[step.number] += step.seconds
        size[step.number] = step.nbytes
        if before is None:
            causes["before the log begins"] += 1
        else:
            room = f", {format_bytes(before.wanted_bytes)}" if before.wanted_bytes else ""
            causes[f"to make room for {before.wanted}{room}" if before.wanted else f"by {before.why}"] += 1
    total = sum(cost.values())
    kept: list[int] = []
    saved = 0.0
    for number in sorted(cost, key=lambda one: (-cost[one] / max(1, size[one]), one)):
        kept.append(number)
        saved += cost[number]
        if saved >= _ENOUGH * total:
            break
    return Reason(
        *place,
        len(pairs),
        total,
        total / whole if whole else 0.0,
        causes.most_common(1)[0][0],
        asked.most_common(1)[0][0],
        sum(size[number] for number in kept),
        saved / total if total else 1.0,
        tuple(kept),
    )
