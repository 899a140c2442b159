"""How an engine is set: the library's own way, unless the simulator or staging ask for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineOptions:
    """What the simulator and staging set otherwise, the former to do as the published simulator does."""

    room: Callable[[Any], Sequence[tuple[str, int]]] | None = None
    """(device, bytes) that the first run of a function asks for; None: what was learnt."""
    program_order: bool = False
    """Evicted arguments come back, and are unlocked, in the order of the program; else so that the peak is low."""
    patient: bool = True
    """Whether locks that only wait are let go when memory is short."""
    remember_all: bool = False
    """Whether what nobody can need any more is kept, in its component."""
    active: bool = False
    """Whether components are kept from the start, not from the first question."""
    start: float = 0.0
    """Where the compute clock starts."""
    expected_cost: Callable[[Any], float] | None = None
    """The cost of what a function makes: it counts as evicted while the first run waits. None: it does not count."""
    before_bringing: Callable[[], None] | None = None
    """Called before `get`, `pin` or `detach` brings a value; it may raise."""
    effort: float = 0.3
    """Of about ten seconds, in which the rounds of a program that repeats are planned."""
    waits: bool = False
    """Whether the program waits for that."""
    warns: bool = True
    """Whether the user is told if most of the computing is repeated computing."""
