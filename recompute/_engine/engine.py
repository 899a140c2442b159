"""The engine: Dynamic Tensor Rematerialization as four callbacks, with locks, threads and events.

`_perform`, `_rematerialize`, `_allocate` and `_evict` are the whole of it (Kirisame et al., ICLR 2021, figure 1;
`_allocate` is in _allocation, `_evict` in _lifetimes). What surrounds them: arguments are brought back on an explicit
stack of frames (a chain of a million evicted values is no deeper than one), functions run outside the lock, and
whatever is raised, the frames in flight give back what they had locked and reserved. Its bases, down to _turns, are
entered through this file, _at_once and _cache alone: _repair knows by these names whether a thread is inside.

One lock guards everything below this file in the house; its methods hold it, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recompute._adapters.adapter import fingerprint, kinds
from recompute._engine.events import Accessed, Added, Detached, Pinned, Unpinned
from recompute._engine.frames import Flight, Frame, Goal, by_peak, running
from recompute._engine.graph import EVICTED, Operation, Storage, Value
from recompute._engine.references import INTERRUPT
from recompute._engine.repair import HANDLES
from recompute._engine.runs import Runs
from recompute._engine.scheduler import running_here


class Engine(Runs):
    """Performs operations within the limits, and brings evicted values back."""

    _order: Callable[[list[Value]], list[Value]] = staticmethod(by_peak)
    """In which evicted arguments are brought back."""

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
                elif operation.frame.flight in (flight, *(each.flight for each in running_here())):
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
        with self._settling, self._lock:
            storage = value.storage
            evictable = value.payload is not EVICTED and not storage.locks
            if evictable:
                self._evict(storage, "request")
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
        with self._settling, self._lock:
            if value.pinned:
                self._unpin_locked(value)
                if self._listeners:
                    self._events.append(Unpinned(self.now, value.storage.pool.used, value.number))


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
