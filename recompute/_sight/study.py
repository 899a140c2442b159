"""A study of a program over budgets: replays, stretches where they fail, plans, and the least that any schedule needs.

A study can be stopped at any time: it has what is ready. Budgets come in an order in which they halve the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from time import perf_counter
from typing import Any, Final, Literal

from recompute._pictures.overheads import Floor
from recompute._plans.plan import plan
from recompute._plans.schedule import PlanError
from recompute._sight.look import Look, Subject, look_at
from recompute._simulator.many import spread
from recompute._simulator.tier import SimulatedTier
from recompute._traces.program import Program

LIMIT: Final = 3.0
"""The overhead above which a budget counts as one that does not work."""
BUDGETS: Final = 20
MOST: Final = 50
"""Budgets: a page of more would be too large."""
PLANS: Final = 5
_NARROW: Final = 0.005
"""Of the peak: so exactly it is found out where a stretch that does not work begins and ends."""
_THIN: Final = 0.002
"""Of the peak: what is narrower could not be seen."""
_WORTH_A_PROCESS: Final = 100_000
"""Steps: less is done before another Python has started."""
_DIGITS: Final = 4

Progress = Callable[[int, int, str], None]
"""Hears how many of how many pieces of work are done, and what comes next."""


@dataclass(frozen=True)
class Mark:
    """A point of a curve. Bytes; overhead None: it does not work."""

    budget: int
    share: float
    overhead: float | None
    why: str = ""
    """Why it does not work: "oom" or "thrash", or what a planner said."""


@dataclass(frozen=True)
class Hole:
    """Budgets, as shares of the peak, that do not work."""

    start: float
    stop: float
    why: Literal["oom", "thrash"]


@dataclass
class Study:
    """All results so far, by budget, the smallest first."""

    subject: Subject
    floor: Floor
    tier: str | None = None
    limit: float = LIMIT
    looks: list[Look] = field(default_factory=list)
    between: list[Look] = field(default_factory=list)
    """Figures alone, around the ends of stretches that do not work."""
    tiered: list[Look] = field(default_factory=list)
    planned: list[Mark] = field(default_factory=list)
    segments: Mark | None = None
    """Chen et al.'s checkpoints in equal segments: needs so much, costs so much."""
    notes: list[str] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    """Those to look at."""
    complete: bool = False

    @property
    def curve(self) -> list[Mark]:
        """The default policy."""
        return _marks([*self.looks, *self.between])

    @property
    def curve_with_tier(self) -> list[Mark]:
        return _marks(self.tiered)

    @property
    def holes(self) -> list[Hole]:
        """Where the default policy does not work, as stretches."""
        holes: list[Hole] = []
        works = False  # whether a smaller budget does
        open_ = False  # whether the mark before belongs to a stretch
        for mark in self.curve:
            if mark.overhead is not None:
                works, open_ = True, False
                continue
            why: Literal["oom", "thrash"] = "oom" if mark.why == "oom" else "thrash"
            start = mark.share if works else 0.0
            if open_:
                before = holes.pop()
                start = before.start
                if before.why != why:
                    start = min(before.stop, mark.share)  # not beyond where the other reason begins
                    holes.append(replace(before, stop=start))
            holes.append(Hole(start, max(mark.share, start + _THIN), why))
            open_ = True
        return holes


def study(
    program: Program,
    *,
    budgets: int = BUDGETS,
    seconds: float = 60.0,
    tier: str | None = None,
    processes: int = 1,
    progress: Progress = lambda done, of, what: None,
    so_far: Callable[[Study], None] = lambda study: None,
) -> Study:
    """Replay and plan a program over budgets.

    Parameters
    ----------
    budgets
        How many the page can be turned to, from the least that could work to the peak without a budget.
    seconds
        For plans, all together; 0: none are made.
    tier
        Where evicted bytes may go in a second curve: "12GB/s", "12GB/s,overlap", as for `recompute.simulator.simulate`.
    processes
        At most so many replays at a time. More than one is for scripts with `if __name__ == "__main__":`.
    progress
        Told what is going on.
    so_far
        Given the study before it begins: what is ready when an exception ends it is in there.

    Raises ValueError for numbers that are none, and for a program that has no operations.
    """
    if not 2 <= budgets <= MOST or not seconds >= 0:
        raise ValueError(
            f"budgets are at least 2, at most {MOST}, and seconds at least 0, not {budgets!r}, {seconds!r}"
        )
    if tier is not None:
        SimulatedTier.read(tier)
    subject = Subject(program)
    if not program.calls or not subject.whole:
        raise ValueError(f"{program.name} has no operations that make anything: there is nothing to show")
    result = Study(subject, Floor.of(program, subject.whole), tier)
    result.budgets = grid(subject.whole, result.floor, budgets)
    so_far(result)
    jobs: list[tuple[int, dict[str, Any]]] = [(at, {}) for at in halving(len(result.budgets))]
    if tier is not None:
        jobs += [(at, {"tier": tier, "draw": False}) for at in halving(len(result.budgets))]
    whole = len(jobs) + 1 + (min(PLANS, budgets) if seconds else 0)
    count = 0
    wanted = [(result.budgets[at], {"limit": result.limit, **options}) for at, options in jobs]
    for (_, options), look in zip(jobs, looks(subject, wanted, processes), strict=True):
        _enter(result.tiered if "tier" in options else result.looks, look)
        count += 1
        progress(count, whole, "replays")
    _refine(result)
    progress(count + 1, whole, "plans")
    _segments(result)
    if seconds:
        _plan(result, seconds, lambda done: progress(count + 1 + done, whole, "plans"))
    result.complete = True
    return result


