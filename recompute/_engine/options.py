"""What is set when a cache is made, beyond what users set: by adapters, the simulator and staging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The third protocol of `recompute.extend`: `Cache(..., settings=Settings(...))`."""

    smallest: int = 1
    """Values of fewer bytes are never evicted to make room."""
    lenient: bool = False
    """What cannot fit is admitted, as an overshoot: for values that have to be given back."""
    cure: str = ""
    """What the warning of thrashing advises; empty: what the core knows."""
    package: str = "recompute"
    """Whose calls are not the program's own: a warning points to the line that called it."""
    paste: str = ""
    """How a program gets a budget: `'rt.budget("{budget}")'`. A report of a trace shows it, with a budget filled in."""
    keeps: bool = True
    """Whether values that are released can stay: not if their memory goes with the references of the program."""
    counts_whole: bool = False
    """Whether arrays that a result shares with arguments count in both, since they will not be shared for ever."""
    room: Callable[[Any], tuple[Sequence[tuple[str, int]], bool]] | None = None
    """(device, bytes) that the first run of a function asks for, and whether that is certain; None: what was learnt."""
    before_bringing: Callable[[], None] | None = None
    """Called before `get`, `pin` or `detach` brings a value; it may raise."""
    effort: float = 0.3
    """Of about ten seconds, in which the rounds of a program that repeats are planned."""
    waits: bool = False
    """Whether the program waits for that."""
    warns: bool = True
    """Whether the user is told if most of the computing is repeated computing."""
    internal: bool = False
    """Whether the cache is no program's own, so that the command line and other watchers of caches do not see it."""
