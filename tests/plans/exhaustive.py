"""The least overhead of a small program by exhaustive search: the definition of the machine, and nothing clever."""

from __future__ import annotations

from heapq import heappop, heappush

from recompute._traces.program import Program


def least_cost(program: Program, budget: int) -> float | None:
    """The least cost of all runs under a budget; None if there is no plan. Exponential: for some ten operations."""
    storages, sizes = program.storages, program.sizes
    sources = frozenset(value for value, maker in enumerate(program.makers) if maker < 0)
    always = {storages[value] for value in sources}
    order = [which for kind, which in program.steps if kind == "call"]
    outputs = set(program.outputs)
    if sum(sizes[storage] for storage in always) > budget:
        return None
    start = (sources, 0)
    costs: dict[tuple[frozenset[int], int], float] = {start: 0.0}
    queue: list[tuple[float, int, tuple[frozenset[int], int]]] = [(0.0, 0, start)]
    number = 0
    while queue:
        cost, _, state = heappop(queue)
        if cost > costs[state]:
            continue
        present, done = state
        if done == len(order) and outputs <= present:
            return cost
        resident = {storages[value] for value in present} | always
        used = sum(sizes[storage] for storage in resident)
        following: list[tuple[float, tuple[frozenset[int], int]]] = []
        for storage in resident - always:
            following.append((cost, (frozenset(value for value in present if storages[value] != storage), done)))
        for place in range(min(done + 1, len(order))):
            call = program.calls[order[place]]
            if not present.issuperset(call.arguments):
                continue
            made = {storages[value] for value in call.results} - {storages[value] for value in call.arguments}
            if used + sum(sizes[storage] for storage in made) <= budget:
                after = (present | set(call.results), max(done, place + 1))
                following.append((cost + call.cost, after))
        for each, after in following:
            if each < costs.get(after, float("inf")):
                costs[after] = each
                number += 1
                heappush(queue, (each, number, after))
    return None
