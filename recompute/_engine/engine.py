"""The engine: Dynamic Tensor Rematerialization as four callbacks, over the parts of this folder.

    allocate         evict until what an operation makes fits
    perform          bring back the arguments, make room, run the function, keep the outputs
    evict            drop the values on a storage, and join its evicted neighbours' components
    rematerialize    find the evicted operation to perform next, so that a value comes back

That is all of it (Kirisame et al., ICLR 2021, figure 1). Below them stands what keeps it right: arguments come back on
an explicit stack of frames; the parts (graph, memory, references, scheduler, meter, journal, finalizer) change under
one lock; functions, adapters, budgets, scores, clocks, listeners and destructors, all that a user may have written,
run without it. A change begins with `begin` and ends with `end`; one that is cut short in between is made good by
whoever holds the lock next (see recount).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from gc import collect, disable, enable, isenabled
from math import inf
from threading import get_ident
from typing import Any, Final
from weakref import WeakSet

from recompute._adapters.adapter import kinds
from recompute._budget import Limits
from recompute._engine.arguments import fill
from recompute._engine.events import Evicted, LetGo, Listener, Reason, TakenBack
from recompute._engine.finalizer import Departure, Finalizer, HeldReference, StayReference, remains_of
from recompute._engine.frames import Frame, Order, Request, by_peak, in_program_order, running, running_here
from recompute._engine.graph import EVICTED, Operation, Options, Reference, ReleaseMode, Storage, Value
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory, Pool, ProgramOrderPool
from recompute._engine.meter import Meter, checked_clock
from recompute._engine.recount import recount
from recompute._engine.references import References
from recompute._engine.results import Made, Results, own_memory, refer
from recompute._engine.scheduler import Scheduler, frames_on_stacks
from recompute._engine.verify import Fingerprints
from recompute._policy.formulas import Policy
from recompute._policy.search import Search, rank

_SMALL: Final = 4096
"""Bytes: a number or the like, if it is smaller, goes at the next use of the cache, not at once."""


@dataclass(frozen=True)
class EngineOptions:
    """What the simulator and staging set otherwise, the former to do as the published simulator does."""

    room: Callable[[Any], Sequence[tuple[str, int]]] | None = None
    """(device, bytes) that the first run of a function asks for; None: what was learnt."""
    program_order: bool = False
    """Evicted arguments come back, and are unlocked, in the order of the program; else so that the peak is low."""
    patient: bool = True
    """Whether locks that only wait are let go when memory is short."""
    remember_all: bool = False
    """Whether what nobody can need any more is kept, in its component."""
    active: bool = False
    """Whether components are kept from the start, not from the first question."""
    start: float = 0.0
    """Where the compute clock starts."""
    before_bringing: Callable[[], None] | None = None
    """Called before `get`, `pin` or `detach` brings a value; it may raise."""


_NONE: Final[dict[str, Any]] = {}
_FITS: Final[dict[Pool, int]] = {}


class Engine:
    """Performs operations within the limits, and brings evicted values back."""

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
        options: EngineOptions,
    ) -> None:
        self.fingerprints = Fingerprints() if verify else None
        self.journal = Journal()
        self.meter = Meter(checked_clock(clock))
        self.meter.now = options.start
        self.memory = Memory(limits, policy, search, ProgramOrderPool if options.program_order else Pool)
        self.memory.neighbourhood.active = self.memory.neighbourhood.active or options.active
        self.scheduler = Scheduler()
        self.finalizer = Finalizer()
        self.results = Results(self.memory, self.meter, self.journal, self.finalizer, self.fingerprints)
        self.references = References(
            release,
            self.evict,
            self.memory,
            self.meter,
            self.journal,
            self.finalizer,
            self.scheduler,
            self.results,
            self.fingerprints,
            options.remember_all,
        )
        self.options = options
        self.order: Order = in_program_order if options.program_order else by_peak
        self.lock = self.scheduler.lock
        self.observed = verify
        """Whether somebody listens or verifies."""
        self.watchful = verify
        """Whether `get` of a resident value is more than a look: somebody listens, verifies, or runs a function."""
        self._unlimited = self.memory.unlimited and options.room is None  # nothing is reserved that was not declared
        self._foreign = policy.foreign
        self.note: Callable[[Any], None] = self.finalizer.queue.append
        self.unlocked: dict[Frame, None] = {}
        """Frames that have begun at once, and whose arguments are not locked yet."""
        self._unfinished = False  # a change has begun and not ended
        self._collects = True  # whether the garbage collector was enabled when it began
        _engines.add(self)

    # The four callbacks

    def allocate(self, pool: Pool, size: int, frame: Frame, what: Operation | None) -> bool:
        """Evict until `size` more bytes fit, and reserve them for a frame. Without the lock.

        What is evicted is destroyed on the way, so that its bytes are free. False: the frame waited for others, and
        must lock its arguments again. Raises BudgetError if the bytes can never fit.
        """
        collected = False
        while True:
            pool.ask_limit()
            victims = self._rank(pool) if self._foreign and pool.used + size > pool.limit else None
            with self.lock:
                self.begin()
                found = True
                fits = pool.used + size <= pool.limit
                if fits:
                    pool.reserve(size)
                    frame.reserved += ((pool, size),)
                elif not self._mine_depart(pool):
                    if victims is None:
                        victims = self.memory.victims(pool, size, self.meter.now)
                    for victim in victims:
                        if victim.resident and not victim.locks:
                            self.evict(victim, "pressure")
                    found = bool(victims) or self._find_room(pool, frame)
                self.end()
            self.settle_departures()
            if fits:
                return True
            if not found and not self.finalizer.queue:
                if pool.held and not collected:  # what was in a cycle may be held by nobody
                    collect()
                    collected = True
                    continue
                raise pool.shortage(size, what)
            self.settle()
            if frame.missing is None and frame.operation is not None and not frame.running:
                return False

    def perform(self, bottom: Frame) -> None:
        """Run the operation of the frame, and before it whatever has to be brought back for it. Without the lock."""
        stack = bottom.stack
        outer = running.get()
        if outer is not None and not outer.running:  # an interrupt has kept it from saying that it is over
            outer = next(iter(running_here()), None)
            running.set(outer)
        start = self.meter.clock() if outer is not None else 0.0
        self.watchful = True
        try:
            frame: Frame | None = bottom if self._begins_at_once(bottom) else None
            while stack:
                frame = frame or self.rematerialize(stack)
                if frame is not None and (frame.running or self._reserve(frame)):
                    made, cost = self._run(frame, outer)
                    frame = self._store(frame, made, cost)
                    del made  # or what it holds could not be evicted for the operations that follow
                else:
                    frame = None
        except BaseException:  # not bound: what looks at this call from elsewhere would keep it
            running.set(outer)
            self._abandon(bottom)
            raise
        if self.scheduler.stacks:
            self._over(bottom)
        if not self.scheduler.stacks and not self.unlocked:
            self.watchful = self.observed
        if outer is not None:
            outer.elsewhere += self.meter.clock() - start

    def evict(self, storage: Storage, why: Reason) -> None:
        """Drop the values on a resident, unlocked storage. Under the lock: they are destroyed after it."""
        departure = self.finalizer.depart(storage, watch=True)
        if departure is not None and departure.vacates:
            self._guard(departure)
        self.memory.evicted(storage)
        journal = self.journal
        if why == "release":
            journal.releases += 1
        else:
            journal.evictions += 1
        if departure is not None:
            departure.why = why
        elif journal.listeners:
            journal.events.append(Evicted(self.meter.now, storage.pool.used, storage.number, storage.size, why))
        self.references.forget_if_unused(storage)

    def rematerialize(self, stack: list[Frame]) -> Frame | None:
        """Push a frame for each evicted operation that must run first; the one on top, which can run now.

        None: what was asked for is there. See `_next`.
        """
        with self.lock:
            self.begin()
            frame = self._next(stack)
            self.end()
        return frame

    # One operation

    def _begins_at_once(self, frame: Frame) -> bool:
        """Whether all that a first run takes is in memory, and what it makes fits: nearly always. Without the lock.

        Then it runs with its arguments unlocked: they are locked as soon as anybody else changes anything (`begin`).
        """
        operation, stacks = frame.operation, self.scheduler.stacks
        if operation is None or operation.runs or self.scheduler.leader is not None:
            stacks[frame] = None
            return False
        if not self._unlimited or operation.options is not None:
            self._expect(frame)
            needs = frame.needs
            if needs is None:
                stacks[frame] = None
                return False
            if needs:
                stacks[frame] = None
                with self.lock:
                    self.begin()
                    self._drain()
                    fits = self.memory.reserve(frame, needs)
                    self.end()
                if not fits:
                    return False
        self.unlocked[frame] = None  # from here on the arguments stay
        frame.running = True
        frame.born = self.results.number
        stacks.pop(frame, None)
        now = self.meter.now
        for argument in operation.arguments:
            argument.storage.last_access = now
            if argument.payload is EVICTED:
                stacks[frame] = None
                self._lock_at_last(frame, False)
                return False
        return True

    def _next(self, stack: list[Frame]) -> Frame | None:
        """Lock what the frame on top takes, with a new frame on top for what is evicted; the frame that can run now.

        None: what was asked for is there. Under the lock.
        """
        scheduler = self.scheduler
        while stack:
            if scheduler.leader is not None and scheduler.leader is not stack[0] and not scheduler.mine(self):
                self._let_leader_go_first(stack)
            self._drain()  # what has gone need not be there any more
            frame = stack[-1]
            missing = frame.lock_arguments(self.meter.now, self.order)
            if missing is not None:
                operation = missing.operation
                if missing.remains is not None and self._take_back(missing):
                    continue
                if operation is None:
                    self.end()
                    raise RuntimeError(_gone(frame))
                busy = scheduler.in_flight.get(operation)
                if busy is None:
                    scheduler.in_flight[operation] = Frame(self, operation, stack)
                elif self._waits_for_itself(busy, stack):
                    self.end()
                    raise RuntimeError(f"{operation} needs its own result: it gets a value that is made from it")
                else:
                    self._wait(stack[0])
            elif frame.operation is None:
                assert isinstance(frame, Request)
                frame.result = frame.then(frame.arguments[0])
                self._leave(frame)
            else:
                if self._has_room(frame, frame.operation):
                    self._start(frame)
                return frame
        return None

    def _has_room(self, frame: Frame, operation: Operation) -> bool:
        """Reserve room for what an operation makes, if that is known and fits. Under the lock."""
        if frame.reserved:
            return True
        if operation.runs:
            if operation.options is None:  # nearly always: one output, on memory of its own
                storage = operation.storage
                pool, size = storage.pool, storage.size
                if storage.resident:
                    frame.needs = ()
                    return True
                if pool.used + size <= pool.limit and pool.adaptive is None:
                    pool.reserve(size)
                    frame.reserved = ((pool, size),)
                    return True
            frame.needs = self.memory.room_again(operation)
        elif self._unlimited and operation.options is None:
            return True
        return frame.needs is not None and self.memory.reserve(frame, frame.needs)

    def _drain(self) -> None:
        """See to the references that have gone. Under the lock."""
        queue = self.finalizer.queue
        while queue:
            self._see_to(queue.popleft())

    def _lock_at_last(self, frame: Frame, runs: bool) -> None:
        """A frame that began at once is one like others from now on."""
        if runs:
            frame.lock_arguments(self.meter.now, self.order)
            frame.counts = True
            self.scheduler.executing += 1
            self.scheduler.stacks[frame] = None
        else:
            frame.running = False
        self.unlocked.pop(frame, None)

    def _expect(self, frame: Frame) -> None:
        """Find out how much room the outputs of a first run need, as far as that can be known. Without the lock.

        Asks adapters, and so does nothing while an argument is evicted.
        """
        operation = frame.operation
        assert operation is not None
        if operation.runs:
            return
        options = operation.options
        if frame.needs is not None:
            return
        if self.options.room is not None:
            frame.needs = self.options.room(operation.function)
        elif options is not None and options.declared is not None:
            device = operation.arguments[0].storage.pool.device if operation.arguments else "cpu"
            frame.needs = [(device, size) for size in options.declared]
        elif self.memory.unlimited:
            frame.needs = ()
        elif all(argument.payload is not EVICTED for argument in operation.arguments):
            sizes = self.memory.sizes
            payloads = fill(operation.positional)
            if options is None:
                frame.key = sizes.key(operation.function, payloads)
            else:
                named = filled_keywords(options)
                frame.key = sizes.key(operation.function, payloads, named, options.nout or 1)
            frame.needs = sizes.get(frame.key, operation)

    def _reserve(self, frame: Frame) -> bool:
        """Make room for the outputs, and start; False if the arguments must be locked again."""
        operation = frame.operation
        assert operation is not None
        if frame.needs is None:
            self._expect(frame)
        for pool, size in self.memory.by_pool(frame.needs or ()).items():
            if not self.allocate(pool, size, frame, operation):
                with self.lock:
                    self.begin()
                    frame.give_back()
                    self.end()
                return False
        with self.lock:
            self.begin()
            self._start(frame)
            self.end()
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

    def _run(self, frame: Frame, outer: Frame | None) -> tuple[list[Made], float]:
        """Call the function: its outputs, measured, and its cost without what it spent elsewhere. Without the lock."""
        operation, meter = frame.operation, self.meter
        assert operation is not None
        if self.fingerprints is not None:
            for argument in operation.arguments:
                self.fingerprints.check_untouched(argument)
        options, arguments = operation.options, operation.arguments
        positional: Sequence[Any]
        if operation.positional is arguments and len(arguments) == 1:  # mostly, and quicker
            positional = (arguments[0].payload,)
        else:
            positional = fill(operation.positional)
        named = _NONE if options is None else filled_keywords(options)
        clock = meter.clock
        quiet = _quiet(operation) if operation.runs else None
        timer = meter.start_timer(operation) if meter.timers else None
        frame.outer = outer
        running.set(frame)
        start = clock()
        try:
            if quiet is not None:
                with quiet:
                    result = operation.function(*positional, **named)
            else:
                result = operation.function(*positional, **named)
        except BaseException as error:
            note_creation(error, operation)
            raise
        finally:
            cost = clock() - start - frame.elsewhere
            running.set(outer)
        if not 0.0 <= cost < inf:
            cost = meter.checked(cost)
        if timer is not None and not frame.elsewhere:  # the device cannot tell what else was computed meanwhile
            frame.ask = timer()
        del positional, named
        if frame.found is not None:
            with self.lock:
                self.begin()
                self.results.depend(operation, frame.found, operation.runs > 0)
                self.end()
        if options is None:
            return [self.results.measure(operation, 0, result)], cost
        return self.results.measure_all(operation, options, result), cost

    def _make_room_for(self, frame: Frame, made: list[Made]) -> None:
        """Make room for what was not known before the run, after the fact: it is there already. Without the lock."""
        with self.lock:
            self.begin()
            self._stop(frame)
            short = self._shortage(frame, made)
            for pool, extra in short.items():
                pool.overshoot = max(pool.overshoot, pool.used + extra - int(pool.limit))
                pool.peak = max(pool.peak, pool.used + extra)
            for _, _, _, _, _, shares in made:
                if shares is not None and not shares.locks:  # got at run time; it must stay now
                    frame.lock(shares)
            self.end()
        for pool, extra in short.items():
            self.allocate(pool, extra, frame, frame.operation)

    def _shortage(self, frame: Frame, made: list[Made]) -> dict[Pool, int]:
        """The bytes of outputs that do not fit, beyond what was reserved for them."""
        operation, memory = frame.operation, self.memory
        assert operation is not None
        if len(made) == 1:  # nearly always
            _, size, _, device, _, shares = made[0]
            pool = memory.pools.get(device) or memory.pool(device)
            extra = size - (frame.reserved[0][1] if frame.reserved and frame.reserved[0][0] is pool else 0)
            return {pool: extra} if extra > 0 and shares is None and pool.used + extra > pool.limit else _FITS
        if operation.runs:
            wanted = [output is not None and output.payload is EVICTED for output in operation.outputs]
            made = [output for output, needed in zip(made, wanted, strict=True) if needed]
        short: dict[Pool, int] = {}
        for pool, size in memory.by_pool(own_memory(made)).items():
            extra = size - sum([room for reserved, room in frame.reserved if reserved is pool])
            if extra > 0 and pool.used + extra > pool.limit:
                short[pool] = extra
        return short

    def _store(self, frame: Frame, made: list[Made], cost: float) -> Frame | None:
        """Keep the outputs, record the cost, let the arguments go; the next frame of the stack. Without the lock."""
        operation, memory, meter, results = frame.operation, self.memory, self.meter, self.results
        assert operation is not None
        again = operation.runs > 0
        name = operation.name if self.journal.listeners else ""
        following: Frame | None = None
        if again:
            if operation.remains is not None or len(made) > 1:
                _tell_restored(operation, made)
            function = getattr(operation.function, "__code__", None) or operation.name
        else:
            handle = frame.handle
            constant = isinstance(handle, type)
            classes: list[Any] = [handle] * len(made) if constant else [handle(payload) for payload, *_ in made]
        if meter.unknown:
            self.learn_costs()
        self.unlocked.pop(frame, None)
        while True:
            with self.lock:
                self.begin()
                fits = memory.unlimited or not self._shortage(frame, made)
                if fits:
                    room = frame.reserved
                    if room:
                        frame.give_back()
                    meter.now += cost
                    if again:
                        meter.remat_time += cost
                        self._restore(operation, made, cost, frame.ask is None)
                        meter.count_repeated(function, cost)
                    else:
                        self.journal.operations += 1
                        results.create(operation, made, cost)
                        note = self.note
                        for value, cls in zip(operation.outputs, classes, strict=True):
                            frame.handles.append(refer(cls, self, value, note))
                    if len(made) > 1 and operation.options is not None:
                        operation.options.room = own_memory(made)
                    if frame.ask is not None:
                        meter.unknown.append((operation, cost, again, frame.ask))
                    if self.journal.listeners:
                        self.journal.events.append(results.performed(operation, name, cost, again, room))
                    self._leave(frame)
                    if again:
                        self.references.performed_again(frame.arguments)
                    if frame.stack:
                        following = self._next(frame.stack)
                    elif self.finalizer.queue:
                        self._drain()
                self.end()
            if fits:
                break
            self._make_room_for(frame, made)
        if frame.key is not None:
            memory.sizes.learn(frame.key, own_memory(made))
        return following

    def _restore(self, operation: Operation, made: list[Made], cost: float, reprice: bool) -> None:
        """The outputs of a repeated run that are evicted."""
        self.journal.rematerializations += 1
        operation.runs += 1
        for value, output in zip(operation.outputs, made, strict=True):
            if value is not None and value.payload is EVICTED:
                self.results.restore(value, operation, output)
        if cost < operation.c0 and reprice:  # the first run of a compiled function is not its cost
            self.results.reprice(operation, cost)

    # Without an operation

    def make_room(self, device: str, size: int, then: Callable[[], None] | None = None) -> None:
        """Evict until `size` more bytes fit on a device, and call `then` under the lock when they do."""
        with self.lock:
            self.begin()
            pool = self.memory.pool(device)
            self.end()
        bottom = Frame(self, None)
        self.scheduler.stacks[bottom] = None
        try:
            self.allocate(pool, size, bottom, None)
            with self.lock:
                self.begin()
                bottom.give_back()
                if then is not None:
                    then()
                self.end()
        except BaseException:
            self._abandon(bottom)
            raise
        self._over(bottom)

    def set_limits(self, limits: Limits) -> None:
        """Another budget from now on. Under the lock; nothing is evicted yet."""
        self.memory.set_limits(limits)
        self._unlimited = self.memory.unlimited and self.options.room is None

    def next_victims(self, pool: Pool) -> list[Storage]:
        """Whom to evict next, whatever is free."""
        if self._foreign:
            return self._rank(pool)
        with self.lock:
            self.begin()
            victims = pool.candidates.choose(self.meter.now)
            self.end()
        return victims

    # When memory is short, or somebody else is at it

    def _rank(self, pool: Pool) -> list[Storage]:
        """The victim of a policy that is the user's own code, which runs without the lock."""
        with self.lock:
            self.begin()
            snapshot = pool.candidates.snapshot(self.meter.now)
            self.end()
        memory = self.memory
        best = rank(memory.policy, memory.search, snapshot)
        found = [storage for storage in best if storage.resident and not storage.locks and storage.pool is pool]
        return found if memory.search.together else found[:1]

    def _mine_depart(self, pool: Pool) -> bool:
        """Whether bytes are on their way out by this thread, or by one that was kept from it."""
        if pool.departing:
            for departure in self.finalizer.departures:
                if departure.pool is pool and self._takes_over(departure):
                    return True
        return False

    def _find_room(self, pool: Pool, frame: Frame) -> bool:
        """Find room beyond the candidates; False if there is none.

        Memory that is too short for several threads may do for one: the first thread that finds no room leads, and the
        others let go what only waits, until it has got what it asked for. Then its own outer frames let go.
        """
        scheduler = self.scheduler
        if not self.options.patient:
            return False
        stack: list[Frame] = [] if frame.running or frame.operation is None else frame.stack
        mine = scheduler.mine(self)
        if (scheduler.executing > mine or scheduler.blocked) and not mine and stack:
            if scheduler.leader is None:
                scheduler.leader = stack[0]
            elif scheduler.leader is not stack[0]:
                self._let_leader_go_first(stack)
                return True
        if scheduler.executing > mine or pool.departing:
            self._wait(frame.stack[0])
            return True
        unlocked = False
        for blocked in scheduler.blocked:
            unlocked = scheduler.unlock_waiting(blocked.stack) or unlocked
        if unlocked:
            return True
        stacks = [stack, *(outer.stack for outer in running_here() if outer.engine is self)]
        return any(scheduler.unlock_outermost(one) for one in stacks) or self._left_behind()

    def _let_leader_go_first(self, stack: list[Frame]) -> None:
        """Let another thread go first, with all the memory that this one does not need right now."""
        while len(stack) > 1:  # the leader may need what these were to bring: start over, later
            self._leave(stack[-1])
        stack[0].waiting_below = 0
        self.scheduler.unlock_waiting(stack)
        while self.scheduler.leader is not None and self.scheduler.leader is not stack[0]:
            self._wait(stack[0])

    def _wait(self, bottom: Frame) -> None:
        """Wait until another thread has finished something. What was changed so far is a change by itself."""
        self.end()
        try:
            self.scheduler.wait(bottom)
        except BaseException:
            self._unfinished = True
            raise
        self.begin()

    def _waits_for_itself(self, busy: Frame, stack: list[Frame]) -> bool:
        if busy.operation is None:  # its value is on the way out of memory
            return bool(busy.key == get_ident())
        return busy.stack is stack or any(busy.stack is outer.stack for outer in running_here())

    def _leave(self, frame: Frame) -> None:
        """A frame is over, with success or without: what it had locked and reserved is free. Under the lock."""
        scheduler, operation, locked = self.scheduler, frame.operation, frame.locked
        if frame.counts:
            frame.counts = False
            scheduler.executing -= 1
        frame.running = False
        if frame.reserved:
            frame.give_back()
        if locked is not None:
            if self.options.program_order:
                place = {value.storage: number for number, value in enumerate(frame.arguments)}
                locked.sort(key=lambda storage: place.get(storage, -1))
            frame.locked = frame.missing = None
            for storage in locked:
                storage.pool.unlock(storage)
            if self.references.waiting:
                self.references.unlocked(frame.arguments)
        if operation is not None and scheduler.in_flight and scheduler.in_flight.get(operation) is frame:
            del scheduler.in_flight[operation]
        stack = frame.stack
        stack.pop()
        if stack and stack[0].waiting_below >= len(stack):
            stack[0].waiting_below = len(stack) - 1
        if scheduler.blocked:
            scheduler.changed.notify_all()

    def _over(self, bottom: Frame) -> None:
        """A request is over."""
        scheduler = self.scheduler
        scheduler.stacks.pop(bottom, None)
        if not scheduler.stacks:
            self.watchful = self.observed
        if scheduler.leader is bottom:
            self._lead_no_more()

    def _lead_no_more(self) -> None:
        with self.lock:
            self.scheduler.leader = None
            self.scheduler.changed.notify_all()

    def _abandon(self, bottom: Frame) -> None:
        """After a fault: what the frames had taken is given back."""
        with self.lock:
            if not isinstance(sys.exc_info()[1], Exception):
                self._unfinished = True
            self.begin()
            while bottom.stack:
                self._leave(bottom.stack[-1])
            self.end()
        self._over(bottom)

    def calls_going_on(self) -> set[Frame]:
        """The bottom frames of all requests that some thread is at."""
        return {frame.f_locals.get("bottom") for frame in frames_on_stacks(_REQUESTS)}  # type: ignore[misc]

    def _left_behind(self) -> bool:
        """Whether an interrupt has left something behind, which is free now."""
        alive = self.calls_going_on()
        if all(bottom in alive for bottom in self.scheduler.stacks):
            return False
        recount(self)
        return True

    # Changes, whole or made good

    def begin(self) -> None:
        """A change begins: the lock is held, and destructors wait for its end."""
        if self._unfinished:
            self._make_good()
        else:
            self._collects = isenabled()
            self._unfinished = True
        disable()
        if self.unlocked:
            for frame in list(self.unlocked):
                self._lock_at_last(frame, True)

    def end(self) -> None:
        """A change has ended, and everything that is counted is right."""
        if self._collects:
            enable()
        self._unfinished = False

    def _make_good(self) -> None:
        lock = self.lock
        lock.release()
        nested = lock._is_owned()  # type: ignore[attr-defined]  # the library's Condition relies on it, too
        lock.acquire()
        if nested:
            raise RuntimeError(
                "the cache is used by the handler of a signal that came in the middle of a change of it; let the "
                "handler only note the signal, and use the cache afterwards"
            )
        if self._unfinished:  # no other thread was faster
            disable()
            recount(self)
        self._unfinished = True

    def settle(self, blocking: bool = True) -> None:
        """See to references that went, destroy what was dropped, tell listeners. After each use; without the lock."""
        finalizer = self.finalizer
        while finalizer.queue:
            if not self.lock.acquire(blocking):
                return  # whoever holds it will see to that
            try:
                self.begin()
                self._drain()
                self.end()
            finally:
                self.lock.release()
            self.settle_departures()
        if finalizer.garbage or finalizer.departures:
            self.settle_departures()
        if self.journal.events:
            self.journal.deliver()
        if finalizer.interrupts:
            finalizer.raise_interrupts()

    def _see_to(self, reference: Reference | HeldReference | StayReference) -> None:
        if type(reference) is Reference:
            self.references.dropped(reference)
        elif isinstance(reference, StayReference):
            if reference in self.finalizer.stays:
                self.finalizer.stays.discard(reference)
                reference.storage.pool.unlock(reference.storage)
                self.references.unlocked(reference.storage.values)
                self.scheduler.notify()
        elif isinstance(reference, HeldReference) and self.memory.let_go(reference.held) and self.journal.listeners:
            held = reference.held
            self.journal.events.append(LetGo(self.meter.now, held.pool.used, held.number))

    def settle_departures(self) -> None:
        """Destroy what was evicted, once its adapters know; then its bytes are free. Without the lock."""
        finalizer = self.finalizer
        finalizer.destroy_garbage()
        for departure in list(finalizer.departures):
            if self._takes_over(departure):
                try:
                    departure.tell_adapters(self.let_go)
                finally:
                    with self.lock:
                        self.begin()
                        self._departed(departure)
                        self.end()
        finalizer.destroy_garbage()

    def _takes_over(self, departure: Departure) -> bool:
        """Whether this thread sees to a departure: its own, or one whose thread was kept from it."""
        if departure.owner != get_ident():
            if any(frame.f_locals.get("departure") is departure for frame in frames_on_stacks(_SETTLING)):
                return False
            departure.owner = get_ident()
        return True

    def _departed(self, departure: Departure) -> None:
        """A storage has left memory: its bytes are free, unless somebody outside holds them."""
        if self.finalizer.departures.pop(departure, departure) is departure:
            return  # it was seen to already
        pool, held, storage, scheduler = departure.pool, departure.held, departure.storage, self.scheduler
        departure.payloads = []
        pool.departing -= departure.size
        pool.used -= departure.size
        if held is not None and (held.reference is None or held.reference() is None):
            held = None
        if held is not None:
            self.memory.hold(held)
            if not storage.resident:
                remains_of(storage).held = held
        for operation in departure.guarded:
            scheduler.in_flight.pop(operation, None)
        if departure.why is not None and self.journal.listeners:
            ghosts = () if held is None else tuple([value.number for value in storage.values if _alive(value)])
            event = Evicted(
                self.meter.now, pool.used, departure.number, departure.size, departure.why, held is not None, ghosts
            )
            self.journal.events.append(event)
        if scheduler.blocked:
            scheduler.changed.notify_all()

    def _guard(self, departure: Departure) -> None:
        """Nobody brings the values back before their memory is given up."""
        guard = Frame(self, None)
        guard.key = departure.owner
        for value, _, _ in departure.payloads:
            if value.operation is not None:
                departure.guarded.append(value.operation)
                self.scheduler.in_flight[value.operation] = guard

    def going(self, handle: Any, value: Value) -> None:
        """A Recomputable is going: called from its destructor, at any time, and in any thread.

        Should this be cut short, or be too much now, the callback of the reference still brings the news.
        """
        if _can_wait(value) or self.lock._is_owned():  # type: ignore[attr-defined]  # the library's Condition asks, too
            return
        reference = value.reference_of(handle)
        if reference is not None:
            self.finalizer.queue.append(reference)
            self.settle(blocking=False)

    def let_go(self, reference: HeldReference | StayReference) -> None:
        """Somebody has let go of a buffer, or need not have a storage in memory: called from a destruction, as `going`."""
        self.finalizer.queue.append(reference)
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            self.settle(blocking=False)

    def _take_back(self, value: Value) -> bool:
        """Make an evicted value resident again without recomputing it, if somebody still holds it."""
        storage, memory = value.storage, self.memory
        payload = value.remains.payload() if value.remains is not None and value.remains.payload is not None else None
        held = storage.remains.held if storage.remains is not None else None
        if payload is None or held is None or storage.resident or not memory.let_go(held):
            return False
        assert storage.remains is not None
        storage.remains.held = None
        storage.buffer = held.buffer
        for other in storage.values:
            remains = other.remains
            if remains is not None and remains.payload is not None:
                kept = remains.payload()
                other.payload = EVICTED if kept is None else kept
                remains.payload = None
        memory.restored(storage)
        self.journal.recoveries += 1
        if self.journal.listeners:
            event = TakenBack(self.meter.now, storage.pool.used, storage.number, storage.size)
            self.journal.events.append(event)
        return True

    def after_fork(self) -> None:
        """In a child process: the lock may have been held by a thread that is not here, in the middle of a change."""
        self.scheduler.after_fork()
        self.lock = self.scheduler.lock
        self._collects = True
        self._unfinished = True

    def tidy(self) -> None:
        """Nothing is left to be done: see `settle`, also for what an interrupt has left behind. Without the lock."""
        self.settle()
        self.learn_costs()
        if self.scheduler.stacks and running.get() is None:
            with self.lock:
                self.begin()
                self._left_behind()
                self.end()
            self.settle()

    # Seconds that become known later

    def learn_costs(self) -> None:
        """Take the costs that devices know by now in the place of the time it took to launch what ran there."""
        known = self.meter.answers()
        if not known:
            return
        with self.lock:
            self.begin()
            for operation, launched, again, seconds in known:
                self.meter.bill(seconds - launched, again)
                if operation.outputs and (not again or seconds < operation.c0):
                    self.results.reprice(operation, seconds)
            self.end()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` for every event from now on; returns a function that stops it."""
        self.journal.subscribe(listener)
        self.observed = self.watchful = True

        def unsubscribe() -> None:
            self.journal.unsubscribe(listener)
            self.observed = bool(self.journal.listeners) or self.fingerprints is not None

        return unsubscribe


def filled_keywords(options: Options) -> dict[str, Any]:
    """The arguments by name, with payloads filled in."""
    keywords = options.keywords
    return {} if keywords is None else dict(zip(keywords, fill(keywords.values()), strict=True))


def note_creation(error: BaseException, operation: Operation) -> None:
    """Let an error say where the operation was created that raised it."""
    try:
        error.add_note(f"in {operation.name}, an operation created at {operation.created}")
    except Exception:  # an exception class may forbid it, and the error itself matters more
        return


def _gone(frame: Frame) -> str:
    what = "a value" if frame.operation is None else f"an argument of {frame.operation.name}"
    return (
        f"{what} is gone: another thread has changed the array in place; let threads that change one array take turns, "
        "with a lock"
    )


def _quiet(operation: Operation) -> AbstractContextManager[Any] | None:
    """What surrounds a repeated run on arrays of a library that would warn of the same again."""
    for value in operation.arguments:
        adapter = kinds[type(value.payload)].array
        if adapter is not None:
            return adapter.repeated()
    return None


def _tell_restored(operation: Operation, made: list[Made]) -> None:
    """Let adapters put the memory of what was made again where it belongs. Without the lock."""
    for value, output in zip(operation.outputs, made, strict=True):
        if value is not None and value.payload is EVICTED and value.remains is not None:
            payload = output[0]
            restored = kinds[type(payload)].restored
            if restored is not None and value.remains.outline is not None:
                restored(value.remains.outline, payload)


def _can_wait(value: Value) -> bool:
    """Whether a number or the like is all that can go with a reference: its recipe stays, for those who use it."""
    storage = value.storage
    return value.users is not None and not storage.buffer and storage.resident and storage.size < _SMALL


def _alive(value: Value) -> bool:
    remains = value.remains
    return remains is not None and remains.payload is not None and remains.payload() is not None


_engines: Final[WeakSet[Engine]] = WeakSet()

_REQUESTS: Final = (Engine.perform.__code__, Engine.make_room.__code__)
_SETTLING: Final = (Engine.settle_departures.__code__,)


def _after_fork() -> None:
    """In a child process the other threads are gone, and what they were at must be made good."""
    for engine in list(_engines):
        engine.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
