"""The published machine: the algorithm as its authors' simulator has it, decision by decision.

Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021: `Machine` has figure 1 as four methods, allocate, perform,
evict, rematerialize. The cache of this library does otherwise where that is better. Here

* the clock starts at one, and components are kept from the start;
* evicted arguments come back in program order, and what is unlocked is the newest candidate, even one of no bytes;
* locks stay: without a candidate it is out of memory;
* a repeated operation gets room for all that it makes, whatever of that is still there;
* what can never be needed again stays in its component, unless it is banished;
* an operation that waits for evicted arguments is there already: to those above it, what it will make is evicted;
* constants stay, referred to or not, and there are no tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from recompute import events
from recompute._budget import Limits
from recompute._interrupts import is_interrupt
from recompute._policy.search import candidates
from recompute._simulator.neighbourhoods import NEIGHBOURHOODS, Operation, Pool, Storage, Value
from recompute._simulator.run import Thrashing
from recompute._traces.program import Call, Program
from recompute.policies import Policy, ReleaseMode, Search
from recompute.text import outside, warn


class OutOfMemory(Exception):
    """There is no candidate left, or all of them would not do."""


@dataclass(eq=False, slots=True)
class Frame:
    """An operation in flight, or (None) something that wants a value."""

    operation: Operation | None
    arguments: tuple[Value, ...]
    missing: list[Value] | None = None
    """Evicted arguments, the next one last; None: not looked at yet."""


class Machine:
    """Performs operations within a budget; after an OutOfMemory or Thrashing it is of no further use."""

    def __init__(self, limits: Limits, policy: Policy, search: Search, release: ReleaseMode) -> None:
        self.clock = 1.0
        self.remat_time = 0.0
        self.left = inf
        """Recomputation that is still allowed."""
        self.release = release
        self.pools: dict[str, Pool] = {}
        self.listeners: list[events.Listener] = []
        self.evictions = self.rematerializations = 0
        self._limits = limits
        self._policy = policy
        self._search = search
        self._neighbourhood = NEIGHBOURHOODS[policy.neighbourhood]()
        self._number = 0  # of the newest value
        self._stack: list[Frame] = []
        self._to_release: set[Storage] = set()  # released, but locked by an operation in flight
        self._to_banish: set[Storage] = set()  # released, but an evicted value still needs them

    # The four callbacks: figure 1

    def allocate(self, pool: Pool, size: int) -> None:
        """Evict the candidate of least score until `size` more bytes fit."""
        while pool.used + size > pool.limit:
            if pool.fixed + size > pool.limit and not self._policy.foreign:
                raise OutOfMemory  # whatever is evicted
            victims = pool.candidates.choose(self.clock)
            if not victims:
                raise OutOfMemory
            for victim in victims:
                self.evict(victim, "pressure")
        pool.peak = max(pool.peak, pool.used + size)

    def perform(self, operation: Operation | None, arguments: tuple[Value, ...]) -> None:
        """Run an operation for the first time, or (None) bring a value and lock it; before it, what is evicted."""
        stack = self._stack
        stack.append(Frame(operation, arguments))
        while stack:
            frame = stack[-1]
            missing = self.rematerialize(frame)
            if missing is not None:
                stack.append(missing)
                continue
            if frame.operation is not None:
                room = self._room(frame.operation)
                for pool, size in room.items():
                    self.allocate(pool, size)
                self._run(frame.operation, room)
                for value in frame.arguments:
                    self.unlock(value.storage)
            stack.pop()
            if self._to_release:
                self._unlocked(frame.arguments)
            if self._to_banish and frame.operation is not None and frame.operation.runs > 1:
                for value in frame.arguments:
                    if value.storage in self._to_banish:
                        self._banish(value.storage)

    def evict(self, storage: Storage, why: Literal["pressure", "release", "request"]) -> None:
        """Drop the values; the evicted storages around become dearer."""
        self._leave(storage)
        for value in storage.values:
            value.resident = False
        self._neighbourhood.evicted(storage)
        self.evictions += why != "release"
        if self.listeners:
            self.tell(events.Evicted(self.clock, storage.pool.used, storage.number, storage.size, why))
        if self.release == "ignore":
            self._forget([value for value in storage.values if not value.users and not value.referred])

    def rematerialize(self, frame: Frame) -> Frame | None:
        """Lock the arguments; for the next one that is evicted, the operation to be performed first."""
        if frame.missing is None:
            missing = []
            for value in frame.arguments:
                value.storage.last_access = self.clock
                if value.resident:
                    self.lock(value.storage)
                else:
                    missing.append(value)
            missing.reverse()
            frame.missing = missing
        while frame.missing:
            value = frame.missing[-1]
            if not value.resident:
                if value.operation is None:
                    raise RuntimeError(f"value {value.number} is gone: it was banished, and is needed again")
                return Frame(value.operation, value.operation.arguments)
            self.lock(value.storage)
            frame.missing.pop()
        return None

    # A run

    @staticmethod
    def _room(operation: Operation) -> dict[Pool, int]:
        """Bytes for what it makes: all of it again, unless that is a single value on a storage that is there."""
        room: dict[Pool, int] = {}
        again, output = operation.runs > 0, operation.outputs[0]
        if not (again and len(operation.outputs) == 1 and output is not None and output.storage.resident):
            for pool, size in operation.makes:
                if size or not again:
                    room[pool] = room.get(pool, 0) + size
        return room

    def _run(self, operation: Operation, room: dict[Pool, int]) -> None:
        cost, varying = operation.cost, operation.call.again
        again = operation.runs > 0
        if again:
            if varying:
                cost = float(varying[min(operation.runs, len(varying)) - 1])
            self.left -= cost
            if self.left < 0:
                raise Thrashing
        self.clock += cost
        operation.runs += 1
        if again:
            self.remat_time += cost
            self.rematerializations += 1
            for value in operation.outputs:
                if value is not None and not value.resident:
                    value.resident = True
                    if not value.storage.resident:
                        self._neighbourhood.restored(value.storage)
                        self._enter(value.storage)
            if cost < operation.cost:
                self._reprice(operation, cost)
        else:
            self._create(operation)
        if self.listeners:
            self._tell_performed(operation, cost, room, again=again)

    def _create(self, operation: Operation) -> None:
        """The first run is over: its results are there, and its links."""
        self._neighbourhood.waiting = None
        for argument in operation.arguments:
            argument.users[operation] = None
        paid: set[Storage] = set()
        for value in operation.outputs:
            assert value is not None
            storage = value.storage
            storage.values[value] = None
            value.resident = value.referred = True
            if not storage.resident:
                storage.cost = operation.cost
                self._enter(storage)
            elif storage not in paid:
                self._add_cost(storage, operation.cost)
            paid.add(storage)
            storage.last_access = self.clock
            self._link(value, operation, 1)

    def _reprice(self, operation: Operation, cost: float) -> None:
        """It was cheaper this time: that is its cost now."""
        change, operation.cost = cost - operation.cost, cost
        for storage in dict.fromkeys(value.storage for value in operation.outputs if value is not None):
            self._add_cost(storage, change)

    def _add_cost(self, storage: Storage, change: float) -> None:
        storage.cost = max(0.0, storage.cost + change)
        if storage.resident:
            storage.pool.candidates.changed(storage)
        else:
            self._neighbourhood.own_cost_changed(storage, change)

    @staticmethod
    def _link(value: Value, operation: Operation, change: int) -> None:
        """The storage of a result is below those of the arguments, or (-1) not through this result any more."""
        home = value.storage
        for storage in dict.fromkeys(argument.storage for argument in operation.arguments):
            if storage is not home:
                count = home.above.get(storage, 0) + change
                if count:
                    home.above[storage] = storage.below[home] = count
                else:
                    del home.above[storage], storage.below[home]
                    home.evicted_above.pop(storage, None)
                    storage.evicted_below.pop(home, None)

    # Memory

    def pool(self, device: str) -> Pool:
        pool = self.pools.get(device)
        if pool is None:
            limit = self._limits.of(device)
            assert not callable(limit)
            choice = candidates(self._search, self._policy, self._neighbourhood)
            pool = self.pools[device] = Pool(device, inf if limit is None else limit, choice)
        return pool

    def _enter(self, storage: Storage) -> None:
        """It becomes resident."""
        pool = storage.pool
        storage.resident = True
        pool.used += storage.size
        if storage.locks:
            pool.fixed += storage.size
        else:
            pool.candidates.add(storage)

    def _leave(self, storage: Storage) -> None:
        pool = storage.pool
        storage.resident = False
        pool.used -= storage.size
        if storage.locks:
            pool.fixed -= storage.size
        if storage.slot >= 0:
            pool.candidates.remove(storage)

    def lock(self, storage: Storage) -> None:
        if not storage.locks:
            storage.pool.fixed += storage.size
            storage.pool.candidates.remove(storage)
        storage.locks += 1

    def unlock(self, storage: Storage) -> None:
        """With the last lock gone it is a candidate, the newest one."""
        storage.locks -= 1
        if not storage.locks and storage.resident:
            storage.pool.fixed -= storage.size
            storage.pool.candidates.add(storage)

    # What a program does

    def source(self, size: int, device: str) -> Value:
        """A value that is not computed."""
        pool = self.pool(device)
        self.allocate(pool, size)
        value = self._value(Storage(self._number + 1, size, pool), None)
        storage = value.storage
        storage.values[value] = None
        storage.locks = 1
        storage.last_access = self.clock
        value.resident = value.referred = True
        self._enter(storage)
        if self.listeners:
            self.tell(events.Added(self.clock, pool.used, value.number, size, device))
        return value

    def call(self, call: Call, arguments: tuple[Value, ...], program: Program) -> list[Value]:
        """Perform a new operation. A result lies where the first argument or result before it does that shares it."""
        operation = self._neighbourhood.waiting = Operation(call, arguments, float(call.cost))
        homes: dict[int, Storage] = {}
        for number, argument in zip(call.arguments, arguments, strict=True):
            homes.setdefault(program.storages[number], argument.storage)
        results: list[Value] = []
        for number in call.results:
            where = program.storages[number]
            if where not in homes:
                pool, size = self.pool(program.devices[where]), program.sizes[where]
                homes[where] = Storage(self._number + 1, size, pool)
                operation.makes.append((pool, size))
            results.append(self._value(homes[where], operation))
        operation.outputs += results
        self.perform(operation, arguments)
        return results

    def _value(self, storage: Storage, operation: Operation | None) -> Value:
        self._number += 1
        return Value(self._number, storage, operation)

    def get(self, value: Value) -> None:
        """It is there, for a moment."""
        if value.resident:
            value.storage.last_access = self.clock
        else:
            self.perform(None, (value,))
            self.let_go(value)
        if self.listeners:
            self.tell(events.Accessed(self.clock, value.storage.pool.used, value.number))

    def pin(self, value: Value) -> None:
        """Bring it back if it is evicted, and keep it."""
        self.perform(None, (value,))
        if value.pinned:
            self.let_go(value)
        value.pinned = True
        if self.listeners:
            self.tell(events.Pinned(self.clock, value.storage.pool.used, value.number))

    def unpin(self, value: Value) -> None:
        if value.pinned:
            value.pinned = False
            self.unlock(value.storage)
            if self.listeners:
                self.tell(events.Unpinned(self.clock, value.storage.pool.used, value.number))

    def hold(self, value: Value) -> None:
        """It is held outside: its bytes are in use, and it is no candidate."""
        self.perform(None, (value,))

    def let_go(self, value: Value) -> None:
        self.unlock(value.storage)
        self._unlocked((value,))

    def request(self, value: Value) -> None:
        """Evict it, if it can be."""
        if value.resident and not value.storage.locks:
            self.evict(value.storage, "request")

    def drop(self, value: Value) -> None:
        """The program cannot name it any more."""
        storage = value.storage
        value.referred = False
        if self.listeners:
            self.tell(events.Released(self.clock, storage.pool.used, value.number))
        if value not in storage.values:
            return  # it was forgotten before
        if value.pinned:
            value.pinned = False
            self.unlock(storage)
        if self.release == "banish" and not value.users:
            if self._in_flight(storage):
                self._to_release.add(storage)
            else:
                self._forget([value])
        elif self.release == "eager" or (self.release == "banish" and not self._banish(storage)):
            self._evict_unreferenced(storage)

    def detach(self, value: Value) -> None:
        """Keep it, and forget how it was made."""
        self.perform(None, (value,))
        if self.listeners:
            self.tell(events.Detached(self.clock, value.storage.pool.used, value.number))
        self._detach(value)
        self.let_go(value)

    # Release: eager eviction, and banishing (section 3.2 of the paper, and its appendix)

    def _evict_unreferenced(self, storage: Storage) -> None:
        if storage.resident and not any(value.referred for value in storage.values):
            if not storage.locks:
                self.evict(storage, "release")
            elif self._in_flight(storage):
                self._to_release.add(storage)

    def _unlocked(self, values: Sequence[Value]) -> None:
        """Those that were released while an operation needed them can go now."""
        for value in values:
            storage = value.storage
            if storage in self._to_release and not self._in_flight(storage):
                self._to_release.discard(storage)
                for idle in [value for value in storage.values if not value.users and not value.referred]:
                    if idle in storage.values and self.release == "banish":
                        self._forget([idle])
                if storage.values and not storage.locks and self.release != "ignore":
                    self._evict_unreferenced(storage)

    @staticmethod
    def _in_flight(storage: Storage) -> bool:
        """Whether it is locked by more than pins, and values that are sources."""
        return storage.locks > sum((value.operation is None) + value.pinned for value in storage.values)

    def _banish(self, storage: Storage) -> bool:
        """Forget a released storage, and make sources of what was made from it; False: something evicted needs it."""
        self._to_banish.discard(storage)
        if any(value.referred or value.pinned for value in storage.values):
            return False
        users = dict.fromkeys(user for value in storage.values for user in value.users)
        outputs = [output for user in users for output in user.outputs if output is not None]
        in_flight = [frame.operation for frame in self._stack]
        if not all(output.resident for output in outputs) or any(user in in_flight for user in users):
            self._to_banish.add(storage)
            return False
        for output in outputs:
            if output in output.storage.values:  # else it went with one before it
                self._detach(output)
        return True

    def _detach(self, value: Value) -> None:
        if value.operation is not None:
            self.lock(value.storage)
            self._forget(self._unlink(value, value.operation))

    def _forget(self, dead: list[Value]) -> None:
        """Nothing can need these: drop them, and whatever that leaves without a use."""
        while dead:
            value = dead.pop()
            operation, storage = value.operation, value.storage
            if value.pinned:
                self.unpin(value)
            if operation is None:
                self.unlock(storage)
            if len(storage.values) == 1:
                self._to_release.discard(storage)
                self._to_banish.discard(storage)
                if storage.resident:
                    self._leave(storage)
                else:
                    self._neighbourhood.restored(storage)
                storage.values.clear()
                if self.listeners:
                    self.tell(events.Forgotten(self.clock, storage.pool.used, storage.number))
            else:
                if not storage.resident:
                    self._neighbourhood.unlinking(storage)
                del storage.values[value]
                if storage.resident and not any(other.resident for other in storage.values):
                    self._leave(storage)  # the others were never recomputed
                    self._neighbourhood.evicted(storage)
            value.resident = False
            if operation is not None:
                dead += self._unlink(value, operation)

    def _unlink(self, value: Value, operation: Operation) -> list[Value]:
        """Take an output off its operation, which goes with the last one; the arguments that this leaves unused."""
        storage, value.operation = value.storage, None
        if storage.values and all(other.operation is not operation for other in storage.values):
            self._add_cost(storage, -operation.cost)
        self._link(value, operation, -1)
        operation.outputs[operation.outputs.index(value)] = None
        unused: list[Value] = []
        if not any(operation.outputs):
            for argument in operation.arguments:
                if argument.users.pop(operation, operation) is None and not argument.users and not argument.referred:
                    if self._in_flight(argument.storage):
                        self._to_release.add(argument.storage)
                    elif self.release == "banish":
                        unused.append(argument)
        return unused

    # Who listens

    def tell(self, event: events.Event) -> None:
        """An observer cannot break a run: one that raises is dropped."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception as error:
                if is_interrupt(error):
                    raise
                self.listeners.remove(listener)
                told = f"{listener!r} raised {error!r} and will hear no more events"
                warn(told, RuntimeWarning, stacklevel=outside())

    def _tell_performed(self, operation: Operation, cost: float, room: dict[Pool, int], *, again: bool) -> None:
        results = [value for value in operation.outputs if value is not None]
        storages = list(dict.fromkeys(value.storage for value in results))
        self.tell(
            events.Performed(
                self.clock,
                sum(pool.used for pool in dict.fromkeys(storage.pool for storage in storages)),
                operation.call.name,
                cost,
                again,
                tuple([storage.number for storage in storages]),
                tuple([storage.size for storage in storages]),
                tuple([argument.storage.number for argument in operation.arguments]),
                tuple([value.number for value in results]),
                tuple([value.storage.number for value in results]),
                tuple([argument.number for argument in operation.arguments]),
                next((storage.pool.device for storage in storages), "cpu"),
                None if self._limits.given is None else sum(room.values()),
            )
        )
