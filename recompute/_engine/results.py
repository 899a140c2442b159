"""Results: what an operation made, the outputs of a first run and of a repeated one.

Where each output lives, on memory of its own or on what it shares, in which pool, and what that makes its storage cost.
Under the cache's lock; nothing here makes room, waits, or runs a user's function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from recompute._adapters.adapter import kinds
from recompute._budget import Limits
from recompute._engine.events import Performed
from recompute._engine.frames import Made
from recompute._engine.graph import EVICTED, Operation, ReleaseMode, Storage, Value
from recompute._engine.memory import Pool
from recompute._engine.references import Lifetimes
from recompute._policy.formulas import Policy
from recompute._policy.search import Search, candidates

Timer = Callable[[str], Callable[[], Callable[[], float | None]] | None]
"""`Adapter.timer`: of a device whose work goes on after a function has returned."""


class Results(Lifetimes):
    """Enters the outputs of operations into the graph and the pools."""

    pool_class = Pool

    def __init__(self, limits: Limits, policy: Policy, search: Search, release: ReleaseMode, verify: bool) -> None:
        super().__init__(policy, release, verify)
        self.search = search
        self._limits = limits
        self._unlimited = limits.given is None
        self._number = 0  # of the newest value
        self._operations = self._rematerializations = 0
        self._remat_time = 0.0
        self._timers: dict[str, Timer] = {}  # by device
        # Operation, seconds it took to launch it, whether that was again, and how to ask for what it took.
        self._unknown_costs: deque[tuple[Operation, float, bool, Callable[[], float | None]]] = deque()

    def _create(self, operation: Operation, made: list[Made], homes: list[Storage | None]) -> None:
        """The outputs of a first run, each on the storage it shares or on one of its own."""
        outputs: list[Value | None] = []
        own: dict[int, Storage] = {}  # by buffer: outputs may share memory with each other
        for number, (payload, size, buffer, device, digest) in enumerate(made):
            storage = homes[number] or own.get(buffer)
            self._number += 1
            if storage is None:
                pool = self._pools.get(device) or self._pool(device)
                storage = Storage(pool, size, buffer, self._number, self.now)
                self._settle_in(storage)
                if buffer:
                    own[buffer] = storage
            elif homes[number] is None and size > storage.size:  # two views of what neither of them owns
                storage.pool.resize(storage, size)
            storage.last_access = self.now
            value = Value(payload, operation, storage, self._number)
            value.refs = 1
            self._join(value, operation, storage)
            outputs.append(value)
            if self._fingerprints is not None:
                self._fingerprints.note(value, digest)
        operation.outputs = tuple(outputs)
        for argument in operation.arguments:
            argument.add_user(operation)

    def _restore(self, value: Value, operation: Operation, made: Made, home: Storage | None) -> None:
        """An evicted value was computed again; should it share memory otherwise than before, it moves."""
        payload, size, buffer, device, _ = made
        storage = value.storage
        if home is None:
            home = home_among(operation.outputs, buffer)
            if home is not None and size > home.size:
                home.pool.resize(home, size)
        if home is not None or storage.resident:
            if home is None:
                self._number += 1
                home = Storage(self._pool(device), size, buffer, self._number, self.now)
                self._settle_in(home)
            if home is not storage:
                users = self._neighbourhood.moving(value)
                if not storage.resident:
                    self._neighbourhood.unlinking(storage)
                storage.values = tuple([each for each in storage.values if each is not value])
                if not storage.values:
                    self._vanish(storage, source=False)
                elif all(each.operation is not operation for each in storage.values):
                    self._own_cost(storage, -operation.cost)
                self._join(value, operation, home)
                self._neighbourhood.moved(users)
        else:
            if self._neighbourhood.asked:
                self._neighbourhood.restored(storage)
            storage.resident = True
            storage.held = None  # should anybody still hold the old buffer, that stays counted on its own
            if storage.pool.device != device:
                storage.pool = self._pool(device)
            storage.size, storage.buffer = size, buffer
            for each in storage.values:
                each.ghost = None
            self._settle_in(storage)
        value.payload = payload
        kind = kinds[type(payload)]
        if kind.restored is not None and (remains := getattr(value, "outline", None)) is not None:
            kind.restored(remains, payload)

    def _overwritten(self, value: Value) -> None:
        """Its memory holds a value that was made from it: should it be needed again, it is made again, elsewhere.

        Takes over one outside reference, which goes.
        """
        with self._settling, self._lock:
            storage, operation = value.storage, value.operation
            assert operation is not None, "a source that is written over cannot be made again"
            value.payload = EVICTED
            value.outline = None
            users = self._neighbourhood.moving(value)
            self._number += 1
            own = Storage(storage.pool, storage.size, 0, self._number, storage.last_access)
            own.resident = False
            storage.values = tuple([each for each in storage.values if each is not value])
            if storage.values and all(each.operation is not operation for each in storage.values):
                self._own_cost(storage, -operation.cost)
            elif not storage.values:
                self._vanish(storage, source=False)
            self._join(value, operation, own)
            value.refs -= 1
            if self._neighbourhood.asked:
                self._neighbourhood.evicted(own)
            self._neighbourhood.moved(users)
            value.refs += 1
            self._gone(value)

    def _join(self, value: Value, operation: Operation, storage: Storage) -> None:
        """Let `value` live on `storage`, whose cost includes every operation that makes a value on it, once."""
        value.storage = storage
        if not storage.values:
            storage.cost += operation.cost
        elif all(each.operation is not operation for each in storage.values):
            self._own_cost(storage, operation.cost)
        storage.values += (value,)

    def _start_timer(self, operation: Operation) -> Callable[[], Callable[[], float | None]] | None:
        """Time an operation on the first device of its arguments that has a timer. Without the lock."""
        for argument in operation.arguments:
            timer = self._timers.get(argument.storage.pool.device)
            if timer is not None:
                return timer(argument.storage.pool.device)
        return None

    def _learn_costs(self) -> None:
        """Take the costs that devices know by now in the place of the time it took to launch what ran there."""
        unknown = self._unknown_costs
        while unknown:
            operation, launched, again, ask = unknown[0]
            seconds = ask()
            if seconds is None:
                return
            unknown.popleft()
            self.now += seconds - launched
            if again:
                self._remat_time += seconds - launched
            if operation.outputs and (not again or seconds < operation.cost):
                self._reprice(operation, seconds)

    def _defer(self, operation: Operation) -> Value | None:
        """A view of an evicted value, as an evicted value: nothing runs before it is needed. None: nothing was done."""
        (argument,) = operation.arguments
        if self._fingerprints is not None:
            return None
        with self._noting, self._lock:
            if argument.payload is not EVICTED:
                return None
            storage = argument.storage
            self._number += 1
            value = Value(EVICTED, operation, storage, self._number)
            value.refs = 1
            operation.outputs, operation.runs = (value,), 1
            storage.values += (value,)
            argument.add_user(operation)
            self._operations += 1
            if self._listeners:
                self._events.append(self._performed(operation, 0.0, False, 0))
        return value

    def _reprice(self, operation: Operation, cost: float) -> None:
        """A repeated run was cheaper: that is the cost from now on."""
        change = cost - operation.cost
        operation.cost = cost
        for storage in {each.storage for each in operation.outputs if each is not None}:
            self._own_cost(storage, change)

    def _depend(self, operation: Operation, found: list[Value], again: bool) -> None:
        """Values that the function asked for at run time are arguments from now on."""
        new = [each for each in dict.fromkeys(found) if each not in operation.arguments and (each.refs or each.uses)]
        operation.arguments += tuple(new)
        if again:
            for value in new:
                value.add_user(operation)

    def _pool(self, device: str) -> Pool:
        pool = self._pools.get(device)
        if pool is None:
            found = candidates(self.search, self.policy, self._neighbourhood)
            pool = self._pools[device] = self.pool_class(device, found, self._limits.of(device))
        return pool

    def _performed(self, operation: Operation, cost: float, again: bool, room: int) -> Performed:
        if len(operation.outputs) == 1 and (value := operation.outputs[0]) is not None:  # mostly, and quicker
            storage = value.storage
            pool, home = storage.pool, (storage.number,)
            return Performed(
                self.now,
                pool.used,
                operation.name,
                cost,
                again,
                home,
                (storage.size,),
                tuple([argument.storage.number for argument in operation.arguments]),
                (value.number,),
                home,
                tuple([argument.number for argument in operation.arguments]),
                pool.device,
                None if self._unlimited else room,
            )
        results = [each for each in operation.outputs if each is not None]
        storages = dict.fromkeys(each.storage for each in results)
        used = sum(pool.used for pool in {storage.pool for storage in storages})
        return Performed(
            self.now,
            used,
            operation.name,
            cost,
            again,
            tuple(storage.number for storage in storages),
            tuple(storage.size for storage in storages),
            tuple(argument.storage.number for argument in operation.arguments),
            tuple(each.number for each in results),
            tuple(each.storage.number for each in results),
            tuple(argument.number for argument in operation.arguments),
            next((each.pool.device for each in storages), "cpu"),
            None if self._unlimited else room,
        )


def home_among(values: tuple[Value | None, ...], buffer: int) -> Storage | None:
    """The storage among those of `values` whose memory an output shares."""
    if buffer:
        for value in values:
            if value is not None and value.storage.buffer == buffer:
                return value.storage
    return None


def own_memory(made: list[Made], homes: list[Storage | None]) -> list[tuple[str, int]]:
    """(device, bytes) of the outputs that share no memory with an argument; of those that share it, the largest."""
    own: dict[int, tuple[str, int]] = {}
    for number, (each, home) in enumerate(zip(made, homes, strict=True)):
        if home is None:
            _, size, buffer, device, _ = each
            own[buffer or -number] = (device, max(size, own[buffer][1]) if buffer in own else size)
    return [each for each in own.values() if each[1]]
