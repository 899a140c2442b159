"""The engine: Dynamic Tensor Rematerialization as four callbacks, over the parts of this folder.

    allocate         evict until what an operation makes fits
    perform          bring back the arguments, make room, run the function, keep the outputs
    evict            drop the values on a storage, and join its evicted neighbours' components
    rematerialize    find the evicted operation to perform next, so that a value comes back

That is all of it (Kirisame et al., ICLR 2021, figure 1). Below them stands what keeps it right: arguments come back on
an explicit stack of frames; the parts (graph, memory, references, scheduler, meter, journal, finalizer) change under
one lock; functions, adapters, budgets, scores, clocks, listeners and destructors, all that a user may have written,
run without it. A change that is cut short is made good when the next one begins (see recount).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from gc import collect
from threading import get_ident
from types import FunctionType
from typing import Any, Final
from weakref import ref

from recompute._budget import Limits
from recompute._engine import destroyed
from recompute._engine.advice import Wall, end_advice, say, shown
from recompute._engine.ahead import Ahead
from recompute._engine.changes import COMPILED, Call, Changes
from recompute._engine.events import Evicted, Listener, Reason
from recompute._engine.finalizer import Finalizer
from recompute._engine.forking import engines
from recompute._engine.frames import Frame, Request, running
from recompute._engine.graph import EVICTED, NOWHERE, Operation, ReleaseMode, Storage, Value, copy_of, tier_of
from recompute._engine.journal import Journal
from recompute._engine.memory import Made, Memory, is_expected, own_memory
from recompute._engine.meter import Meter, checked_clock
from recompute._engine.moving import Moving
from recompute._engine.options import Settings
from recompute._engine.pool import Pool
from recompute._engine.randomness import turns
from recompute._engine.recount import recount
from recompute._engine.references import References
from recompute._engine.results import Results, refer
from recompute._engine.runs import Runs, tell_restored
from recompute._engine.scheduler import Scheduler, gone, needs_itself
from recompute._engine.settling import Settling
from recompute._engine.states import LEAVING, MOVING
from recompute._engine.thrashing import Thrashing
from recompute._engine.verify import Fingerprints
from recompute._errors import BudgetError
from recompute._policy.formulas import DEFAULT, Policy, policy_of
from recompute._policy.search import Search, is_compiled, rank
from recompute._tiers.tiers import Tiers

_SPARE: Final = 64
"""Evictions beyond the number of candidates that making room may take before it is done without the user's code."""


