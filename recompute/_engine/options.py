"""How an engine is set: the library's own way, unless the simulator or staging ask for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineOptions:
    """What the simulator and staging set otherwise."""

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
