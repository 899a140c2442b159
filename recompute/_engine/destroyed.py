"""Destroyed arrays: one of JAX can be deleted, or donated to a jitted function, although others refer to it.

Its memory is free, so it is not counted. A value that an operation made is evicted then, and made again when it is
needed; a source is lost, and an error says which one when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from recompute._adapters.adapter import kinds
from recompute._engine.graph import EVICTED, Operation, Storage, Value

if TYPE_CHECKING:
    from recompute._engine.engine import Engine


class Lost:
    """Instead of what made a source: it cannot be made again."""

    __slots__ = ("__name__", "_what")

    def __init__(self, number: int, what: str) -> None:
        self.__name__ = f"source {number}"
        self._what = what

    def __call__(self) -> None:
        raise RuntimeError(
            f"{self.__name__}, {self._what}, and nothing can make it again: give the cache a copy, or keep the array"
        )


def evict_needed(engine: Engine, values: Iterable[Value]) -> None:
    """Evict what is destroyed among the values, and among those they are made of. Without the lock."""
    evict_destroyed(engine, _needed(values))


def evict_all(engine: Engine) -> None:
    """Evict all that is destroyed. Without the lock; O(values)."""
    evict_destroyed(engine, list(engine.memory.storages))


def evict_destroyed(engine: Engine, storages: Iterable[Storage]) -> None:
    """Those that are destroyed are not in memory any more, and what is held of evicted ones neither."""
    found = destroyed(storages)
    held = [
        holder for holder in list(engine.machine.held) if holder.reference is not None and _word(holder.reference())
    ]
    if found or held:
        with engine.changes.alone(), engine.changes.begun(python=True):
            for storage, what in found:
                lose(engine, storage, what)
            for holder in held:
                engine.machine.let_go(holder)
        engine.settling.settle()


def destroyed(storages: Iterable[Storage]) -> list[tuple[Storage, str]]:
    """Those that are, and the words of their adapters for it. Without the lock."""
    found = []
    for storage in storages:
        for value in tuple(storage.values):
            what = _word(value.payload)
            if what is not None:
                found.append((storage, what))
                break
    return found


def of(values: Sequence[Value]) -> list[tuple[Storage, str]]:
    """`destroyed`, of what an operation has taken."""
    return destroyed(dict.fromkeys(value.storage for value in values))


def lose(engine: Engine, storage: Storage, what: str) -> None:
    """A storage is not in memory any more, unless an operation in flight has it, which will fail. Under the lock."""
    sources = [value for value in storage.values if value.operation is None]
    pinned = [value for value in storage.values if value.pinned]
    staying = [value for value in sources if value.stays]
    if not storage.resident or storage.locks > len(staying) + len(pinned):
        return
    for value in pinned:
        engine.references.unpin(value)
    for value in sources:
        if value in staying:
            engine.machine.unlock(storage)
        if value.copy is None:
            operation = Operation(Lost(value.number, what), (), ())
            operation.number, operation.outputs, operation.runs = value.number, (value,), 1
            value.operation = operation
    engine.machine.settle(storage)
    engine.evict(storage, "request", watch=False)


def _needed(values: Iterable[Value]) -> Iterator[Storage]:
    """The storages of what is in memory of the values, and of what the others are made of."""
    stack, seen = list(values), set(values)
    while stack:
        value = stack.pop()
        if value.payload is not EVICTED:
            yield value.storage
        elif value.operation is not None:
            new = [argument for argument in value.operation.arguments if argument not in seen]
            seen.update(new)
            stack += new


def _word(payload: object) -> str | None:
    ask = kinds[type(payload)].destroyed
    return None if ask is None else ask(payload)