class Engine:
    """Performs operations within the limits, and brings evicted values back."""

    __slots__ = (
        "__weakref__",
        "_foreign",
        "_ranking",
        "before",
        "cache",
        "changes",
        "finalizer",
        "fingerprints",
        "hold",
        "is_pressed",
        "journal",
        "machine",
        "memory",
        "meter",
        "moving",
        "note",
        "observed",
        "options",
        "pressed",
        "reads",
        "references",
        "results",
        "runs",
        "scheduler",
        "settling",
        "thrashing",
        "unadvised",
        "wall",
        "wanted",
        "watchful",
    )

    cache: Any
    """Who has it."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        search: Search,
        release: ReleaseMode,
        clock: Callable[[], float],
        verify: bool,
        options: Settings,
        tiers: Tiers | None = None,
    ) -> None:
        self.options = options
        self.fingerprints = Fingerprints() if verify else None
        self.changes = Changes(lambda: recount(self))
        self.journal = journal = Journal()
        self.meter = meter = Meter(checked_clock(clock))
        self.finalizer = finalizer = Finalizer()
        self.memory = memory = Memory(limits, policy, search, finalizer, tiers, options)
        self.machine = finalizer.machine = memory.machine
        self.scheduler = scheduler = Scheduler(self.changes)
        self.results = results = Results(memory, meter, journal, self.fingerprints)
        self.runs = Runs(self.changes, memory, meter, results, self.fingerprints, options.room)
        self.references = references = References(
            *(release, self.evict, memory, meter, journal, finalizer, scheduler, results, self.fingerprints),
        )
        self.moving = Moving(self.changes, memory, finalizer, meter, journal)
        if tiers is not None and any(store.ahead for _, store in tiers.all()):
            self.moving.ahead = Ahead(self)
        self.settling = Settling(self.changes, finalizer, references, memory, scheduler, meter, journal, self.moving)
        self.thrashing = Thrashing(options)
        self.observed = verify
        """Whether there are listeners, or results are verified."""
        self.watchful = verify
        """Whether `get` of a resident value is more than a look: `observed`, or a function runs."""
        self.note: Callable[[Any], None] = finalizer.queue.append
        """Told when a Recomputable has gone."""
        self.before: Callable[[Operation], None] | None = None
        """Told of each operation before it runs for the first time."""
        self.wanted: Callable[[Value], None] | None = None
        """Told of each evicted value that is got, pinned or detached, before it is brought back."""
        self.pressed: Callable[[], None] | None = None
        """Told when something is evicted to make room for the first time."""
        self.is_pressed = False
        """Whether it was told."""
        self.reads = 0
        """`get`s of the program outside of operations, so far."""
        self.wall = Wall(partial(end_advice, self))
        """Around these three, and around advice that memory asks."""
        self.hold: Callable[[Any, str, int], object] | None = None
        """Counts bytes on a device as used until an object goes."""
        self.unadvised: Callable[[str], None] | None = None
        """Told when an error has ended all advice, and which."""
        self._foreign = policy.foreign
        self._ranking: dict[int, ref[Call]] = {}
        """Threads in which the user's policy is being asked."""
        self.watch()
        engines.add(self)

    @property
    def lock(self) -> Any:
        """That of all changes: an RLock."""
        return self.changes.lock

    # The four callbacks

    def allocate(self, pool: Pool, size: int, frame: Frame, what: Operation | None) -> None:
        """Evict until `size` more bytes fit, and reserve them for a frame, unless that is unlocked. Without the lock.

        What is evicted is destroyed on the way, so that its bytes are free. Raises BudgetError if the bytes can never
        fit, unless memory is lenient.
        """
        collected = tried = False
        evicted, most = 0, len(pool.candidates) + _SPARE
        while not frame.unlocked:
            asks = evicted <= most  # else the user's code brings back what is evicted whenever it is asked
            if pool.adaptive is not None and asks:
                pool.ask_limit()
            victims = self._rank(pool, asks) if self._foreign and pool.used + size > pool.limit else None
            with self.changes.alone(), self.changes.begun():
                found = True
                fits = there = pool.used + size <= pool.limit
                ranked = victims is not None or not self._foreign  # else another thread has just taken the room
                if not there and ranked and not self.settling.mine_depart(pool):
                    if self.memory.story is not None:
                        self.memory.story.wants(what, size)
                    if victims is None:
                        victims = self.memory.victims(pool, size, self.meter.now)
                    for victim in victims:
                        if victim.resident and not victim.locks:
                            self.evict(victim, "pressure")
                            evicted += 1
                    if victims:
                        fits = pool.used + size <= pool.limit and pool.adaptive is None
                    else:
                        found = self.scheduler.find_room(self, pool, frame)
                if fits:
                    self.machine.reserve(pool, size)
                    frame.reserved += ((pool, size),)
            self.settling.settle_departures()
            if there or frame.unlocked:
                return
            if not self.is_pressed:
                self.is_pressed = True
                if self.pressed is not None:
                    try:
                        with self.wall:
                            self.pressed()
                    except BaseException:  # an interrupt
                        self.is_pressed = False
                        raise
            if fits:
                self.settling.settle()
                return
            if not found and not self.finalizer.queue and not self._retry_moving(pool, False):
                if not tried and self._retry_moving(pool, True):
                    tried = True
                    continue
                if (pool.held or self.results.fragile) and not collected and not self.memory.lenient:
                    destroyed.evict_all(self)
                    collect()  # cycles of garbage may hold evicted payloads
                    collected = True
                    continue
                if not self.memory.lenient:
                    raise pool.shortage(size, what)
                with self.changes.alone(), self.changes.begun():
                    self.machine.reserve(pool, size)
                    pool.note(pool.used)
                    frame.reserved += ((pool, size),)
                return
            self.settling.settle()

    def perform(self, bottom: Frame) -> None:
        """Run the operation of the frame, and before it whatever has to be brought back for it. Without the lock."""
        stack = bottom.stack
        here = running.here()
        outer = here.innermost()
        meter = self.meter
        start = meter.read() if outer is not None else 0.0
        began, spent = meter.turn_begins(), 0.0
        repeated = self.journal.rematerializations
        self.watchful = True
        call = Call()
        bottom.belongs_to(call)
        try:
            self.scheduler.stacks[bottom] = None
            if bottom.operation is not None:
                self.runs.expect(bottom)
            frame = self.rematerialize(stack)
            if frame is not bottom:
                self._check_arguments(bottom)
            while stack:
                frame = frame or self.rematerialize(stack)
                if frame is not None and (frame.running or self._reserve(frame)):
                    if self.finalizer.garbage:
                        self.finalizer.destroy_garbage()  # its bytes count no more, and are about to be used again
                    try:
                        made, cost = self.runs.run(frame, here, outer)
                    except Exception as error:
                        copy = frame.copy
                        if copy is None or not self.moving.failed(copy, error):
                            raise
                        self._start_over(frame)
                        frame = None
                        continue
                    spent = frame.elsewhere if frame.copy is not None else cost + frame.elsewhere
                    frame = self._store(frame, made, cost)
                    del made  # or what it holds could not be evicted for the operations that follow
                    if stack:
                        meter.turn_ends(began, spent)
                        began, spent = meter.turn_begins(), 0.0
                else:
                    frame = None
                    if self.finalizer.departures:  # maybe what is needed is on its way out, by this very thread
                        self.settling.settle_departures()
        except BaseException:
            here.frame = outer
            self._abandon(bottom)
            if turns.lent:
                turns.take_back()
            raise
        self.scheduler.over(bottom)
        if turns.lent:
            turns.take_back()
        meter.turn_ends(began, spent)
        if not self.scheduler.stacks:
            self.watchful = self.observed or self.results.fragile
        if outer is not None:
            outer.elsewhere += self.meter.read() - start
        elif repeated < self.journal.rematerializations >= self.thrashing.next and self.options.warns:
            self.thrashing.look(self)

    def evict(self, storage: Storage, why: Reason, watch: bool = True) -> bool:
        """Drop the values on a resident, unlocked storage, or move them. Under the lock: they are destroyed after it.

        False: they can neither be made again nor moved, and stay.
        """
        tiers, copy = storage.pool.tiers, None
        if tiers is not None:
            tiers.restore_limits(now=False)
        if tiers is not None and copy_of(storage) is None and why != "release" and watch and tiers.moves(storage):
            copy = tiers.begin(storage, self.meter.now)
            if copy is None and not tiers.can_drop(storage):
                self.references.keep_sources(storage)
                return False
        departure = self.finalizer.depart(storage, watch, copy)
        if departure is not None and (departure.vacates or copy is not None):
            self.settling.guard(self, departure)
        if copy is not None:
            self.machine.move(storage, MOVING, why)
        elif departure is None or copy_of(storage) is not None:
            self.memory.evicted(storage, why)
        else:
            self.machine.move(storage, LEAVING, why)
        journal = self.journal
        if why == "release":
            journal.releases += 1
        else:
            journal.evictions += 1
        if self.memory.neighbourhood.kept:
            self.memory.neighbourhood.kept.discard(storage)
        if departure is not None:
            departure.why = why
        elif journal.listeners:
            pool, number, size = storage.pool, storage.number, storage.size
            self.settling.tell(Evicted(self.meter.now, pool.used, number, size, why, tier=tier_of(storage)))
        self.references.forget_if_unused(storage)
        return True

    def rematerialize(self, stack: list[Frame]) -> Frame | None:
        """Push a frame for each evicted operation that must run first; the one on top, which can run now.

        None: what was asked for is there. See `_next`.
        """
        with self.changes.alone(), self.changes.begun():
            return self._next(stack)

    # One operation

    def _check_arguments(self, frame: Frame) -> None:
        """Raise BudgetError if what an operation takes can never be in memory at once: nothing is tried in vain."""
        memory, operation = self.memory, frame.operation
        if operation is None or memory.lenient:
            return
        for pool in {value.storage.pool for value in operation.arguments if value.storage is not NOWHERE}:
            pool.ask_limit()
        short = memory.too_small_for(operation.arguments)
        if short is not None:
            pool, size = short
            raise pool.shortage(size, operation)

    def _start_over(self, frame: Frame) -> None:
        """A copy could not be fetched: what needs its value looks for another way back. Without the lock."""
        with self.changes.alone(), self.changes.begun():
            self.leave(frame)

    def _next(self, stack: list[Frame]) -> Frame | None:
        """Lock what the frame on top takes, with a new frame on top for what is evicted; the frame that can run now.

        None: what was asked for is there. Under the lock.
        """
        scheduler = self.scheduler
        while stack:
            if scheduler.leader is not None and scheduler.yields(stack[0]):
                scheduler.let_leader_go_first(self, stack)
            if self.finalizer.queue:
                self.settling.drain()  # what has gone need not be there any more
            frame = stack[-1]
            missing = frame.lock_arguments(self.meter.now)
            if missing is not None:
                operation = missing.operation
                if missing.remains is not None or missing.storage.held is not None:
                    self.changes.calls_python()
                    if self.moving.take_back(missing):
                        continue
                    operation = self.moving.way_back(missing)
                if operation is None:
                    self.changes.unfinished = False  # nothing was cut short
                    raise gone(frame.operation)
                busy = scheduler.in_flight.get(operation)
                if busy is not None:
                    if self.settling.leaves_here(busy):
                        return None
                    if not scheduler.comes_back_here(busy):
                        scheduler.wait(stack[0], operation)
                        continue
                    if scheduler.needs_itself(busy, stack):
                        self.changes.unfinished = False
                        raise needs_itself(operation)
                scheduler.in_flight[operation] = fetching = Frame(self, operation, stack)
                fetching.instead_of = busy
                if operation is not missing.operation:
                    operation.outputs, fetching.copy = (missing,), missing.copy
            elif frame.operation is None:
                assert isinstance(frame, Request)
                if type(frame.then) is FunctionType:
                    self.changes.calls_python()
                frame.result = frame.then(self, frame.arguments[0])
                self.leave(frame)
            else:
                if self.memory.reserve_for(frame, frame.operation):
                    self._start(frame)
                return frame
        return None

    def _reserve(self, frame: Frame) -> bool:
        """Make room for the outputs, and start; False if the arguments must be locked again."""
        operation = frame.operation
        assert operation is not None
        if frame.needs is None:  # else that was tried as its arguments were locked
            self.runs.expect(frame)
            with self.changes.alone(), self.changes.begun():
                if not frame.unlocked and self.memory.reserve(frame, frame.needs or ()):
                    self._start(frame)
                    return True
        for pool, size in self.memory.by_pool(frame.needs or ()).items():
            try:
                self.allocate(pool, size, frame, operation)
            except BudgetError:
                if self.runs.is_sure(frame):
                    raise
                break  # it was a guess: the run will tell
        with self.changes.alone(), self.changes.begun():
            if frame.unlocked:
                frame.give_back()
                return False
            self._start(frame)
        return True

    def _start(self, frame: Frame) -> None:
        """The function may run: its arguments are locked, and there is room."""
        frame.running = frame.counts = True
        frame.born = self.results.number
        self.scheduler.executing += 1

    def _stop(self, frame: Frame) -> None:
        """It does not run any more."""
        if frame.counts:
            frame.counts = False
            self.scheduler.executing -= 1

    def _make_room_for(self, frame: Frame, made: list[Made]) -> None:
        """Make room for what was not known before the run, after the fact: it is there already. Without the lock."""
        with self.changes.alone(), self.changes.begun():
            self._stop(frame)
            short = self.memory.shortage(frame, made)
            for pool, extra in short.items():
                pool.note(pool.used + extra)
            for _, _, _, _, _, shares in made:
                if shares is not None and shares.resident and not shares.locks:  # got at run time; it must stay now
                    frame.lock(shares)
        for pool, extra in short.items():
            try:
                self.allocate(pool, extra, frame, frame.operation)
            except BudgetError:
                if not self._let_arguments_go(frame, made):
                    raise
                self.allocate(pool, extra, frame, frame.operation)

    def _let_arguments_go(self, frame: Frame, made: list[Made]) -> bool:
        """The function has run, so what it took may be evicted for what it made; whether that is anything."""
        with self.changes.alone(), self.changes.begun():
            kept = {shares for *_, shares in made}
            free = [storage for storage in frame.locked or () if storage not in kept]
            if not free:
                return False
            frame.locked = [storage for storage in frame.locked or () if storage in kept]
            for storage in free:
                self.machine.unlock(storage)
        return True

    def _store(self, frame: Frame, made: list[Made], cost: float) -> Frame | None:
        """Keep the outputs, record the cost, let the arguments go; the next frame of the stack. Without the lock."""
        operation, memory, meter, results = frame.operation, self.memory, self.meter, self.results
        assert operation is not None
        again = operation.runs > 0
        name, sure = "", True
        if self.journal.listeners:
            name, sure = operation.name, again or self.runs.is_sure(frame)
        room = frame.reserved or frame.needs or ()  # before the run, when a size that is new was not known
        following: Frame | None = None
        copy = frame.copy
        why = ""
        if again:
            if self.machine.watch is not None:
                why = self._why_again(frame)
            if copy is not None or len(made) > 1 or operation.outputs[0].remains is not None:  # type: ignore[union-attr]
                tell_restored(operation, made)
            function = getattr(operation.function, "__code__", None) or operation.name
        else:
            handle = frame.handle
            constant = isinstance(handle, type)
            classes: list[Any] | None = None if constant else [handle(payload) for payload, *_ in made]
        if meter.unknown:
            self.learn_costs()
        lost = destroyed.of(frame.arguments) if results.fragile else ()
        if not frame.reserved and not memory.unlimited:  # else it was asked when that was reserved
            for _, size, _, device, _, shares in made:
                if size and shares is None:
                    memory.pool(device).ask_limit()
        while True:
            with self.changes.alone(), self.changes.begun():
                fits = memory.unlimited or not memory.shortage(frame, made)
                if fits:
                    if frame.reserved:
                        frame.give_back()
                    if copy is not None:
                        self._restore(operation, made, why)
                        self.moving.fetched(copy, cost)
                    elif again:
                        meter.now += cost
                        meter.remat_time += cost
                        self.journal.rematerializations += 1
                        operation.runs += 1
                        self._restore(operation, made, why)
                        if cost < operation.c0 and frame.ask is None:  # a compiled function's first run is not its cost
                            results.reprice(operation, cost)
                        meter.count_repeated(function, cost)
                    else:
                        meter.now += cost
                        self.journal.operations += 1
                        results.create(operation, made, cost)
                        for number, value in enumerate(operation.outputs):
                            cls: Any = handle if classes is None else classes[number]
                            frame.handles.append(refer(cls, self, value, self.note))
                    if len(made) > 1 and operation.options is not None:
                        operation.options.room = own_memory(made)
                    if frame.ask is not None:
                        meter.unknown.append((operation, cost, again, frame.ask))
                    if self.journal.listeners and copy is None:
                        self.journal.events.append(results.performed(operation, name, cost, again, room, sure))
                    self.leave(frame)
                    for storage, what in lost:
                        destroyed.lose(self, storage, what)
                    if again:
                        self.references.mode.performed_again(self.references, frame.arguments)
                    if frame.stack:
                        if len(self.scheduler.stacks) == 1:  # else it may wait, and would hold what it made
                            following = self._next(frame.stack)
                    elif self.finalizer.queue:
                        self.settling.drain()
            if fits:
                break
            self._make_room_for(frame, made)
        if frame.key is not None and (frame.rough is not None or not is_expected(made, frame.needs)):
            memory.sizes.learn(frame.key, own_memory(made), frame.rough)
        return following

    def _why_again(self, frame: Frame) -> str:
        """Why its outputs come back."""
        bottom, depth = frame.stack[0].operation, len(frame.stack) - 1
        how = "made again" if frame.copy is None else "fetched"
        return f"{how} for {'get' if bottom is None else bottom.name}{f', {depth} deep' if depth > 1 else ''}"

    def _restore(self, operation: Operation, made: list[Made], why: str) -> None:
        """The outputs of a repeated run, or of a fetch, that are evicted."""
        for number, value in enumerate(operation.outputs):
            if value is not None and value.payload is EVICTED and value in value.storage.values:
                self.results.restore(value, value.operation or operation, made[number], why)

    # Without an operation

    def make_room(self, device: str, size: int, then: Callable[[], None] | None = None) -> None:
        """Evict until `size` more bytes fit on a device, and call `then` under the lock when they do."""
        with self.changes.alone(), self.changes.begun():
            pool = self.memory.pool(device)
        bottom = Frame(self, None)
        call = Call()
        bottom.belongs_to(call)
        try:
            self.scheduler.stacks[bottom] = None
            self.allocate(pool, size, bottom, None)
            with self.changes.alone(), self.changes.begun():
                bottom.give_back()
                if then is not None:
                    then()
        except BaseException:
            self._abandon(bottom)
            raise
        self.scheduler.over(bottom)

    def set_limits(self, limits: Limits) -> None:
        """Set another budget. Under the lock; nothing is evicted yet."""
        self.changes.calls_python()
        self.memory.set_limits(limits)

    def next_victims(self, pool: Pool, asks: bool) -> list[Storage]:
        """Whom to evict next, whatever is free. `asks`: see `_rank`."""
        if self._foreign:
            return self._rank(pool, asks)
        with self.changes.alone(), self.changes.begun():
            return pool.candidates.choose(self.meter.now)

    # When memory is short

    def _retry_moving(self, pool: Pool, full: bool) -> bool:
        """Whether there are sources that no tier could take, and one may have room for now.

        `full`: or one was full, and there may be room again.
        """
        if pool.tiers is None or not pool.tiers.fixed:
            return False
        with self.changes.alone(), self.changes.begun():
            if full:
                pool.tiers.restore_limits(now=True)
            return self.references.let_sources_move(pool.tiers)

    def _rank(self, pool: Pool, asks: bool) -> list[Storage]:
        """The victim of a policy that is the user's own code, which runs without the lock.

        Not `asks`, or where that code needs room itself: of the default policy, or it might be asked for ever.
        """
        with self.changes.alone(), self.changes.begun():
            snapshot = pool.candidates.snapshot(self.meter.now)
        memory, thread = self.memory, get_ident()
        around = self._ranking.get(thread)
        if not asks or (around is not None and around() is not None):
            best = rank(policy_of(DEFAULT), memory.search, snapshot)
        else:
            call = Call()
            self._ranking[thread] = ref(call)
            try:
                best = rank(memory.policy, memory.search, snapshot)
            finally:
                self._ranking.pop(thread, None)
        found = [storage for storage in best if storage.resident and not storage.locks and storage.pool is pool]
        if not found and asks:
            return self._rank(pool, False)  # all that could go went meanwhile, and others may have come
        return found if memory.search.together else found[:1]

    def leave(self, frame: Frame) -> None:
        """A frame is over, with success or without: what it had locked and reserved is free. Under the lock."""
        scheduler, operation, locked = self.scheduler, frame.operation, frame.locked
        if frame.counts:
            frame.counts = False
            scheduler.executing -= 1
        frame.running = False
        if frame.reserved:
            frame.give_back()
        if locked is not None:
            frame.locked = frame.missing = None
            for storage in locked:
                self.machine.unlock(storage)
            if self.references.waiting:
                self.references.unlocked(frame.arguments)
        if operation is not None and scheduler.in_flight and scheduler.in_flight.get(operation) is frame:
            other = frame.instead_of
            while other is not None and other not in other.stack:  # it is over
                other = other.instead_of
            if other is not None:
                scheduler.in_flight[operation] = other
            else:
                del scheduler.in_flight[operation]
                if frame.copy is not None:
                    operation.outputs = ()
        stack = frame.stack
        stack.pop()
        if stack and stack[0].waiting_below >= len(stack):
            stack[0].waiting_below = len(stack) - 1
        scheduler.notify()

    def _abandon(self, bottom: Frame) -> None:
        """After a fault: what the frames had taken is given back."""
        ordinary = isinstance(sys.exc_info()[1], Exception)
        with self.lock:
            if not ordinary:
                self.changes.distrust()
            with self.changes.begun():
                while bottom.stack:
                    self.leave(bottom.stack[-1])
                if bottom.operation is not None and not bottom.operation.runs:  # it has never been
                    self.references.forget(self.references.forget_operation(bottom.operation))
        self.scheduler.over(bottom)
        if ordinary:
            self.settling.settle()

    def left_behind(self) -> bool:
        """Whether an interrupt has left something behind, which is free now."""
        if all(bottom.goes_on for bottom in list(self.scheduler.stacks)):
            return False
        self.changes.calls_python()
        recount(self)
        return True

    def after_fork(self) -> None:
        """In a child process: the threads that were at something are not here."""
        self.changes.distrust()  # another thread may have been in the middle of one
        for bottom in self.scheduler.stacks:
            if bottom.thread != get_ident():
                bottom.call = None  # its thread is not here
        for departure in self.finalizer.departures:
            if departure.owner != get_ident():
                departure.call = None
        self.scheduler.after_fork()
        self.journal.after_fork()
        self.meter.after_fork()
        for pool in self.memory.pools.values():
            pool.asking.clear()
        if self.memory.tiers is not None:
            self.memory.tiers.after_fork(child=True)
        if self.moving.ahead is not None:
            self.moving.ahead.after_fork()

    def tidy(self) -> None:
        """Nothing is left to be done, nor behind by an interrupt. Without the lock."""
        if self.results.fragile:
            destroyed.evict_all(self)
        self.settling.settle()
        self.learn_costs()
        if self.scheduler.stacks and running.frame() is None:
            with self.changes.alone(), self.changes.begun():
                self.left_behind()
            self.settling.settle()

    # Seconds that become known later

    def learn_costs(self) -> None:
        """Take the costs that devices know by now instead of the time it took to launch what ran there."""
        known = self.meter.answers()
        if not known:
            return
        with self.changes.alone(), self.changes.begun():
            for operation, launched, again, seconds in known:
                self.meter.bill(seconds - launched, again)
                if operation.outputs and (not again or seconds < operation.c0):
                    self.results.reprice(operation, seconds)

    def subscribe(self, listener: Listener, *, advises: bool = False) -> Callable[[], None]:
        """Call `listener(event)` for every event; returns a function that stops it.

        `advises`: an error of the listener ends all advice.
        """

        self.journal.subscribe(listener, Wall(partial(self._fails, listener, advises=advises)))
        self.observed = self.watchful = True
        self.watch()
        return partial(self.unsubscribe, listener)  # no closure: compiled, it would be a cycle

    def unsubscribe(self, listener: Listener) -> None:
        self.journal.unsubscribe(listener)
        self.observed = bool(self.journal.listeners) or self.fingerprints is not None
        self.watch()

    def watch(self) -> None:
        """Whether changes call what is not compiled."""
        memory = self.memory
        plain = self.observed or self.results.fragile or memory.tiers is not None
        plain = plain or memory.story is not None or memory.advice is not None
        plain = plain or not is_compiled(memory.search, memory.policy)
        self.changes.atomic = COMPILED and not plain

    def _fails(self, listener: Listener, error: Exception, *, advises: bool) -> None:
        """A listener has raised an error."""
        self.unsubscribe(listener)
        if not (advises and end_advice(self, error)):
            say(f"{shown(listener)} raised {shown(error)} and will hear no more events")
