"""DTR with the future known: replay the program, and evict what is cheap, large, and not needed for long.

The score of a storage is (own cost + evicted ancestors' cost) / (size x wait^0.25). The wait is the compute time until
the next use, which may be to make something evicted again (Belady's rule is the power that goes to infinity). What
nothing will ever need again goes first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from recompute._plans.problem import Problem

_NEVER: Final = 1 << 60
_POWER: Final = 0.25  # of the wait
_RUNS: Final = 20  # times the runs of the program, and the limit: runs may cost nothing


def replayed(problem: Problem, limit: float = 10.0, most: float = inf) -> tuple[list[int] | None, float]:
    """The order of runs, None if something did not fit; and the work that took, in steps of about a microsecond.

    It is given up when its cost goes above `limit` times the model's, or its work above `most`.
    O(runs x log(storages) + the evicted neighbourhoods).
    """
    run = _Run(problem, limit, most)
    for place, operation in enumerate(problem.order):
        run.place = place
        if not run.perform(operation):
            return None, run.work
    return run.order, run.work


class _Facts:
    """What stays the same in a replay."""

    def __init__(self, problem: Problem) -> None:
        storages, fixed = problem.storages, problem.fixed
        count = len(problem.sizes)
        self.uses: list[list[int]] = [[] for _ in range(count)]  # storage -> places in the program, ascending
        self.clock: list[float] = []  # place in the program -> the cost of all before
        clock, mean = 0.0, problem.model_cost / max(1, len(problem.order))
        for place, operation in enumerate(problem.order):
            for storage in {storages[value] for value in problem.arguments[operation]}:
                self.uses[storage].append(place)
            self.clock.append(clock)
            clock += problem.costs[operation] + mean
        self.own = [0.0] * count  # storage -> the cost of all operations that make values on it
        above: list[dict[int, None]] = [{} for _ in range(count)]
        below: list[dict[int, None]] = [{} for _ in range(count)]
        for operation in range(len(problem.arguments)):
            made = {storages[value] for value in problem.results[operation] if not fixed[storages[value]]}
            held = {storages[value] for value in problem.arguments[operation] if not fixed[storages[value]]}
            for storage in sorted(made):
                self.own[storage] += problem.costs[operation]
                above[storage].update(dict.fromkeys(sorted(held - {storage})))
            for storage in sorted(held):
                below[storage].update(dict.fromkeys(sorted(made - {storage})))
        for storage in problem.lasting:
            self.own[storage] = inf
        self.above = [list(near) for near in above]
        self.below = [list(near) for near in below]
        self.on: list[list[int]] = [[] for _ in range(count)]
        for value, storage in enumerate(storages):
            self.on[storage].append(value)


class _Run:
    """One replay: what is in memory, and how far it has come."""

    def __init__(self, problem: Problem, limit: float, most: float) -> None:
        self.order: list[int] = []
        self.place = 0
        self.work = 0.0
        self._problem = problem
        self._facts = facts = _Facts(problem)
        self._most = most  # work
        self._cost_left = limit * problem.model_cost
        self._runs_left = int(_RUNS * limit * len(problem.order))
        self._present = bytearray(len(problem.storages))
        self._resident = bytearray(problem.fixed)
        self._was_made = bytearray(problem.fixed)  # was in memory at least once
        self._locks = [0] * len(problem.sizes)
        self._version = [0] * len(problem.sizes)
        self._heap: list[tuple[float, int, int]] = []  # (score, version, storage); other versions are out of date
        self._used = 0
        self._next_use = [places[0] if places else _NEVER for places in facts.uses]

    def perform(self, operation: int) -> bool:
        """Run an operation, and before it whatever it lacks; False: it does not fit, or takes too much."""
        problem, storages = self._problem, self._problem.storages
        stack, held = [operation], [list[int]()]  # what runs, and the storages that each locks
        while stack:
            problem.rest()
            operation, mine = stack[-1], held[-1]
            maker = self._lock(operation, mine)
            if maker >= 0:
                if problem.once[maker] or maker in stack:
                    return False
                stack.append(maker)
                held.append([])
                continue
            if not self._make_room(problem.needs[operation], held):
                return False
            if len(stack) == 1:
                self._pass_uses(mine)
            if not self._count(operation):
                return False
            stack.pop()
            held.pop()
            for storage in mine:
                self._locks[storage] -= 1
            if stack:
                wanted, outer = problem.arguments[stack[-1]], held[-1]
                for value in problem.results[operation]:
                    if value in wanted and storages[value] not in outer:
                        outer.append(storages[value])
                        self._locks[storages[value]] += 1
            for storage in {*mine, *problem.makes[operation]}:
                if problem.sizes[storage] and self._resident[storage] and not self._locks[storage]:
                    heappush(self._heap, self._rated(storage))
        return True

    def _lock(self, operation: int, mine: list[int]) -> int:
        """Lock what the operation takes and is there; who makes the largest value that is not there; -1: all are."""
        problem, present = self._problem, self._present
        storages, arguments = problem.storages, problem.arguments[operation]
        missing = [value for value in arguments if not present[value]]
        if not mine or not missing:
            for value in arguments:
                storage = storages[value]
                if present[value] and storage not in mine:
                    mine.append(storage)
                    self._locks[storage] += 1
        return problem.makers[max(missing, key=lambda value: problem.sizes[storages[value]])] if missing else -1

    def _pass_uses(self, storages: Sequence[int]) -> None:
        """The program has come to this use of them."""
        for storage in storages:
            places = self._facts.uses[storage]
            at = bisect_right(places, self.place)
            self._next_use[storage] = places[at] if at < len(places) else _NEVER

    def _count(self, operation: int) -> bool:
        """The operation runs; False: that is too much."""
        problem, resident = self._problem, self._resident
        self._cost_left -= problem.costs[operation]
        self._runs_left -= 1
        if self._cost_left < 0 or not self._runs_left or self.work > self._most:
            return False
        self.order.append(operation)
        self.work += 20.0
        for storage in problem.makes[operation]:
            if not resident[storage]:
                resident[storage] = self._was_made[storage] = 1
                self._used += problem.sizes[storage]
        for value in problem.results[operation]:
            self._present[value] = 1
        return True

    def _make_room(self, need: int, held: Sequence[Sequence[int]]) -> bool:
        """Evict until so many bytes fit; False: they do not."""
        most = self._problem.room - need
        if self._used <= most:
            return True
        aside: list[tuple[float, int, int]] = []
        victims = self._victims(held, aside)
        while self._used > most and (victim := next(victims, -1)) >= 0:
            self._resident[victim] = 0
            self._used -= self._problem.sizes[victim]
            for value in self._facts.on[victim]:
                self._present[value] = 0
        for entry in aside:
            heappush(self._heap, entry)
        return self._used <= most

    def _victims(self, held: Sequence[Sequence[int]], aside: list[tuple[float, int, int]]) -> Iterator[int]:
        """Storages that can go, by score; then those that wait for the run on top. `aside`: those that cannot go."""
        yield from self._by_score(aside)
        aside.clear()
        sizes, resident = self._problem.sizes, self._resident
        ready = [at for at, size in enumerate(sizes) if size and resident[at] and not self._locks[at]]
        self._heap = [self._rated(storage) for storage in ready]
        heapify(self._heap)
        yield from self._by_score(aside)
        for frame in held[:-1]:
            for storage in frame:
                if resident[storage] and sizes[storage] and storage not in held[-1] and self._facts.own[storage] < inf:
                    yield storage

    def _by_score(self, aside: list[tuple[float, int, int]]) -> Iterator[int]:
        """The heap, smallest score first: a score that has risen since is put back."""
        heap = self._heap
        while heap:
            key, version, storage = heappop(heap)
            if version != self._version[storage] or not self._resident[storage]:
                continue
            now = inf if self._locks[storage] else self._rate(storage)
            if now == inf:
                aside.append((key, version, storage))
            elif heap and now > key * 1.0001 + 1e-30 and now > heap[0][0]:
                heappush(heap, (now, version, storage))
            else:
                yield storage

    def _rated(self, storage: int) -> tuple[float, int, int]:
        """An entry of the heap; others of this storage are out of date."""
        self._version[storage] += 1
        return self._rate(storage), self._version[storage], storage

    def _rate(self, storage: int) -> float:
        """The score now; -1: nothing will need it."""
        facts, next_use = self._facts, self._next_use
        below = self._evicted(storage, facts.below, self._was_made)
        at = min([next_use[storage], *[next_use[other] for other in below]])
        if at == _NEVER:
            return -1.0
        cost = facts.own[storage] + sum([facts.own[other] for other in self._evicted(storage, facts.above, None)])
        size = self._problem.sizes[storage]
        value = cost / size if size else 0.0
        wait = facts.clock[at] - facts.clock[self.place]
        return value / wait**_POWER if wait > 0 else value * 1e6

    def _evicted(self, storage: int, links: Sequence[Sequence[int]], among: bytearray | None) -> list[int]:
        """The evicted storages that `links` lead to, over evicted ones alone, `among` these; None: of all."""
        resident, seen, stack = self._resident, {storage}, [storage]
        evicted: list[int] = []
        while stack:
            self.work += 0.5
            for other in links[stack.pop()]:
                if not resident[other] and (among is None or among[other]) and other not in seen:
                    seen.add(other)
                    stack.append(other)
                    evicted.append(other)
        return evicted