def by_device(subject: Subject, budget: int) -> dict[str, int]:
    """A budget for all devices together, as bytes of each: in proportion to its peak."""
    share = budget / subject.whole
    return {
        device: budget if len(subject.peak) == 1 else max(1, round(size * share))
        for device, size in subject.peak.items()
    }


def grid(whole: int, floor: Floor, count: int) -> list[int]:
    """So many budgets at most, in bytes, with few digits: from the least that could work to the peak."""
    least = min(0.95, max(0.02, floor.operation))
    wanted = [whole * (least + (1 - least) * at / (count - 1)) for at in range(count)]
    return sorted({few_digits(size) for size in wanted})


def few_digits(size: float) -> int:
    """Rounded up, so that it can be written down with a few digits: 14.26 GB."""
    unit: int = 10 ** max(0, len(str(ceil(size))) - _DIGITS)
    return ceil(ceil(size) / unit) * unit


def exact(size: int) -> str:
    """Bytes as text that can be pasted: what `few_digits` gives is read as the same number again."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit and size * 1000 % unit == 0:
            return f"{size / unit:.3f}".rstrip("0").rstrip(".") + name
    return f"{size}B"


def halving(count: int) -> list[int]:
    """The numbers below `count`: both ends first, then always what halves the gaps."""
    order = dict.fromkeys([count - 1, 0])
    step = count
    while step > 1:
        step = (step + 1) // 2
        order.update(dict.fromkeys(range(0, count, step)))
    return list(order)


def looks(subject: Subject, wanted: Sequence[tuple[int, dict[str, Any]]], processes: int = 1) -> Iterator[Look]:
    """A look at each budget, in order, as it is ready."""
    work = len(subject.program.steps) * len(wanted)
    count = min(len(wanted), processes, max(1, work // _WORTH_A_PROCESS))
    return spread(_look, subject, wanted, count)


def _look(subject: Subject, wanted: tuple[int, dict[str, Any]]) -> Look:
    budget, options = wanted
    return look_at(subject, by_device(subject, budget), **options)


def _enter(looks: list[Look], look: Look) -> None:
    looks.append(look)
    looks.sort(key=lambda one: one.budget)


def _marks(looks: Sequence[Look]) -> list[Mark]:
    return [
        Mark(look.budget, look.share, look.overhead, "" if look.status == "ok" else look.status)
        for look in sorted(looks, key=lambda one: one.budget)
    ]


def _refine(result: Study) -> None:
    """Bisect between budgets next to each other of which one works and the other does not."""
    subject = result.subject
    known = sorted(result.looks, key=lambda look: look.budget)
    for one, other in pairwise(known):
        low, high = one, other
        narrow = max(1.0, _NARROW * subject.whole)
        while (low.status == "ok") != (high.status == "ok") and high.budget - low.budget > narrow:
            middle = (low.budget + high.budget) // 2
            look = look_at(subject, by_device(subject, middle), draw=False, limit=result.limit)
            result.between.append(look)
            if (look.status == "ok") == (low.status == "ok"):
                low = look
            else:
                high = look


def _segments(result: Study) -> None:
    """Checkpoints in equal segments need what they need."""
    subject = result.subject
    try:
        made = plan(subject.program, 4 * subject.whole, "chen-sqrt")
        result.segments = Mark(made.peak, made.peak / subject.whole, made.overhead)
    except (PlanError, ValueError) as error:
        result.notes.append(f"There is no checkpointing by segments: {error}.")


def _plan(result: Study, seconds: float, done: Callable[[int], None]) -> None:
    """Plans for some of the budgets, the time shared among those that are left."""
    subject = result.subject
    chosen = sorted({result.budgets[round(at * (len(result.budgets) - 2) / (PLANS - 1))] for at in range(PLANS)})
    end = perf_counter() + seconds
    for number, budget in enumerate(chosen):
        left = max(0.01, end - perf_counter()) / (len(chosen) - number)
        try:
            made = plan(subject.program, budget, "own", time_limit=left)
            result.planned.append(Mark(budget, budget / subject.whole, made.overhead))
        except PlanError as error:
            result.planned.append(Mark(budget, budget / subject.whole, None, str(error)))
        except ValueError as error:
            result.notes.append(f"There is no plan: {error}.")
            return
        done(number + 1)
