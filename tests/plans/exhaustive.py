"""The least overhead of a small program by exhaustive search: the definition of the machine, and nothing clever."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from recompute._traces.program import Program


def least_cost(program: Program, budget: int, price: Callable[[int], float] | None = None) -> float | None:
    """The least cost of all runs under a budget; None if there is no plan. Exponential: for some ten operations.

    `price` of bytes: all results of an operation that has run can be fetched, too, and are written once for that.
    Of what a program does between its calls only sources count, that come and go: no `get`, no `detach`.
    """
    storages, sizes = program.storages, program.sizes
    order = [which for kind, which in program.steps if kind == "call"]
    outputs = set(program.outputs)
    gaps: list[list[tuple[str, int]]] = [[]]  # number of first runs done -> what the program does then
    for kind, which in program.steps:
        if kind == "call":
            gaps.append([])
        elif program.makers[which] < 0:
            gaps[-1].append((kind, which))
    start = (frozenset[int](), frozenset[int](), 0, 0, frozenset[int]())
    costs = {start: 0.0}
    queue = [(0.0, 0, start)]
    number = 0
    while queue:
        cost, _, state = heappop(queue)
        if cost > costs[state]:
            continue
        present, kept, done, passed, written = state  # kept: sources that are referred to; passed: steps of the gap
        if done == len(order) and outputs <= present and passed == len(gaps[done]):
            return cost
        resident = {storages[value] for value in present}
        used = sum(sizes[storage] for storage in resident)
        following: list[tuple[float, tuple[frozenset[int], frozenset[int], int, int, frozenset[int]]]] = []
        for storage in resident - {storages[value] for value in kept}:
            left = frozenset(value for value in present if storages[value] != storage)
            following.append((cost, (left, kept, done, passed, written)))
        if passed < len(gaps[done]):
            kind, which = gaps[done][passed]
            if kind == "drop":
                following.append((cost, (present, kept - {which}, done, passed + 1, written)))
            elif kind == "source" and used + sizes[storages[which]] <= budget:
                following.append((cost, (present | {which}, kept | {which}, done, passed + 1, written)))
        else:
            for place in range(min(done + 1, len(order))):
                call = program.calls[order[place]]
                if price is not None and place < done:
                    brought = {storages[value] for value in call.results}
                    size = sum(sizes[storage] for storage in brought)
                    if used + size <= budget:
                        once = price(size)
                        now = (present | set(call.results), kept, done, passed, written | {place})
                        following.append((cost + (once if place in written else 2 * once), now))
                if not present.issuperset(call.arguments):
                    continue
                made = {storages[value] for value in call.results} - {storages[value] for value in call.arguments}
                if used + sum(sizes[storage] for storage in made) <= budget:
                    first = place == done
                    after = (present | set(call.results), kept, done + first, 0 if first else passed, written)
                    following.append((cost + call.cost, after))
        for spent, after in following:
            if spent < costs.get(after, float("inf")):
                costs[after] = spent
                number += 1
                heappush(queue, (spent, number, after))
    return None
