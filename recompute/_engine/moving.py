"""Moving: values are written to tiers when they leave memory, and fetched, or taken back from a holder outside.

Bytes are moved without the lock, by the thread that needs the room or the value; the others go on meanwhile. Whatever
fails (a full disk, a file that is gone or damaged) costs time: the value is computed again, if it can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recompute._engine.changes import Changes
from recompute._engine.device_tiers import Copy
from recompute._engine.events import Fetched, Moved, TakenBack
from recompute._engine.finalizer import Finalizer
from recompute._engine.graph import EVICTED, Operation, Value
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory
from recompute._engine.meter import Meter
from recompute._interrupts import is_interrupt
from recompute._tiers.tier import Key
from recompute.text import outside, warn

if TYPE_CHECKING:
    from recompute._engine.ahead import Ahead
    from recompute._engine.finalizer import Departure


class Moving:
    """Writes and fetches copies."""

    def __init__(self, changes: Changes, memory: Memory, finalizer: Finalizer, meter: Meter, journal: Journal) -> None:
        self._changes = changes
        self._memory = memory
        self._finalizer = finalizer
        self._meter = meter
        self._journal = journal
        self._warned: set[str] = set()
        self.ahead: Ahead | None = None
        """Moves values before their room is needed; None: nothing does."""

    # Out of memory

    def write(self, departure: Departure) -> None:
        """Write the copy of what departs, once. Without the lock; whatever cannot be written has no copy."""
        copy = departure.copy
        if copy is not None and copy.displaced and not self._move_down(copy, departure):
            return
        payload = next((payload for value, payload, _ in departure.payloads if copy and value is copy.root), EVICTED)
        if copy is None or copy.key is not None or payload is EVICTED:
            return
        key = None
        start = self._meter.read()
        try:
            key = Key(copy.store, payload, copy.nbytes)
            key.write()
        except Exception as error:  # of the adapter, of pickle, or of the disk
            if is_interrupt(error):
                raise
            if key is not None and isinstance(error, OSError):  # else it is the value's
                departure.full = True
                with self._changes.alone(), self._changes.begun(python=True):
                    copy.store.lower_limit(copy.nbytes)
            self._warn(copy, error)
            return
        finally:
            del payload
        seconds = self._meter.checked(self._meter.read() - start)
        tiers = departure.pool.tiers
        assert tiers is not None, "a copy is for a tier"
        with self._changes.alone(), self._changes.begun(python=True):
            if copy.key is not None or copy.root.copy is not copy:
                return  # a destructor that ran here has seen to it, or the value has gone meanwhile
            tiers.written(copy, key)
            copy.store.writing.learn(copy.nbytes, seconds)
            self._waited(seconds)
            self._moved(departure.pool.used, copy, seconds)
        if self.ahead is not None and not self.ahead.is_here:
            self.ahead.waited(departure.pool, copy.nbytes)

    def _waited(self, seconds: float) -> None:
        """The program has waited for a transfer, if it has."""
        if self.ahead is None or not self.ahead.is_here:
            self._meter.moving_time += seconds

    def _move_down(self, copy: Copy, departure: Departure) -> bool:
        """Move those that make room for a copy to the next tier; whether there is room then. Without the lock."""
        tiers, room = departure.pool.tiers, True
        assert tiers is not None, "a copy is for a tier"
        while copy.displaced:
            other = copy.displaced[-1]
            before, key = other.key, None
            start = self._meter.read()
            try:
                if before is not None and other.moves_down:
                    key = before.moved(other.store)
            except Exception as error:  # one tier cannot be read, or the other one not written
                if is_interrupt(error):
                    raise
                self._warn(other, error)
            seconds = self._meter.checked(self._meter.read() - start)
            with self._changes.alone(), self._changes.begun(python=True):
                if other.moves_down:
                    tiers.moved_down(other, key)
                    if key is not None:
                        other.store.writing.learn(other.nbytes, seconds)
                        self._waited(seconds)
                        self._moved(departure.pool.used, other, seconds)
                    else:
                        room = tiers.elsewhere(copy)
                copy.displaced.remove(other)
        return room

    def _moved(self, used: int, copy: Copy, seconds: float) -> None:
        if self._journal.listeners:
            number = copy.root.storage.number
            self._journal.events.append(Moved(self._meter.now, used, number, copy.nbytes, copy.store.name, seconds))

    # Back

    def take_back(self, value: Value) -> bool:
        """Make an evicted value resident again, with all on its storage that is held; False if it is not held."""
        storage, memory = value.storage, self._memory
        held = storage.held
        payload = None if held is None else held.payload_of(value)
        if payload is None or held is None or storage.resident or not memory.machine.let_go(held):
            self._finalizer.garbage.append(payload)  # should this be the last reference, it goes without the lock
            return False
        storage.buffer = held.buffer
        for other in storage.values:
            kept = held.payload_of(other)
            if kept is not None:
                other.payload = kept
        memory.machine.come_back(storage, "taken back from outside")
        journal = self._journal
        journal.recoveries += 1
        if journal.listeners:
            journal.events.append(TakenBack(self._meter.now, storage.pool.used, storage.number, storage.size))
        return True

    def way_back(self, value: Value) -> Operation | None:
        """The operation that brings an evicted value back: its own, or the fetch of a copy. Under the lock."""
        copy = value.copy
        if copy is None or copy.root is not value:
            return value.operation
        operation = value.operation
        if operation is not None and copy.key is not None and not copy.store.always:
            there = all(argument.payload is not EVICTED for argument in operation.arguments)
            if there and operation.c0 < copy.seconds:
                return operation
        return copy.fetching

    def fetched(self, copy: Copy, seconds: float) -> None:
        """A value is back. Under the lock."""
        copy.store.reading.learn(copy.nbytes, seconds)
        self._meter.moving_time += seconds
        if self._journal.listeners:
            storage = copy.root.storage
            self._journal.events.append(
                Fetched(self._meter.now, storage.pool.used, storage.number, copy.nbytes, copy.store.name, seconds)
            )

    def failed(self, copy: Copy, error: Exception) -> bool:
        """A copy cannot be read; whether its value can be made again. Without the lock."""
        root = copy.root
        if root.operation is None or is_interrupt(error):
            return False
        with self._changes.alone(), self._changes.begun(python=True):
            copy.fetching.outputs = ()
            tiers = root.storage.pool.tiers
            if tiers is not None:
                tiers.lose(copy)
        self._warn(copy, error)
        return True

    def _warn(self, copy: Copy, error: Exception) -> None:
        """Say once for each kind of error that a tier has failed."""
        what = f"{copy.store.name}: {type(error).__name__}"
        if what not in self._warned:
            self._warned.add(what)
            verb = "written to" if copy.key is None else "read from"
            then = "it is computed again" if copy.root.operation is not None else "it stays in memory"
            warn(
                f"a value could not be {verb} {copy.store.name}, so {then} ({type(error).__name__}: {error}); this is "
                "said once for each kind of error",
                RuntimeWarning,
                stacklevel=outside(),
            )
