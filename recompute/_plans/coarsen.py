"""Fewer, larger operations, for planners that cannot take many."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from recompute._plans.problem import Problem


def coarsen(problem: Problem, most: int) -> list[list[int]]:
    """At most `most` groups of neighbours in program order; the use of the outputs is a group of its own.

    Again and again the two neighbouring groups are merged of which one is least worth a decision of its own: it costs
    little and makes few bytes, each compared with the mean. What only one group uses is then no longer seen, so a
    merged program has fewer schedules, and its optimum is at least that of the program. O(operations x log).
    """
    groups: list[list[int] | None] = [[operation] for operation in problem.order[:-1]]
    after = list(range(1, len(groups) + 1))
    before = list(range(-1, len(groups) - 1))
    stamp = [0] * (len(groups) + 1)
    costs = [problem.costs[operation] for operation in problem.order[:-1]]
    sizes = [float(problem.needs[operation]) for operation in problem.order[:-1]]
    mean = problem.model_cost / max(1, len(costs)) or 1.0
    scale = sum(sizes) / max(1, len(sizes)) or 1.0

    def loss(left: int) -> float:
        right = after[left]
        weight = [costs[group] / mean + sizes[group] / scale for group in (left, right)]
        return min(weight) + 0.1 * max(weight)

    heap = [(loss(left), 0, 0, left) for left in range(len(groups) - 1)]
    heapify(heap)
    left_over = len(groups)
    while left_over > max(1, most - 1) and heap:
        _, one, two, left = heappop(heap)
        right = after[left]
        mine, other = groups[left], groups[right] if right < len(groups) else None
        if mine is None or other is None or stamp[left] != one or stamp[right] != two:
            continue
        groups[left] = mine + other
        groups[right] = None
        costs[left] += costs[right]
        sizes[left] += sizes[right]
        stamp[left] += 1
        after[left] = after[right]
        if after[left] < len(groups):
            before[after[left]] = left
            heappush(heap, (loss(left), stamp[left], stamp[after[left]], left))
        if before[left] >= 0:
            heappush(heap, (loss(before[left]), stamp[before[left]], stamp[left], before[left]))
        left_over -= 1
    return [*[group for group in groups if group is not None], [problem.final]]
