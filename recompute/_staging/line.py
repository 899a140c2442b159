"""The straight line: operations that take their arguments from numbered slots, and put their results into others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recompute._adapters.adapter import kinds
from recompute._budget import format_bytes
from recompute._errors import StagingError
from recompute.extend import Container, Operation, Value


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
        positional = [fill(part, slots) for part in self.positional]
        keywords = {} if self.keywords is None else {name: fill(part, slots) for name, part in self.keywords.items()}
        result = self.function(*positional, **keywords)
        made = (result,) if self.nout == 1 else tuple(result)
        if len(made) != self.nout:
            raise self._other(f"returned {len(made)} values instead of {self.nout}")
        for slot, size, payload in zip(self.results, self.sizes, made, strict=True):
            found = kinds[type(payload)].nbytes(payload)
            if found > size:
                raise self._other(f"made {format_bytes(found)} instead of {format_bytes(size)}")
            if slots[slot] is None:  # else it is there, and views of it may be: the second copy goes
                slots[slot] = payload

    def _other(self, what: str) -> StagingError:
        return StagingError(
            f"this is not the graph that was planned: {self.name} (created at {self.created}) {what}; stage the "
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
    return part
