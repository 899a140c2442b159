"""The program of a graph, whose values keep the names that they have there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from recompute._traces.program import Program, StepKind

V = TypeVar("V", bound=Hashable)


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
