"""A recorded program: its operations, and the order in which it ran them and dropped their results.

Names are resolved when a trace is read. What is left are numbers: of values, of storages (which aliases share) and of
calls, each counted from zero in order of creation. The simulator and the planners read nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Generic, Literal, TypeVar

V = TypeVar("V", bound=Hashable)

StepKind = Literal["source", "call", "get", "keep", "drop", "pin", "unpin", "detach", "evict", "hold", "let go"]
"""The kinds of steps: `keep` and `drop` are its first and last outside reference (a new value has one).

`hold` and `let go`: what `get` returned is kept outside. `call` has the number of a call.
"""

Step = tuple[StepKind, int]


def total(costs: Iterable[float]) -> float:
    """The sum as a clock has it, rounded after each addition: that of `sum` is more exact from Python 3.12 on."""
    return reduce(add, costs, 0.0)


class TraceError(ValueError):
    """A trace that cannot be read: file, line, what is wrong."""


@dataclass(slots=True)
class Call:
    """One operation. `arguments` and `results` are values; an argument may occur more than once."""

    name: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    cost: float
    """Of the first run, in units of the program."""
    again: list[float] = field(default_factory=list)
    """Of the second and later runs, where they were recorded; the last one serves from then on."""
    room: int | None = None
    """Bytes that were known to be needed before the first run; None: those of the results."""
    sure: bool = True
    """Whether `room` was known; where it was guessed, the call runs without it if need be."""
    place: str = ""
    """Where it was created, `file:line`; empty if the trace does not say."""


@dataclass(slots=True)
class Program:
    """One run of a program.

    Its results are the values in `outputs`: at the end they are brought back into memory, in this order, and kept.
    """

    name: str
    unit: float = 1.0
    """Seconds in one unit of cost."""
    sizes: list[int] = field(default_factory=list)
    """Storage -> bytes."""
    devices: list[str] = field(default_factory=list)
    """Storage -> the device that it lies on."""
    storages: list[int] = field(default_factory=list)
    """Value -> storage."""
    makers: list[int] = field(default_factory=list)
    """Value -> call; -1: a source."""
    calls: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    """(number of the call that comes next, text)."""
    outputs: list[int] = field(default_factory=list)
    published: bool = False
    """Whether it comes from a trace in the published format."""
    revived: set[int] = field(default_factory=set)
    """Values that are used after their last reference was dropped, which only a published trace can do."""
    numbers: list[int] = field(default_factory=list)
    """Value -> its number in the trace, if that has numbers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the recorded run: policy, budget and what else the first line of the trace says."""

    @property
    def model_time(self) -> float:
        """The cost of all calls, each run once, in units."""
        return self.cost_of(range(len(self.calls)))

    def cost_of(self, calls: Iterable[int]) -> float:
        """The cost of these runs, in units."""
        return total([self.calls[number].cost for number in calls])

    def most_in_use(self) -> dict[str, int]:
        """The bytes of each device at their peak, if each storage goes with the last reference to a value on it."""
        references = [0] * len(self.sizes)
        used: dict[str, int] = {}
        peak: dict[str, int] = {}
        for kind, number in self.steps:
            for value in self.calls[number].results if kind == "call" else (number,):
                storage = self.storages[value]
                size, device = self.sizes[storage], self.devices[storage]
                if kind == "drop":
                    references[storage] -= 1
                    used[device] -= 0 if references[storage] else size
                else:
                    used[device] = used.get(device, 0) + (0 if references[storage] else size)
                    references[storage] += 1
                peak[device] = max(peak.get(device, 0), used[device])
        return peak

    def copy(self) -> Program:
        """The same, to which more can be added; the calls are shared. O(program)."""
        lists = ("sizes", "devices", "storages", "makers", "calls", "steps", "marks", "outputs", "numbers")
        copied: dict[str, Any] = {name: list(getattr(self, name)) for name in lists}
        return replace(self, revived=set(self.revived), **copied)

    def add_storage(self, size: int, device: str = "cpu") -> int:
        """Memory for results to share; its number."""
        self.sizes.append(size)
        self.devices.append(device)
        return len(self.sizes) - 1

    def add_source(self, size: int, device: str = "cpu") -> int:
        """A value that is not computed; its number."""
        return self.add_source_on(self.add_storage(size, device))

    def add_source_on(self, storage: int) -> int:
        """A value that is not computed, on memory that others may share; its number."""
        value = self._add_value(storage, -1)
        self.steps.append(("source", value))
        return value

    def add_call(self, name: str, arguments: Sequence[int], storages: Sequence[int], cost: float) -> tuple[int, ...]:
        """An operation that makes one value on each of `storages`; the values."""
        number = len(self.calls)
        results = tuple([self._add_value(storage, number) for storage in storages])
        self.calls.append(Call(name, tuple(arguments), results, cost))
        self.steps.append(("call", number))
        return results

    def _add_value(self, storage: int, maker: int) -> int:
        self.storages.append(storage)
        self.makers.append(maker)
        return len(self.storages) - 1

    def __repr__(self) -> str:
        return f"<program {self.name}: {len(self.calls):,} operations, {len(self.sizes):,} storages>"


@dataclass
class ProgramBuilder(Generic[V]):
    """Writes a program in the order of a graph: sources and calls, by the names of values. Each has its own memory.

    For a graph with views the name of a value is that of the memory, which views share.
    """

    program: Program
    values: dict[V, int] = field(default_factory=dict)
    """Name -> value of the program."""

    def source(self, value: V, nbytes: int = 0) -> None:
        """A value that is not computed; without bytes, if it is in memory anyway."""
        self.values[value] = self.program.add_source(nbytes)

    def call(self, name: str, reads: Iterable[V], makes: Mapping[V, int], cost: float, room: int = 0) -> Sequence[int]:
        """An operation that makes values of so many bytes.

        `cost` is in units of the program; `room` are the bytes that a run needs beside its results: if there are any,
        a result more, whose number is returned. Raises KeyError if nothing made what it reads. O(reads and makes).
        """
        program = self.program
        arguments = [self.values[value] for value in reads]
        storages = [program.add_storage(nbytes) for nbytes in (*makes.values(), *([room] if room else []))]
        results = program.add_call(name, arguments, storages, cost)
        self.values.update(zip(makes, results, strict=False))
        return results[len(makes) :]

    def step(self, kind: StepKind, values: Iterable[V]) -> None:
        """A step with values between calls: "get", "detach", "drop"."""
        self.program.steps.extend((kind, self.values[value]) for value in values)

    def nbytes(self, value: V) -> int:
        """The bytes of a value."""
        return self.program.sizes[self.program.storages[self.values[value]]]

    def copy(self) -> ProgramBuilder[V]:
        """The same, to which more can be added."""
        return ProgramBuilder(self.program.copy(), dict(self.values))


def file_and_line(place: str) -> tuple[str, int]:
    """Of a place `file:line`; something else, which a trace of another program may have there, is a file alone."""
    file, colon, line = place.rpartition(":")
    return (file, int(line)) if colon and line.isdecimal() and len(line) < 10 else (place, 0)


def last_uses(runs: Sequence[tuple[Collection[V], Collection[V]]], lasting: Iterable[V]) -> list[list[V]]:
    """For each run, the values that nothing needs once it is over.

    A run is (what it makes, what it reads). A value is needed up to the last run that reads it before it is made again,
    if it is; what is `lasting`, after the last run, too. What nothing reads goes with the run that makes it. So does,
    after its last use, what is read and never made: count sources as lasting if they stay. What a run makes comes
    before what it reads, each value once. O(what all runs make and read).
    """
    needed = set(lasting)
    dying: list[list[V]] = []
    for makes, reads in reversed(runs):
        dying.append([value for value in dict.fromkeys((*makes, *reads)) if value not in needed])
        needed.difference_update(makes)
        needed.update(reads)
    dying.reverse()
    return dying
