"""A run to look at: the program, and the events of the run as it was recorded or as it is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recompute._budget import parse_budget
from recompute._simulator.published_replay import baseline
from recompute._simulator.simulate import by_amount, simulate
from recompute._traces.program import Program
from recompute._traces.read import read, recorded_events
from recompute.events import Added, Event, Fetched, Performed, TakenBack

DEAREST: Final = 20.0
"""The overhead above which a replay is given up: below the least budget it could recompute for days, and then fail."""


@dataclass(frozen=True)
class RecordedRun:
    """One run of a program. Times of events are in units of the program."""

    program: Program
    events: list[Event]
    budget: int | None
    """Bytes on all devices together; None: there was none, or it is not known."""
    replayed: bool
    """Whether it is a replay, and not what happened."""

    @property
    def places(self) -> dict[int, tuple[str, str]]:
        """Storage -> the function that made it first, and where that was called; a source has neither."""
        places: dict[int, tuple[str, str]] = {}
        for event in self.events:
            if isinstance(event, Performed):
                for storage in event.storages:
                    places.setdefault(storage, (event.function, event.place))
            elif isinstance(event, Added):
                places.setdefault(event.storage, ("a source", ""))
        return places

    @property
    def devices(self) -> dict[int, str]:
        """Storage -> its device."""
        devices: dict[int, str] = {}
        for event in self.events:
            if isinstance(event, Performed):
                devices.update(dict.fromkeys(event.storages, event.device))
            elif isinstance(event, Added):
                devices[event.storage] = event.device
        return devices


def arriving(event: Event) -> list[tuple[int, int]]:
    """(storage, bytes) of what an event brings into memory, some of which may be there already."""
    if isinstance(event, Performed):
        return list(zip(event.storages, event.nbytes, strict=True))
    if isinstance(event, Added | TakenBack | Fetched):
        return [(event.storage, event.nbytes)]
    return []


def open_recording(path: str | Path, budget: int | float | None = None) -> RecordedRun:
    """The run that a trace tells of, or what it would be under another budget: bytes (int) or a share of its peak.

    A trace in the published format has a program alone: it is replayed, without a budget if none is given. Raises
    TraceError, OSError, and ValueError for a budget that is none or in which the program does not run.
    """
    program = read(path)
    if budget is None and not program.published:
        return RecordedRun(program, list(recorded_events(path)), budget_of(program.settings), False)
    return replayed(program, budget)


def replayed(program: Program, budget: int | float | None = None) -> RecordedRun:
    """A replay of the program under a budget, with the default policy; ValueError if it does not run in that."""
    events: list[Event] = []
    peak = baseline(program)
    most = sum(peak.values())
    limit = most if budget is None else parse_budget(budget, whole=most)
    amount = by_amount(1 << 62 if budget is None else budget)
    run = simulate(program, **amount, peak=peak, listener=events.append, limit=DEAREST, machine="library")
    if run.status != "ok":
        why = "oom" if run.status == "oom" else f"more than {DEAREST:g} times the compute"
        raise ValueError(f"{program.name} does not run in {limit:,} bytes: {why}; give it a larger --budget")
    return RecordedRun(program, events, None if budget is None else limit, True)


def budget_of(settings: Mapping[str, Any]) -> int | None:
    """The budget that the header of a trace tells, in bytes on all devices together."""
    given = settings.get("budget")
    try:
        if isinstance(given, Mapping):
            return sum(parse_budget(amount) for amount in given.values() if amount is not None)
        return None if given is None else parse_budget(given)
    except (TypeError, ValueError):  # it was a function, or a share of the machine's memory
        return None
