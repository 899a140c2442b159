"""From events to stays: when each storage was in memory, what was large, and when the marks of a program were."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from recompute.events import Added, Event, Evicted, Fetched, Forgotten, Performed, TakenBack

How = Literal["first", "again", "fetched", "moved"]
"""In memory since it was first computed (or taken back), recomputed or fetched; or in a tier instead."""

Moment = tuple[float, str]
"""A time on the clock of the events, and what begins then."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A storage was in memory, or in a tier, from `start` to `end` (the clock of the events)."""

    storage: int
    start: float
    end: float
    how: How = "first"


def bars(events: Iterable[Event], storages: Collection[int] | None = None) -> list[Bar]:
    """When each storage was in memory or in a tier, by the end of its stay; what is there stays to the last event.

    A stay begins with the operation that computes the value. `storages` limits them to some. O(events).
    """
    found: list[Bar] = []
    here: dict[int, tuple[float, How]] = {}
    now = 0.0

    def arrive(storage: int, start: float, how: How) -> None:
        if storages is None or storage in storages:
            if storage in here and here[storage][1] == "moved":
                leave(storage)
            here.setdefault(storage, (start, how))

    def leave(storage: int) -> None:
        if storage in here:
            start, how = here.pop(storage)
            found.append(Bar(storage, start, now, how))

    for event in events:
        now = event.time
        match event:
            case Added():
                arrive(event.storage, now, "first")
            case Performed():
                for storage in event.storages:
                    arrive(storage, now - event.cost, "again" if event.again else "first")
            case TakenBack():
                arrive(event.storage, now, "first")
            case Fetched():
                arrive(event.storage, now, "fetched")
            case Evicted():
                leave(event.storage)
                if event.tier:
                    arrive(event.storage, now, "moved")
            case Forgotten():
                leave(event.storage)
    for storage in list(here):
        leave(storage)
    return found


def large(events: Iterable[Event], share: float) -> set[int]:
    """The storages of at least this share of the most bytes that were used. O(events)."""
    sizes: dict[int, int] = {}
    most = 0
    for event in events:
        most = max(most, event.used)
        match event:
            case Added() | TakenBack():
                sizes[event.storage] = event.nbytes
            case Performed():
                sizes.update(zip(event.storages, event.nbytes, strict=False))
    return {storage for storage, size in sizes.items() if size >= share * most}


def moments(events: Iterable[Event], marks: Sequence[tuple[int, str]]) -> list[Moment]:
    """The moments of the marks of a program: each before the first run of the operation with its number. O(events).

    `marks` are those of the program that was replayed; one after the last operation is left out.
    """
    waiting = sorted(marks, reverse=True)
    found: list[Moment] = []
    done, before = 0, 0.0  # first runs, and the end of the last one
    for event in events:
        while waiting and waiting[-1][0] <= done and isinstance(event, Performed):
            found.append((before, waiting.pop()[1]))
        if not waiting:
            break
        if isinstance(event, Performed) and not event.again:
            done += 1
            before = event.time
    return found
