"""The recorded graph: the operations that the results need, as a program for the planner and as functions to call.

The functions take their arguments from numbered slots, and put their results into others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recompute._adapters.adapter import kinds
from recompute._budget import format_bytes
from recompute._cache import Cache
from recompute._errors import ImpureError, StagingError
from recompute._traces.program import Program, last_uses
from recompute.events import Event, Performed
from recompute.extend import Changeable, Container, Operation, Settings, Value


class RecordingCache(Cache):
    """The cache that the example runs in: it refuses what would make the graph depend on a value."""

    def __init__(self, budget: int | None) -> None:
        # Counted whole: arrays in a container stay with it where the plan frees them.
        settings = Settings(before_bringing=_refuse, warns=False, internal=True, counts_whole=True)
        super().__init__(budget, foresight=False, settings=settings)
        self.made: dict[int, tuple[int, int]] = {}  # value -> (storage, bytes)
        self.subscribe(self._record_sizes)

    def _record_sizes(self, event: Event) -> None:
        if isinstance(event, Performed) and not event.again:
            sizes = dict(zip(event.storages, event.nbytes, strict=True))
            self.made.update(
                (value, (storage, sizes[storage])) for value, storage in zip(event.results, event.homes, strict=True)
            )


def _refuse() -> None:
    raise StagingError(
        "get, pin and detach cannot be planned in advance: what is recorded would depend on the values of this one "
        "run; return the Recomputable, or make the value before and pass it as an argument"
    )


class Graph:
    """The recorded operations that the results need, as a program and as functions to call."""

    def __init__(self, name: str, recorder: RecordingCache, inputs: list[Value], wanted: list[Value]) -> None:
        operations: dict[Operation, None] = {}
        sources: dict[Value, None] = dict.fromkeys(inputs)
        stack = [*wanted]
        seen = set(stack)
        while stack:
            value = stack.pop()
            if value.operation is None:
                sources.setdefault(value)
            elif value.operation not in operations:
                operations[value.operation] = None
                new = [argument for argument in value.operation.arguments if argument not in seen]
                seen.update(new)
                stack += new
        program = self.program = Program(name)
        self.slots: dict[Value, int] = {}
        for value in sources:
            self.slots[value] = program.add_source(value.storage.size, value.storage.pool.device)
        self.inputs = [self.slots[value] for value in inputs]
        self.constants = [(slot, value.payload) for value, slot in self.slots.items() if value not in set(inputs)]
        self.computes: list[Compute] = []
        storages = {value.storage.number: program.storages[slot] for value, slot in self.slots.items()}
        for operation in sorted(operations, key=lambda operation: operation.number):
            self._add(operation, recorder, storages)
        results = dict.fromkeys(self.slots[value] for value in wanted)
        program.outputs = [slot for slot in results if program.makers[slot] >= 0]
        _drop_after_use(program)

    def _add(self, operation: Operation, recorder: RecordingCache, storages: dict[int, int]) -> None:
        if operation.options is not None and operation.options.draws:
            raise StagingError(
                f"{operation.name} (created at {operation.created}) draws random numbers, which cannot be planned in "
                "advance: each call would draw others; pass it a seed, and make the generator inside it, or pass the "
                "numbers as an argument of the planned function"
            )
        numbers = range(operation.number, operation.number + operation.nout)
        made = [recorder.made[number] for number in numbers]
        device = next(output.storage.pool.device for output in operation.outputs if output is not None)
        for storage, size in made:
            if storage not in storages:
                storages[storage] = self.program.add_storage(size, device)
        missing = [argument for argument in operation.arguments if argument not in self.slots]
        assert not missing, f"{operation} takes values that nothing made"
        arguments = [self.slots[argument] for argument in operation.arguments]
        results = self.program.add_call(
            operation.name, arguments, [storages[storage] for storage, _ in made], operation.c0
        )
        for slot, value in zip(results, operation.outputs, strict=True):
            if value is not None:
                self.slots[value] = slot
        self.computes.append(Compute(operation, self.slots, list(results), [size for _, size in made]))


def _drop_after_use(program: Program) -> None:
    """Drop each value after its last use: the peak is what the function needs if nothing is computed twice."""
    sources = [step for step in program.steps if step[0] == "source"]
    runs = [(call.results, call.arguments) for call in program.calls]
    dying = last_uses(runs, (*program.outputs, *[value for _, value in sources]))
    program.steps[:] = sources
    for number, values in enumerate(dying):
        program.steps.append(("call", number))
        program.steps += [("drop", value) for value in values]


@dataclass(frozen=True)
class Slot:
    """Stands for a value among arguments and results."""

    number: int


class Compute:
    """One operation of the straight line."""

    __slots__ = ("created", "function", "keywords", "name", "nout", "positional", "results", "sizes")

    def __init__(self, operation: Operation, slots: dict[Value, int], results: list[int], sizes: list[int]) -> None:
        self.function = operation.function
        self.positional = [bind(part, slots) for part in operation.positional]
        keywords = operation.keywords
        self.keywords = None if keywords is None else {name: bind(part, slots) for name, part in keywords.items()}
        self.nout = operation.nout
        self.results = results
        self.sizes = sizes
        self.name = operation.name
        self.created = operation.created

    def run(self, slots: list[Any]) -> None:
        named = self.keywords
        try:
            positional = [fill(part, slots) for part in self.positional]
            keywords = {} if named is None else {name: fill(part, slots) for name, part in named.items()}
        except ImpureError as error:
            raise ImpureError(f"an argument of {self.name} (created at {self.created}) {error}") from None
        result = self.function(*positional, **keywords)
        made = (result,) if self.nout == 1 else tuple(result)
        if len(made) != self.nout:
            raise self._other(f"returned {len(made)} values instead of {self.nout}")
        for slot, size, payload in zip(self.results, self.sizes, made, strict=True):
            nbytes = kinds[type(payload)].nbytes(payload)
            if nbytes > size:
                raise self._other(f"made {format_bytes(nbytes)} instead of {format_bytes(size)}")
            if slots[slot] is None:  # else it is there, and views of it may be: the second copy goes
                slots[slot] = payload

    def _other(self, what: str) -> StagingError:
        return StagingError(
            f"this is not the graph that was planned: {self.name} (created at {self.created}) {what}; plan the "
            "function again, with arguments like these"
        )


def bind(part: Any, slots: dict[Value, int]) -> Any:
    """A packed argument with slots instead of values."""
    if type(part) is Value:
        return Slot(slots[part])
    if type(part) is Container:
        return Container(part.build, [bind(inner, slots) for inner in part.parts])
    return part


def fill(part: Any, slots: list[Any]) -> Any:
    if type(part) is Slot:
        return slots[part.number]
    if type(part) is Container:
        return part.build([fill(inner, slots) for inner in part.parts])
    if type(part) is Changeable:
        return part.again()
    return part
