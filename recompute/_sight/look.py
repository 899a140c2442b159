"""A run under one budget, small enough for a page: bytes over time, the stays of the largest values, two tables.

What is left out is counted: values beside the largest, and stays that would be thinner than a hair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Final

from recompute._pictures.bars import bars
from recompute._sight.recording import arriving
from recompute._simulator.published_replay import baseline
from recompute._simulator.replay import Numbers
from recompute._simulator.run import Status
from recompute._simulator.simulate import simulate
from recompute._traces.program import Program
from recompute.events import Event, Evicted, Forgotten, Performed

COLUMNS: Final = 300
"""Columns from left to right."""
ROWS: Final = 40
"""Values whose stays are shown."""
STEPS: Final = 10_000
"""Times are parts of the run: so many to its end."""
_BARS: Final = 1_500
_TOP: Final = 10
_HOW: Final = {"first": 0, "again": 1, "fetched": 2, "moved": 3}

Place = tuple[str, str]
"""A function, and `file:line`; a source is ("sources", "")."""


class Subject:
    """A program, and what is known of it before any replay."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.peak = baseline(program)
        """Bytes at the peak without a budget, by device."""
        self.places: dict[int, Place] = {}
        """Storage of the program -> what makes it."""
        for value, maker in enumerate(program.makers):
            place = ("sources", "") if maker < 0 else (program.calls[maker].name, program.calls[maker].place)
            self.places.setdefault(program.storages[value], place)
        self.shown = self._largest()
        """The storages of the largest computed values, in order of creation; of many that are equally large, some."""

    @property
    def whole(self) -> int:
        """Bytes at the peak without a budget, on all devices."""
        return sum(self.peak.values())

    def _largest(self) -> list[int]:
        sizes = self.program.sizes
        made = [storage for storage, (name, _) in self.places.items() if name != "sources" and sizes[storage]]
        if len(made) <= ROWS:
            return made
        least = sorted((sizes[storage] for storage in made), reverse=True)[ROWS - 1]
        above = [storage for storage in made if sizes[storage] > least]
        equal = [storage for storage in made if sizes[storage] == least]
        count = ROWS - len(above)
        chosen = {*above, *(equal[at * len(equal) // count] for at in range(count))}
        return [storage for storage in made if storage in chosen]


@dataclass(frozen=True)
class Look:
    """The part of a page about one budget. Bytes and seconds."""

    budget: int
    """On all devices together."""
    share: float
    """Of the peak without a budget."""
    status: Status
    overhead: float | None
    peak: int
    evictions: int
    rematerializations: int
    seconds: float
    """All compute of the run, and transfers that stop it."""
    used: list[int] = field(default_factory=list)
    """The most in each of `COLUMNS` equal parts of the run."""
    again: list[int] = field(default_factory=list)
    """Per cent of each part that were spent on recomputation."""
    rows: list[list[int]] = field(default_factory=list)
    """For each of the values shown: start, length, how, start, ... in `STEPS`, see `_HOW`."""
    left_out: int = 0
    """Stays that are too short to be drawn."""
    held: list[tuple[str, str, int, int]] = field(default_factory=list)
    """At the peak: function, line, bytes, values; the most first."""
    repeated: list[tuple[str, str, int, float]] = field(default_factory=list)
    """Function, line, times, seconds; the most first."""


def look_at(subject: Subject, budget: Mapping[str, int], *, draw: bool = True, **options: Any) -> Look:
    """Replay a program under a budget, and see what happens. `draw`: with pictures and tables, not figures alone."""
    events: list[Event] = []
    run = simulate(
        subject.program,
        budget,
        peak=subject.peak,
        machine="library",
        listener=events.append if draw else None,
        **options,
    )
    look = Look(
        run.budget_bytes,
        run.budget_bytes / max(1, subject.whole),
        run.status,
        run.overhead,
        run.peak_bytes,
        run.evictions,
        run.rematerializations,
        run.total_time,
    )
    return _drawn(look, subject, events) if draw and run.status == "ok" and events else look


def _drawn(look: Look, subject: Subject, events: Sequence[Event]) -> Look:
    end = events[-1].time or 1.0
    numbers = Numbers(subject.program)
    for event in events:
        numbers.hear(event)
    storages = numbers.storages
    rows, left_out = _rows(events, storages, subject.shown, end)
    return replace(
        look,
        used=_used(events, end),
        again=_again(events, end),
        rows=rows,
        left_out=left_out,
        held=_held(events, {number: subject.places[storage] for number, storage in storages.items()}),
        repeated=_repeated(events, subject.program.unit),
    )


def _used(events: Sequence[Event], end: float) -> list[int]:
    """The most bytes in each part of the run, on all devices together."""
    most = [-1] * COLUMNS
    by_device: dict[str, int] = {}
    on: dict[int, str] = {}
    now = 0
    last = 0  # column
    for event in events:
        column = min(COLUMNS - 1, int(event.time / end * COLUMNS))
        for at in range(last, column + 1):  # what was there before goes on until now
            most[at] = max(most[at], now)
        last = column
        device = _device(event, on)
        now += event.used - by_device.get(device, 0)
        by_device[device] = event.used
        most[column] = max(most[column], now)
    return [now if value < 0 else value for value in most]


def _device(event: Event, on: dict[int, str]) -> str:
    """The device whose bytes an event tells. `on`: those of storages, noted here."""
    device = getattr(event, "device", None)
    if device is not None:
        on.update(dict.fromkeys([storage for storage, _ in arriving(event)], device))
        return str(device)
    return on.get(getattr(event, "storage", getattr(event, "value", -1)), next(iter(on.values()), "cpu"))


def _again(events: Sequence[Event], end: float) -> list[int]:
    """Per cent of each part of the run that went into recomputation."""
    parts = [0.0] * COLUMNS
    for event in events:
        if isinstance(event, Performed) and event.again:
            start, stop = (event.time - event.cost) / end * COLUMNS, event.time / end * COLUMNS
            for at in range(max(0, int(start)), min(COLUMNS, ceil(stop))):
                parts[at] += max(0.0, min(stop, at + 1) - max(start, at))
    return [min(100, round(100 * part)) for part in parts]


def _rows(
    events: Sequence[Event], storages: Mapping[int, int], shown: Sequence[int], end: float
) -> tuple[list[list[int]], int]:
    """The stays of the values that are shown, and how many are left out because they are too short."""
    at = {storage: row for row, storage in enumerate(shown)}
    stays = bars(events, {number for number, storage in storages.items() if storage in at})
    longest = sorted(stays, key=lambda bar: bar.start - bar.end)[:_BARS]
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for bar in sorted(longest, key=lambda bar: bar.start):
        start = round(bar.start / end * STEPS)
        rows[at[storages[bar.storage]]] += [start, max(1, round(bar.end / end * STEPS) - start), _HOW[bar.how]]
    return [rows[row] for row in range(len(shown))], len(stays) - len(longest)


def _held(events: Sequence[Event], names: Mapping[int, Place]) -> list[tuple[str, str, int, int]]:
    """The memory at its peak, by function and line."""
    peak = max(range(len(events)), key=lambda at: events[at].used)
    here: dict[int, int] = {}
    for event in events[: peak + 1]:
        here.update(arriving(event))
        if isinstance(event, Evicted | Forgotten) and not getattr(event, "held", False):
            here.pop(event.storage, None)
    sizes: Counter[Place] = Counter()
    counts: Counter[Place] = Counter()
    for storage, size in here.items():
        place = names.get(storage, ("?", ""))
        sizes[place] += size
        counts[place] += 1
    return [(*place, size, counts[place]) for place, size in sizes.most_common(_TOP) if size]


def _repeated(events: Sequence[Event], unit: float) -> list[tuple[str, str, int, float]]:
    times: Counter[Place] = Counter()
    spent: defaultdict[Place, float] = defaultdict(float)
    for event in events:
        if isinstance(event, Performed) and event.again:
            times[event.function, event.place] += 1
            spent[event.function, event.place] += event.cost * unit
    most = sorted(times, key=lambda place: (-spent[place], -times[place], place))
    return [(*place, times[place], spent[place]) for place in most[:_TOP]]
