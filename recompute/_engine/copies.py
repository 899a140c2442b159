"""Copies: what a tier has of a value that was evicted, from which it can come back without its operation.

A copy stays valid as long as the value lives, because values do not change: to evict it a second time costs nothing.
"""

from __future__ import annotations

from typing import Any

from recompute._engine.graph import EVICTED, Operation, Options, Storage, Value
from recompute._tiers.tier import Key, Store


class Copy:
    """What a tier has of one value, or is about to have."""

    __slots__ = ("__weakref__", "displaced", "fetching", "key", "nbytes", "root", "store")

    def __init__(self, root: Value, store: Store) -> None:
        self.root = root
        self.store = store
        """Where it counts: before it goes one further down already."""
        self.displaced: list[Copy] = []
        """Those that go one further down first, to make room for it."""
        self.nbytes = root.storage.size
        self.key: Key | None = None
        """By which the tier knows the bytes, which go with it; None: they are not written yet."""
        made_by = root.operation
        options = Options(declared=(self.nbytes,))
        options.room = [(root.storage.pool.device, self.nbytes)]
        code, instruction = (None, 0) if made_by is None else (made_by.code, made_by.instruction)
        self.fetching = Operation(Fetch(), (), (), code, instruction, options)
        """The operation that brings the value back from the tier. It has outputs while it is in flight."""
        self.fetching.runs = 1

    @property
    def moves_down(self) -> bool:
        """Whether its bytes are on their way to a slower tier."""
        return self.key is not None and self.key.store is not self.store

    @property
    def seconds(self) -> float:
        """What it takes to fetch it."""
        return self.store.reading.seconds(self.nbytes)

    def __repr__(self) -> str:
        return f"<copy of value {self.root.number} in {self.store.name}>"


class Fetch:
    """The function of the operation that brings a value back: reads the bytes, and makes the value of them."""

    __name__ = "fetch"
    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Key | None = None

    def __call__(self) -> Any:
        assert self.key is not None, "a fetch waits until the copy is written"
        return self.key.load()


def moves_source(storage: Storage) -> bool:
    """Whether there is a source on a storage that may move."""
    return any(value.operation is None and not value.stays for value in storage.values)


def root_of(storage: Storage) -> Value | None:
    """The one value in memory that the others on a storage are views of; None: there is no such value."""
    roots = [
        value
        for value in storage.values
        if value.operation is None or all(each.storage is not storage for each in value.operation.arguments)
    ]
    return roots[0] if len(roots) == 1 and roots[0].payload is not EVICTED else None
