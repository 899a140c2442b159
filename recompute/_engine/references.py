"""References that come and go: what a cache keeps, what it drops, and when it forgets how a value was made.

All of it is bookkeeping under the engine's lock; what is dropped is destroyed later (see the finalizer).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from recompute._adapters.adapter import kinds
from recompute._engine.device_tiers import DeviceTiers, root_of
from recompute._engine.events import Forgotten, Reason, Released
from recompute._engine.finalizer import Finalizer
from recompute._engine.graph import EVICTED, Operation, Reference, ReleaseMode, Storage, Value, remains_of
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory
from recompute._engine.meter import Meter
from recompute._engine.results import Results, no_function
from recompute._engine.scheduler import Scheduler
from recompute._engine.verify import Fingerprints

Evict = Callable[[Storage, Reason], bool]


def _can_stay(storage: Storage) -> bool:
    """Whether it is still there without references: memory that lies elsewhere goes with the last reference."""
    for value in storage.values:
        kind = kinds.get(type(value.payload))
        if kind is not None and kind.outlive is not None:
            return False
    return True


class Eager:
    """It is evicted, unless something evicted that is needed is made from it."""

    __slots__ = ("lingers", "name", "waiting")

    def __init__(self, name: ReleaseMode = "eager", lingers: bool = False) -> None:
        self.name: ReleaseMode = name
        self.lingers = lingers
        """Whether a value that nothing can need stays until its room is needed."""
        self.waiting: set[Storage] = set()
        """Released, but not yet what it is to become."""

    def released(self, references: References, storage: Storage) -> None:
        """Nothing outside refers to a value on it; something inside may need it."""
        references.evict_unreferenced(storage)

    def unlocked(self, references: References, storage: Storage) -> None:
        """No operation in flight needs it, and it was released while one did."""
        references.evict_unreferenced(storage)

    def shrunk(self, references: References, storage: Storage) -> None:
        """One of several values on it has been forgotten."""
        references.evict_unreferenced(storage)

    def performed_again(self, references: References, values: Sequence[Value]) -> None:
        """What was made from these is in memory again."""


class Ignore(Eager):
    """Nothing happens: it is a candidate like any other, and what nothing can need goes when its room is needed."""

    __slots__ = ()

    def __init__(self) -> None:
        Eager.__init__(self, "ignore", True)

    def released(self, references: References, storage: Storage) -> None:
        pass

    def unlocked(self, references: References, storage: Storage) -> None:
        pass

    def shrunk(self, references: References, storage: Storage) -> None:
        pass


class Banish(Eager):
    """It is forgotten, and what was made from it is a source, as soon as nothing evicted needs it.

    Not as long as a view of another value is made from it, too: a source has memory of its own.
    """

    __slots__ = ()

    def __init__(self) -> None:
        Eager.__init__(self, "banish")

    def released(self, references: References, storage: Storage) -> None:
        if not self._banish(references, storage):
            references.evict_unreferenced(storage)

    def shrunk(self, references: References, storage: Storage) -> None:
        pass

    def performed_again(self, references: References, values: Sequence[Value]) -> None:
        for value in values:
            if value.storage in self.waiting:
                self._banish(references, value.storage)

    def _banish(self, references: References, storage: Storage) -> bool:
        """False: something evicted needs it, or a view of something else is made from it, too."""
        users = dict.fromkeys(user for value in storage.values for user in value.each_user())
        outputs = [output for user in users for output in user.outputs if output is not None]
        self.waiting.discard(storage)
        if any(value.referred or value.pinned for value in storage.values):
            return False
        in_flight = references.scheduler.in_flight
        busy = any(user in in_flight or not user.runs for user in users)
        views = any(
            other.operation not in users  # it is made from the value that it shares memory with, too
            for output in outputs
            if output.storage is not storage and len(output.storage.values) > 1
            for other in output.storage.values
        )
        if busy or views or any(output.payload is EVICTED for output in outputs):
            self.waiting.add(storage)
            return False
        for output in outputs:
            if output in output.storage.values:  # else it went with one before it
                references.detach(output)
        return True


MODES: Final[dict[ReleaseMode, Callable[[], Eager]]] = {"eager": Eager, "ignore": Ignore, "banish": Banish}
"""What becomes of a storage when the last reference to a value on it goes (Kirisame et al., ICLR 2021)."""


class References:
    """Counts what needs a value, and evicts or forgets values that are not needed."""

    __slots__ = (
        "_evict",
        "_finalizer",
        "_fingerprints",
        "_journal",
        "_memory",
        "_meter",
        "_on_advice",
        "_results",
        "history",
        "history_limit",
        "mode",
        "released_sources",
        "scheduler",
        "waiting",
    )

    def __init__(
        self,
        release: ReleaseMode,
        evict: Evict,
        memory: Memory,
        meter: Meter,
        journal: Journal,
        finalizer: Finalizer,
        scheduler: Scheduler,
        results: Results,
        fingerprints: Fingerprints | None,
    ) -> None:
        self.mode: Final[Eager] = MODES[release]()
        self._evict = evict
        self._memory = memory
        self._meter = meter
        self._journal = journal
        self._finalizer = finalizer
        self.scheduler = scheduler
        self._results = results
        self._fingerprints = fingerprints
        self.history = 0
        """Values that only operations refer to."""
        self.history_limit = 10_000
        """When the array wrapper warns of it."""
        self.released_sources: deque[Value] | None = None
        """Sources that only operations need, as their last outside reference goes; None: not asked for."""
        self.waiting: set[Storage] = set()
        """Released, but locked by an operation in flight."""
        self._on_advice: set[Storage] = set()  # without outside references, but kept

    # An outside reference goes

    def dropped(self, reference: Reference) -> None:
        """A Recomputable has gone."""
        value = getattr(reference, "value", None)  # None: an interrupt struck while it was made
        if value is not None and value.forget_reference(reference) and value.references is None:
            self.released(value)

    def released(self, value: Value) -> None:
        """The last outside reference to `value` has gone."""
        storage = value.storage
        if self._journal.listeners:
            self._journal.events.append(Released(self._meter.now, storage.pool.used, value.number))
        if self._memory.neighbourhood.active and not storage.needed_outside():
            self._memory.neighbourhood.released(storage)
        if value.pinned:
            self.unpin(value)  # nothing else could
        if value.users is not None:
            self.history += 1
            if self.released_sources is not None and value.operation is None:
                self.released_sources.append(value)
        elif not self._stays(value):
            if storage.locks and self.in_flight(storage):
                self.waiting.add(storage)
            else:
                self.forget([value])
            return
        self.mode.released(self, storage)

    def evict_unreferenced(self, storage: Storage) -> None:
        """Eager release: without outside references a storage is evicted, immediately or when the last lock goes.

        Not as long as it is wanted: what is evicted, and needed, was cheap to evict because this one was there.
        """
        if storage.resident and not storage.needed_outside():
            advice, neighbourhood = self._memory.advice, self._memory.neighbourhood
            if advice is not None:
                if advice.keeps(storage):
                    self._on_advice.add(storage)
                    return
            elif neighbourhood.keeps and neighbourhood.wanted(storage) and _can_stay(storage):
                neighbourhood.kept.add(storage)
                return
            tiers = storage.pool.tiers
            if not storage.locks and (tiers is None or tiers.can_drop(storage)):
                self._evict(storage, "release")
            elif storage.locks and self.in_flight(storage):
                self.waiting.add(storage)

    def evict_unwanted(self) -> None:
        """What was released, and stayed because it was wanted, goes when it is wanted no more."""
        kept, unwanted = self._memory.neighbourhood.kept, self._memory.neighbourhood.unwanted
        while unwanted:
            storage = unwanted.pop()
            if storage in kept:
                kept.discard(storage)
                self.evict_unreferenced(storage)

    def on_advice(self) -> list[Storage]:
        """Storages kept without references, unless it has been forgotten; it is not asked for again."""
        kept, self._on_advice = self._on_advice, set()
        return [storage for storage in kept if storage.values]

    def unlocked(self, values: Sequence[Value]) -> None:
        """Those of the values that were released while an operation needed them can go now."""
        waiting = self.waiting
        for value in values:
            storage = value.storage
            if storage in waiting and not (storage.locks and self.in_flight(storage)):
                waiting.discard(storage)
                self._forget_unused(storage)
                if storage.values and not storage.locks:
                    self.mode.unlocked(self, storage)

    def in_flight(self, storage: Storage) -> bool:
        """Whether an operation that runs now has locked it: another thread may drop an array that it takes."""
        left = storage.locks
        for value in storage.values:  # sources come first, so mostly it ends there
            left -= value.stays + value.pinned
            if not left:
                return False
        return left > 0

    def _stays(self, value: Value) -> bool:
        """Whether a value without a use stays until its room is needed."""
        storage = value.storage
        return self.mode.lingers and storage.resident and storage.size > 0 and not storage.locks

    # Pins

    def pin(self, value: Value) -> None:
        if not value.pinned:
            storage = value.storage
            value.pinned = True
            self._memory.machine.pin(storage)
            if self.mode.lingers and len(storage.values) > 1:
                self._forget_unused(storage, value)  # it waited for an eviction, which will not come now

    def unpin(self, value: Value) -> None:
        value.pinned = False
        self._memory.machine.unpin(value.storage)

    # A recipe goes

    def detach(self, value: Value) -> None:
        """Forget how a resident value was made: it becomes a source."""
        operation, storage = value.operation, value.storage
        if operation is None:
            return
        value.operation = None
        tiers = storage.pool.tiers
        if tiers is not None and root_of(storage) is value:
            remains_of(value).movable = True
            self._memory.machine.settle(storage)
        else:
            self.keep(value)
        if not storage.is_made_by(operation, value):
            self._memory.add_cost(storage, -operation.c0)
        self.forget(self._unlink(value, operation))
        if self.mode.lingers:  # those without a use waited for an eviction, which will not come now
            self._forget_unused(storage, value)

    def keep(self, value: Value) -> None:
        """Keep a resident source in memory."""
        storage = value.storage
        if value.remains is not None and value.remains.movable:
            value.remains.movable = False
        self._memory.machine.lock(storage)
        self._memory.machine.settle(storage)

    def keep_sources(self, storage: Storage) -> None:
        """No tier has room for a storage with sources on it: they stay in memory, until one may have."""
        for value in storage.values:
            if value.operation is None and not value.stays:
                self.keep(value)
        if self.mode.lingers:
            self._forget_unused(storage)
        if storage.pool.tiers is not None and root_of(storage) is not None:
            storage.pool.tiers.fixed.add(storage)

    def let_sources_move(self, tiers: DeviceTiers) -> bool:
        """Let sources that no tier had room for move, if one has now; whether there are any."""
        fits = [storage for storage in tiers.fixed if tiers.has_room(storage)]
        for storage in fits:
            tiers.fixed.discard(storage)
            for value in storage.values:
                if value.stays:
                    self.let_move(value)
        return bool(fits)

    def let_move(self, value: Value) -> None:
        """Let a resident source leave memory, if a tier can have it."""
        storage = value.storage
        pool = storage.pool
        if pool.tiers is not None and root_of(storage) is value:
            remains_of(value).movable = True
            self._memory.machine.settle(storage)
            self._memory.machine.unlock(storage)

    def _forget_unused(self, storage: Storage, but: Value | None = None) -> None:
        unused = [value for value in storage.values if value is not but and value.users is None and not value.referred]
        for value in unused:
            if value in storage.values and not self._stays(value):
                self.forget([value])

    def forget_unused(self, values: Iterable[Value]) -> None:
        """Forget those that can never be needed, immediately or when the last lock goes."""
        for value in values:
            if value.users is None and not value.referred and value in value.storage.values and not self._stays(value):
                if value.storage.locks and self.in_flight(value.storage):
                    self.waiting.add(value.storage)
                else:
                    self.forget([value])

    def forget_if_unused(self, storage: Storage) -> None:
        """What waited for its eviction goes with it."""
        if self.mode.lingers:
            for value in [value for value in storage.values if value.users is None and not value.referred]:
                self.forget([value])

    def lose_copy(self, value: Value) -> None:
        """A tier keeps nothing of a value any more."""
        remains, tiers = value.remains, value.storage.pool.tiers
        if remains is not None and remains.copy is not None and tiers is not None:
            tiers.lose(remains.copy)

    def forget(self, dead: list[Value]) -> None:
        """Nothing can need these values: drop them, and whatever that leaves without a use, on an explicit stack."""
        memory, finalizer = self._memory, self._finalizer
        while dead:
            value = dead.pop()
            operation, storage = value.operation, value.storage
            if value.pinned:
                self.unpin(value)
            if value.stays:
                memory.machine.unlock(storage)
            if len(storage.values) == 1:
                for waiting in (self.waiting, self.mode.waiting, self._on_advice, memory.neighbourhood.kept):
                    if waiting:
                        waiting.discard(storage)
                if storage.pool.tiers is not None:
                    storage.pool.tiers.fixed.discard(storage)
                if storage.resident:
                    # A source is the caller's, unless something that was made from it has its memory.
                    finalizer.depart(storage, watch=operation is not None or storage in self._results.within)
                self._results.forget_storage(storage)
                storage.values = ()
                self.lose_copy(value)
                if self._journal.listeners:
                    event = Forgotten(self._meter.now, storage.pool.used, storage.number)
                    self._journal.events.append(event)
            else:
                if not storage.resident:
                    memory.neighbourhood.unlinking(storage)
                storage.remove_value(value)
                self.lose_copy(value)  # the others have none: only their recipes bring them back
                if value.payload is not EVICTED:
                    finalizer.garbage.append(value.payload)
                    value.payload = EVICTED
                if operation is None:  # else it is what it was; to look at all the others takes long
                    memory.machine.settle(storage)
                if storage.resident and storage.is_vacant():
                    memory.evicted(storage, "release")  # the others were never taken back or recomputed
                else:
                    self.mode.shrunk(self, storage)
            if self._fingerprints is not None:
                self._fingerprints.forget(value)
            if operation is None:
                self._results.samples.pop(value, None)
            if operation is not None:
                if storage.values and not storage.is_made_by(operation, value):
                    memory.add_cost(storage, -operation.c0)
                value.operation = None
                dead += self._unlink(value, operation)
            if value.remains is not None:
                finalizer.garbage.append(value.remains)
                value.remains = None

    def _unlink(self, value: Value, operation: Operation) -> list[Value]:
        """Take an output off its operation, which goes with its last one; the arguments that this leaves unused."""
        outputs, options = operation.outputs, operation.options
        if isinstance(outputs, list) and options is not None:
            outputs[value.number - operation.number] = None
            options.living -= 1
            if options.living:
                return []
        return self.forget_operation(operation)

    def forget_operation(self, operation: Operation) -> list[Value]:
        """An operation without outputs holds on to nothing; the arguments that this leaves unused."""
        operation.outputs = ()
        arguments, operation.arguments = operation.arguments, ()
        self._finalizer.garbage.append((operation.function, operation.positional, operation.options))
        operation.positional, operation.options, operation.function = (), None, no_function
        return self.unlink(operation, arguments)

    def unlink(self, operation: Operation, arguments: Sequence[Value]) -> list[Value]:
        """Its arguments know it no more; those that this leaves unused."""
        unused: list[Value] = []
        for argument in arguments:
            if argument.users is operation:  # mostly
                argument.users = None
            elif isinstance(argument.users, dict) and operation in argument.users:
                argument.remove_user(operation)
            else:
                continue
            if argument.users is None and argument.references is None:
                self.history -= 1
                if argument.storage.locks and self.in_flight(argument.storage):
                    self.waiting.add(argument.storage)
                elif not self._stays(argument):
                    unused.append(argument)
        return unused

    def restart(self, values: Iterable[Value]) -> None:
        """Count again, after a change that was cut short."""
        self.waiting.clear()
        self.mode.waiting.clear()
        self._on_advice.clear()
        self.history = sum(value.users is not None and not value.referred for value in values)
