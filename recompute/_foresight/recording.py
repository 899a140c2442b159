"""What one round of a program did, as a program for the planner, with the order in which the cache ran it.

An operation is known again in the next round by its function, and by what of the round it takes.

What was in memory when the round began counts as a source: nothing is known of how it came there. A source stays as
long as the cache keeps it: until nothing that is alive could be made again from it. But what could be evicted, or was
and came back, stays only up to its last use, unless it is in memory, and referred to, when the round ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from typing import Any, Final

from recompute._traces.program import Program, Step
from recompute.events import Accessed, Added, Detached, Event, Forgotten, Performed, Pinned, Released
from recompute.extend import EVICTED, Operation, Storage, Value

_AT_ONCE: Final = 64
"""Operations that have begun and not ended: one for each thread."""


class Round:
    """One round, recorded."""

    def __init__(
        self,
        program: Program,
        order: list[Step],
        calls: list[Call | None],
        lazy: Set[int],
        model_cost: float | None = None,
    ) -> None:
        self.program = program
        self.model_cost = program.model_time if model_cost is None else model_cost
        """Seconds of the first runs."""
        self.order = order
        """The runs of the cache, and what was got and detached; see `order_of_runs`."""
        self.calls = calls
        """Call of the program -> how it is known."""
        self.lazy = lazy
        """The calls that did not run where the program has them: views of what was evicted."""

    def with_costs(self, costs: Sequence[float]) -> Round:
        """The same round, with other costs of its calls when they run again."""
        program = copy(self.program)
        program.calls = [replace(call, cost=cost) for call, cost in zip(program.calls, costs, strict=True)]
        return Round(program, self.order, self.calls, self.lazy, self.model_cost)


class Recording:
    """Listens to the events of a cache from the beginning of a round to its end."""

    def __init__(self, resident: Iterable[Storage]) -> None:
        self._program = Program("round")
        self._values: dict[int, int] = {}  # number in the events -> value
        self._storages: dict[int, int] = {}  # number in the events -> storage
        self._homes: dict[int, int] = {}  # value in the events -> its storage there
        self._sources: dict[int, list[int]] = {}  # storage in the events -> sources on it, and what was detached
        self._lasting: set[int] = set()  # these
        self._passing: dict[int, int] = {}  # value from before the round that could be evicted -> steps at its last use
        self._order: list[Step] = []
        self._begun: dict[Operation, Call] = {}  # operations that have not ended
        self._places: dict[Operation | None, int] = {}  # those that have -> their calls
        self._calls: list[Call | None] = []
        self._lazy: set[int] = set()
        self._hear: dict[type[Event], Callable[[Any], None]] = {
            Added: lambda event: self._source(event.storage, event.storage, event.nbytes, event.device),
            Performed: self._performed,
            Released: self._released,
            Forgotten: self._forgotten,
            Accessed: lambda event: self._run("get", event.value),
            Detached: self._detached,
            Pinned: lambda event: self._run("detach", event.value),  # it stays, as what is detached does
        }
        for storage in resident:
            lasts = any(value.operation is None for value in storage.values)
            for value in storage.values:
                self._source(value.number, storage.number, storage.size, storage.pool.device, lasts=lasts)

    def begins(self, operation: Operation) -> None:
        """An operation is about to run for the first time."""
        if len(self._begun) >= _AT_ONCE:
            first, *_ = list(self._begun)
            self._begun.pop(first, None)  # it has failed
        self._begun[operation] = call_of(operation, self._places)

    @property
    def length(self) -> int:
        """Steps so far."""
        return len(self._program.steps)

    def __call__(self, event: Event) -> None:
        hear = self._hear.get(type(event))
        if hear is not None:
            hear(event)

    def finish(self, device: str, outputs: Iterable[Value]) -> Round:
        """The round, with the bytes of one device.

        `outputs`: the values that are in memory, and referred to, when it ends.
        """
        program = self._program
        for storage, where in enumerate(program.devices):
            if where != device:
                program.sizes[storage], program.devices[storage] = 0, device
        kept = [self._values[value.number] for value in outputs if value.number in self._values]
        program.steps = self._with_last_uses(program.steps, set(kept))
        program.steps = self._with_early_views(program.steps)
        program.outputs = [value for value in kept if program.makers[value] >= 0]
        return Round(program, self._order, self._calls, self._lazy)

    def _with_last_uses(self, steps: Sequence[Step], kept: Set[int]) -> list[Step]:
        """The steps, with each passing source dropped after its last use, but for those that were kept to the end."""
        drops: dict[int, list[Step]] = {}
        for value, place in list(self._passing.items()):
            if value not in kept:
                drops.setdefault(place, []).append(("drop", value))
        added: list[Step] = []
        for place, step in enumerate(steps):
            added += drops.get(place, ())
            added.append(step)
        return added + drops.get(len(steps), [])

    def _with_early_views(self, steps: Sequence[Step]) -> list[Step]:
        """The steps, with views of what was evicted right behind what they are views of: there they cost nothing."""
        program = self._program
        behind: dict[int, list[int]] = {}
        for call in sorted(self._lazy):
            maker = program.makers[program.calls[call].arguments[0]]
            if maker < 0:
                self._lazy.discard(call)  # it is not known when its memory is there
            else:
                behind.setdefault(maker, []).append(call)
        added: list[Step] = []
        for step in steps:
            if step[0] != "call" or step[1] not in self._lazy:
                added.append(step)
                views = list(behind.get(step[1], ())) if step[0] == "call" else []
                for view in views:  # grows by views of views
                    added.append(("call", view))
                    views += behind.get(view, ())
        return added

    def _source(self, number: int, storage: int, size: int, device: str, *, lasts: bool = True) -> None:
        self._storage(storage, size, device)
        if number not in self._values:
            value = self._values[number] = self._program.add_source_on(self._storages[storage])
            if lasts:
                self._last(storage, number)
            else:
                self._passing[value] = len(self._program.steps)

    def _storage(self, storage: int, size: int, device: str) -> None:
        if storage not in self._storages:
            self._storages[storage] = self._program.add_storage(size, device)

    def _performed(self, event: Performed) -> None:
        values, program = self._values, self._program
        for storage, size in zip(event.storages, event.nbytes, strict=True):
            self._storage(storage, size, event.device)
        if event.again:
            for number, home in zip(event.results, event.homes, strict=True):
                if number not in values:  # it was evicted when the round began
                    self._source(number, home, 0, event.device, lasts=False)
            makers = {program.makers[values[number]] for number in event.results}
            self._order += [("call", maker) for maker in makers if maker >= 0]
            return
        for number, storage in zip(event.inputs, event.arguments, strict=False):
            if number not in values:
                self._source(number, storage, 0, event.device)
        arguments = [values[number] for number in event.inputs]
        call = len(program.calls)
        homes = [self._storages[home] for home in event.homes]
        self._homes.update(zip(event.results, event.homes, strict=True))
        values.update(zip(event.results, program.add_call(event.function, arguments, homes, event.cost), strict=True))
        self._use(arguments)
        operation, known = self._ended(call, event.results)
        self._calls.append(known)
        if event.function == "view" and not event.cost and operation is not None and _is_evicted(operation):
            self._lazy.add(call)  # nothing ran
        else:
            self._order.append(("call", call))

    def _ended(self, call: int, results: tuple[int, ...]) -> tuple[Operation | None, Call | None]:
        """The operation that made these values, and how it is known; None: it was not told of."""
        for operation in reversed(list(self._begun)):  # mostly the last one
            if operation.number <= results[0] and (
                operation.number == results[0]
                or any(output and output.number in results for output in operation.outputs)
            ):
                self._places[operation] = call
                self._program.calls[call].cost = operation.c0
                return operation, self._begun.pop(operation, None)
        return None, None

    def _released(self, event: Released) -> None:
        if event.value not in self._lasting and self._values.get(event.value) not in self._passing:
            self._step("drop", event.value)

    def _detached(self, event: Detached) -> None:
        self._run("detach", event.value)
        self._last(self._homes.get(event.value, event.value), event.value)

    def _last(self, storage: int, number: int) -> None:
        self._sources.setdefault(storage, []).append(number)
        self._lasting.add(number)

    def _forgotten(self, event: Forgotten) -> None:
        for number in self._sources.pop(event.storage, ()):
            self._step("drop", number)

    def _step(self, kind: Any, number: int) -> None:
        if number in self._values:
            self._program.steps.append((kind, self._values[number]))

    def _run(self, kind: Any, number: int) -> None:
        self._step(kind, number)
        if number in self._values:
            self._order.append((kind, self._values[number]))
            self._use([self._values[number]])

    def _use(self, values: Iterable[int]) -> None:
        """These are used by the last step."""
        for value in values:
            if value in self._passing:
                self._passing[value] = len(self._program.steps)


def _is_evicted(operation: Operation) -> bool:
    """Whether what it made is not in memory."""
    return all(output is None or output.payload is EVICTED for output in operation.outputs)


Call = tuple[Hashable, *tuple[int, ...]]
"""The function, and for each argument the place of the operation of this round that made it, or as below."""

UNKNOWN: Final = -1
"""The place of an operation of this round that the round before did not have."""

ELSEWHERE: Final = -2
"""Less its size: what was there before the round."""


def call_of(operation: Operation, places: Mapping[Operation | None, int]) -> Call:
    """How an operation is known. `places`: of the operations of this round."""
    arguments = operation.arguments
    if len(arguments) == 1:  # nearly always, and quicker
        (argument,) = arguments
        place = places.get(argument.operation)
        return name_of_call(operation.function), ELSEWHERE - argument.storage.size if place is None else place
    return (
        name_of_call(operation.function),
        *[places.get(argument.operation, ELSEWHERE - argument.storage.size) for argument in arguments],
    )


def name_of_call(function: Any) -> Hashable:
    """The same for functions that are made anew each time, whatever they have bound."""
    for _ in range(4):  # a partial of a partial of ...
        code = getattr(function, "__code__", None)
        if code is not None:
            return code  # type: ignore[no-any-return]  # hashable
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return type(function), getattr(function, "__name__", None)
