"""The machine: the state of each storage, and every sum of bytes that follows from it.

Two rules. Whatever is counted (states, locks, bytes, candidates, evicted neighbourhoods) changes here and nowhere else.
And nothing of anybody's runs here: no function, adapter, clock, score, listener or destructor; nothing waits.

How it works. A storage is in one state (`states`). `move` is the only thing that changes it, and `states.NEXT` says
from where to where; what it does to the sums is in `move` alone. Beside the state a storage has locks: as long as it
has any it is no candidate for eviction. Bytes that belong to no storage in memory have records of their own, which are
counted from the beginning to the end of each: room that is reserved, what departs until its payloads are destroyed,
and what was evicted but is held outside. So

    used  = storages in memory + reserved + departing + held
    fixed = locked storages in memory + reserved

All of it under the engine's lock. A change that was cut short by an exception from the handler of a signal is made good
by `restart`, which counts everything again from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from recompute._engine import states
from recompute._engine.states import (
    COMING,
    DROPPED,
    EVICTED,
    FORGOTTEN,
    HELD,
    IN_MEMORY,
    LEAVING,
    LOST,
    MOVABLE,
    MOVED,
    MOVING,
    NEXT,
    RESIDENT,
    SOURCE,
)

if TYPE_CHECKING:
    from recompute._engine.finalizer import Departure
    from recompute._engine.graph import Held, Storage
    from recompute._engine.neighbours import Neighbourhood
    from recompute._engine.pool import Pool


def _bits(states: Iterable[bool]) -> int:
    return sum(1 << state for state, is_set in enumerate(states) if is_set)


_MAY = tuple(_bits(state in following for state in range(len(NEXT))) for following in NEXT)
_IN_MEMORY = _bits(IN_MEMORY)
_EVICTED = _bits(EVICTED)
_LOST = _bits(LOST)
"""The tables of `states` as bits, which each transition asks several times."""


class WrongMove(AssertionError):
    """A storage cannot go from its state to that one: a fault of this library."""


class Machine:
    """Moves storages from state to state, and counts."""

    __slots__ = ("held", "neighbourhood", "watch")

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self.neighbourhood = neighbourhood
        self.held: set[Held] = set()
        """Evicted buffers that the program still holds."""
        self.watch: Callable[[Storage, int, int, str], None] | None = None
        """Told of each move: the states before and after it, and why. None: no listener. It runs under the lock."""

    # States

    def move(self, storage: Storage, state: int, why: str = "") -> None:
        """The only writer of states."""
        before = storage.state
        may = _MAY[before]
        if not may >> state & 1:
            raise WrongMove(f"{storage!r} cannot go from {states.NAMES[before]} to {states.NAMES[state]}")
        pool, size = storage.pool, storage.size
        in_memory = _IN_MEMORY >> state & 1 != 0
        if _EVICTED >> before & 1 and (in_memory or state in (COMING, FORGOTTEN)) and self.neighbourhood.active:
            self.neighbourhood.restored(storage)
        storage.state = state
        storage.resident = in_memory
        storage.dropped = lost = _LOST >> state & 1 != 0
        if (_IN_MEMORY >> before & 1 != 0) != in_memory:
            if in_memory:
                self.take(pool, size)
                if storage.locks:
                    pool.fixed += size
                else:
                    self._admit(storage)
            else:
                storage.buffer = 0
                if storage.slot != -1:
                    pool.candidates.remove(storage)
                if storage.locks:
                    pool.fixed -= size
                pool.used -= size
        if before == SOURCE:
            pool.sources -= size
        elif before == MOVABLE:
            pool.movable -= size
        if state == SOURCE:
            pool.sources += size
        elif state == MOVABLE:
            pool.movable += size
        if lost and not _LOST >> before & 1 and self.neighbourhood.active:
            self.neighbourhood.evicted(storage)
        if self.watch is not None:
            self.watch(storage, before, state, why)

    def enter(self, storage: Storage, pool: Pool, size: int, buffer: int, now: float, why: str = "made") -> None:
        """A storage is in memory, for the first time or again, with what lives on it."""
        if storage.state != COMING:
            self.move(storage, COMING, why)
        storage.pool = pool
        storage.size = size
        storage.buffer = buffer
        storage.last_access = now
        self.move(storage, kind_of(storage), why)

    def settle(self, storage: Storage) -> None:
        """What lives on a storage has changed: it may be a source now, or none any more."""
        kind = kind_of(storage)
        if storage.resident and storage.state != kind:
            self.move(storage, kind, "what lives on it has changed")

    def come_back(self, storage: Storage, why: str) -> None:
        """An evicted storage is in memory again, as it was."""
        self.move(storage, kind_of(storage), why)

    # Locks

    def lock(self, storage: Storage) -> None:
        """One more reason to keep a storage."""
        if not storage.locks and storage.resident:
            storage.pool.fixed += storage.size
        storage.locks += 1

    def unlock(self, storage: Storage) -> None:
        """One reason less; with the last one gone it is a candidate again."""
        storage.locks -= 1
        if not storage.locks and storage.resident:
            storage.pool.fixed -= storage.size
            if storage.slot < 0:
                self._admit(storage)

    def pin(self, storage: Storage) -> None:
        self.lock(storage)
        storage.pool.pinned += storage.size

    def unpin(self, storage: Storage) -> None:
        storage.pool.pinned -= storage.size
        self.unlock(storage)

    def _admit(self, storage: Storage) -> None:
        """Make it a candidate, if anything is gained by its eviction."""
        if storage.slot < 0 and storage.size >= storage.pool.smallest:
            storage.pool.candidates.add(storage)

    # Bytes

    def take(self, pool: Pool, size: int) -> None:
        """So many bytes more are in use."""
        pool.used += size
        if pool.used > pool.peak:
            pool.note(pool.used)

    def resize(self, storage: Storage, size: int, pins: int) -> None:
        """A storage in memory turned out to have another size; so many values on it are pinned."""
        pool, change = storage.pool, size - storage.size
        storage.size = size
        self.take(pool, change)
        pool.pinned += pins * change
        if storage.state == SOURCE:
            pool.sources += change
        elif storage.state == MOVABLE:
            pool.movable += change
        if storage.locks:
            pool.fixed += change
        elif storage.slot >= 0:
            pool.candidates.changed(storage)
        else:
            self._admit(storage)

    def reserve(self, pool: Pool, size: int) -> None:
        """Set bytes aside for what an operation makes."""
        self.take(pool, size)
        pool.fixed += size

    def give_back(self, pool: Pool, size: int) -> None:
        """What was reserved is free again."""
        pool.used -= size
        pool.fixed -= size

    def depart(self, pool: Pool, size: int) -> None:
        """Payloads are on their way out: their bytes count on, until `departed`."""
        pool.used += size
        pool.departing += size

    def departed(self, pool: Pool, size: int) -> None:
        """The payloads are destroyed, written, put back, or held outside."""
        pool.used -= size
        pool.departing -= size

    def hold(self, held: Held) -> None:
        """The program holds what was evicted: it counts as used, once."""
        if held not in self.held:
            self.held.add(held)
            self.take(held.pool, held.size)
            held.pool.held += held.size
            if held.alone:
                held.pool.beside += held.size

    def let_go(self, held: Held) -> bool:
        """The program has released it; False if that was known."""
        if held not in self.held:
            return False
        self.held.discard(held)
        held.pool.held -= held.size
        held.pool.used -= held.size
        if held.alone:
            held.pool.beside -= held.size
        held.reference = None
        storage = held.storage
        if storage is not None and storage.held is held:
            storage.held = None
            if storage.state == HELD:
                self.move(storage, DROPPED, "released by the program")
        held.storage = None
        return True

    # After a change that was cut short

    def restart(
        self,
        pools: Iterable[Pool],
        storages: Iterable[Storage],
        reserved: Iterable[tuple[Pool, int]],
        locks: Mapping[Storage, int],
        departures: Iterable[Departure],
    ) -> None:
        """Count again. `locks`: those of operations in flight; what lives on the storages is right already."""
        for held in [held for held in self.held if held.reference is None or held.reference.is_dead]:
            self.held.discard(held)
        leaving = list(departures)
        departing = {departure.storage: departure for departure in leaving}
        for pool in pools:
            pool.used = pool.fixed = pool.held = pool.beside = pool.departing = 0
            pool.sources = pool.movable = pool.pinned = 0
            pool.candidates.clear()
        for departure in leaving:
            self.depart(departure.pool, departure.size)
        for held in self.held:
            held.pool.used += held.size
            held.pool.held += held.size
            if held.alone:
                held.pool.beside += held.size
        for pool, size in reserved:
            pool.used += size
            pool.fixed += size
        found = list(storages)
        for storage in found:
            storage.slot = -1
            storage.nearby = None
            storage.locks = sum([value.stays + value.pinned for value in storage.values])
            kind = state_of(storage, departing.get(storage))
            if storage.held is not None and (kind != HELD or storage.held not in self.held):
                if IN_MEMORY[kind]:
                    self.let_go(storage.held)
                storage.held = None
            if not IN_MEMORY[kind]:
                storage.buffer, storage.locks = 0, 0
                storage.state, storage.resident, storage.dropped = kind, False, LOST[kind]
                continue
            storage.locks += locks.get(storage, 0)
            storage.pool.pinned += storage.size * sum([value.pinned for value in storage.values])
            peak = storage.pool.peak
            storage.state, storage.resident, storage.dropped = COMING, False, False
            self.move(storage, kind, "counted again")
            storage.pool.peak = max(peak, min(storage.pool.peak, storage.pool.used))
        self.neighbourhood.restart([storage for storage in found if LOST[storage.state]])


def kind_of(storage: Storage) -> int:
    """The state of a storage in memory with what lives on it now."""
    kind = RESIDENT
    for value in storage.values:
        if value.operation is None:
            if value.stays:
                return SOURCE
            kind = MOVABLE
    return kind


def state_of(storage: Storage, departure: Departure | None) -> int:
    """The state that a storage must have, by what is there of it; `departure`: its payloads are on their way out."""
    if any(value.is_there for value in storage.values):
        return kind_of(storage)
    if any(value.copy is not None for value in storage.values):
        return MOVED if departure is None or departure.copy is None else MOVING
    if departure is not None:
        return LEAVING
    return DROPPED if storage.held is None else HELD


def check(storages: Iterable[Storage], pools: Iterable[Pool], machine: Machine) -> None:
    """Raise AssertionError if a sum is not what the states make of it; while nothing is reserved or departs."""
    found = list(storages)
    for pool in pools:
        mine = [storage for storage in found if storage.pool is pool]
        resident = [storage for storage in mine if storage.resident]
        held = sum([held.size for held in machine.held if held.pool is pool])
        expected = {
            "used": sum([storage.size for storage in resident]) + held,
            "fixed": sum([storage.size for storage in resident if storage.locks]),
            "held": held,
            "beside": sum([held.size for held in machine.held if held.pool is pool and held.alone]),
            "departing": 0,
            "sources": sum([storage.size for storage in mine if storage.state == SOURCE]),
            "movable": sum([storage.size for storage in mine if storage.state == MOVABLE]),
        }
        for what, size in expected.items():
            counted = getattr(pool, what)
            assert counted == size, f"{pool.device}: {counted} bytes {what} are counted, and {size} are true"


__all__ = ["LEAVING", "MOVED", "MOVING", "Machine", "WrongMove", "check", "kind_of", "state_of"]
