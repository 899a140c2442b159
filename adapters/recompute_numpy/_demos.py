"""What the demos have in common: what the runs took, the picture, sizes to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from recompute import Stats
from recompute.events import Event
from recompute.pictures import residency, save


def check(budget: float, picture: str | Path | None) -> None:
    """Raise before anything is computed: ValueError for the budget, FileNotFoundError for the picture's folder."""
    if not 0 < budget <= 1:
        raise ValueError(f"budget is a fraction of the unlimited peak, more than 0 and at most 1, not {budget!r}")
    if picture is not None and not Path(picture).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no directory {Path(picture).absolute().parent} for the picture")


class Run(Protocol):
    """A run of a demo, at its end."""

    @property
    def stats(self) -> Stats: ...
    @property
    def seconds(self) -> float: ...


def costs(free: Run, tight: Run, limit: int) -> dict[str, float]:
    """What a run took without a budget, and what one took within it."""
    return {
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


def draw(
    events: Iterable[Event], title: str, limit: int, picture: str | Path | None, echo: Callable[[str], None]
) -> str | None:
    """Draw which value was in memory when; the file, or None where there is none. What stands in the way is echoed."""
    if picture is None:
        return None
    try:
        path = str(save(residency(events, title=title, budget=limit), picture))
    except (ImportError, ValueError) as error:  # no matplotlib, or no such format
        echo(f"no picture: {error}")
        return None
    echo(f"picture             {path}")
    return path


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 100_000_000 else f"{size / 1e6:.1f} MB"
