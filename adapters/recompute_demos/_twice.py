"""A program run twice, without a budget and within one: what it gave, what it took, and a picture of its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any, Generic, NamedTuple, TypeVar

import recompute as rc
from recompute.events import Event
from recompute.pictures import residency, save

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Takes a few words on what is being done, and the share of the whole that is done."""
Program = Callable[[Progress, Callable[[], Any]], T]
"""Takes where to tell of progress, and a function to call where the picture begins."""


def silent(words: str, share: float) -> None:
    """A `Progress` that says nothing."""


class Run(NamedTuple, Generic[T]):
    """What a program gave, and what it took."""

    result: T
    stats: rc.Stats
    seconds: float
    """Of the processor."""
    events: list[Event]


class Twice(NamedTuple, Generic[T]):
    """The results of both runs, and the figures of what they took: bytes, seconds, counts."""

    free: T
    tight: T
    figures: dict[str, Any]
    events: list[Event]
    """Of the second run."""

    def report(self) -> list[str]:
        """What they took, as lines to read."""
        figures = self.figures
        share = figures["budget_peak_bytes"] / figures["peak_bytes"]
        return [
            f"peak memory         {megabytes(figures['peak_bytes'])} without a budget, "
            f"{megabytes(figures['budget_peak_bytes'])} within {megabytes(figures['budget_bytes'])}: {share:.1%}",
            f"processor time      {figures['seconds']:.1f} s without a budget, "
            f"{figures['budget_seconds']:.1f} s within it: x {figures['time_ratio']:.2f}",
        ]

    def draw(self, title: str, picture: str | Path | None, echo: Callable[[str], None]) -> str | None:
        """Draw which value was in memory when; the file, or None where there is none. What hinders that is echoed."""
        if picture is None:
            return None
        try:
            path = str(save(residency(self.events, title=title, budget=self.figures["budget_bytes"]), picture))
        except (ImportError, ValueError) as error:  # no matplotlib, or no such format
            echo(f"no picture: {error}")
            return None
        echo(f"picture             {path}")
        return path


def check(budget: float, picture: str | Path | None) -> None:
    """Raise before anything is computed: ValueError for the budget, FileNotFoundError for the picture's folder."""
    if not 0 < budget <= 1:
        raise ValueError(f"budget is a fraction of the unlimited peak, more than 0 and at most 1, not {budget!r}")
    if picture is not None and not Path(picture).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no directory {Path(picture).absolute().parent} for the picture")


def twice(program: Program[T], budget: float, progress: Progress) -> Twice[T]:
    """Run it without a budget, then within so much of the peak of that. Raises BudgetError if that is too little."""
    free = _run(rc.Cache(), program, lambda words, share: progress(f"without a budget: {words}", share / 2))
    limit = int(budget * free.stats.peak)
    within = f"within {budget:.0%} of it"
    tight = _run(rc.Cache(limit), program, lambda words, share: progress(f"{within}: {words}", (1 + share) / 2))
    figures = {
        "peak_bytes": free.stats.peak,
        "budget_bytes": limit,
        "budget_peak_bytes": tight.stats.peak,
        "overhead": tight.stats.overhead,
        "seconds": free.seconds,
        "budget_seconds": tight.seconds,
        "time_ratio": tight.seconds / free.seconds,
        "evictions": tight.stats.evictions,
        "rematerializations": tight.stats.rematerializations,
    }
    return Twice(free.result, tight.result, figures, tight.events)


def _run(cache: rc.Cache, program: Program[T], progress: Progress) -> Run[T]:
    events: list[Event] = []
    start = process_time()
    with cache:
        result = program(progress, lambda: cache.subscribe(events.append))
    return Run(result, cache.stats(), process_time() - start, events)


def megabytes(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e6:.0f} MB" if size >= 100_000_000 else f"{size / 1e6:.1f} MB"
