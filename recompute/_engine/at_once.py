"""Operations that need nothing special, all written out: calls are what an operation costs.

Two short cuts past the four callbacks, for what is in memory already; benchmarks/operations.py has the figures.
Whatever is not that simple goes the long way, with nothing done.
"""

from __future__ import annotations

from typing import Any

from recompute._adapters.adapter import kinds
from recompute._engine.arguments import Several
from recompute._engine.engine import Engine
from recompute._engine.frames import ON_THE_GROUND, Frame, Running, running
from recompute._engine.graph import EVICTED, Operation, Storage, Value
from recompute._engine.memory import Pool
from recompute._engine.results import home_among
from recompute._engine.runs import say_where
from recompute._engine.sizes import Sizes


class AtOnce(Engine):
    """An engine with short cuts."""

    def _apply_held(self, operation: Operation) -> Value | None:
        """`_apply_at_once` under one hold of the lock: for a function that asks for no payloads and meets no cache.

        Its arguments need no locks, since nobody else does anything meanwhile, on any thread. None, with nothing done,
        if it is not that simple, or if something has to be evicted first. Called inside of `_settling`.
        """
        if self._fingerprints is not None or self._timers or running.get() is not None:
            return None
        if self._interrupted:
            self._recover()
        with self._lock:
            while self._dropped:
                self._gone(self._dropped.popleft())
            if self._executing or self._blocked:
                return None
            now = self.now
            for value in operation.arguments:
                if value.payload is EVICTED:
                    return None
                value.storage.last_access = now
            room = 0
            if not self._unlimited:
                function: Any = operation.function
                key = function.size_key()
                for device, room in self._sizes.get(key, operation):
                    pool = self._pools.get(device) or self._pool(device)
                    if pool.used + room > pool.limit or pool.adaptive is not None:
                        return None
            clock = self._clock
            start = clock()
            try:
                payload = operation.function()
            except BaseException as error:
                say_where(error, operation)
                raise
            cost = clock() - start
            kind = kinds[type(payload)]
            size, owner = (-1, None) if kind.enter is None else kind.enter(payload)
            if size < 0 or (size > room and not self._unlimited):
                frame = Frame(self, operation, ON_THE_GROUND)
                frame.key = None if self._unlimited else key
                made = list(payload) if type(payload) is Several else [payload]
                operation.nout = len(made)
                self._executing += 1
                self._store(frame, [self._measure(operation, n, each) for n, each in enumerate(made)], max(cost, 0.0))
                return operation.outputs[0]
            device = "cpu" if kind.device is None else kind.device(payload)
            if device != "cpu" and kind.timer is not None:
                self._timers.setdefault(device, kind.timer)
            pool = self._pools.get(device) or self._pool(device)
            self.now = now = now + cost
            self._operations += 1
            operation.nout = operation.runs = 1
            operation.cost = cost
            self._number = number = self._number + 1
            value = _enter(pool, operation, payload, size, id(owner), number, now)
            if self._listeners:
                self._events.append(self._performed(operation, cost, False, room))
            return value

    def _apply_at_once(self, operation: Operation) -> Value | None:
        """`_apply` for one output, resident arguments, and none by name or in containers: the hot path.

        It is `_perform`, `_reserve`, `_run` and `_store` written out, because calls are what an operation costs:
        benchmarks/operations.py has the figures. None, with nothing done, if the operation is not that simple.
        """
        if self._fingerprints is not None or self._timers or self._leader is not None or running.get() is not None:
            return None
        if self._interrupted:
            self._recover()
        arguments, declared = operation.arguments, operation.declared
        payloads: list[Any] = []
        room: Pool | None = None
        reserved = 0
        started = False
        try:
            with self._lock:
                while self._dropped:
                    self._gone(self._dropped.popleft())
                for value in arguments:
                    if value.payload is EVICTED:
                        return None
                now = self.now
                for part in operation.positional:
                    if type(part) is Value:
                        payloads.append(part.payload)
                        storage = part.storage
                        storage.last_access = now
                        if not storage.locks:
                            storage.pool.fixed += storage.size
                        storage.locks += 1
                    else:
                        payloads.append(part)
                if not self._unlimited or declared is not None:
                    known: Sizes
                    if declared is not None:
                        known = ((arguments[0].storage.pool.device if arguments else "cpu", declared[0]),)
                    else:
                        key = self._sizes.key(operation.function, payloads)
                        known = self._sizes.get(key, operation)
                    if len(known) > 1:
                        for each in arguments:
                            each.storage.pool.unlock(each.storage)
                        return None
                    for device, size in known:
                        pool = self._pools.get(device) or self._pool(device)
                        if pool.used + size > pool.limit or pool.adaptive is not None:
                            if pool.fixed + pool.held + size > pool.limit:  # not without others, or not at all
                                for each in arguments:
                                    each.storage.pool.unlock(each.storage)
                                return None
                            self._allocate(pool, size, ON_THE_GROUND, operation)
                        pool.take(size)
                        pool.fixed += size
                        room, reserved = pool, size
                self._executing += 1
                started = True
                frame = Running(self, ON_THE_GROUND, self._number)
            clock = self._clock
            running.set(frame)
            start = clock()
            try:
                payload = operation.function(*payloads)
            except BaseException as error:
                say_where(error, operation)
                raise
            finally:
                cost = clock() - start - frame.nested
                running.set(None)
            if operation.nout != 1:
                if type(payload) is Several:
                    operation.nout = len(payload)
                    made = [self._measure(operation, number, each) for number, each in enumerate(payload)]
                    del payload
                    with self._lock:
                        whole = Frame(self, operation, ON_THE_GROUND)
                        whole.found, whole.locked = frame.found, [each.storage for each in arguments]
                        whole.reserved = () if room is None else ((room, reserved),)
                        room, started = None, False
                        self._store(whole, made, max(cost, 0.0))
                    return operation.outputs[0]
                operation.nout = 1
            kind = kinds[type(payload)]
            if kind.atomic:
                size, buffer, device = kind.nbytes(payload), 0, "cpu"
            elif kind.enter is not None and not _among(payload, arguments):
                size, owner = kind.enter(payload)
                buffer = 0 if owner is None else id(owner)
                device = "cpu" if kind.device is None else kind.device(payload)
                del owner
            else:
                _, size, buffer, device, _ = self._measure(operation, 0, payload)
            if declared is not None:
                size = declared[0]
            if cost < 0:
                cost = 0.0
            with self._lock:
                if frame.found:
                    self._depend(operation, frame.found, again=False)
                home = home_among(operation.arguments, buffer) if buffer else None
                pool = self._pools.get(device) or self._pool(device)
                started = False
                self._executing -= 1
                if not self._unlimited or declared is not None:
                    if room is pool and home is None and size <= reserved:
                        pool.used -= reserved
                        pool.fixed -= reserved
                        room = None
                    elif room is not None or pool.used + size > pool.limit:
                        taken = ((room, reserved),) if room is not None else ()
                        room = None
                        self._make_room_now(taken, operation, [(payload, size, buffer, device, None)], [home])
                    if declared is None and (size != reserved or home is not None):
                        self._sizes.learn(key, ((device, size),) if size and home is None else ())
                self.now = now = self.now + cost
                self._operations += 1
                operation.runs = 1
                operation.cost = cost
                self._number = number = self._number + 1
                if home is None:
                    _enter(pool, operation, payload, size, buffer, number, now)
                else:
                    self._enter_at(home, operation, payload, number)
                for each in arguments:
                    storage = each.storage
                    storage.locks -= 1
                    if not storage.locks:
                        storage.pool.fixed -= storage.size
                        if storage.slot < 0 and storage.size:
                            storage.pool.candidates.add(storage)
                if self._late:
                    self._evict_late(arguments)
                if self._blocked:
                    self._changed.notify_all()
                if self._listeners:
                    self._events.append(self._performed(operation, cost, False, reserved))
            return operation.outputs[0]
        except BaseException as error:
            running.set(None)
            self._interrupted = self._interrupted or not isinstance(error, Exception)
            with self._lock:
                if started:
                    self._executing -= 1
                if room is not None:
                    room.used -= reserved
                    room.fixed -= reserved
                if payloads and not operation.runs:
                    for each in arguments:
                        each.storage.pool.unlock(each.storage)
                    self._evict_late(arguments)
                self._changed.notify_all()
            raise

    def _enter_at(self, home: Storage, operation: Operation, payload: Any, number: int) -> None:
        """The output lies on the storage of an argument."""
        value = Value(payload, operation, home, number)
        value.refs = 1
        home.values += (value,)
        home.last_access = self.now
        operation.outputs = (value,)
        self._own_cost(home, operation.cost)
        _use(operation)


def _enter(pool: Pool, operation: Operation, payload: Any, size: int, buffer: int, number: int, now: float) -> Value:
    """The output has a storage of its own."""
    storage = Storage(pool, size, buffer, number, now)
    storage.cost = operation.cost
    value = Value(payload, operation, storage, number)
    value.refs = 1
    storage.values = operation.outputs = (value,)
    pool.used = used = pool.used + size
    if used > pool.peak:
        pool.peak = used
    if size:
        pool.candidates.add(storage)
    _use(operation)
    return value


def _use(operation: Operation) -> None:
    for each in operation.arguments:
        if each.using is None:
            each.uses = 1
            each.using = operation
        else:
            each.add_user(operation)


def _among(payload: Any, values: tuple[Value, ...]) -> bool:
    for value in values:  # noqa: SIM110  # a generator takes longer
        if value.payload is payload:
            return True
    return False
