"""The library's own trace format: a header, then the events of a cache as JSON lines, then an end.

An event is an object of its fields, with its type under "event" (recompute.events says what each means). What the
cache decided (evictions under pressure, rematerializations) is there for pictures; the program is what its user did.

A replay under the same budget, policy, search and release makes the same decisions, with these exceptions:

* Operations that failed, and those that did not fit: what was evicted or brought back for them is not.
* Functions that use the cache themselves: what they get counts as an argument, and is brought back before they run.
* Results that take other memory in every run, and lists of values (`sequence`), which keep those in memory.
* Memory that is held outside by something other than a value that `get` returned, such as a view of it.
* A budget that changed on the way, or follows the machine; threads; `verify`; policies that draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from recompute._traces.program import Program, Step, StepKind

HEADER: Final = "recompute-trace"
"""The key of the header's object that has the version of the format."""
VERSION: Final = 1
_MOST: Final = 2**63
"""An upper bound of all numbers: bytes, seconds, and numbers of values."""


class Recorded:
    """Builds a program from the lines of a recorded run, one at a time. Raises ValueError, which says why."""

    def __init__(self, name: str) -> None:
        self.program = Program(name)
        self._values: dict[int, int] = {}  # number in the trace -> value
        self._storages: dict[int, int] = {}  # number in the trace -> storage
        self._seen: dict[int, dict[int, int]] = {}  # storage -> values that went outside -> the step after that
        self._where: dict[int, int] = {}  # value -> number of its storage now: it may move when it is made again
        self._released: set[int] = set()  # values without an outside reference
        self._made: dict[int, dict[int, int]] = {}  # storage in memory -> its values -> the step after that
        self._away: dict[int, list[int]] = {}  # storage in a tier -> its values
        self._held: dict[int, list[list[int]]] = {}  # storage -> values that are held outside, after each eviction
        self._between: list[tuple[int, Step]] = []  # steps that were found out later: (number of the next step, step)
        self._ended = False
        self._events: dict[str, Callable[[dict[str, Any]], None]] = {
            HEADER: self._header,
            "Added": self._added,
            "Performed": self._performed,
            "Evicted": self._evicted,
            "LetGo": self._let_go,
            "Accessed": self._accessed,
            "Released": self._drop,
            "Pinned": lambda line: self._step("pin", self._value(line, "value")),
            "Unpinned": lambda line: self._step("unpin", self._value(line, "value")),
            "Detached": lambda line: self._step("detach", self._value(line, "value")),
            "TakenBack": self._taken_back,
            "Moved": lambda _: None,
            "Fetched": self._fetched,
            "Foresaw": lambda _: None,
            "Forgotten": lambda _: None,
            "End": lambda _: None,
        }

    def add(self, line: dict[str, Any]) -> None:
        """The next line."""
        event = HEADER if HEADER in line else line.get("event")
        run = self._events.get(event) if isinstance(event, str) else None
        if run is None:
            raise ValueError(f"unknown event {event!r}; known are {', '.join(self._events)}")
        run(line)
        self._ended = event == "End"

    def finish(self) -> Program:
        """The program, after the last line."""
        if not self._ended:
            raise ValueError("the file is truncated: the line with the event End is missing")
        self._between.sort(key=lambda pair: pair[0])
        self.program.numbers = [0] * len(self.program.storages)
        for number, value in self._values.items():
            self.program.numbers[value] = number
        steps = self.program.steps
        merged: list[Step] = []
        start = 0
        for number, step in self._between:
            merged += steps[start:number]
            merged.append(step)
            start = max(start, number)
        self.program.steps[:] = merged + steps[start:]
        return self.program

    def _header(self, line: dict[str, Any]) -> None:
        if line[HEADER] != VERSION:
            raise ValueError(
                f"format version {line[HEADER]!r} is not known here, only {VERSION}: record the program again, or "
                f"read the trace with the recompute that wrote it ({line.get('recompute', 'unknown')})"
            )
        self.program.settings |= line  # adapters may add some

    def _added(self, line: dict[str, Any]) -> None:
        number = _natural(line, "storage")
        if number in self._storages:
            raise ValueError(f"storage {number} is added twice")
        value = self.program.add_source(_natural(line, "nbytes"), _text(line, "device"))
        self._values[number] = value
        self._storages[number] = self.program.storages[value]

    def _performed(self, line: dict[str, Any]) -> None:
        cost = _cost(line)
        results = _naturals(line, "results")
        if line.get("again") is True:
            makers = {self.program.makers[self._values[result]] for result in results if result in self._values}
            if len(makers) != 1 or -1 in makers:
                raise ValueError("an operation runs again whose first run is not there")
            self.program.calls[makers.pop()].again.append(cost)
            for result, storage in zip(results, _naturals(line, "homes"), strict=False):
                if result in self._values:
                    self._make(self._values[result], storage, len(self.program.steps) + 1)
            return
        device, on = _text(line, "device"), _naturals(line, "homes")
        storages, sizes = _naturals(line, "storages"), _naturals(line, "nbytes")
        inputs = [self._known(self._values, number, "value") for number in _naturals(line, "inputs")]
        if not results or len(on) != len(results) or len(storages) != len(sizes) or not set(on) <= {*storages}:
            raise ValueError("results and homes, and storages and nbytes, must go together, and there must be some")
        if not self._values.keys().isdisjoint(results) or len(set(results)) < len(results):
            raise ValueError("a result is made twice")
        for storage, size in zip(storages, sizes, strict=True):
            if storage not in self._storages:
                self._storages[storage] = self.program.add_storage(size, device)
        made = self.program.add_call(_text(line, "function"), inputs, [self._storages[storage] for storage in on], cost)
        self._values.update(zip(results, made, strict=True))
        for value, storage in zip(made, on, strict=True):
            self._make(value, storage, len(self.program.steps))
        if line.get("place") is not None:
            self.program.calls[-1].place = _text(line, "place")
        if line.get("room") is not None:
            self.program.calls[-1].room = _natural(line, "room")
            self.program.calls[-1].sure = line.get("sure") is not False

    def _make(self, value: int, storage: int, step: int) -> None:
        """A value is in memory after that many steps, unless it was already."""
        before = self._where.get(value, storage)
        if before != storage:
            self._made.get(before, {}).pop(value, None)
        self._where[value] = storage
        self._storages.setdefault(storage, self.program.storages[value])
        self._made.setdefault(storage, {}).setdefault(value, step)

    def _evicted(self, line: dict[str, Any]) -> None:
        storage = self._storage(line)
        if line.get("held") is True:
            self._hold(storage, [self._known(self._values, number, "value") for number in _naturals(line, "ghosts")])
        values = self._made.pop(storage, {})
        if line.get("tier"):
            self._away[storage] = list(values)
        self._seen.pop(storage, None)
        if line.get("why") == "request":
            for value in values:  # the first that the cache has not forgotten will do it
                self._step("evict", value)

    def _accessed(self, line: dict[str, Any]) -> None:
        value = self._value(line, "value")
        self._step("get", value)
        self._seen.setdefault(self._where.get(value, -1), {})[value] = len(self.program.steps)

    def _hold(self, storage: int, values: Sequence[int]) -> None:
        """An evicted storage turns out to be held outside: since `get` returned its values, or they were made.

        `values` are those of them that are held; none: those that the cache has forgotten.
        """
        since = self._made.get(storage, {}) | self._seen.get(storage, {})
        held = [value for value in values or self._released.intersection(since) if value in since]
        steps = len(self.program.steps)
        self._held.setdefault(storage, []).append(held)
        self._between += [(min(since[value], steps), ("hold", value)) for value in held]

    def _drop(self, line: dict[str, Any]) -> None:
        value = self._value(line, "value")
        self._released.add(value)
        self._step("drop", value)

    def _taken_back(self, line: dict[str, Any]) -> None:
        """It may still be held outside, or not: while it is in memory, no event tells."""
        storage = self._storage(line)
        after = len(self.program.steps) + 1
        values = self._held[storage].pop() if self._held.get(storage) else []
        self._between += [(after, ("let go", value)) for value in values]
        self._made[storage] = dict.fromkeys(values, after)

    def _fetched(self, line: dict[str, Any]) -> None:
        """It is in memory again, without a run."""
        storage = self._storage(line)
        self._made[storage] = dict.fromkeys(self._away.pop(storage, ()), len(self.program.steps) + 1)

    def _let_go(self, line: dict[str, Any]) -> None:
        storage = self._storage(line)
        if not self._held.get(storage):  # it was not evicted, but forgotten
            self._hold(storage, ())
        for value in self._held[storage].pop(0):
            self._step("let go", value)

    def _step(self, kind: StepKind, number: int) -> None:
        self.program.steps.append((kind, number))

    def _value(self, line: dict[str, Any], key: str) -> int:
        return self._known(self._values, _natural(line, key), "value")

    def _storage(self, line: dict[str, Any]) -> int:
        """The number of a storage in the trace, where it has been made."""
        self._known(self._storages, number := _natural(line, "storage"), "storage")
        return number

    @staticmethod
    def _known(numbers: dict[int, int], number: int, what: str) -> int:
        if number not in numbers:
            raise ValueError(f"{what} {number} is used before it is made")
        return numbers[number]


