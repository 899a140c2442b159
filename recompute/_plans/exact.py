"""The optimum of a tiny program, by search over states.

A state is what is in memory, and how many operations have run for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from recompute._plans.problem import Problem
from recompute._plans.schedule import PlanError

State = tuple[int, int]
"""(bits of the values in memory, first runs done)"""


def exact(problem: Problem, states: int) -> list[int] | None:
    """An order of runs with the least cost; None: undecided after so many states.

    A* with the cost of what has not run yet as the estimate, which never exceeds the truth. Exponential in general.
    Raises PlanError if there is no such order.
    """
    space = _Space(problem)
    rest, count = space.rest, len(problem.order)
    start = (0, 0)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, int]] = {}
    queue = [(rest[0], 0, start)]
    seen = 0
    while queue:
        estimate, _, state = heappop(queue)
        cost, done = best[state], state[1]
        if estimate > cost + rest[done] + 1e-9 * rest[0]:
            continue
        if done == count:
            return _path(came, state)
        seen += 1
        if seen > states:
            return None
        problem.rest()
        for extra, after, operation in space.following(state):
            spent = cost + extra
            if spent < best.get(after, inf):
                best[after] = spent
                came[after] = (state, operation)
                heappush(queue, (spent + rest[after[1]], -len(best), after))
    raise PlanError("infeasible: no schedule runs the program within this budget; give more")


class _Space:
    """The states of a problem, and the ways between them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        order, costs = problem.order, problem.costs
        self.rest = [0.0] * (len(order) + 1)
        """Number of first runs -> the cost of those that are left."""
        for place in range(len(order) - 1, -1, -1):
            self.rest[place] = self.rest[place + 1] + costs[order[place]]
        on = [0] * len(problem.sizes)
        for value, storage in enumerate(problem.storages):
            if problem.makers[value] >= 0:
                on[storage] |= 1 << value
        self.storages = [(on[storage], size) for storage, size in enumerate(problem.sizes) if size and on[storage]]
        self.takes = [sum([1 << value for value in arguments]) for arguments in problem.arguments]
        self.gives = [sum([1 << value for value in results]) for results in problem.results]

    def following(self, state: State) -> Iterator[tuple[float, State, int]]:
        """(cost, state after it, operation that runs; -1: a storage is freed).

        Something is freed only when a run that is possible otherwise would not fit. O(operations + storages).
        """
        problem, takes, gives = self.problem, self.takes, self.gives
        order, costs, needs = problem.order, problem.costs, problem.needs
        present, done = state
        resident = [(values, size) for values, size in self.storages if present & values]
        left = problem.room - sum([size for _, size in resident])
        is_short = False
        following = order[done]
        goes_on = (
            following >= problem.calls and not takes[following] & ~present
        )  # nothing runs before that, see `verify`
        for place in range(done if goes_on else 0, done + 1):
            operation = order[place]
            if takes[operation] & ~present:
                continue
            if place < done and (not gives[operation] & ~present or problem.once[operation]):
                continue
            if needs[operation] > left:
                is_short = True
            else:
                yield costs[operation], (present | gives[operation], max(done, place + 1)), operation
        if is_short:
            for values, _ in resident:
                yield 0.0, (present & ~values, done), -1


def _path(came: dict[State, tuple[State, int]], state: State) -> list[int]:
    """The operations run on the way to the state."""
    runs = []
    while state in came:
        state, operation = came[state]
        if operation >= 0:
            runs.append(operation)
    return runs[::-1]
