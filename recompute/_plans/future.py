"""DTR with the future known: replay the program, and evict what is cheap, large, and not needed for long.

The score of a storage is the cost of getting it back, divided by its size and a power of the time to its next use
(Belady's rule is the power that goes to infinity). What nothing will ever need again goes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
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
        homes, fixed = problem.homes, problem.fixed
        count = len(problem.sizes)
        self.uses: list[list[int]] = [[] for _ in range(count)]  # storage -> places in the program, ascending
        for place, operation in enumerate(problem.order):
            for home in dict.fromkeys([homes[value] for value in problem.arguments[operation]]):
                self.uses[home].append(place)
        clock = 0.0
        self.clock: list[float] = []  # place in the program -> the cost of all before
        mean = problem.model_cost / max(1, len(problem.order))
        for operation in problem.order:
            self.clock.append(clock)
            clock += problem.costs[operation] + mean
        self.own = [0.0] * count  # storage -> the cost of all operations that make values on it
        self.above: list[list[int]] = [[] for _ in range(count)]
        self.below: list[list[int]] = [[] for _ in range(count)]
        for operation in range(problem.calls):
            made = {homes[value] for value in problem.results[operation] if not fixed[homes[value]]}
            held = {homes[value] for value in problem.arguments[operation] if not fixed[homes[value]]}
            for home in sorted(made):
                self.own[home] += problem.costs[operation]
                self.above[home].extend(sorted(held - {home}))
            for home in sorted(held):
                self.below[home].extend(sorted(made - {home}))
        self.above = [list(dict.fromkeys(each)) for each in self.above]
        self.below = [list(dict.fromkeys(each)) for each in self.below]
        self.on: list[list[int]] = [[] for _ in range(count)]
        for value, home in enumerate(homes):
            self.on[home].append(value)

    def run(self, score: Score, weights: Sequence[float] | None = None, limit: float = 10.0) -> list[int] | None:
        """The order of runs; None if something did not fit, or the cost went above `limit` times the model's.

        `weights`: storage -> a factor on its score. O(runs x log(storages) + the evicted neighbourhoods looked at).
        """
        problem = self.problem
        arguments, results, makes = problem.arguments, problem.results, problem.makes
        homes, makers, sizes, needs, costs = problem.homes, problem.makers, problem.sizes, problem.needs, problem.costs
        fixed, on, own, uses, clock = problem.fixed, self.on, self.own, self.uses, self.clock
        above, below = self.above, self.below
        count = len(sizes)
        time_power, above_weight, below_weight, size_power = score.time, score.above, score.below, score.size
        through = score.through
        factor = [
            (1.0 if weights is None else weights[home]) / size**size_power if size else 0.0
            for home, size in enumerate(sizes)
        ]
        present = bytearray(len(homes))
        resident = bytearray(fixed)
        born = bytearray(fixed)  # was in memory at least once
        locks = [0] * count
        version = [0] * count
        heap: list[tuple[float, int, int]] = []
        room = problem.room
        used = 0
        place = 0
        budget_left = limit * problem.model_cost
        runs_left = int(20 * limit * len(problem.order))  # runs may cost nothing
        out: list[int] = []
        next_use = [each[0] if each else _NEVER for each in uses]

        def reached(home: int, links: list[list[int]], *, unborn: bool = False) -> list[int]:
            """The evicted storages that `links` lead to, over evicted ones alone; never made ones only if `unborn`."""
            seen = {home}
            found: list[int] = []
            stack = [home]
            while stack:
                for each in links[stack.pop()]:
                    if not resident[each] and (unborn or born[each]) and each not in seen:
                        seen.add(each)
                        stack.append(each)
                        found.append(each)
            return found

        def rate(home: int) -> float:
            at = next_use[home]
            look = through or at == _NEVER
            made = reached(home, below) if look or below_weight else []
            if look:  # the next use may be to make something evicted again from it
                at = min([at, *[next_use[each] for each in made]])
            if at == _NEVER:
                return -1.0
            cost = own[home]
            if above_weight:
                for each in reached(home, above, unborn=True):
                    cost += above_weight * own[each]
            if below_weight:
                for each in made:
                    cost += below_weight * own[each]
            wait = clock[at] - clock[place]
            if time_power and wait > 0:
                return float(cost * factor[home] / wait**time_power)
            return cost * factor[home] if wait > 0 or not time_power else cost * factor[home] * 1e6

        def make_room(need: int, soft: list[int] | None) -> bool:
            nonlocal used, heap
            aside: list[tuple[float, int, int]] = []
            rebuilt = False
            while used + need > room:
                victim = -1
                while heap:
                    key, stamp, home = heappop(heap)
                    if stamp != version[home] or not resident[home]:
                        continue
                    if locks[home]:
                        aside.append((key, stamp, home))
                        continue
                    now = rate(home)
                    if heap and now > key * 1.0001 + 1e-30 and now > heap[0][0]:
                        heappush(heap, (now, stamp, home))
                        continue
                    victim = home
                    break
                if victim < 0 and not rebuilt:
                    rebuilt = True
                    heap = []
                    for home in range(count):
                        if resident[home] and not locks[home] and sizes[home]:
                            version[home] += 1
                            heap.append((rate(home), version[home], home))
                    heapify(heap)
                    aside = []
                    if heap:
                        continue
                if victim < 0:
                    victim = next((home for home in soft or () if resident[home] and sizes[home]), -1)
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
                operation = stack[-1]
                mine = held[-1]
                missing = -1
                most = -1.0
                for value in arguments[operation]:
                    if present[value]:
                        continue
                    size = sizes[homes[value]]
                    if size > most:
                        most, missing = size, value
                if not mine or missing < 0:
                    for value in arguments[operation]:
                        home = homes[value]
                        if present[value] and home not in mine:
                            mine.append(home)
                            locks[home] += 1
                if missing >= 0:
                    maker = makers[missing]
                    if len(stack) > problem.calls or (len(stack) > 1 and maker in stack):
                        return None
                    stack.append(maker)
                    held.append([])
                    continue
                need = needs[operation]
                if used + need > room:
                    top = set(mine)
                    soft = [home for frame in held[:-1] for home in frame if home not in top]
                    if not make_room(need, soft):
                        return None
                if len(stack) == 1:
                    for home in mine:
                        places = uses[home]
                        at = bisect_left(places, place + 1)
                        next_use[home] = places[at] if at < len(places) else _NEVER
                budget_left -= costs[operation]
                runs_left -= 1
                if budget_left < 0 or not runs_left:
                    return None
                out.append(operation)
                for home in makes[operation]:
                    if not resident[home]:
                        resident[home] = born[home] = 1
                        used += sizes[home]
                for value in results[operation]:
                    present[value] = 1
                stack.pop()
                held.pop()
                outer = held[-1] if held else None
                for home in mine:
                    locks[home] -= 1
                if outer is not None:
                    wanted = arguments[stack[-1]]
                    for value in results[operation]:
                        if value in wanted and homes[value] not in outer:
                            outer.append(homes[value])
                            locks[homes[value]] += 1
                for home in {*mine, *makes[operation]}:
                    if sizes[home] and resident[home] and not locks[home]:
                        version[home] += 1
                        heappush(heap, (rate(home), version[home], home))
            place += 1
        return out
