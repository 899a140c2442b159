"""A sequence of runs that can be changed one run at a time, with the memory of every moment kept up to date.

The order of runs decides everything else: a use of a value is served by the last run before it that made the value,
and its storage stays in between. So a schedule can be improved by taking runs out (something stays longer) and
putting runs in (something goes earlier).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Final

from recompute._plans.problem import Problem
from recompute._traces.program import total

_APART: Final = 1 << 56  # labels of neighbours, at the start
_EARLY: Final = 8  # a new run's label is this fraction of the way to the next: many are put in before the same run


class Crowded(Exception):
    """No label is left between two neighbours: build the timeline again from its sequence."""


class Timeline:
    """The runs in order; what is in memory at each.

    A run has a label that never changes, so that what refers to it need not move when others come and go. Changing
    one run costs O(arguments + results) updates, each of O(moments in which the storage comes or goes).
    """

    def __init__(self, problem: Problem, sequence: Sequence[int]) -> None:
        self.problem = problem
        self.work = 0.0
        """Work done, in steps of about a microsecond."""
        self.labels = [_APART * (place + 1) for place in range(len(sequence))]
        self.runs = list(sequence)
        """Place -> operation."""
        self._memory = [0] * len(sequence)
        self._changes: list[tuple[int, int]] = []  # (after this label, so many bytes more): not in `_memory` yet
        self.raised = 0
        """The most bytes at a place where more came to be in use; a caller that watches it sets it to zero before."""
        self.cost = total([problem.costs[operation] for operation in sequence])
        self.events: list[list[int]] = [[] for _ in problem.storages]
        """Value -> ascending 2 x label of its uses, and 2 x label + 1 of the runs that make it."""
        self.first: dict[int, int] = {}
        """Operation -> the label of its first run, which stays."""
        self.log: list[tuple[bool, int, int]] = []
        """Changes since the last `commit`: (put in, label, operation)."""
        self.on: list[list[int]] = [[] for _ in problem.sizes]
        for value, storage in enumerate(problem.storages):
            if problem.makers[value] >= 0:
                self.on[storage].append(value)
        self.spans: list[list[tuple[int, int]]] = [[] for _ in problem.sizes]
        """Storage -> (after this label, up to and with this one): when it is in memory to be used later."""
        self._build()

    def _build(self) -> None:
        problem = self.problem
        for place, operation in enumerate(self.runs):
            label = self.labels[place]
            self.first.setdefault(operation, label)
            self._memory[place] = problem.needs[operation]
            for value in problem.arguments[operation]:
                self.events[value].append(2 * label)
            for value in problem.results[operation]:
                self.events[value].append(2 * label + 1)
        changes = [0] * (len(self.runs) + 1)
        for storage, size in enumerate(problem.sizes):
            self.spans[storage] = spans = self._spans(storage)
            for start, end in spans if size else ():
                changes[bisect_right(self.labels, start)] += size
                changes[bisect_right(self.labels, end)] -= size
        used = 0
        for place in range(len(self.runs)):
            used += changes[place]
            self._memory[place] += used

    @property
    def memory(self) -> list[int]:
        """Place -> bytes in use while it runs, without sources. O(places that changed since it was asked for)."""
        changes, memory, labels = self._changes, self._memory, self.labels
        if changes:
            changes.sort()
            level = since = low = 0
            for label, change in changes:
                if label > since:
                    high = bisect_right(labels, label, low)
                    if level and high > low:
                        part = [used + level for used in memory[low:high]]
                        memory[low:high] = part
                        if level > 0:
                            self.raised = max(self.raised, max(part))
                        self.work += 0.06 * (high - low)
                    since, low = label, high
                level += change
            self.work += 1.5 * len(changes)
            changes.clear()
        return memory

    def _spans(self, storage: int) -> list[tuple[int, int]]:
        """When the storage is in memory: the union over its values of (run that makes it, its last use)."""
        spans: list[tuple[int, int]] = []
        values = self.on[storage]
        for value in values:
            made = last = -1
            for event in self.events[value]:
                if event & 1:
                    if last > made >= 0:
                        spans.append((made >> 1, last >> 1))
                    made = event
                else:
                    last = event
            if last > made >= 0:
                spans.append((made >> 1, last >> 1))
        if len(values) > 1 and len(spans) > 1:
            spans.sort()
            merged = [spans[0]]
            for start, end in spans[1:]:
                if start <= merged[-1][1]:
                    if end > merged[-1][1]:
                        merged[-1] = (merged[-1][0], end)
                else:
                    merged.append((start, end))
            return merged
        return spans

    def _update(self, storage: int) -> None:
        """The storage's events changed: so does the memory."""
        old = self.spans[storage]
        new = self._spans(storage)
        if old == new:
            return
        self.spans[storage] = new
        size = self.problem.sizes[storage]
        if size:
            changes = self._changes
            for start, end in old:
                changes += ((start, -size), (end, size))
            for start, end in new:
                changes += ((start, size), (end, -size))

    def put(self, operation: int, label: int) -> None:
        """A run of the operation in front of the one with this label. Raises Crowded."""
        place = bisect_left(self.labels, label)
        before = self.labels[place - 1] if place else 0
        new = before + max(1, (label - before) // _EARLY)
        if new >= label:
            raise Crowded
        self._put(operation, new, place)
        self.log.append((True, new, operation))

    def _put(self, operation: int, label: int, place: int) -> None:
        problem = self.problem
        self.work += 20.0
        held = self._memory[place] - problem.needs[self.runs[place]]
        self.labels.insert(place, label)
        self.runs.insert(place, operation)
        self._memory.insert(place, held + problem.needs[operation])
        self.cost += problem.costs[operation]
        storages, events = problem.storages, self.events
        touched = []
        for value in problem.arguments[operation]:
            insort(events[value], 2 * label)
            touched.append(storages[value])
        for value in problem.results[operation]:
            insort(events[value], 2 * label + 1)
            touched.append(storages[value])
        for storage in dict.fromkeys(touched):
            self._update(storage)

    def take(self, label: int) -> int:
        """Take out the run with this label; the operation. What it made must have been made before."""
        place = bisect_left(self.labels, label)
        operation = self.runs[place]
        self._take(operation, label)
        self.log.append((False, label, operation))
        return operation

    def _take(self, operation: int, label: int) -> None:
        problem = self.problem
        self.work += 20.0
        storages, events = problem.storages, self.events
        touched = []
        for value in problem.arguments[operation]:
            mine = events[value]
            del mine[bisect_left(mine, 2 * label)]
            touched.append(storages[value])
        for value in problem.results[operation]:
            mine = events[value]
            del mine[bisect_left(mine, 2 * label + 1)]
            touched.append(storages[value])
        for storage in dict.fromkeys(touched):
            self._update(storage)
        place = bisect_left(self.labels, label)
        before = self.labels[place - 1] if place else 0
        self._changes = [(before if at == label else at, change) for at, change in self._changes]
        del self.labels[place], self.runs[place], self._memory[place]
        self.cost -= problem.costs[operation]

    def commit(self) -> None:
        """Keep what was done."""
        self.log.clear()

    def undo(self, mark: int = 0) -> None:
        """Go back to when the log had `mark` entries."""
        log = self.log
        while len(log) > mark:
            put, label, operation = log.pop()
            if put:
                self._take(operation, label)
            else:
                self._put(operation, label, bisect_left(self.labels, label))

    def drop(self, label: int) -> None:
        """Take out a repeated run, and the repeated runs that only it needed. O(runs taken out)."""
        problem = self.problem
        stack = [label]
        while stack:
            operation = self.take(stack.pop())
            for value in problem.arguments[operation]:
                source = self.source(value, label)
                if source >= 0 and self.is_idle(source):
                    stack.append(source)
            stack = list(dict.fromkeys(stack))

    def source(self, value: int, label: int) -> int:
        """The label of the repeated run that serves a use at `label`; -1: a first run, or none does."""
        mine = self.events[value]
        place = bisect_left(mine, 2 * label) - 1
        while place >= 0 and not mine[place] & 1:
            place -= 1
        if place < 0:
            return -1
        run = mine[place] >> 1
        return -1 if run == self.first[self.problem.makers[value]] else run

    def is_idle(self, label: int) -> bool:
        """Nothing uses what the run with this label makes."""
        operation = self.runs[bisect_left(self.labels, label)]
        for value in self.problem.results[operation]:
            mine = self.events[value]
            place = bisect_left(mine, 2 * label + 1) + 1
            if place < len(mine) and not mine[place] & 1:
                return False
        return True

    def repeated(self) -> list[int]:
        """The labels of all runs that are not first ones, in order. O(runs)."""
        first = self.first
        return [label for label, operation in zip(self.labels, self.runs, strict=True) if first[operation] != label]
