"""The cache that a program is replayed through: the library's own, or with the habits of the published simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recompute._adapters.adapter import Adapter, register
from recompute._cache import Cache
from recompute._engine.frames import Flight, Frame
from recompute._engine.graph import Operation, Storage, Value
from recompute._engine.memory import Pool


def _as_written(values: list[Value]) -> list[Value]:
    return values


class Placeholder:
    """Stands in for a value: memory of a size, on a device, that aliases share."""

    __slots__ = ("__weakref__", "device", "owner", "size")

    def __init__(self, size: int, device: str, owner: Placeholder | None) -> None:
        self.size = size
        self.device = device
        self.owner = owner  # None: itself


class _PlaceholderAdapter(Adapter):
    name = "placeholder"

    def nbytes(self, value: Any) -> int:
        return int(value.size)

    def buffer(self, value: Any) -> object:
        return value.owner or value

    def watch(self, value: Any) -> object:
        return value.owner or value

    def device(self, value: Any) -> str:
        return str(value.device)


register(Placeholder, _PlaceholderAdapter())


class Machine(Cache):
    """The cache as everybody uses it, told how much room each operation asked for when it was recorded."""

    published = False

    def _expected(self, frame: Frame, operation: Operation) -> Sequence[tuple[str, int]]:
        if operation.runs:
            return super()._expected(frame, operation)
        function: Any = operation.function
        room: Sequence[tuple[str, int]] = function.room
        return room

    def adopt(self, value: Value) -> None:
        """A value was made."""


class _PublishedPool(Pool):
    """A storage that was locked is the newest candidate when it is unlocked, even one of no bytes."""

    __slots__ = ()

    def admit(self, storage: Storage) -> None:
        if storage.slot < 0:
            self.candidates.add(storage)

    def lock(self, storage: Storage) -> None:
        super().lock(storage)
        if storage.slot >= 0:
            self.candidates.remove(storage)


class PublishedMachine(Machine):
    """As the DTR authors' simulator has it: all that the engine does otherwise, and why.

    * The clock starts at one, and components are kept from the start (the engine joins them at the first question).
    * Evicted arguments come back in program order (the engine's order keeps the peak low).
    * Locks do not give way: who finds no candidate is out of memory.
    * Nothing is forgotten: a value that can never be needed again stays in its component.
    """

    published = True
    pool_class = _PublishedPool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.now = 1.0
        self._neighbourhood.asked = True
        self._order = _as_written

    def _make_way(self, pool: Pool, size: int, flight: Flight, what: Operation | None) -> None:
        raise pool.shortage(size, what)

    def _unlock(self, frame: Frame) -> None:
        if frame.locked is not None:
            place = {value.storage: number for number, value in enumerate(frame.arguments)}
            frame.locked.sort(key=lambda storage: place.get(storage, -1))
        super()._unlock(frame)

    def adopt(self, value: Value) -> None:
        if self.release != "banish":
            value.uses += 1
