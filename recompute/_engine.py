"""The engine: Dynamic Tensor Rematerialization as four callbacks, with locks, threads and events.

`_allocate`, `_perform`, `_evict` and `_rematerialize` are the whole of it (Kirisame et al., ICLR 2021, figure 1;
`_evict` is in _lifetimes). What surrounds them: arguments are brought back on an explicit stack of frames (a chain of a
million evicted values is no deeper than one), functions run outside the lock, and whatever is raised, the frames in
flight give back what they had locked and reserved.

One lock guards everything below this file in the house; its methods hold it, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Condition
from types import CodeType
from typing import Any

from recompute._adapter import fingerprint, kinds
from recompute._arguments import Several, fill
from recompute._budget import Limits
from recompute._events import Accessed, Added, Detached, Pinned, Unpinned
from recompute._flight import ON_THE_GROUND, Flight, Frame, Goal, Made, Room, Running, by_peak, running
from recompute._graph import EVICTED, Operation, ReleaseMode, Storage, Value
from recompute._lifetimes import INTERRUPT
from recompute._policy import Policy
from recompute._pool import Pool
from recompute._repair import HANDLES
from recompute._results import Results, home_among, own_memory
from recompute._search import Search
from recompute._sizes import LearntSizes


class Engine(Results):
    """Performs operations within the limits, and brings evicted values back."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        search: Search,
        release: ReleaseMode,
        clock: Callable[[], float],
        verify: bool,
    ) -> None:
        super().__init__(limits, policy, search, release, verify)
        self._clock = clock
        self._changed = Condition(self._lock)
        self._sizes = LearntSizes()
        self._order: Callable[[list[Value]], list[Value]] = by_peak  # in which evicted arguments are brought back
        self._leader: Flight | None = None  # goes first, when memory is too short for several
        self._blocked: list[Flight] = []  # threads that wait for memory or for a value
        self._again: dict[CodeType | str, list[float]] = {}  # function -> [times, seconds]

    # The four callbacks

    def _allocate(self, pool: Pool, size: int, flight: Flight, what: Operation | None) -> bool:
        """Evict until `size` more bytes fit; False if the frame on top lost its locks while it waited for others."""
        while pool.used + size > pool.refresh():
            fits = pool.fixed + pool.held + size <= pool.limit
            victims = pool.candidates.choose(self.now) if fits else []
            if victims and self.policy.reprieves:
                victims = self._spare(pool, size, victims)
            for victim in victims:
                self._evict(victim, "pressure")
            if not victims:
                self._make_way(pool, size, flight, what)
                if flight.frames and flight.frames[-1].todo is None:
                    return False
        return True

    def _perform(self, frame: Frame) -> None:
        """Run the operation of `frame` after bringing back its arguments. Called without the lock."""
        flight = frame.flight
        flight.frames.append(frame)
        outer = running.get()
        if self._interrupted and outer is None:
            self._recover()
        start = self._clock() if outer is not None else 0.0
        try:
            with self._lock:
                ready = self._rematerialize(flight)
            while ready is not None:
                made, cost = self._run(ready)
                with self._lock:
                    self._store(ready, made, cost)
                    del made  # or what it holds could not be evicted for the operations that follow
                    flight.pop()
                    ready = self._rematerialize(flight)
        except BaseException as error:
            running.set(outer)  # an interrupt may have kept _run from it
            with self._lock:
                while flight.frames:
                    self._abandon(flight.frames.pop())
            self._interrupted = self._interrupted or not isinstance(error, Exception)
            raise
        finally:
            self._arrived(flight)
            if outer is not None:
                outer.nested += self._clock() - start

    def _rematerialize(self, flight: Flight) -> Frame | None:
        """Lock what the frame on top needs, with a new frame on top for what is evicted; the frame that can run now.

        None: the goal is reached.
        """
        frames = flight.frames
        while frames:
            if self._leader is not None and self._leader is not flight and not self._running_mine():
                self._wait_for_leader(flight)
            frame = frames[-1]
            missing = frame.lock_arguments(self.now)
            if missing is not None:
                operation = missing.operation
                assert operation is not None, "a source is never evicted"
                if missing.ghost is not None and self._take_back(missing):
                    continue
                if operation.frame is None:
                    operation.frame = Frame(self, operation, flight)
                    frames.append(operation.frame)
                elif operation.frame.flight in (flight, *(each.flight for each in _running_here())):
                    raise RuntimeError(f"{operation} needs its own result: it gets a value that is made from it")
                else:
                    self._wait(flight)
            elif frame.operation is None:
                assert isinstance(frame, Goal)
                frame.result = frame.arrive(frame.arguments[0])
                self._unlock(frame)
                flight.pop()
            elif self._reserve(frame, frame.operation):
                return frame
        return None

    def _spare(self, pool: Pool, size: int, victims: list[Storage]) -> list[Storage]:
        """Choose until `size` bytes fit; of all victims those that are really necessary, the first ones first."""
        if pool.used - sum(each.size for each in victims) + size <= pool.limit:
            return victims
        chosen: list[Storage] = []
        while victims:
            for each in victims:
                self._set_aside(each)
            chosen += victims
            victims = pool.candidates.choose(self.now) if pool.used + size > pool.limit else []
        spared: set[Storage] = set()
        if pool.used + size <= pool.limit:
            for each in reversed(chosen):
                if pool.used + each.size + size <= pool.limit:
                    self._put_back(each)
                    spared.add(each)
        doomed = [each for each in chosen if each not in spared]
        for each in doomed:
            self._put_back(each)
        return doomed

    # An operation in flight

    def _reserve(self, frame: Frame, operation: Operation) -> bool:
        """Make room for the outputs, as far as their sizes are known; False if the arguments must be locked again."""
        expected = self._expected(frame, operation)
        if len(expected) > 1:
            together: dict[str, int] = {}
            for device, size in expected:
                together[device] = together.get(device, 0) + size
            expected = list(together.items())
        for device, size in expected:
            pool = self._pools.get(device) or self._pool(device)
            tight = pool.used + size > pool.limit or pool.adaptive is not None
            if tight and not self._allocate(pool, size, frame.flight, operation):
                self._give_back(frame.reserved)
                frame.reserved = ()
                return False
            pool.take(size)
            pool.fixed += size
            frame.reserved += ((pool, size),)
        frame.running = True
        frame.born = self._number
        self._executing += 1
        return True

    def _expected(self, frame: Frame, operation: Operation) -> Sequence[tuple[str, int]]:
        """(device, bytes) of the outputs: as before, as declared, or as learnt; empty if unknown."""
        if operation.runs:
            if operation.room is not None:  # the function makes all of them again, whichever are wanted
                return operation.room
            storage = next(each.storage for each in operation.outputs if each is not None)
            return () if storage.resident else ((storage.pool.device, storage.size),)
        if operation.declared is not None:
            device = operation.arguments[0].storage.pool.device if operation.arguments else "cpu"
            return [(device, size) for size in operation.declared]
        if self._unlimited:
            return ()
        keywords = operation.keywords
        named = None if keywords is None else dict(zip(keywords, fill(keywords.values()), strict=True))
        frame.key = self._sizes.key(operation.function, fill(operation.positional), named, operation.nout or 1)
        return self._sizes.get(frame.key, operation)

    def _give_back(self, reserved: Room) -> None:
        for pool, size in reserved:
            pool.used -= size
            pool.fixed -= size

    def _run(self, frame: Frame) -> tuple[list[Made], float]:
        """Call the function: its outputs, measured, and its cost without what it spent in the cache. Takes no lock."""
        operation = frame.operation
        assert operation is not None
        if self._fingerprints is not None:
            for argument in operation.arguments:
                self._fingerprints.check_untouched(argument)
        positional = fill(operation.positional)
        keywords = operation.keywords
        clock = self._clock
        outer = frame.outer = running.get()
        running.set(frame)
        timer = self._start_timer(operation) if self._timers else None
        start = clock()
        try:
            if operation.runs and (quiet := _quiet(operation)) is not None:
                named = {} if keywords is None else dict(zip(keywords, fill(keywords.values()), strict=True))
                with quiet:
                    result = operation.function(*positional, **named)
            elif keywords is None:
                result = operation.function(*positional)
            else:
                result = operation.function(*positional, **dict(zip(keywords, fill(keywords.values()), strict=True)))
        except BaseException as error:
            say_where(error, operation)
            raise
        finally:
            cost = clock() - start - frame.nested
            running.set(outer)
        if timer is not None and not frame.nested:  # the device cannot tell what else was computed meanwhile
            frame.ask = timer()
        if not operation.nout:
            if type(result) is Several and len(result) == 1:
                (result,) = result
            operation.nout = len(result) if type(result) is Several else 1
        if operation.nout == 1:
            made = [self._measure(operation, 0, result)]
        else:
            made = [self._measure(operation, number, each) for number, each in enumerate(_outputs(operation, result))]
        return made, cost if cost > 0 else 0.0

    def _measure(self, operation: Operation, number: int, payload: Any) -> Made:
        """Ask the adapter about one output. Without the lock."""
        kind = kinds[type(payload)]
        if kind.readonce:
            raise TypeError(
                f"{operation.name} returned a {type(payload).__name__}, which can be read only once, but its result "
                f"is kept and read again; return a list or a tuple instead (created at {operation.created})"
            )
        declared = operation.declared
        size = kind.nbytes(payload) if declared is None else declared[number]
        if kind.freeze is not None:
            for argument in operation.arguments:
                if payload is argument.payload:
                    break  # frozen when it was made, or a source, which is the caller's
            else:
                kind.freeze(payload)
        digest = None
        if self._fingerprints is not None:
            digest = fingerprint(payload)
            value = operation.outputs[number] if operation.runs else None
            if value is not None:
                self._fingerprints.check_repeated(operation, value, digest)
        device = "cpu" if kind.device is None else kind.device(payload)
        if kind.timer is not None and device != "cpu":
            self._timers.setdefault(device, kind.timer)
        buffer = None if kind.buffer is None else kind.buffer(payload)  # last: nbytes and freeze may count references
        return payload, size, 0 if buffer is None else id(buffer), device, digest

    def _store(self, frame: Frame, made: list[Made], cost: float) -> None:
        """Keep the outputs, record the cost, let the arguments go."""
        operation = frame.operation
        assert operation is not None
        again = operation.runs > 0
        if self._unknown_costs:
            self._learn_costs()
        if frame.ask is not None:
            self._unknown_costs.append((operation, cost, again, frame.ask))
        frame.running = False
        self._executing -= 1
        if frame.found:
            self._depend(operation, frame.found, again)
        homes: list[Storage | None] = []
        for each in made:
            home = home_among(operation.arguments, each[2]) if each[2] else None
            if home is not None and not home.locks:  # got at run time; making room must not evict it now
                frame.lock(home)
            homes.append(home)
        if operation.nout > 1:
            operation.room = own_memory(made, homes)
        reserved, frame.reserved = frame.reserved, ()
        self._make_room_now(reserved, operation, made, homes)
        self.now += cost
        operation.runs += 1
        if again:
            self._rematerializations += 1
            self._remat_time += cost
            key = getattr(operation.function, "__code__", None) or operation.name
            count = self._again.get(key)
            if count is None:
                count = self._again[key] = [0, 0.0]
            count[0] += 1
            count[1] += cost
            for number, value in enumerate(operation.outputs):
                if value is not None and value.payload is EVICTED:
                    self._restore(value, operation, made[number], homes[number])
            if cost < operation.cost and frame.ask is None:  # the first run of a compiled function is not its cost
                self._reprice(operation, cost)
        else:
            self._operations += 1
            operation.cost = cost
            self._create(operation, made, homes)
            if frame.key is not None:
                self._sizes.learn(frame.key, own_memory(made, homes))
        if self._listeners:
            self._events.append(self._performed(operation, cost, again, sum(size for _, size in reserved)))
        operation.frame = None
        self._unlock(frame)
        if self._banishable and again:
            for argument in operation.arguments:
                if argument.storage in self._banishable:
                    self._banish(argument.storage)
        if self._blocked:
            self._changed.notify_all()

    def _make_room_now(
        self, reserved: Room, operation: Operation, made: list[Made], homes: list[Storage | None]
    ) -> None:
        """Turn the room reserved into room for what was made; if that is more, evict after the fact."""
        if reserved:
            self._give_back(reserved)
            pool, size = reserved[0]
            if len(made) == 1 and made[0][1] <= size and made[0][3] == pool.device:
                return  # the ordinary case: the size was known
        if self._unlimited:
            return
        if operation.runs:
            wanted = [each is not None and each.payload is EVICTED for each in operation.outputs]
            made = [each for each, needed in zip(made, wanted, strict=True) if needed]
            homes = [each for each, needed in zip(homes, wanted, strict=True) if needed]
        needs: dict[Pool, int] = {}
        for device, size in own_memory(made, homes):
            pool = self._pool(device)
            needs[pool] = needs.get(pool, 0) + size
        for pool, size in needs.items():
            if pool.used + size > pool.limit and size > sum(room for one, room in reserved if one is pool):
                pool.overshoot = max(pool.overshoot, pool.used + size - int(pool.limit))
                pool.peak = max(pool.peak, pool.used + size)
                self._allocate(pool, size, ON_THE_GROUND, operation)

    def _unlock(self, frame: Frame) -> None:
        """Let the arguments go, and evict those that were released in the meantime."""
        frame.let_go()
        if self._late:
            self._evict_late(frame.arguments)

    def _abandon(self, frame: Frame) -> None:
        """After a fault: what the frame had taken is given back."""
        if frame.running:
            frame.running = False
            self._executing -= 1
        self._give_back(frame.reserved)
        frame.reserved = ()
        self._unlock(frame)
        if frame.operation is not None and frame.operation.frame is frame:
            frame.operation.frame = None
        if self._blocked:
            self._changed.notify_all()

    # Room when no candidate is left, and other threads

    def _make_way(self, pool: Pool, size: int, flight: Flight, what: Operation | None) -> None:
        """Find room beyond the candidates, or raise BudgetError.

        Memory that is too short for several threads may do for one: the first thread that finds no room leads, and the
        others let go what only waits, until it has arrived. Then locks of its own outer frames give way.
        """
        mine = self._running_mine()
        if (self._executing > mine or self._blocked) and not mine and flight is not ON_THE_GROUND:
            if self._leader is None:
                self._leader = flight
            elif self._leader is not flight:
                self._wait_for_leader(flight)
                return
        if self._executing > mine:
            self._wait(flight)
            return
        stolen = False
        for other in self._blocked:
            stolen = other.let_go() or stolen
        if stolen:
            return
        if any(each.give_way() for each in (flight, *(running_here.flight for running_here in _running_here()))):
            return
        raise pool.shortage(size, what)

    def _wait_for_leader(self, flight: Flight) -> None:
        """Let another thread go first, with all the memory that this one does not need right now."""
        while len(flight.frames) > 1:  # the leader may need what these were to bring: start over, later
            self._abandon(flight.frames.pop())
        flight.free_below = 0
        flight.let_go()
        while self._leader is not None and self._leader is not flight:
            self._wait(flight)

    def _wait(self, flight: Flight) -> None:
        """Wait until another thread has finished something. Operations around this one do not run meanwhile."""
        mine = self._running_mine()
        self._executing -= mine
        self._blocked.append(flight)
        if not self._executing:
            self._changed.notify_all()  # nobody runs: those who wait for memory must look again
        try:
            self._changed.wait()
        finally:
            self._blocked.remove(flight)
            self._executing += mine

    def _running_mine(self) -> int:
        """How many of the functions that run now are around this call, in its own thread."""
        return sum(each.cache is self for each in _running_here())

    def _arrived(self, flight: Flight) -> None:
        """A flight is over, with success or without: if it led, the others may go on. Called without the lock."""
        if self._leader is flight:
            with self._lock:
                self._leader = None
                self._changed.notify_all()
        if self._dropped or self._events:
            self._settle()

    # What the surface calls, without the lock

    def _add_source(self, payload: Any) -> Value:
        kind = kinds[type(payload)]
        if kind.readonce:
            raise TypeError(
                f"a {type(payload).__name__} can be read only once, but a value may be read again; make a list of it"
            )
        size = kind.nbytes(payload)
        digest = None if self._fingerprints is None else fingerprint(payload)
        device = "cpu" if kind.device is None else kind.device(payload)
        if kind.timer is not None and device != "cpu":
            self._timers.setdefault(device, kind.timer)
        buffer = None if kind.buffer is None else kind.buffer(payload)
        flight = Flight()
        try:
            with self._lock:
                pool = self._pool(device)
                self._allocate(pool, size, flight, None)
                self._number += 1
                storage = Storage(pool, size, 0 if buffer is None else id(buffer), self._number, self.now)
                storage.locks = 1
                value = Value(payload, None, storage, self._number)
                value.refs = 1
                storage.values = (value,)
                self._settle_in(storage)
                pool.sources += size
                if self._fingerprints is not None:
                    self._fingerprints.note(value, digest)
                if self._listeners:
                    self._events.append(Added(self.now, pool.used, storage.number, size, device))
        finally:
            self._arrived(flight)
        return value

    def _apply(self, operation: Operation) -> tuple[Value | None, ...]:
        """Perform a new operation; its outputs, each with one outside reference."""
        arguments = operation.arguments
        with self._noting, self._lock:
            for value in arguments:
                if value.payload is EVICTED and value not in value.storage.values:
                    raise RuntimeError(
                        f"an argument of {operation.name} is gone: another thread has changed the array in place; "
                        "let threads that change one array take turns, with a lock"
                    )
            holds = [_Hold(self, value) for value in dict.fromkeys(arguments)]
        self._note_found(arguments)
        self._perform(Frame(self, operation, Flight()))
        holds.clear()
        return operation.outputs

    def _note_found(self, values: tuple[Value, ...]) -> None:
        """Inside an operation's function: what it asks for, and did not make itself, is a dependency."""
        outer = running.get()
        if outer is not None and outer.cache is self:
            if outer.found is None:
                outer.found = []
            outer.found += [value for value in values if value.storage.number <= outer.born]

    def _bring(self, value: Value, arrive: Callable[[Value], Any]) -> Any:
        """Make `value` resident and call `arrive` on it under the lock."""
        self._note_found((value,))
        goal = Goal(self, value, arrive)
        self._perform(goal)
        return goal.result

    def _get(self, value: Value) -> Any:
        """The payload, by the slow path: evicted, inside an operation, or verified."""
        payload = self._bring(value, self._read)
        if self._fingerprints is not None:
            self._fingerprints.check_untouched(value)
        return payload

    def _read(self, value: Value) -> Any:
        if self._listeners and not self._running_mine():
            self._events.append(Accessed(self.now, value.storage.pool.used, value.number))
        return value.payload

    def _evict_now(self, value: Value) -> bool:
        with self._noting, self._lock:
            storage = value.storage
            evictable = value.payload is not EVICTED and not storage.locks
            if evictable:
                self._evict(storage, "request")
        if self._dropped or self._events:
            self._settle()
        return evictable

    def _detach(self, value: Value) -> None:
        if self._listeners:
            self._events.append(Detached(self.now, value.storage.pool.used, value.number))
        self._cut(value)

    def _pin(self, value: Value) -> None:
        if self._listeners:
            self._events.append(Pinned(self.now, value.storage.pool.used, value.number))
        if not value.pinned:
            value.pinned = True
            value.storage.pool.lock(value.storage)
            value.storage.pool.pinned += value.storage.size

    def _unpin(self, value: Value) -> None:
        with self._noting, self._lock:
            if value.pinned:
                self._unpin_locked(value)
                if self._listeners:
                    self._events.append(Unpinned(self.now, value.storage.pool.used, value.number))
        if self._dropped or self._events:
            self._settle()


