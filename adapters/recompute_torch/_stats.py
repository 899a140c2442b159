"""What a block did and holds: the figures of the core, and which path ran."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import recompute as rc


@dataclass(frozen=True)
class Stats(rc.Stats):
    """`recompute.Stats` of a block."""

    path: Literal["python", "native"] = "python"
    """Which one tracked the operators: a dispatch mode, or C++ below it."""


def of_python(stats: rc.Stats) -> Stats:
    """Those of a cache."""
    return Stats(**{each.name: getattr(stats, each.name) for each in fields(rc.Stats)})
