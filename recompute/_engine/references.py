"""References that come and go: what a cache keeps, what it drops, and when it forgets how a value was made.

All of it is bookkeeping on the graph and the pools, under the cache's lock unless a method says otherwise. Nothing here
runs a user's function.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from sys import getrefcount
from threading import Lock
from typing import Final

from recompute._adapters.adapter import kinds, weak, weak_to
from recompute._engine.events import Event, Evicted, Forgotten, LetGo, Listener, Reason, Released, TakenBack
from recompute._engine.frames import running
from recompute._engine.graph import EVICTED, Operation, ReleaseMode, Storage, Value
from recompute._engine.memory import Held, Pool
from recompute._engine.repair import elsewhere, repair
from recompute._engine.verify import Fingerprints
from recompute._policy.formulas import Policy
from recompute._policy.needed import NEIGHBOURHOODS, referred

_ALONE: Final = 3
"""References to a payload that nobody but its value holds, as seen where it has a name: value, name, argument."""

INTERRUPT: Final = None
"""Among the dropped references: a KeyboardInterrupt that came while a destructor ran."""


class _NoteInterrupts:
    """Around a use of the books: an interrupt in the middle is noted, and repaired at the next use."""

    def __init__(self, cache: Lifetimes) -> None:
        self._cache = cache

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._cache._interrupted = True


class _Settle(_NoteInterrupts):
    """Around an operation of the program: what came of it is settled, too, when the locks are free again."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        cache = self._cache
        if kind is not None and not issubclass(kind, Exception):
            cache._interrupted = True
        if cache._dropped or cache._events:
            cache._settle()


