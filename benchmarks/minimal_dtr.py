"""Dynamic Tensor Rematerialization in plain Python, for reading; on a chain it measures overhead against memory.

    python benchmarks/minimal_dtr.py

prints the overhead of a chain of forward and backward operations by budget and by length, and which forward values were
in memory during the backward pass.

DTR (Kirisame et al., ICLR 2021) knows nothing of a program in advance. When memory is short it evicts the value that
is cheapest to get back; when that value is needed after all, it repeats the operation that made it. `MinimalDTR` has
figure 1 of the paper as four methods:

    allocate(size)         while it does not fit: evict the candidate with the smallest score
    perform(operation)     rematerialize the evicted arguments and lock all of them; allocate; run; unlock
    evict(storage)         drop the values; join the components of the evicted neighbours
    rematerialize(value)   perform its operation, if it is evicted

The score is h_DTR-eq of section 4.1, computed for every candidate at each eviction. No function is called: an operation
is a cost, a storage is a size, and the decisions are what is left. They are those of the library's simulator with the
policy "dtr-eq" and the published machine, one by one: see tests/simulator/test_minimal_dtr.py.

Left out, compared with the library: functions and payloads, measured costs and sizes, other policies, a search in less
than O(n), several devices, unpinning, in-place writes, threads, a limit to thrashing, forgetting what nothing can need
any more, and order after an error: a MinimalDTR that has raised MemoryError is of no further use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isqrt
from typing import NamedTuple


@dataclass(eq=False)
class Operation:
    """One application of a function."""

    number: int
    cost: float
    arguments: Sequence[Value]
    results: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)  # those that it makes: not those of its arguments
    runs: int = 0


@dataclass(eq=False)
class Value:
    """A result of an operation, or a source, which has no operation."""

    storage: Storage
    operation: Operation | None
    users: list[Operation] = field(default_factory=list)  # those that have taken it as an argument
    resident: bool = False
    referenced: bool = True  # the program can still name it


@dataclass(eq=False)
class Storage:
    """A buffer, which several values may share (aliases): the unit of eviction."""

    number: int
    size: float
    values: list[Value] = field(default_factory=list)
    resident: bool = False
    locks: int = 0  # operations in flight that need it; one more, for good, for a source or a pinned storage
    last_access: float = 0.0
    component: Component | None = None  # while it is evicted

    @property
    def cost(self) -> float:
        """c0: the cost of the operations that made its values, each counted once."""
        return sum(operation.cost for operation in {value.operation for value in self.values} if operation)

    def evicted_components(self) -> set[Component]:
        """e~*: the components of what its values were made from, and of what was made from its values."""
        near = [argument for value in self.values if value.operation for argument in value.operation.arguments]
        near += [result for value in self.values for user in value.users for result in user.results]
        return {value.storage.component.root() for value in near if value.storage.component}


class Component:
    """Evicted storages that are connected, in a union-find forest: the root stands for all, and has their cost."""

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.nodes = 1
        self.parent = self

    def root(self) -> Component:
        node = self
        while node.parent is not node:
            node.parent = node.parent.parent  # path halving
            node = node.parent
        return node

    def join(self, other: Component) -> None:
        small, large = sorted((self.root(), other.root()), key=lambda root: root.nodes)  # union by size
        if small is not large:
            small.parent = large
            large.cost += small.cost
            large.nodes += small.nodes


class Decision(NamedTuple):
    """A line of the log. Operations and storages are numbered in order of creation, each from 0."""

    clock: float
    what: str  # perform, rematerialize, evict; release: evict, because the program refers to it no more
    number: int


class MinimalDTR:
    """Runs a program, operation by operation, within a budget; `log` lists all that it decided, in order."""

    def __init__(self, budget: float = inf) -> None:
        self.budget = budget
        self.used = self.peak = 0.0
        self.clock = 1.0  # the costs of all runs; from 1 on, as in the published simulator
        self.model_time = 0.0  # the costs of first runs
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.candidates: dict[Storage, None] = {}  # resident and unlocked, the newest last
        self.log: list[Decision] = []

    # The four callbacks: figure 1

    def allocate(self, size: float) -> None:
        """Evict until `size` more fits: the candidate with the smallest score, of several the newest."""
        while self.used + size > self.budget:
            if not self.candidates:
                raise MemoryError(f"no room for {size}: {self.used} of {self.budget} is locked")
            self.evict(max(reversed(self.candidates), key=self.inverse_score))
        self.peak = max(self.peak, self.used + size)

    def perform(self, operation: Operation) -> Iterator[Value]:
        """Run an operation, for the first time or again; yields each argument that must be rematerialized before."""
        for argument in operation.arguments:
            argument.storage.last_access = self.clock
        for argument in sorted(operation.arguments, key=lambda argument: not argument.resident):  # these last
            if not argument.resident:
                yield argument
            self.lock(argument.storage)
        self.allocate(sum(storage.size for storage in operation.storages))  # also when some of them are resident
        self.clock += operation.cost
        self.log.append(Decision(self.clock, "rematerialize" if operation.runs else "perform", operation.number))
        if not operation.runs:
            self.link(operation)
        operation.runs += 1
        for result in operation.results:
            self.enter(result.storage)
            result.resident = True
        for argument in operation.arguments:
            self.unlock(argument.storage)

    def evict(self, storage: Storage, why: str = "evict") -> None:
        """Drop the values on a storage; with its evicted neighbours it becomes one component."""
        self.log.append(Decision(self.clock, why, storage.number))
        self.used -= storage.size
        storage.resident = False
        del self.candidates[storage]
        for value in storage.values:
            value.resident = False
        neighbours = storage.evicted_components()
        storage.component = Component(storage.cost)
        for neighbour in neighbours:
            storage.component.join(neighbour)

    def rematerialize(self, value: Value) -> None:
        """Perform the operation of a value that is not resident; before it those of its arguments, and so on.

        The paper recurses. Here the operations in flight wait on a stack, so that a chain may have any length.
        """
        in_flight: list[Iterator[Value]] = []
        missing = None if value.resident else value
        while missing or in_flight:
            if missing:
                assert missing.operation, "a source is never evicted"
                in_flight.append(self.perform(missing.operation))
            missing = next(in_flight[-1], None)
            if not missing:
                in_flight.pop()

    # The score: section 4.1

    def inverse_score(self, storage: Storage) -> float:
        """1 / h_DTR-eq = size * staleness / (c0 + cost of e~*), because a storage may have been used just now."""
        cost = storage.cost + sum(component.cost for component in storage.evicted_components())
        return storage.size / cost * (self.clock - storage.last_access)

    # What a program does

    def source(self, size: float) -> Value:
        """A value that is not computed, and therefore never evicted."""
        self.allocate(size)
        storage = self.new_storage(size)
        self.lock(storage)
        self.enter(storage)
        storage.values.append(Value(storage, None, resident=True))
        return storage.values[0]

    def call(
        self, cost: float, sizes: Sequence[float], arguments: Sequence[Value], aliases: Sequence[int | None] = ()
    ) -> list[Value]:
        """Perform a new operation of positive cost; a result for each of `sizes`, of which there is at least one.

        `aliases` has for each result None or the number of the argument whose storage it shares, whatever its size;
        the numbers after those of the arguments mean the results before it.
        """
        operation = Operation(len(self.operations), cost, tuple(arguments))
        self.operations.append(operation)
        homes = [argument.storage for argument in arguments]
        for size, alias in zip(sizes, aliases or [None] * len(sizes), strict=True):
            if alias is None:
                operation.storages.append(self.new_storage(size))
            homes.append(operation.storages[-1] if alias is None else homes[alias])
            operation.results.append(Value(homes[-1], operation))
        self.rematerialize(operation.results[0])  # the same, except that it is the first time
        return operation.results

    def release(self, value: Value) -> None:
        """The program will not name the value again. If it can name no other on the storage, evict that now."""
        value.referenced = False
        storage = value.storage
        if storage in self.candidates and not any(value.referenced for value in storage.values):
            self.evict(storage, "release")

    def pin(self, value: Value) -> None:
        """Bring back what the program returns, if it is evicted, and keep it."""
        self.rematerialize(value)
        self.lock(value.storage)

    @property
    def overhead(self) -> float:
        """All compute divided by the compute without eviction."""
        return (self.clock - 1) / self.model_time

    # Bookkeeping

    def new_storage(self, size: float) -> Storage:
        self.storages.append(Storage(len(self.storages), size))
        return self.storages[-1]

    def link(self, operation: Operation) -> None:
        """It has run for the first time: now it counts in costs and neighbourhoods."""
        self.model_time += operation.cost
        for argument in operation.arguments:
            argument.users.append(operation)
        for result in operation.results:
            result.storage.values.append(result)
            result.storage.last_access = self.clock

    def enter(self, storage: Storage) -> None:
        """It is resident, and leaves its component with its cost.

        Union-find cannot split: those that it connected remain one component, by phantom connections.
        """
        if storage.resident:
            return
        storage.resident = True
        self.used += storage.size
        if storage.component:
            storage.component.root().cost -= storage.cost
            storage.component = None
        if not storage.locks:
            self.candidates[storage] = None

    def lock(self, storage: Storage) -> None:
        storage.locks += 1
        self.candidates.pop(storage, None)

    def unlock(self, storage: Storage) -> None:
        storage.locks -= 1
        if not storage.locks:
            self.candidates[storage] = None


def train(n: int, budget: float) -> tuple[MinimalDTR, list[str]]:
    """A chain of n operations forward and n backward, all of cost 1 and size 1; its input takes no memory.

    The backward operation of step i takes the gradient of step i + 1 and the forward value before step i. With the run
    come n lines, one for each of them: # for each forward value that was in memory before it.
    """
    dtr = MinimalDTR(budget)
    forward = [dtr.source(0)]
    for _ in range(n):
        forward += dtr.call(1, [1], [forward[-1]])
    if n > 1:
        dtr.release(forward[n - 1])  # the first backward operation takes the last value alone
    gradient, lines = forward[n], []
    for step in range(n, 0, -1):
        lines.append("".join("#" if value.resident else "." for value in forward[1:]))
        before = gradient
        (gradient,) = dtr.call(1, [1], [before] if step == n else [before, forward[step - 1]])
        dtr.release(before)
        if 1 < step < n:
            dtr.release(forward[step - 1])
    dtr.pin(gradient)
    return dtr, lines


def main() -> None:
    n = 64
    print(f"{n} operations forward, {n} backward, all of cost 1 and size 1\n")
    print("budget  evictions  rematerializations  overhead")
    for budget in (n, 3 * n // 4, n // 2, 2 * isqrt(n), 12, 8, 6, 4):
        dtr, _ = train(n, budget)
        times = Counter(decision.what for decision in dtr.log)
        print(f"{budget:6}{times['evict']:11}{times['rematerialize']:20}{dtr.overhead:10.2f}")
    budget = 2 * isqrt(n)
    print(f"\nForward values in memory (#) within {budget}, before every fourth step of the way back:\n")
    for line in train(n, budget)[1][::4]:
        print(line)
    print("\nThe longer the chain, in memory for 2 sqrt(n):\n\n     n  budget  overhead")
    for n in (16, 64, 256, 1024):
        print(f"{n:6}{2 * isqrt(n):8}{train(n, 2 * isqrt(n))[0].overhead:10.2f}")


if __name__ == "__main__":
    main()