def _running_here() -> list[Running]:
    """The operations whose functions run in this thread or task, the innermost first."""
    frames = []
    frame = running.get()
    while frame is not None:
        frames.append(frame)
        frame = frame.outer
    return frames


class _Hold:
    """A reference to an argument while its operation is in flight: the caller's own may go to another value."""

    __slots__ = ("_cache", "_value")

    def __init__(self, cache: Engine, value: Value) -> None:
        value.refs += 1  # under the lock
        self._cache = cache
        self._value = value

    def __del__(self) -> None:
        try:
            self._cache._drop(self._value)
        except KeyboardInterrupt:  # as in Recomputable
            self._cache._interrupted = True
            self._cache._dropped.append(INTERRUPT)
        except AttributeError:  # interrupted before it was complete
            return


HANDLES.append(_Hold)


def _quiet(operation: Operation) -> AbstractContextManager[Any] | None:
    """What surrounds a repeated run on arrays of a library that would warn of the same again."""
    for value in operation.arguments:
        adapter = kinds[type(value.payload)].array
        if adapter is not None:
            return adapter.repeated()
    return None


def _outputs(operation: Operation, result: Any) -> tuple[Any, ...]:
    if operation.nout == 1:
        return (result,)
    try:
        outputs = tuple(result)
    except TypeError:
        outputs = ()
        what = f"a {type(result).__name__}"
    else:
        what = f"{len(outputs)} values"
    if len(outputs) != operation.nout:
        raise ValueError(
            f"{operation.name} (created at {operation.created}) returned {what}, but nout={operation.nout} outputs "
            "were announced"
        )
    return outputs


def say_where(error: BaseException, operation: Operation) -> None:
    try:
        error.add_note(f"in {operation.name}, an operation created at {operation.created}")
    except Exception:  # an exception class may forbid it, and the error itself matters more
        return
