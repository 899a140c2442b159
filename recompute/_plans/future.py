"""DTR with the future known: replay the program, and evict what is cheap, large, and not needed for long.

The score of a storage is the cost of getting it back, divided by its size and a power of the time to its next use
(Belady's rule is the power that goes to infinity). What nothing will ever need again goes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from recompute._plans.problem import Problem

_NEVER: Final = 1 << 60


@dataclass(frozen=True)
class Score:
    """(own cost + above x evicted ancestors' + below x evicted descendants' cost) / (size^size x wait^time).

    The wait is the compute time until the next use.
    """

    time: float = 0.25
    above: float = 1.0
    below: float = 0.0
    size: float = 1.0
    through: bool = True
    """Whether a next use may be the recomputation of something evicted."""


class Replay:
    """What all replays of one problem share."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work = 0.0
        """What has been done, in steps of about a microsecond."""
        storages, fixed = problem.storages, problem.fixed
        count = len(problem.sizes)
        self.uses: list[list[int]] = [[] for _ in range(count)]  # storage -> places in the program, ascending
        for place, operation in enumerate(problem.order):
            for storage in dict.fromkeys([storages[value] for value in problem.arguments[operation]]):
                self.uses[storage].append(place)
        clock = 0.0
        self.clock: list[float] = []  # place in the program -> the cost of all before
        mean = problem.model_cost / max(1, len(problem.order))
        for operation in problem.order:
            self.clock.append(clock)
            clock += problem.costs[operation] + mean
        self.own = [0.0] * count  # storage -> the cost of all operations that make values on it
        self.above: list[list[int]] = [[] for _ in range(count)]
        self.below: list[list[int]] = [[] for _ in range(count)]
        for operation in range(len(problem.arguments)):
            made = {storages[value] for value in problem.results[operation] if not fixed[storages[value]]}
            held = {storages[value] for value in problem.arguments[operation] if not fixed[storages[value]]}
            for storage in sorted(made):
                self.own[storage] += problem.costs[operation]
                self.above[storage].extend(sorted(held - {storage}))
            for storage in sorted(held):
                self.below[storage].extend(sorted(made - {storage}))
        for storage in problem.lasting:
            self.own[storage] = inf
        self.above = [list(dict.fromkeys(near)) for near in self.above]
        self.below = [list(dict.fromkeys(near)) for near in self.below]
        self.on: list[list[int]] = [[] for _ in range(count)]
        for value, storage in enumerate(storages):
            self.on[storage].append(value)

    def run(
        self, score: Score, weights: Sequence[float] | None = None, limit: float = 10.0, most: float = inf
    ) -> list[int] | None:
        """The order of runs; None if something did not fit, or the cost went above `limit` times the model's.

        `weights`: storage -> a factor on its score. `most`: steps of work, after which it is given up, too.
        O(runs x log(storages) + the evicted neighbourhoods looked at).
        """
        enough = self.work + most
        problem = self.problem
        arguments, results, makes = problem.arguments, problem.results, problem.makes
        storages, makers, sizes, needs, costs = (
            problem.storages,
            problem.makers,
            problem.sizes,
            problem.needs,
            problem.costs,
        )
        fixed, on, own, uses, clock = problem.fixed, self.on, self.own, self.uses, self.clock
        above, below = self.above, self.below
        count = len(sizes)
        time_power, above_weight, below_weight, size_power = score.time, score.above, score.below, score.size
        through = score.through
        factor = [
            (1.0 if weights is None else weights[storage]) / size**size_power if size else 0.0
            for storage, size in enumerate(sizes)
        ]
        present = bytearray(len(storages))
        resident = bytearray(fixed)
        was_made = bytearray(fixed)  # was in memory at least once
        locks = [0] * count
        version = [0] * count
        heap: list[tuple[float, int, int]] = []
        room = problem.room
        used = 0
        place = 0
        budget_left = limit * problem.model_cost
        runs_left = int(20 * limit * len(problem.order))  # runs may cost nothing
        out: list[int] = []
        next_use = [places[0] if places else _NEVER for places in uses]

        def reached(storage: int, links: list[list[int]], *, unmade: bool = False) -> list[int]:
            """The evicted storages that `links` lead to, over evicted ones alone; never made ones only if `unmade`."""
            seen = {storage}
            found: list[int] = []
            stack = [storage]
            while stack:
                self.work += 0.5
                for other in links[stack.pop()]:
                    if not resident[other] and (unmade or was_made[other]) and other not in seen:
                        seen.add(other)
                        stack.append(other)
                        found.append(other)
            return found

        def rate(storage: int) -> float:
            at = next_use[storage]
            look = through or at == _NEVER
            made = reached(storage, below) if look or below_weight else []
            if look:  # the next use may be to make something evicted again from it
                at = min([at, *[next_use[other] for other in made]])
            if at == _NEVER:
                return -1.0
            cost = own[storage]
            if above_weight:
                for other in reached(storage, above, unmade=True):
                    cost += above_weight * own[other]
            if below_weight:
                for other in made:
                    cost += below_weight * own[other]
            wait = clock[at] - clock[place]
            if time_power and wait > 0:
                return float(cost * factor[storage] / wait**time_power)
            return cost * factor[storage] if wait > 0 or not time_power else cost * factor[storage] * 1e6

        def make_room(need: int, soft: list[int] | None) -> bool:
            nonlocal used, heap
            aside: list[tuple[float, int, int]] = []
            rebuilt = False
            while used + need > room:
                victim = -1
                while heap:
                    key, stamp, storage = heappop(heap)
                    if stamp != version[storage] or not resident[storage]:
                        continue
                    if locks[storage]:
                        aside.append((key, stamp, storage))
                        continue
                    now = rate(storage)
                    if now == inf:
                        aside.append((key, stamp, storage))
                        continue
                    if heap and now > key * 1.0001 + 1e-30 and now > heap[0][0]:
                        heappush(heap, (now, stamp, storage))
                        continue
                    victim = storage
                    break
                if victim < 0 and not rebuilt:
                    rebuilt = True
                    heap = []
                    for storage in range(count):
                        if resident[storage] and not locks[storage] and sizes[storage]:
                            version[storage] += 1
                            heap.append((rate(storage), version[storage], storage))
                    heapify(heap)
                    aside = []
                    if heap:
                        continue
                if victim < 0:
                    loose = [storage for storage in soft or () if resident[storage] and own[storage] < inf]
                    victim = next((storage for storage in loose if sizes[storage]), -1)
                    if victim < 0:
                        return False
                resident[victim] = 0
                used -= sizes[victim]
                for value in on[victim]:
                    present[value] = 0
            for entry in aside:
                heappush(heap, entry)
            return True

        for operation_in_order in problem.order:
            stack = [operation_in_order]
            held: list[list[int]] = [[]]  # frame -> storages it locks
            while stack:
                problem.rest()
                operation = stack[-1]
                mine = held[-1]
                missing = -1
                most = -1.0
                for value in arguments[operation]:
                    if present[value]:
                        continue
                    size = sizes[storages[value]]
                    if size > most:
                        most, missing = size, value
                if not mine or missing < 0:
                    for value in arguments[operation]:
                        storage = storages[value]
                        if present[value] and storage not in mine:
                            mine.append(storage)
                            locks[storage] += 1
                if missing >= 0:
                    maker = makers[missing]
                    if problem.once[maker]:
                        return None
                    if len(stack) > problem.calls or (len(stack) > 1 and maker in stack):
                        return None
                    stack.append(maker)
                    held.append([])
                    continue
                need = needs[operation]
                if used + need > room:
                    top = set(mine)
                    soft = [storage for frame in held[:-1] for storage in frame if storage not in top]
                    if not make_room(need, soft):
                        return None
                if len(stack) == 1:
                    for storage in mine:
                        places = uses[storage]
                        at = bisect_left(places, place + 1)
                        next_use[storage] = places[at] if at < len(places) else _NEVER
                budget_left -= costs[operation]
                runs_left -= 1
                if budget_left < 0 or not runs_left or self.work > enough:
                    return None
                out.append(operation)
                self.work += 20.0
                for storage in makes[operation]:
                    if not resident[storage]:
                        resident[storage] = was_made[storage] = 1
                        used += sizes[storage]
                for value in results[operation]:
                    present[value] = 1
                stack.pop()
                held.pop()
                outer = held[-1] if held else None
                for storage in mine:
                    locks[storage] -= 1
                if outer is not None:
                    wanted = arguments[stack[-1]]
                    for value in results[operation]:
                        if value in wanted and storages[value] not in outer:
                            outer.append(storages[value])
                            locks[storages[value]] += 1
                for storage in {*mine, *makes[operation]}:
                    if sizes[storage] and resident[storage] and not locks[storage]:
                        version[storage] += 1
                        heappush(heap, (rate(storage), version[storage], storage))
            place += 1
        return out
