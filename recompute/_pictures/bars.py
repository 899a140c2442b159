"""From events to stays of storages in memory, the large storages, and the times of the marks of a program.

A plan becomes events, too, so that it can be drawn as a run of a cache is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from recompute.events import Added, Event, Evicted, Fetched, Forgotten, Performed, TakenBack

if TYPE_CHECKING:
    from recompute._plans.schedule import ProgramPlan
    from recompute._traces.program import Program

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
    stays: list[Bar] = []
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
            stays.append(Bar(storage, start, now, how))

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
    return stays


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
    times: list[Moment] = []
    done, before = 0, 0.0  # first runs, and the end of the last one
    for event in events:
        while waiting and waiting[-1][0] <= done and isinstance(event, Performed):
            times.append((before, waiting.pop()[1]))
        if not waiting:
            break
        if isinstance(event, Performed) and not event.again:
            done += 1
            before = event.time
    return times


def plan_events(program: Program, plan: ProgramPlan) -> list[Event]:
    """The events of a cache that followed the plan. Storages have the program's numbers; times are in its units."""
    sizes, storages = program.sizes, program.storages
    events: list[Event] = []
    resident: set[int] = set()
    ran: set[int] = set()
    used, now = 0, 0.0

    for value, maker in enumerate(program.makers):
        storage = storages[value]
        if maker < 0 and storage not in resident:
            resident.add(storage)
            used += sizes[storage]
            events.append(Added(now, used, storage, sizes[storage], program.devices[storage]))
    for kind, which in plan.steps:
        if kind == "compute":
            call = program.calls[which]
            made = tuple(dict.fromkeys(storages[value] for value in call.results))
            used += sum(sizes[storage] for storage in made if storage not in resident)
            resident.update(made)
            now += call.cost
            events.append(
                Performed(
                    now,
                    used,
                    call.name,
                    call.cost,
                    which in ran,
                    made,
                    tuple([sizes[storage] for storage in made]),
                    tuple(dict.fromkeys(storages[value] for value in call.arguments)),
                )
            )
            ran.add(which)
        else:
            resident.discard(which)
            used -= sizes[which]
            events.append(Evicted(now, used, which, sizes[which], "request"))
    return events