def _natural(line: dict[str, Any], key: str) -> int:
    return _check(line.get(key), line, key)


def _naturals(line: dict[str, Any], key: str) -> list[int]:
    numbers = line.get(key)
    if not isinstance(numbers, list):
        raise ValueError(f"{line.get('event')} needs a list as {key}, not {numbers!r}")
    return [_check(number, line, key) for number in numbers]


def _check(number: Any, line: dict[str, Any], key: str) -> int:
    if type(number) is not int:
        raise ValueError(f"{line.get('event')} needs a whole number as {key}, not {number!r}")
    if number < 0:
        raise ValueError(f"{key} must not be negative, but is {number}")
    if number >= _MOST:
        raise ValueError(f"{key} must be below 2**63, but is {number}")
    return number


def _text(line: dict[str, Any], key: str) -> str:
    text = line.get(key)
    if not isinstance(text, str):
        raise ValueError(f"{line.get('event')} needs a text as {key}, not {text!r}")
    return text


def _cost(line: dict[str, Any]) -> float:
    cost: Any = line.get("cost")
    if type(cost) not in (int, float) or not -_MOST < cost < _MOST:
        raise ValueError(f"{line.get('event')} needs a number as cost, not {cost!r}")
    if cost < 0:
        raise ValueError(f"cost must not be negative, but is {cost}")
    return float(cost)
