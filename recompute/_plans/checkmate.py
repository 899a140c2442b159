"""Checkmate: the best schedule by mixed integer programming (Jain et al., MLSys 2020), solved by HiGHS through SciPy.

Stage t runs the t-th operation for the first time, and before it any earlier ones again, in program order, each at most
once. Minimal is the cost of all runs. Within this class of schedules, which is Checkmate's, the bound is proved.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from importlib import import_module
from typing import Any

from recompute._plans.liveness import prune, schedule
from recompute._plans.problem import Problem
from recompute._plans.schedule import PlanError


def checkmate(
    problem: Problem, *, time_limit: float = 60.0, operations: int | None = None, most: int = 80
) -> tuple[list[int], float, int]:
    """The order of runs, the proved least overhead, and of how many operations that was proved.

    Parameters
    ----------
    time_limit
        Seconds for the solver; then its best schedule counts, and what it has proved.
    operations
        Merge neighbours until only so many are left (see `coarsen`); the bound is then that of the merged program.
    most
        Refuse more than this many operations. The integer program has O(operations^2 + operations x arguments)
        variables, and its solution may take exponential time.

    Raises PlanError if the program is too large, no schedule exists, or none was found in time; ImportError without
    SciPy.
    """
    groups = coarsen(problem, operations) if operations is not None else [[operation] for operation in problem.order]
    if len(groups) > most:
        raise PlanError(
            f"{len(groups):,} operations are too many for checkmate, which takes {most}: merge them with "
            f"operations={min(most, 60)}, or use method 'own'"
        )
    merged = problem if operations is None else _merged(problem, groups)
    order = merged.order
    model = _Model(merged)
    runs, bound = model.solve(time_limit)
    sequence: list[int] = []
    for place in runs:
        sequence += groups[place] if operations is not None else [order[place]]
    sequence = prune(problem, sequence)
    peak = schedule(problem, sequence)[1]
    if peak > problem.room + problem.constant:
        raise PlanError(
            f"the solver's schedule needs {peak:,} bytes, above the budget by its rounding; give a little more"
        )
    cost = problem.model_cost
    return sequence, bound / cost if cost else 1.0, len(groups)


def _merged(problem: Problem, groups: list[list[int]]) -> Problem:
    """The problem whose operations are the groups: each runs its members in order, and keeps what others use."""
    place_of = {operation: number for number, group in enumerate(groups) for operation in group}
    wanted: set[int] = set()
    for number, group in enumerate(groups):
        for operation in group:
            for value in problem.arguments[operation]:
                if place_of[problem.makers[value]] != number:
                    wanted.add(value)
    merged = Problem(len(groups) - 1)
    merged.storages, merged.sizes, merged.fixed = problem.storages, problem.sizes, problem.fixed
    merged.makers = [place_of[maker] if maker >= 0 else -1 for maker in problem.makers]
    merged.constant, merged.room = problem.constant, problem.room
    for number, group in enumerate(groups):
        inside: dict[int, None] = {}
        results: list[int] = []
        for operation in group:
            for value in problem.arguments[operation]:
                if place_of[problem.makers[value]] != number:
                    inside[value] = None
            results += [value for value in problem.results[operation] if value in wanted]
        held = {problem.storages[value] for value in inside}
        storages = {problem.storages[value] for value in results} - held
        merged.arguments.append(tuple(inside))
        merged.results.append(tuple(results))
        merged.makes.append(tuple(sorted(storage for storage in storages if not problem.fixed[storage])))
        merged.costs.append(sum([problem.costs[operation] for operation in group]))
        merged.needs.append(_need(problem, group, set(results)))
        merged.once.append(False)
        merged.order.append(number)
    return merged


def _need(problem: Problem, group: list[int], results: set[int]) -> int:
    """Bytes that running the group takes beside its arguments."""
    last: dict[int, int] = {}
    made: set[int] = set()
    for place, operation in enumerate(group):
        for value in problem.arguments[operation]:
            last[problem.storages[value]] = place
        for value in problem.results[operation]:
            last.setdefault(problem.storages[value], place)
            if value in results:
                last[problem.storages[value]] = len(group)
    used = most = 0
    for place, operation in enumerate(group):
        most = max(most, used + problem.needs[operation])
        made.update(problem.makes[operation])
        made = {storage for storage in made if last[storage] > place or last[storage] == len(group)}
        used = sum([problem.sizes[storage] for storage in made])
    return max(most, used)


class _Model:
    """The integer program. Variables, for stage t and place i in program order, i <= t:

    run[t, i]: operation i runs in stage t; kept[t, v]: value v is in memory when stage t begins;
    due[t, v, k]: value v is in memory from after its (k-1)-th user's place up to its k-th user's, in stage t.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bounds: list[tuple[float, float]] = []
        self.integer: list[int] = []
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        """Sums of variables that must be at least a number."""
        order = problem.order
        place_of = {operation: place for place, operation in enumerate(order)}
        self.count = len(order)
        self.made = {
            value: place_of[maker] for value, maker in enumerate(problem.makers) if maker >= 0 and maker in place_of
        }
        users: dict[int, list[int]] = {value: [] for value in self.made}
        for place, operation in enumerate(order):
            for value in problem.arguments[operation]:
                users[value].append(place)
        self.users = {value: places for value, places in users.items() if places}
        self._scale = max(1.0, problem.model_cost)
        self._unit = max(1, problem.room)
        self._build()

    def _variable(self, low: float, cost: float = 0.0, *, integer: bool = True) -> int:
        """A number from `low` to 1."""
        self.bounds.append((low, 1.0))
        self.integer.append(int(integer))
        self.costs.append(cost)
        return len(self.costs) - 1

    def _build(self) -> None:
        problem, order, count = self.problem, self.problem.order, self.count
        self.run: dict[tuple[int, int], int] = {}
        kept: dict[tuple[int, int], int] = {}
        for stage in range(count):
            for place in range(stage + 1):
                operation = order[place]
                again = place == stage or bool(problem.results[operation])
                if again:
                    low = 1.0 if place == stage else 0.0
                    cost = problem.costs[operation] / self._scale
                    self.run[stage, place] = self._variable(low, cost)
            for value, made in self.made.items():
                if value in self.users and made < stage:
                    kept[stage, value] = self._variable(0.0)
        for stage in range(count):
            for value, made in self.made.items():
                here = kept.get((stage, value))
                if here is not None:
                    row = {here: -1.0}
                    if (stage - 1, made) in self.run:
                        row[self.run[stage - 1, made]] = 1.0
                    if (stage - 1, value) in kept:
                        row[kept[stage - 1, value]] = 1.0
                    self.rows.append((row, 0.0))
            for place in range(stage + 1):
                mine = self.run.get((stage, place))
                for value in problem.arguments[order[place]] if mine is not None else ():
                    assert mine is not None
                    row = {mine: -1.0, self.run[stage, self.made[value]]: 1.0}
                    if (stage, value) in kept:
                        row[kept[stage, value]] = 1.0
                    self.rows.append((row, 0.0))
            self._memory(stage, kept)

    def _memory(self, stage: int, kept: dict[tuple[int, int], int]) -> None:
        """The memory at each place of a stage, and that it fits."""
        problem, order = self.problem, self.problem.order
        present: list[dict[int, list[int]]] = [{} for _ in range(stage + 1)]  # place -> storage -> variables
        for value, places in self.users.items():
            made, storage = self.made[value], problem.storages[value]
            if made > stage or not problem.sizes[storage]:
                continue
            if (stage, value) in kept:
                for place in range(min(made, stage) + 1):
                    present[place].setdefault(storage, []).append(kept[stage, value])
            following = kept.get((stage + 1, value))
            end = stage
            for user in reversed([place for place in places if place <= stage]):
                if following is not None:
                    for place in range(user + 1, end + 1):
                        present[place].setdefault(storage, []).append(following)
                mine = self.run.get((stage, user))
                if mine is not None and following is None:
                    following = mine
                elif mine is not None and following is not None:
                    due = self._variable(0.0, integer=False)
                    self.rows += [({due: 1.0, mine: -1.0}, 0.0), ({due: 1.0, following: -1.0}, 0.0)]
                    following = due
                end = user
            if following is not None:
                for place in range(made + 1, end + 1):
                    present[place].setdefault(storage, []).append(following)
        for place in range(stage + 1):
            row: dict[int, float] = {}
            for storage, variables in present[place].items():
                one = variables[0]
                if len(set(variables)) > 1:
                    one = self._variable(0.0, integer=False)
                    self.rows += [({one: 1.0, variable: -1.0}, 0.0) for variable in set(variables)]
                row[one] = row.get(one, 0.0) - problem.sizes[storage] / self._unit
            mine = self.run.get((stage, place))
            if mine is not None:
                row[mine] = row.get(mine, 0.0) - problem.needs[order[place]] / self._unit
            if row:
                self.rows.append((row, -problem.room / self._unit))

    def solve(self, time_limit: float) -> tuple[list[int], float]:
        """The places in the order of runs, and the bound on their cost."""
        try:
            numpy: Any = import_module("numpy")
            optimize: Any = import_module("scipy.optimize")
            sparse: Any = import_module("scipy.sparse")
        except ImportError as error:
            raise ImportError("checkmate needs SciPy: pip install '.[plan]' in a checkout") from error
        data, indices, starts, least = [], [], [0], []
        for row, number in self.rows:
            indices += list(row)
            data += list(row.values())
            starts.append(len(data))
            least.append(number)
        matrix = sparse.csr_array((data, indices, starts), shape=(len(self.rows), len(self.costs)))
        low, high = numpy.array(self.bounds).T
        solution = optimize.milp(
            self.costs,
            integrality=numpy.array(self.integer),
            bounds=optimize.Bounds(low, high),
            constraints=optimize.LinearConstraint(matrix, numpy.array(least) - 1e-9, numpy.inf),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
        )
        if solution.x is None:
            if solution.status == 2:
                raise PlanError("infeasible: Checkmate's integer program has no solution under this budget; give more")
            raise PlanError(f"the solver found no schedule within {time_limit:g} s; give it a longer time_limit")
        bound = solution.mip_dual_bound if solution.mip_dual_bound is not None else 0.0
        runs = [
            place
            for stage in range(self.count)
            for place in range(stage + 1)
            if (stage, place) in self.run and solution.x[self.run[stage, place]] > 0.5
        ]
        return runs, max(self.problem.model_cost, bound * self._scale * (1 - 1e-9))


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