class Lifetimes:
    """The books of a cache, and the ways in which a value leaves memory or the graph."""

    def __init__(self, policy: Policy, release: ReleaseMode, verify: bool) -> None:
        self.policy: Final = policy
        self.release: Final[ReleaseMode] = release
        self.now = 0.0
        """The compute clock (seconds): the costs of all runs so far."""
        self._lock = Lock()
        self._neighbourhood = NEIGHBOURHOODS[policy.neighbourhood](_tell_search)
        self._fingerprints = Fingerprints() if verify else None
        self._pools: dict[str, Pool] = {}
        self._executing = 0  # functions running now
        self._interrupted = False  # an interrupt struck, maybe in the middle of the bookkeeping
        self._noting = _NoteInterrupts(self)
        self._settling = _Settle(self)
        self._dropped: deque[Value | Held | None] = deque()  # references that went, to be seen to under the lock
        self._late: set[Storage] = set()  # released while locked
        self._banishable: set[Storage] = set()  # released, but an evicted value still needs them
        self._held: set[Held] = set()
        self._listeners: list[Listener] = []
        self._attentive = verify  # `get` of what is in memory is more than a look
        self._events: deque[Event] = deque()
        self._evictions = self._releases = self._recoveries = self._coercions = 0
        self._history = 0  # values that nobody refers to but operations
        self._history_limit = 10_000  # when the array wrapper warns of it

    def _evict(self, storage: Storage, why: Reason) -> None:
        """Drop the values on a resident, unlocked storage."""
        self._empty(storage, True)
        if self._neighbourhood.asked:
            self._neighbourhood.evicted(storage)
        if why == "release":
            self._releases += 1
        else:
            self._evictions += 1
        if self._listeners:
            self._events.append(self._evicted(storage, why))
        if self.release == "ignore":
            for value in [each for each in storage.values if not each.refs and not each.uses]:
                self._forget(value)

    def _evicted(self, storage: Storage, why: Reason) -> Evicted:
        held = storage.held is not None
        ghosts = [
            each.number for each in storage.values if held and each.ghost is not None and each.ghost() is not None
        ]
        return Evicted(self.now, storage.pool.used, storage.number, storage.size, why, held, tuple(ghosts))

    def _set_aside(self, storage: Storage) -> None:
        """As if it were evicted, until it is put back under the same hold of the lock."""
        storage.resident = False
        storage.pool.candidates.remove(storage)
        storage.pool.used -= storage.size
        self._neighbourhood.evicted(storage)

    def _put_back(self, storage: Storage) -> None:
        self._neighbourhood.restored(storage)
        storage.resident = True
        storage.pool.used += storage.size
        storage.pool.candidates.add(storage)

    def _empty(self, storage: Storage, watch: bool) -> None:
        """Drop the payloads of a resident storage; what somebody outside still holds stays counted until let go."""
        pool = storage.pool
        reference = None
        if watch and storage.buffer and len(storage.values) == 1:
            payload = storage.values[0].payload
            watch = storage.buffer != id(payload) or getrefcount(payload) != _ALONE  # mostly nobody else holds it
            del payload
        for value in storage.values:
            kind = kinds[type(value.payload)]
            if kind.watch is not None and watch and value.payload is not EVICTED:
                reference = reference or weak(kind, value.payload)
                value.ghost = weak_to(value.payload)
            if kind.evicted is not None and value.refs:
                value.outline = kind.evicted(value.payload)
            if kind.vacate is not None and value.refs:  # otherwise nobody has it any more
                payload, value.payload = value.payload, EVICTED
                kind.vacate(payload)
            else:
                value.payload = EVICTED
        storage.resident = False
        storage.buffer = 0
        if storage.slot != -1:
            pool.candidates.remove(storage)
        if storage.locks:
            pool.fixed -= storage.size
        buffer = reference() if reference is not None else None
        if buffer is None:
            pool.used -= storage.size
            return
        held = storage.held = Held(pool, storage.size, storage.number)
        held.reference = weak_to(buffer, lambda _: self._drop(held))
        pool.held += held.size
        self._held.add(held)

    def _take_back(self, value: Value) -> bool:
        """Make an evicted value resident again without recomputing it, if somebody still holds it."""
        payload = value.ghost() if value.ghost is not None else None
        storage = value.storage
        held = storage.held
        if payload is None or held is None or held not in self._held or storage.resident:
            return False
        self._held.discard(held)
        held.reference = storage.held = None
        held.pool.held -= held.size
        held.pool.used -= held.size
        self._neighbourhood.restored(storage)
        storage.resident = True
        kind = kinds[type(payload)]
        buffer = None if kind.buffer is None else kind.buffer(payload)
        storage.buffer = 0 if buffer is None else id(buffer)
        for each in storage.values:
            ghost = each.ghost() if each.ghost is not None else None
            each.payload = EVICTED if ghost is None else ghost
            each.ghost = None
        self._settle_in(storage)
        self._recoveries += 1
        if self._listeners:
            self._events.append(TakenBack(self.now, storage.pool.used, storage.number, storage.size))
        return True

    def _let_go(self, held: Held) -> None:
        """Nobody holds the evicted buffer any more."""
        if held in self._held:
            self._held.discard(held)
            held.pool.held -= held.size
            held.pool.used -= held.size
            held.reference = None
            if self._listeners:
                self._events.append(LetGo(self.now, held.pool.used, held.number))

    def _settle_in(self, storage: Storage) -> None:
        """Count a storage that has just become resident."""
        storage.pool.take(storage.size)
        if storage.locks:
            storage.pool.fixed += storage.size
        else:
            storage.pool.admit(storage)

    def _own_cost(self, storage: Storage, change: float) -> None:
        storage.cost = max(0.0, storage.cost + change)
        if not storage.resident:
            self._neighbourhood.own_cost_changed(storage, change)
        elif storage.slot >= 0:
            storage.pool.candidates.changed(storage)

    def _recover(self) -> None:
        """After an interrupt, once nothing is in flight: books that were cut short are made again."""
        if running.get() is None and not elsewhere():
            with self._lock:
                repair(self)
                self._interrupted = False

    def _drop(self, reference: Value | Held) -> None:
        """A Recomputable or a held buffer has gone. Called from destructors: at any time, in any thread."""
        if not self._lock.locked() and not self._interrupted:
            with self._lock:
                self._gone(reference)
            if self._dropped or self._events:
                self._settle()
        else:
            self._dropped.append(reference)  # whoever holds the lock sees to the queue when it leaves
            if not self._lock.locked() and not self._interrupted:  # unless it has just left
                self._settle()

    def _settle(self) -> None:
        """See to dropped references and deliver events. Called without the lock, after every use of it."""
        if self._interrupted:
            self._recover()
        while self._dropped:
            with self._noting, self._lock:
                while self._dropped:
                    self._gone(self._dropped.popleft())
        while self._events:
            try:
                event = self._events.popleft()
            except IndexError:  # another thread was faster
                return
            for listener in tuple(self._listeners):
                try:
                    listener(event)
                except Exception as error:
                    self._unsubscribe(listener)
                    warnings.warn(
                        f"{listener!r} raised {error!r} and will hear no more events", RuntimeWarning, stacklevel=2
                    )

    def _gone(self, reference: Value | Held | None) -> None:
        if type(reference) is Value:
            reference.refs -= 1
            if not reference.refs:
                if self._listeners:
                    self._events.append(Released(self.now, reference.storage.pool.used, reference.number))
                self._released(reference)
        elif isinstance(reference, Held):
            self._let_go(reference)
        else:
            raise KeyboardInterrupt

    def _unsubscribe(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._attentive = bool(self._listeners) or self._fingerprints is not None

    def _released(self, value: Value) -> None:
        """The last outside reference to `value` has gone."""
        storage = value.storage
        if self._neighbourhood.asked and not referred(storage):
            self._neighbourhood.released(storage)
        if value.pinned:
            self._unpin_locked(value)  # nobody else could
        if value.uses:
            self._history += 1
        if not value.uses and not self._ignored(value):
            if storage.locks and _in_flight(storage):
                self._late.add(storage)
            else:
                self._forget(value)
        elif self.release != "ignore":
            if self.release == "banish" and self._banish(storage):
                return
            self._evict_unreferenced(storage)

    def _evict_unreferenced(self, storage: Storage) -> None:
        """Eager release: without outside references a storage is evicted, at once or when the last lock goes."""
        if storage.resident and not referred(storage):
            if not storage.locks:
                self._evict(storage, "release")
            elif _in_flight(storage):
                self._late.add(storage)

    def _evict_late(self, values: Sequence[Value]) -> None:
        """Those of the values that were released while an operation needed them can go now."""
        for value in values:
            storage = value.storage
            if storage in self._late and not (storage.locks and _in_flight(storage)):
                self._late.discard(storage)
                for each in [each for each in storage.values if not each.refs and not each.uses]:
                    if each in storage.values and not self._ignored(each):
                        self._forget(each)
                if storage.locks or not storage.values or self.release == "ignore":
                    continue
                if storage.resident and not any(each.refs for each in storage.values):
                    self._evict(storage, "release")

    def _banish(self, storage: Storage) -> bool:
        """Forget a released storage and make sources of what was made from it; False: something evicted needs it."""
        users = dict.fromkeys(user for value in storage.values for user in value.living_users())
        outputs = [output for user in users for output in user.outputs if output is not None]
        if any(value.refs or value.pinned for value in storage.values):
            self._banishable.discard(storage)
            return False
        if any(output.payload is EVICTED for output in outputs) or any(user.frame is not None for user in users):
            self._banishable.add(storage)
            return False
        self._banishable.discard(storage)
        for output in outputs:
            if output in output.storage.values:  # else it went with one before it
                self._cut(output)
        return True

    def _cut(self, value: Value) -> None:
        """Forget how a resident value was made: it is a source from now on."""
        operation, storage = value.operation, value.storage
        if operation is None:
            return
        if all(each.operation is not None for each in storage.values):
            storage.pool.sources += storage.size
        storage.pool.lock(storage)
        value.operation = None
        if all(each.operation is not operation for each in storage.values):
            self._own_cost(storage, -operation.cost)
        for argument in self._unlink(value, operation):
            self._forget(argument)
        if self.release == "ignore":  # those without a use waited for an eviction, which will not come now
            for each in [each for each in storage.values if not each.refs and not each.uses and each is not value]:
                self._forget(each)

    def _forget(self, value: Value) -> None:
        """Nothing can need this value: drop it, and whatever that leaves without a use, on an explicit stack."""
        dead = [value]
        plain = not self._listeners and self._fingerprints is None and not self._late and not self._banishable
        while dead:
            value = dead.pop()
            operation, storage = value.operation, value.storage
            if plain and operation is not None and not storage.locks and len(storage.values) == 1:
                # What follows, written out for the most common cases: benchmarks/operations.py.
                payload, buffer = value.payload, storage.buffer
                if not buffer or (buffer == id(payload) and getrefcount(payload) == _ALONE):
                    if storage.resident:
                        value.payload = EVICTED
                        storage.resident = False
                        storage.buffer = 0
                        if storage.slot != -1:
                            storage.pool.candidates.remove(storage)
                        storage.pool.used -= storage.size
                    else:
                        self._neighbourhood.restored(storage)
                    storage.values = ()
                    del payload
                    if len(operation.outputs) == 1:
                        dead += self._bury(operation)
                    else:
                        dead += self._unlink(value, operation)
                    continue
            if value.pinned:
                self._unpin_locked(value)
            if operation is None:
                storage.pool.unlock(storage)
                if sum(each.operation is None for each in storage.values) == 1:
                    storage.pool.sources -= storage.size
            if len(storage.values) == 1:
                self._vanish(storage, source=operation is None)
            elif not storage.resident:
                self._neighbourhood.unlinking(storage)
            storage.values = tuple([each for each in storage.values if each is not value])
            value.payload = EVICTED
            if storage.resident and storage.values and all(each.payload is EVICTED for each in storage.values):
                self._empty(storage, False)  # the others were never taken back or recomputed
                if self._neighbourhood.asked:
                    self._neighbourhood.evicted(storage)
            elif self.release == "eager" and storage.values:
                self._evict_unreferenced(storage)
            if self._fingerprints is not None:
                self._fingerprints.forget(value)
            if operation is not None:
                if storage.values and all(each.operation is not operation for each in storage.values):
                    self._own_cost(storage, -operation.cost)
                dead += self._unlink(value, operation)

    def _vanish(self, storage: Storage, source: bool) -> None:
        """A storage is about to lose its last value."""
        self._late.discard(storage)
        self._banishable.discard(storage)
        if storage.resident:
            self._empty(storage, watch=not source)
        else:
            self._neighbourhood.restored(storage)
        if self._listeners:
            self._events.append(Forgotten(self.now, storage.pool.used, storage.number))

    def _unlink(self, value: Value, operation: Operation) -> list[Value]:
        """Take an output off its operation, which dies with its last one; the arguments that this leaves unused."""
        operation.outputs = tuple([None if each is value else each for each in operation.outputs])
        if any(each is not None for each in operation.outputs):
            return []
        return self._bury(operation)

    def _bury(self, operation: Operation) -> list[Value]:
        """An operation without outputs holds on to nothing; the arguments that this leaves unused."""
        operation.outputs = ()
        arguments, operation.arguments = operation.arguments, ()
        operation.positional, operation.keywords, operation.function = (), None, _dead
        unused = []
        for argument in arguments:
            argument.remove_user()
            if not argument.uses and not argument.refs:
                self._history -= 1
                if argument.storage.locks and _in_flight(argument.storage):
                    self._late.add(argument.storage)
                elif not self._ignored(argument):
                    unused.append(argument)
        return unused

    def _ignored(self, value: Value) -> bool:
        """Whether a value without a use stays until its room is needed."""
        storage = value.storage
        return self.release == "ignore" and storage.resident and storage.size > 0 and not storage.locks

    def _unpin_locked(self, value: Value) -> None:
        value.pinned = False
        value.storage.pool.pinned -= value.storage.size
        value.storage.pool.unlock(value.storage)


def _in_flight(storage: Storage) -> bool:
    """Whether an operation that runs now has locked it: another thread may let go of an array that it takes."""
    return storage.locks > sum((each.operation is None) + each.pinned for each in storage.values)


def _tell_search(storage: Storage) -> None:
    """A neighbourhood's cost fell: the search must know at once."""
    storage.pool.candidates.changed(storage)


def _dead() -> None:
    """Stands in for the function of an operation that cannot run again, whose data must not be kept."""
