"""Large neighbourhood search on a schedule: take some repeated runs out, make it fit again otherwise, keep the better.

Making it fit: at the moment that lacks the most memory, some storage is dropped between two uses, and what is needed
is run again before the second. The one with the least cost for the bytes it saves where they lack is chosen, with a
little chance. Then every repeated run that the memory can do without is taken out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Final

from recompute._plans.problem import Problem
from recompute._plans.timeline import Crowded, Timeline

_SIZES: Final = (2, 6, 15)  # mean numbers of runs that are taken out
_SHIFT: Final = 0.2  # chance that a repeated run goes earlier instead
_KICK: Final = 0.2  # chance that some storage is dropped without need


class Search:
    """The search: `polish` once, then as many `rounds` as there is time for. `best` is a sequence that fits."""

    def __init__(self, problem: Problem, sequence: Sequence[int], seed: int = 0) -> None:
        self.problem = problem
        self.random = Random(seed)
        self.line = Timeline(problem, sequence)
        self.best = list(self.line.runs)
        self.best_cost = self.line.cost
        self._large = [storage for storage, size in enumerate(problem.sizes) if size]
        self._slack = max(0.02, 4 / len(sequence)) * problem.model_cost
        self._over: list[int] = []  # places that lack memory

    def polish(self, labels: Sequence[int] | None = None) -> None:
        """Take out repeated runs while the memory allows it, dearest first. O(repeated runs) trials."""
        line, costs, room = self.line, self.problem.costs, self.problem.room
        if labels is None:
            labels = line.repeated()
        rank = [(-costs[line.runs[bisect_left(line.labels, label)]], label) for label in labels]
        for _, label in sorted(rank):
            place = bisect_left(line.labels, label)
            if place < len(line.labels) and line.labels[place] == label:
                mark = len(line.log)
                line.drop(label)
                if max(line.memory) > room:
                    line.undo(mark)

    def round(self, heat: float) -> bool:
        """One change; whether it was kept. `heat`: how much dearer (a share of the model cost) it may be."""
        line, random = self.line, self.random
        before = line.cost
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
            self.line = Timeline(self.problem, line.runs)
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
        self.line = Timeline(self.problem, self.best)

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
        if random.random() < _KICK:
            place = random.randrange(len(self.line.labels))
            self._evict(place, random.choice(self._large))

    def _shift(self, label: int) -> None:
        """Run the operation of a repeated run earlier; O(runs)."""
        line = self.line
        operation = line.runs[bisect_left(line.labels, label)]
        low = bisect_right(line.labels, line.first[operation])
        high = bisect_left(line.labels, label)
        low = max(low, high - 1 - int(self.random.expovariate(1 / 20)))
        if low < high:
            line.put(operation, line.labels[self.random.randrange(low, high)])
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
        line, problem, room = self.line, self.problem, self.problem.room
        label = line.labels[place]
        memory, sizes = line.memory, problem.sizes
        over = [index for index, used in enumerate(memory) if used > room]
        lacks = [memory[index] - room for index in over]
        used_now = {problem.storages[value] for value in problem.arguments[line.runs[place]]}
        self._over = over
        makers, costs, noise = problem.makers, problem.costs, self.random.random
        labels, spans_of = line.labels, line.spans
        candidates = []
        if kicked >= 0:
            over, lacks = [], []
        storages = [kicked] if kicked >= 0 else self._large
        most = max(lacks, default=0)
        sums_of: dict[int, list[int]] = {}  # bytes -> sums of what lacks, each at most so many bytes
        for storage in storages:
            for start, end in spans_of[storage]:
                if start < label <= end:
                    break
            else:
                continue
            if storage in used_now:
                continue
            wanted, since = self._gap(storage, label)
            size = sizes[storage]
            low = bisect_right(over, bisect_right(labels, since) - 1)
            high = bisect_left(over, bisect_left(labels, wanted[0][0]))
            if low >= high and kicked < 0:
                continue
            clipped = min(size, most)
            sums = sums_of.get(clipped)
            if sums is None:
                sums = sums_of[clipped] = [0, *accumulate([min(clipped, lack) for lack in lacks])]
            gain = sums[high] - sums[low]
            if gain > 0 or kicked >= 0:
                gain = max(gain, 1)
                weight = (0.5 + noise()) / gain
                least = sum([costs[maker] for maker in {makers[value] for _, value in wanted}]) + 1e-9
                candidates.append((least * weight, weight, since, size, wanted))
        candidates.sort()
        best = math.inf
        found: list[tuple[int, int]] | None = None
        for least, weight, since, size, wanted in candidates:
            if least >= best:
                break
            score = (self._price(wanted, since, size, best / weight) + 1e-9) * weight
            if score < best:
                best, found = score, wanted
                best_since, best_size = since, size
        if found is None:
            return False
        for until, value in found:
            self._ensure(value, until, best_since, best_size)
        return True

    def _gap(self, storage: int, label: int) -> tuple[list[tuple[int, int]], int]:
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
        labels, memory, room = line.labels, line.memory, self.problem.room
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
        return (at == len(over) or over[at] >= high) and max(memory[low:high]) + more <= room

    def _price(self, wanted: list[tuple[int, int]], since: int, size: int, most: float) -> float:
        """What it costs to run these values again before their uses; something above `most` if it is more."""
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


def fitted(problem: Problem, sequence: Sequence[int], seed: int) -> list[int] | None:
    """The sequence with runs put in until it fits; None: that did not work. O(runs put in x operations)."""
    search = Search(problem, sequence, seed)
    try:
        if not search._repair(10 * problem.model_cost + 1e-9, 10 * len(sequence)):
            return None
        search.polish()
    except Crowded:
        return None
    return list(search.line.runs)
