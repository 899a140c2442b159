"""What a cache tells those who listen: typed, in order, and free when nobody does.

Events are delivered in order after the cache's lock is released, so a listener may ask the cache anything. A listener
that raises is dropped with a warning: an observer cannot break a run. Times are on the compute clock (seconds: the sum
of all operation costs so far). Storages are known by number, in order of creation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Reason = Literal["pressure", "release", "request"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened at `time`, and `used` bytes were counted on its device afterwards."""

    time: float
    used: int


@dataclass(frozen=True, slots=True)
class Added(Event):
    """A source: fired when `pure` has made one."""

    storage: int
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True)
class Performed(Event):
    """An operation ran: fired when its outputs are stored. `again`: it was a rematerialization."""

    function: str
    cost: float
    again: bool
    storages: tuple[int, ...]
    nbytes: tuple[int, ...]
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """A storage was dropped: to make room, because its last reference went, or on request."""

    storage: int
    nbytes: int
    why: Reason


@dataclass(frozen=True, slots=True)
class TakenBack(Event):
    """An evicted storage was found in somebody's hands and needed no recomputation."""

    storage: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Forgotten(Event):
    """Nothing can ever need the storage again: value and recipe are gone."""

    storage: int


Listener = Callable[[Event], None]
