"""Settling: work that waits until the lock is free.

References that have gone are seen to, adapters are told what leaves memory, payloads are destroyed, listeners hear.
"""

from __future__ import annotations

from sys import exception, is_finalizing
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from recompute._engine.changes import Call, Changes, shared
from recompute._engine.events import Evicted, Forgotten, LetGo, Released
from recompute._engine.finalizer import Departure, Finalizer, HeldReference, StayReference
from recompute._engine.frames import Frame
from recompute._engine.graph import Held, Reference, Value, tier_of
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory
from recompute._engine.meter import Meter
from recompute._engine.moving import Moving
from recompute._engine.pool import Pool
from recompute._engine.references import References
from recompute._engine.scheduler import Scheduler
from recompute._engine.states import DROPPED, HELD, LEAVING, MOVED, MOVING
from recompute._interrupts import is_interrupt

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

_DEEPEST: Final = 16
"""Evictions of one thread, each while an adapter is told of the one before."""

_SMALL: Final = 4096
"""Bytes: smaller payloads go at the next use of the cache, not immediately."""


class Settling:
    """Completes what the finalizer has put aside."""

    __slots__ = (
        "_changes",
        "_finalizer",
        "_journal",
        "_memory",
        "_meter",
        "_moving",
        "_references",
        "_scheduler",
        "_unwanted",
    )

    def __init__(
        self,
        changes: Changes,
        finalizer: Finalizer,
        references: References,
        memory: Memory,
        scheduler: Scheduler,
        meter: Meter,
        journal: Journal,
        moving: Moving,
    ) -> None:
        self._changes = changes
        self._moving = moving
        self._finalizer = finalizer
        self._references = references
        self._memory = memory
        self._scheduler = scheduler
        self._meter = meter
        self._journal = journal
        self._unwanted = memory.neighbourhood.unwanted

    def settle(self, blocking: bool = True) -> None:
        """Process dropped references, destroy dropped payloads, tell listeners. After each use; without the lock.

        Not `blocking`: never waits, neither for the lock nor for a transfer that is another thread's to do.
        """
        finalizer = self._finalizer
        while finalizer.queue or self._unwanted:
            if not self._seen_to(blocking):
                return  # the holder of the lock will do that
            self.settle_departures(blocking)
        if finalizer.garbage or finalizer.departures:
            self.settle_departures(blocking)
        if self._journal.events:
            self._journal.deliver()
        if finalizer.interrupts:
            finalizer.raise_interrupts()

    def _seen_to(self, blocking: bool) -> bool:
        """Whether the lock could be had, and references have been seen to."""
        changes = self._changes
        if blocking:
            with changes.alone(), changes.begun():
                self.drain()
            return True
        free, handled = False, exception()  # as `do_if_free`, written out: calls under the lock may start the collector
        if not changes.atomic:
            shared.look()
        try:
            with shared.if_free as free:
                if free:
                    with changes.begun():
                        self.drain()
        except RuntimeError as error:
            if free:
                raise
            came = error.__context__
            if came is not None and came is not handled:  # an interrupt
                raise came from None
        return free

    def _process(self, reference: Reference | HeldReference | StayReference) -> None:
        if type(reference) is Reference:
            self._references.dropped(reference)
        elif isinstance(reference, StayReference):
            if reference in self._finalizer.stays:
                self._finalizer.stays.discard(reference)
                self._memory.machine.unlock(reference.storage)
                self._references.unlocked(tuple(reference.storage.values))
                self._scheduler.notify()
        elif isinstance(reference, HeldReference):
            self.gone(reference.held)

    def gone(self, held: Held) -> None:
        """The program has released a buffer. Under the lock."""
        if self._memory.machine.let_go(held) and self._journal.listeners:
            kinds = (Released, Forgotten) if held.alone else (LetGo,)
            self._journal.events += [kind(self._meter.now, held.pool.used, held.number) for kind in kinds]

    def settle_departures(self, others: bool = True) -> None:
        """Destroy what was evicted, once its adapters know; then its bytes are free. Without the lock.

        `others`: also what another thread has evicted, and was kept from seeing to.
        """
        finalizer = self._finalizer
        finalizer.destroy_garbage()
        if not finalizer.departures:
            return
        if len(finalizer.departures) > _DEEPEST:
            _check_depth(finalizer)
        call = Call()
        for departure in list(finalizer.departures):
            if (others or departure.owner == get_ident()) and self.takes_over(departure):
                departure.call = ref(call)
                if not departure.taken:  # an interrupt has struck: beginning a change makes that good
                    with self._changes.alone(), self._changes.begun():
                        pass
                try:
                    self._give_up(departure)
                except BaseException as error:
                    try:
                        if not isinstance(error, Exception) or is_interrupt(error):
                            self._give_up(departure)
                    finally:
                        self._depart(departure)
                        finalizer.destroy_garbage()
                    raise
                self._depart(departure)
        finalizer.destroy_garbage()

    def _give_up(self, departure: Departure) -> None:
        """Write a copy if there is to be one, and let the payloads go, unless they have to stay. Without the lock."""
        if departure.copy is not None:
            self._moving.write(departure)
            if departure.stays:
                return
        departure.tell_adapters(self._finalizer.queue.append, self.let_go)

    def takes_over(self, departure: Departure) -> bool:
        """Whether this thread completes a departure: its own, or one whose thread was kept from it.

        Not one that a thread is just at: this one, too, where an adapter uses the cache as it is told.
        """
        if _is_at_it(departure):
            return False
        departure.owner = get_ident()
        return True

    def leaves_here(self, guard: Frame) -> bool:
        """Whether values are on their way out, and this thread has to finish that before it brings them back.

        Not if a thread is just at that: this one, where an adapter asks for them, or another one, which it waits for.
        But it does not wait for a thread that was kept from it, or is not there after a fork.
        """
        return guard.operation is None and not _is_at_it(guard.key)

    def _depart(self, departure: Departure) -> None:
        with self._changes.alone(), self._changes.begun():
            self._departed(departure)

    def _departed(self, departure: Departure) -> None:
        """A storage has left memory: its bytes are free, unless the program holds them."""
        finalizer, pool, storage, scheduler = self._finalizer, departure.pool, departure.storage, self._scheduler
        if departure not in finalizer.departures:
            return  # it was seen to already
        copy, stays = departure.copy, departure.stays
        if stays:
            self._put_back(departure)  # first: an interrupt must not lose what nothing can make again
        payloads, departure.payloads = departure.payloads, []
        finalizer.garbage.append(payloads)
        self._memory.machine.departed(pool, departure.size)
        held = departure.held
        if held is not None and (held.reference is None or held.reference.is_dead):
            held = None
        if held is not None:  # first: an interrupt must not lose what is neither departing nor held
            self._memory.machine.hold(held)
            if not storage.resident and storage.values:
                storage.held, held.storage = held, storage
        del finalizer.departures[departure]
        if copy is not None and pool.tiers is not None:
            pool.tiers.stay_up(copy)
        if storage.state == MOVING and copy is not None and copy.key is not None:
            self._memory.machine.move(storage, MOVED, "written")
        elif storage.state == LEAVING or (storage.state == DROPPED and storage.held is not None):
            if storage.held is None:
                self._memory.machine.move(storage, DROPPED, "destroyed")
            else:
                self._memory.machine.move(storage, HELD, "held outside")
        if copy is not None and copy.key is None:
            assert pool.tiers is not None, "a copy is for a tier"
            if stays:
                self._stay(departure)
            pool.tiers.failed(copy)
        for operation in departure.guarded:
            guard = scheduler.in_flight.get(operation)
            if guard is not None and guard.operation is None:  # else it is being brought back already
                del scheduler.in_flight[operation]
        if departure.why is not None and self._journal.listeners and not stays:
            ghosts = (
                () if held is None else tuple([value.number for value in storage.values if self._alive(held, value)])
            )
            event = Evicted(
                self._meter.now,
                pool.used,
                departure.number,
                departure.size,
                departure.why,
                held is not None,
                ghosts,
                tier_of(storage),
            )
            self._journal.events.append(event)
        self._journal.events += departure.following
        scheduler.notify()

    def tell(self, event: Evicted) -> None:
        """Listeners hear of the evictions of a thread in their order: of this one after those that take their time."""
        mine = get_ident()
        before = next(
            (departure for departure in reversed(self._finalizer.departures) if departure.owner == mine), None
        )
        (self._journal.events if before is None else before.following).append(event)

    @staticmethod
    def _put_back(departure: Departure) -> None:
        for value, payload, _ in departure.payloads:
            if value in departure.storage.values:
                value.payload = payload
        departure.storage.buffer = departure.buffer

    def _stay(self, departure: Departure) -> None:
        """What could not be moved, and cannot be made again, is in memory again, and stays there. Under the lock."""
        storage, tiers = departure.storage, departure.pool.tiers
        if not storage.resident:
            self._memory.machine.come_back(storage, "no tier took it")
        self._references.keep_sources(storage)
        if tiers is not None and not departure.full:
            tiers.fixed.discard(storage)  # it will never fit

    def _alive(self, held: Held, value: Value) -> bool:
        """Whether the program holds the payload of an evicted value."""
        payload = held.payload_of(value)
        self._finalizer.garbage.append(payload)  # should this be the last reference, it goes without the lock
        return payload is not None

    def guard(self, engine: Engine, departure: Departure) -> None:
        """Keep the values from coming back before their memory is given up."""
        guard = Frame(engine, None)
        guard.stack.clear()  # no cycle: what departs is freed immediately
        guard.key = departure
        departure.guarded.clear()
        operations = [value.operation for value, _, _ in departure.payloads]
        if departure.copy is not None:
            operations.append(departure.copy.fetching)
        for operation in operations:
            if operation is not None:
                departure.guarded.append(operation)
                self._scheduler.in_flight[operation] = guard

    def going(self, handle: Any, value: Value) -> None:
        """A Recomputable is going: called from its destructor, at any time, and in any thread.

        Should this be cut short, or be too much now, the callback of the reference still brings the news.
        """
        if _can_wait(value) or self._changes.is_mine() or is_finalizing():
            return
        reference = value.reference_of(handle)
        if reference is not None:
            self._finalizer.queue.append(reference)
            self.settle(blocking=False)

    def drain(self) -> None:
        """Process dropped references, and released storages that are wanted no more. Under the lock."""
        queue = self._finalizer.queue
        while queue:
            self._process(queue.popleft())
        if self._unwanted:
            self._references.evict_unwanted()

    def mine_depart(self, pool: Pool) -> bool:
        """Whether bytes are on their way out by this thread, or by one that was kept from it."""
        if pool.departing:
            for departure in self._finalizer.departures:
                if departure.pool is pool and self.takes_over(departure):
                    return True
        return False

    def let_go(self, _: object) -> None:
        """A buffer was released, and its reference is in the queue: from its destruction, as `going`."""
        try:
            if not self._changes.is_mine() and not is_finalizing():
                self.settle(blocking=False)
        except RecursionError:
            return  # as in `Handle.__del__`
        except BaseException as interrupt:
            self._finalizer.note_interrupt(interrupt)


def _can_wait(value: Value) -> bool:
    """Whether a number or the like is all that can go with a reference: its recipe stays, for those who use it."""
    storage = value.storage
    return value.users is not None and not storage.buffer and storage.resident and storage.size < _SMALL


def _check_depth(finalizer: Finalizer) -> None:
    """Raise RuntimeError where adapters evict while they are told of an eviction, and that again and again."""
    mine = [one for one in list(finalizer.departures) if one.owner == get_ident() and _is_at_it(one)]
    if len(mine) > _DEEPEST:
        names = ", ".join(sorted({type(payload).__name__ for one in mine for _, payload, _ in one.payloads}))
        raise RuntimeError(
            f"an adapter evicts values while it is told of an eviction, {len(mine)} deep: `evicted` and `vacate` for "
            f"{names} may use the cache, but must not need room there each time"
        )


def _is_at_it(departure: Departure) -> bool:
    """Whether the thread that owns a departure is seeing to it now."""
    return departure.call is not None and departure.call() is not None
