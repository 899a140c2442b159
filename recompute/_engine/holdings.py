"""Where the memory is: what the cache holds now, by the function and line that made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from recompute._budget import format_bytes
from recompute._engine.finalizer import Held
from recompute._engine.graph import EVICTED, Storage
from recompute._engine.places import place_of
from recompute._engine.states import HELD
from recompute._tables import List, Table

_MOST: Final = 10
"""Rows that are shown."""


@dataclass(frozen=True)
class Holding:
    """What one function made at one place. Bytes."""

    function: str
    """"source (ndarray)" for sources of a type, "held outside" for memory that is no value of the cache."""
    place: str
    """`file:line`; empty if it is not known."""
    nbytes: int
    """In memory, or evicted and held outside: so many bytes are counted as used."""
    evicted: int
    """Evicted, and in nobody's hands."""
    values: int
    """Storages in memory."""


class Holdings(list[Holding]):
    """The most bytes first. Prints as a table, of the first ten."""

    def _table(self) -> Table:
        rows = [
            (one.function, format_bytes(one.nbytes), f"{one.values:,}", format_bytes(one.evicted), one.place)
            for one in self[:_MOST]
        ]
        pairs = [("in memory", format_bytes(sum(one.nbytes for one in self)))]
        if len(self) > _MOST:
            pairs.append(("not shown", f"{format_bytes(sum(one.nbytes for one in self[_MOST:]))} of other functions"))
        return Table("memory", pairs, [List(["made by", "in memory", "values", "evicted", "line"], rows, "<>>><")])

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()


def holdings(storages: Iterable[Storage], held: Iterable[Held]) -> list[Holding]:
    """Of these storages, and of what is held without being a value. Under the lock."""
    sums: dict[tuple[str, str], list[int]] = {}
    for storage in storages:
        there = storage.resident or storage.state == HELD
        count = sums.setdefault(_maker(storage), [0, 0, 0])
        count[0 if there else 1] += storage.size
        count[2] += there
    for one in held:
        if one.storage is None:
            count = sums.setdefault(("held outside", ""), [0, 0, 0])
            count[0] += one.size
            count[2] += 1
    rows = [Holding(*maker, *count) for maker, count in sums.items() if count[0] or count[1]]
    return sorted(rows, key=lambda one: (-one.nbytes, -one.evicted, one.function, one.place))


def _maker(storage: Storage) -> tuple[str, str]:
    """The function that made the first value on it, and the line; sources have a type."""
    value = next(iter(storage.values))
    operation = value.operation
    if operation is not None:
        return operation.name, place_of(operation.code, operation.instruction)
    payload = value.payload
    return "source" if payload is EVICTED else f"source ({type(payload).__name__})", ""
