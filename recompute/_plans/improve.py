"""Large neighbourhood search on a schedule: take some repeated runs out, make it fit again otherwise, keep the better.

Making it fit: at the moment that lacks the most memory, some storage is dropped between two uses, and what is needed
is run again before the second. The one with the least cost for the bytes it saves where they lack is chosen, with a
little chance. Then every repeated run that the memory can do without is taken out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Final

from recompute._plans.problem import Problem
from recompute._plans.timeline import Crowded, Timeline

_SIZES: Final = (2, 6, 15)  # mean numbers of runs that are taken out
_SHIFT: Final = 0.2  # chance that a repeated run goes earlier instead
_ALSO: Final = 2.0  # times the best score: what is dropped, too, while memory lacks there
_KICK: Final = 0.2  # chance that some storage is dropped without need

_Uses = list[tuple[int, int]]
"""(label of a use, value), ascending."""


class Search:
    """The search: `polish` once, then as many `rounds` as there is time for. `best` is a sequence that fits."""

    def __init__(self, problem: Problem, sequence: Sequence[int], seed: int = 0) -> None:
        self.problem = problem
        self.random = Random(seed)
        self.line = Timeline(problem, sequence)
        self.best = list(self.line.runs)
        self.best_cost = self.line.cost
        lasting = problem.lasting
        self._large = [storage for storage, size in enumerate(problem.sizes) if size and storage not in lasting]
        self._slack = max(0.02, 4 / len(sequence)) * problem.model_cost
        self._over: list[int] = []  # places that lack memory

    def polish(self, labels: Sequence[int] | None = None) -> None:
        """Take out repeated runs while the memory allows it, dearest first. O(repeated runs) trials."""
        line, costs, room = self.line, self.problem.costs, self.problem.room
        if labels is None:
            labels = line.repeated()
        rank = [(-costs[line.runs[bisect_left(line.labels, label)]], label) for label in labels]
        for _, label in sorted(rank):
            self.problem.rest()
            place = bisect_left(line.labels, label)
            if place < len(line.labels) and line.labels[place] == label and self._may_go(place, line.memory):
                mark = len(line.log)
                line.raised = 0
                line.drop(label)
                if line.memory and line.raised > room:
                    line.undo(mark)

    def _may_go(self, place: int, memory: list[int]) -> bool:
        """Whether there may be memory to keep what this repeated run makes from the last time that it was there.

        What it takes may then be freed; what is made for it alone seldom reaches back so far.
        """
        line, problem = self.line, self.problem
        sizes, storages, labels = problem.sizes, problem.storages, line.labels
        operation, label = line.runs[place], labels[place]
        line.work += 2.0
        most = self.problem.room
        for value in problem.arguments[operation]:
            most += sizes[storages[value]]
        for value in problem.results[operation]:
            size = sizes[storages[value]]
            if size and len(line.on[storages[value]]) == 1:
                events = line.events[value]
                at = bisect_left(events, 2 * label)
                if at and at + 1 < len(events) and not events[at + 1] & 1:
                    low = bisect_right(labels, events[at - 1] >> 1)
                    line.work += 0.015 * (place - low)
                    if low < place and max(memory[low:place]) + size > most:
                        return False
        return True

    def round(self, heat: float) -> bool:
        """One change; whether it was kept. `heat`: how much dearer (a share of the model cost) it may be."""
        line, random = self.line, self.random
        before = line.cost
        line.work += 40.0 + 0.25 * len(line.runs)
        repeated = line.repeated()
        if not repeated:
            return False
        try:
            self._destroy(repeated)
            if not self._repair(before + heat * 4 + self._slack):
                line.undo()
                return False
            new = [label for put, label, _ in line.log if put]
            self.polish([label for label in new if self._is_there(label)])
            if line.cost < before + 1e-12 and random.random() < 0.3:
                self.polish()
        except Crowded:
            line.undo()
            self._renew(line.runs)
            return False
        allowed = before + (-heat * math.log(max(1e-12, random.random())) if heat else 0.0)
        if line.cost > allowed:
            line.undo()
            return False
        line.commit()
        if line.cost < self.best_cost * (1 - 1e-12):
            self.best_cost = line.cost
            self.best = list(line.runs)
        return True

    def restart(self) -> None:
        """Go on from the best."""
        self._renew(self.best)

    def _renew(self, sequence: Sequence[int]) -> None:
        done = self.line.work + 10.0 * len(sequence)
        self.line = Timeline(self.problem, sequence)
        self.line.work = done

    def _is_there(self, label: int) -> bool:
        labels = self.line.labels
        place = bisect_left(labels, label)
        return place < len(labels) and labels[place] == label

    def _destroy(self, repeated: list[int]) -> None:
        """Take out a few repeated runs: neighbours in time, or anywhere."""
        random = self.random
        if random.random() < _SHIFT:
            self._shift(random.choice(repeated))
            return
        many = min(len(repeated), 1 + int(random.expovariate(1 / random.choice(_SIZES))))
        if random.random() < 0.6:
            start = random.randrange(len(repeated))
            chosen = repeated[start : start + many]
        else:
            chosen = random.sample(repeated, many)
        for label in chosen:
            if self._is_there(label):
                self.line.drop(label)
        if self._large and random.random() < _KICK:
            place = random.randrange(len(self.line.labels))
            self._evict(place, random.choice(self._large))

    def _shift(self, label: int) -> None:
        """Run the operation of a repeated run earlier; O(runs)."""
        line = self.line
        operation = line.runs[bisect_left(line.labels, label)]
        low = bisect_right(line.labels, line.first[operation])
        high = bisect_left(line.labels, label)
        low = max(low, high - 1 - int(self.random.expovariate(1 / 20)))
        place = self.random.randrange(low, high) if low < high else high
        while place < high and line.runs[place] >= self.problem.calls:  # in front of a call: see `verify`
            place += 1
        if place < high:
            line.put(operation, line.labels[place])
            line.drop(label)

    def _repair(self, most: float, evictions: int = 200) -> bool:
        """Make it fit; False: it would cost more than `most`, or nothing helps."""
        line, room = self.line, self.problem.room
        for _ in range(evictions):
            memory = line.memory
            worst = max(memory)
            if worst <= room:
                return True
            if line.cost > most or not self._evict(memory.index(worst)):
                return False
        return False

    def _evict(self, place: int, kicked: int = -1) -> bool:
        """Drop the best storage at this place, or the `kicked` one; False: there is none to drop."""
        line, room = self.line, self.problem.room
        self.problem.rest()
        label, memory = line.labels[place], line.memory
        line.work += 40.0 + 0.06 * len(memory) + 0.2 * len(self._large)
        self._over = [index for index, used in enumerate(memory) if used > room]
        priced = self._priced(self._candidates(place, kicked))
        for number, (score, since, size, wanted) in enumerate(priced):
            if number and (score > _ALSO * priced[0][0] or line.memory[bisect_left(line.labels, label)] <= room):
                break
            if number and self._gap(self.problem.storages[wanted[0][1]], label) != (wanted, since):
                continue
            for until, value in wanted:
                self._ensure(value, until, since, size)
        return bool(priced)

    def _candidates(self, place: int, kicked: int) -> list[tuple[float, float, int, int, _Uses]]:
        """Storages to drop at a place: (least score, weight of a cost, last event before, bytes, next uses).

        The weight: one over the bytes that it saves where they lack, and a little chance.
        """
        line, problem, noise = self.line, self.problem, self.random.random
        sizes = problem.sizes
        lacks = [line.memory[index] - problem.room for index in self._over]
        places = [line.labels[index] for index in self._over]  # as labels
        most = max(lacks, default=0)
        sums_of: dict[int, list[int]] = {}  # bytes -> sums of what lacks, each at most so many bytes
        candidates = []
        for storage, since, wanted in self._gaps(place, self._large if kicked < 0 else [kicked]):
            low, high = bisect_right(places, since), bisect_left(places, wanted[0][0])
            gain = 1
            if kicked < 0:
                if low >= high:
                    continue
                clipped = min(sizes[storage], most)
                sums = sums_of.get(clipped)
                if sums is None:
                    line.work += 0.08 * len(lacks)
                    sums = sums_of[clipped] = [0, *accumulate([lack if lack < clipped else clipped for lack in lacks])]
                gain = sums[high] - sums[low]
            weight = (0.5 + noise()) / gain
            makers = {problem.makers[value] for _, value in wanted}
            least = sum([problem.costs[maker] for maker in makers]) + 1e-9
            candidates.append((least * weight, weight, since, sizes[storage], wanted))
        line.work += 1.5 * len(candidates)
        candidates.sort()
        return candidates

    def _gaps(self, place: int, storages: Sequence[int]) -> Iterator[tuple[int, int, _Uses]]:
        """Those that are kept over this place without being used at it: (storage, last event before, next uses)."""
        line, problem = self.line, self.problem
        label, spans_of, events_of, on = line.labels[place], line.spans, line.events, line.on
        used_now = {problem.storages[value] for value in problem.arguments[line.runs[place]]}
        for storage in storages:
            spans = spans_of[storage]
            if not spans or not spans[0][0] < label <= spans[-1][1] or storage in used_now:
                continue
            if len(on[storage]) == 1:
                (value,) = on[storage]
                events = events_of[value]
                at = bisect_left(events, 2 * label)
                if not events[at] & 1:
                    yield storage, events[at - 1] >> 1, [(events[at] >> 1, value)]
            elif any(start < label <= end for start, end in spans):
                wanted, since = self._gap(storage, label)
                yield storage, since, wanted

    def _priced(
        self, candidates: Sequence[tuple[float, float, int, int, _Uses]]
    ) -> list[tuple[float, int, int, _Uses]]:
        """The best of the candidates: (score, last event before, bytes, next uses), the least score first."""
        best = math.inf
        priced = []
        for least, weight, since, size, wanted in candidates:
            if least >= _ALSO * best:
                break
            score = (self._price(wanted, since, size, _ALSO * best / weight) + 1e-9) * weight
            if score < _ALSO * best:
                best = min(best, score)
                priced.append((score, since, size, wanted))
        self.line.work += 10.0 * len(priced)
        priced.sort()
        return priced

    def _gap(self, storage: int, label: int) -> tuple[_Uses, int]:
        """(next use, value) of what is kept over this moment, in order; and the last event before it."""
        wanted = []
        since = 0
        for value in self.line.on[storage]:
            events = self.line.events[value]
            place = bisect_left(events, 2 * label)
            if place < len(events) and not events[place] & 1:
                wanted.append((events[place] >> 1, value))
            if place:
                since = max(since, events[place - 1] >> 1)
        wanted.sort()
        return wanted, since

    def _is_near(self, value: int, until: int, since: int, size: int) -> bool:
        """The value is there before the run at `until`, or can be kept until then."""
        line = self.line
        events = line.events[value]
        place = bisect_left(events, 2 * until)
        if place < len(events) and not events[place] & 1:
            return True
        if not place:
            return False
        more = self.problem.sizes[self.problem.storages[value]]
        if not more:
            return True
        last = events[place - 1] >> 1
        for start, end in line.spans[self.problem.storages[value]]:
            if start < until <= end and start <= last:
                return True  # its storage stays anyway
        labels = line.labels
        low, high = bisect_right(labels, last), bisect_left(labels, until)
        if more < size and high:
            middle = bisect_right(labels, since)
            if middle <= low:
                return True
            high = min(high, middle)
        if low >= high:
            return True
        over = self._over
        at = bisect_left(over, low)
        return (at == len(over) or over[at] >= high) and max(line.memory[low:high]) + more <= self.problem.room

    def _price(self, wanted: _Uses, since: int, size: int, most: float) -> float:
        """The cost of running these values again before their uses; something above `most` if it is more."""
        problem = self.problem
        makers, arguments, costs, storages = problem.makers, problem.arguments, problem.costs, problem.storages
        own = storages[wanted[0][1]]
        seen: set[int] = set()
        total = 0.0
        for until, value in wanted:
            stack = [makers[value]]
            while stack:
                operation = stack.pop()
                if operation in seen:
                    continue
                if problem.once[operation]:
                    return math.inf
                seen.add(operation)
                total += costs[operation]
                if total > most:
                    return total
                for taken in arguments[operation]:
                    maker = makers[taken]
                    if maker not in seen and (storages[taken] == own or not self._is_near(taken, until, since, size)):
                        stack.append(maker)
        return total

    def _ensure(self, value: int, until: int, since: int, size: int) -> None:
        """Put a run that makes the value in front of the one at `until`, and what it needs before. Raises Crowded."""
        line, problem = self.line, self.problem
        makers, arguments, storages = problem.makers, problem.arguments, problem.storages
        own = storages[value]
        done: set[int] = set()
        stack = [makers[value]]
        ready: set[int] = set()
        while stack:
            operation = stack[-1]
            if operation in done:
                stack.pop()
                continue
            if operation not in ready:
                ready.add(operation)
                for taken in arguments[operation]:
                    maker = makers[taken]
                    if maker in done or maker in ready:
                        continue
                    if storages[taken] == own:
                        if self._made_after(taken, since, until):
                            continue
                    elif self._is_near(taken, until, since, size):
                        continue
                    stack.append(maker)
                continue
            stack.pop()
            done.add(operation)
            line.put(operation, until)

    def _made_after(self, value: int, since: int, until: int) -> bool:
        """Some run between the two makes the value."""
        events = self.line.events[value]
        place = bisect_left(events, 2 * until) - 1
        while place >= 0 and not events[place] & 1:
            place -= 1
        return place >= 0 and events[place] >> 1 > since


def fitted(problem: Problem, sequence: Sequence[int], seed: int) -> tuple[list[int] | None, float]:
    """The sequence with runs put in until it fits, None if that did not work; and the work that took.

    O(runs put in x operations).
    """
    search = Search(problem, sequence, seed)
    try:
        if not search._repair(10 * problem.model_cost + 1e-9, 10 * len(sequence)):
            return None, search.line.work
        search.polish()
    except Crowded:
        return None, search.line.work
    return list(search.line.runs), search.line.work
