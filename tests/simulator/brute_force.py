"""The published algorithm by its definitions, as plainly as can be: the oracle of the simulator.

One class, no data structure but lists and sets, everything recomputed when it is asked for. Components are the only
thing with a memory, because phantom connections are part of the algorithm: who leaves one does not split it.
"""

from __future__ import annotations

from collections.abc import Callable

from recompute._traces.program import Program


class OutOfMemory(Exception):
    """No candidate is left."""


class Thrashing(Exception):
    """More recomputation than first computation, times `limit` - 1."""


class Model:
    """Runs a program under a budget (bytes) and a policy; `evictions` lists the storages in order."""

    def __init__(self, program: Program, budget: float, policy: str, limit: float = 2.0) -> None:
        self.program = program
        self.budget = budget
        self.policy = policy
        self.clock = 1.0
        self.again = 0.0
        self.most = (limit - 1) * program.model_time
        self.peak = self.used = 0
        self.resident: set[int] = set()  # storages
        self.present: set[int] = set()  # values
        self.pinned: set[int] = set()
        self.locks = [0] * len(program.sizes)
        self.last = [0.0] * len(program.sizes)
        self.references = [0] * len(program.storages)
        self.candidates: list[int] = []  # in the order in which they became candidates
        self.made: list[int] = []  # values that exist, in order
        self.ran: set[int] = set()  # calls that have run
        self.waiting: int | None = None  # the call that runs for the first time, from before its arguments are there
        self.components: list[float] = []  # costs
        self.member: dict[int, int] = {}  # evicted storage -> its component
        self.evictions: list[tuple[int, str]] = []
        self.rematerializations = 0

    def run(self) -> str:
        """ok, oom or thrash."""
        try:
            for kind, number in self.program.steps:
                getattr(self, f"do_{kind}")(number)
            for value in self.program.outputs:
                if value not in self.present:
                    self.perform(self.program.makers[value])
                storage = self.program.storages[value]
                self.pinned.add(storage)
                self.settle(storage)
        except OutOfMemory:
            return "oom"
        except Thrashing:
            return "thrash"
        return "ok"

    def do_source(self, value: int) -> None:
        storage = self.program.storages[value]
        self.make_room(self.program.sizes[storage])
        self.pinned.add(storage)
        self.made.append(value)
        self.references[value] = 1
        self.arrive(storage)
        self.present.add(value)

    def do_call(self, number: int) -> None:
        self.waiting = number
        self.perform(number)
        self.waiting = None
        for value in self.program.calls[number].results:
            self.references[value] = 1

    def do_keep(self, value: int) -> None:
        self.references[value] += 1

    def do_drop(self, value: int) -> None:
        self.references[value] -= 1
        storage = self.program.storages[value]
        alive = any(self.references[value] for value in self.values_on(storage))
        if not alive and storage in self.resident and storage not in self.pinned:
            self.evict(storage, "release")

    def perform(self, number: int) -> None:
        """Run an operation, for the first time or again."""
        call, storages = self.program.calls[number], self.program.storages
        for value in call.arguments:
            self.last[storages[value]] = self.clock
        missing = [value for value in call.arguments if value not in self.present]
        for value in call.arguments:
            if value not in missing:
                self.lock(storages[value])
        for value in missing:
            if value not in self.present:
                self.perform(self.program.makers[value])
            self.lock(storages[value])
        new = dict.fromkeys(storages[value] for value in call.results)
        shared = {storages[value] for value in call.arguments}
        self.make_room(sum(self.program.sizes[storage] for storage in new if storage not in shared))
        if number in self.ran:
            self.again += call.cost
            self.rematerializations += 1
            if self.again > self.most:
                raise Thrashing
        self.clock += call.cost
        for value in call.results:
            if number not in self.ran:
                self.made.append(value)
            if storages[value] not in self.resident:
                self.arrive(storages[value])
            self.present.add(value)
        if number not in self.ran:
            self.ran.add(number)
            for value in call.results:
                self.last[storages[value]] = self.clock
        for value in call.arguments:
            self.locks[storages[value]] -= 1
            self.settle(storages[value])

    def make_room(self, size: int) -> None:
        while self.used + size > self.budget:
            if not self.candidates:
                raise OutOfMemory
            merits = [self.merit(storage) for storage in self.candidates]
            latest = max(at for at, merit in enumerate(merits) if merit == max(merits))
            self.evict(self.candidates[latest], "pressure")
        self.peak = max(self.peak, self.used + size)

    def evict(self, storage: int, why: str) -> None:
        self.evictions.append((storage, why))
        self.used -= self.program.sizes[storage]
        self.resident.discard(storage)
        self.present.difference_update(self.values_on(storage))
        if storage in self.candidates:
            self.candidates.remove(storage)
        joined = self.adjacent(storage)
        self.components.append(self.own(storage) + sum(self.components[component] for component in joined))
        newest = len(self.components) - 1
        self.member[storage] = newest
        self.member = {member: newest if where in joined else where for member, where in self.member.items()}

    def arrive(self, storage: int) -> None:
        self.used += self.program.sizes[storage]
        self.peak = max(self.peak, self.used)
        self.resident.add(storage)
        if storage in self.member:
            self.components[self.member.pop(storage)] -= self.own(storage)
        self.settle(storage)

    def lock(self, storage: int) -> None:
        self.locks[storage] += 1
        self.settle(storage)

    def settle(self, storage: int) -> None:
        """A candidate is resident, unlocked and unpinned."""
        fit = storage in self.resident and not self.locks[storage] and storage not in self.pinned
        if fit and storage not in self.candidates:
            self.candidates.append(storage)
        elif not fit and storage in self.candidates:
            self.candidates.remove(storage)

    def merit(self, storage: int) -> float:
        """One over the score, (size / cost) x staleness, in the order of the library: so equal scores round equally."""
        size, stale = self.program.sizes[storage], self.clock - self.last[storage]
        cost = self.own(storage)
        match self.policy:
            case "dtr":
                descendants = self.descendants(storage)
                around = self.total(self.ancestors(storage) | descendants) + self.to_come(descendants)
                return size / (cost + around) * stale
            case "dtr-eq":
                return size / (cost + self.around(storage)) * stale
            case "dtr-local":
                return size / cost * stale
            case "msps":
                return size / (cost + self.total(self.ancestors(storage)))
            case "size":
                return float(size)
            case _:
                return stale

    def own(self, storage: int) -> float:
        """The operations that made any value on it."""
        calls = {self.program.makers[value] for value in self.values_on(storage)} - {-1}
        return sum(self.program.calls[number].cost for number in calls)

    def around(self, storage: int) -> float:
        return sum(self.components[component] for component in self.adjacent(storage))

    def adjacent(self, storage: int) -> set[int]:
        """The components of its evicted neighbours, each once."""
        near = self.above(storage) | self.below(storage)
        return {self.member[storage] for storage in near if storage in self.member}

    def total(self, storages: set[int]) -> float:
        return sum(self.own(storage) for storage in storages)

    def to_come(self, descendants: set[int]) -> float:
        """What a call that waits for these will make is evicted, too: a storage's own cost is that of the call."""
        if self.waiting is None:
            return 0.0
        call, storages = self.program.calls[self.waiting], self.program.storages
        arguments = {storages[value] for value in call.arguments}
        made = {storages[value] for value in call.results} - arguments
        return call.cost * len(made) if arguments & descendants else 0.0

    def ancestors(self, storage: int) -> set[int]:
        """Evicted storages reached upwards through evicted ones."""
        return self._reach(storage, self.above)

    def descendants(self, storage: int) -> set[int]:
        return self._reach(storage, self.below)

    def _reach(self, storage: int, direction: Callable[[int], set[int]]) -> set[int]:
        found: set[int] = set()
        todo = [storage]
        while todo:
            for near in direction(todo.pop()):
                if near not in self.resident and near not in found and near != storage:
                    found.add(near)
                    todo.append(near)
        return found

    def above(self, storage: int) -> set[int]:
        calls = {self.program.makers[value] for value in self.values_on(storage)} - {-1}
        taken = {value for number in calls for value in self.program.calls[number].arguments}
        return {self.program.storages[value] for value in taken} - {storage}

    def below(self, storage: int) -> set[int]:
        on = set(self.values_on(storage))
        calls = [number for number in self.ran if on & set(self.program.calls[number].arguments)]
        made = {value for number in calls for value in self.program.calls[number].results}
        return {self.program.storages[value] for value in made} - {storage}

    def values_on(self, storage: int) -> list[int]:
        """The values on it that have been made so far."""
        return [value for value in self.made if self.program.storages[value] == storage]
