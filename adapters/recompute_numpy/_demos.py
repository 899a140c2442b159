"""What the demos have in common: the folder and the file of the picture, sizes to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from recompute.events import Event
from recompute.pictures import residency, save


def check(budget: float, picture: str | Path | None) -> None:
    """Raise before anything is computed: ValueError for the budget, FileNotFoundError for the picture's folder."""
    if not 0 < budget <= 1:
        raise ValueError(f"budget is a fraction of the unlimited peak, more than 0 and at most 1, not {budget!r}")
    if picture is not None and not Path(picture).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no directory {Path(picture).absolute().parent} for the picture")


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
