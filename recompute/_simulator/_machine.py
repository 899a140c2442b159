"""The cache that a program is replayed through: the library's own, or with the habits of the published simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recompute._adapter import Adapter, register
from recompute._cache import Cache
from recompute._flight import Flight, Frame
from recompute._graph import Operation, ReleaseMode, Storage, Value
from recompute._policy import Policy
from recompute._pool import Pool
from recompute._search import Search


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
    rooms: dict[Operation, int]
    """Operations whose sizes were not all known before their first run, and the bytes that were."""

    def __init__(
        self,
        budget: Mapping[str, int] | None,
        policy: str | Policy,
        search: str | Search,
        release: ReleaseMode,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(budget, policy=policy, search=search, release=release, clock=clock)
        self.rooms = {}

    def _expected(self, frame: Frame, operation: Operation) -> Sequence[tuple[str, int]]:
        if operation.runs:
            return super()._expected(frame, operation)
        function: Any = operation.function
        room = self.rooms.pop(operation, None)
        known: Sequence[tuple[str, int]] = function.room
        return known if room is None else [(function.devices[0], room)] if room else ()

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
    * Room is made for all outputs, also for those still in memory, whose second copies go after the run.
    * Locks do not give way: who finds no candidate is out of memory.
    * Nothing is forgotten: a value that can never be needed again stays in its component.
    """

    published = True
    pool_class = _PublishedPool

    def __init__(
        self,
        budget: Mapping[str, int] | None,
        policy: str | Policy,
        search: str | Search,
        release: ReleaseMode,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(budget, policy, search, release, clock)
        self.now = 1.0
        self._neighbourhood.asked = True
        self._order = _as_written

    def _expected(self, frame: Frame, operation: Operation) -> Sequence[tuple[str, int]]:
        function: Any = operation.function
        room: Sequence[tuple[str, int]] = function.room
        return room

    def _make_way(self, pool: Pool, size: int, flight: Flight, what: Operation | None) -> None:
        raise self._shortage(pool, size, what)

    def _unlock(self, frame: Frame) -> None:
        if frame.locked is not None:
            place = {value.storage: number for number, value in enumerate(frame.arguments)}
            frame.locked.sort(key=lambda storage: place.get(storage, -1))
        super()._unlock(frame)

    def adopt(self, value: Value) -> None:
        if self.release != "banish":
            value.uses += 1
