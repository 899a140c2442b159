"""Recovery: what was evicted, but is still held by somebody outside, comes back without being computed again."""

from __future__ import annotations

from recompute._engine.events import TakenBack
from recompute._engine.finalizer import Finalizer
from recompute._engine.graph import EVICTED, Value
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory
from recompute._engine.meter import Meter


class Recovery:
    """Takes values back. Under the lock."""

    def __init__(self, memory: Memory, finalizer: Finalizer, meter: Meter, journal: Journal) -> None:
        self._memory = memory
        self._finalizer = finalizer
        self._meter = meter
        self._journal = journal

    def take_back(self, value: Value) -> bool:
        """Make an evicted value resident again, with all on its storage that is held; False if it is not held."""
        storage, memory = value.storage, self._memory
        payload = value.remains.payload() if value.remains is not None and value.remains.payload is not None else None
        held = storage.held
        if payload is None or held is None or storage.resident or not memory.machine.let_go(held):
            self._finalizer.garbage.append(payload)  # should this be the last reference, it goes without the lock
            return False
        storage.buffer = held.buffer
        for other in storage.values:
            remains = other.remains
            if remains is not None and remains.payload is not None:
                kept = remains.payload()
                other.payload = EVICTED if kept is None else kept
                remains.payload = None
        memory.machine.come_back(storage, "taken back from outside")
        journal = self._journal
        journal.recoveries += 1
        if journal.listeners:
            journal.events.append(TakenBack(self._meter.now, storage.pool.used, storage.number, storage.size))
        return True
