"""Optimal checkpoints on training chains whose values have one size: by formula or by dynamic programming.

Where forward operations cost the same: Griewank and Walther's binomial schedule (Algorithm 799, revolve). Where they
do not: dynamic programming over (segment, memory), as in Beaumont, Herrmann, Pallez, Shilova: Optimal checkpointing for
heterogeneous chains (2019). A checkpoint stays until the backward pass has come down to it: a schedule with that
property is called persistent. Where all values have one size, no other schedule is cheaper (Griewank and Walther,
Evaluating Derivatives, chapter 12).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import comb, gcd, inf
from typing import Final

from recompute._plans.liveness import schedule
from recompute._plans.problem import Problem
from recompute._plans.schedule import PlanError

_ENTRIES: Final = 4_000_000  # of the table, at most: 8 bytes each
_TRIALS: Final = 7.0  # for each of them


@dataclass
class Chain:
    """Forward operations, each on the value of the one before, and backward ones that take these values, last first.

    A backward operation takes the gradient before it, and one state at most.
    """

    forward: list[int]
    """State i is what forward[i - 1] makes; state 0 is a source."""
    size: int
    """Bytes of each state, but for the source."""
    gradient: int
    """Bytes of what each backward operation makes."""
    groups: list[list[int]] = field(default_factory=list)
    """State -> the backward operations that take it, and those after them that take none."""
    peaks: list[int] = field(default_factory=list)
    """State -> bytes besides it while its group runs."""


def chained(problem: Problem, most: float = 1e7) -> tuple[list[int], float, float]:
    """The cheapest order of runs; the least overhead there is, which it has; and the work that took.

    Work is counted in steps of about a microsecond: O(states^2 x units of memory). Raises PlanError if the program is
    no such chain, if it takes more than `most` steps, or if nothing fits.
    """
    chain = recognised(problem)
    if isinstance(chain, str):
        raise PlanError(f"this is for training chains: {chain}; use method 'own'")
    if problem.room < 0:
        raise PlanError("infeasible: the sources alone do not fit")
    states = len(chain.groups)
    room = min(problem.room, chain.size * (states - 1) + max(chain.peaks))
    unit = gcd(chain.size, chain.gradient) or 1
    if room // unit > min(4 * most / _TRIALS, _ENTRIES) / (states * states / 2):
        raise PlanError("the chain is too long for dynamic programming; use method 'own'")
    table = _Table(problem, chain, unit, room // unit)
    if table.least == inf:
        raise PlanError("infeasible: no schedule runs this chain within the budget; give more")
    model = problem.model_cost
    again = table.least - sum([problem.costs[operation] for operation in chain.forward])
    return [*table.runs(), problem.final], (model + again) / model if model else 1.0, table.work


def recognised(problem: Problem) -> Chain | str:
    """The chain that the program is, or why it is none. Sources that stay may be arguments anywhere. O(operations)."""
    calls = problem.order[:-1]
    if len(calls) != problem.calls:
        return "values are got, or sources come and go"
    turn = 0  # the first operation that takes something else than the value before
    previous: tuple[int, ...] = ()
    while turn < len(calls) and problem.arguments[calls[turn]] == previous:
        previous = problem.results[calls[turn]]
        turn += 1
        if len(previous) != 1:
            break
    if turn < 2 or turn == len(calls):
        return "no operation takes the value before it and an earlier one"
    forward, backward = calls[: turn - 1], calls[turn - 1 :]
    kept = set(problem.arguments[problem.final])
    for operation in forward:
        (value,) = problem.results[operation]
        if problem.makes[operation] != (problem.storages[value],) or value in kept:
            return f"operation {operation} does not make one new value that is dropped"
    for operations in (forward, backward):
        made = {tuple([problem.sizes[storage] for storage in problem.makes[operation]]) for operation in operations}
        if len(made) > 1 or len(made.pop()) != 1:
            return "its values differ in size, or an operation makes several"
    chain = Chain(forward, problem.needs[forward[0]], problem.needs[backward[0]])
    return _backward(problem, chain, backward, kept) or chain


def _backward(problem: Problem, chain: Chain, calls: list[int], kept: set[int]) -> str:
    """Enters these operations into the chain; why it is none."""
    now = len(chain.forward)  # the state
    chain.peaks = [0] * (now + 1)
    chain.groups = [[] for _ in range(now + 1)]
    state_of = {problem.results[operation][0]: number for number, operation in enumerate(chain.forward, 1)}
    gradient: int | None = None
    for place, operation in enumerate(calls):
        results, arguments = problem.results[operation], problem.arguments[operation]
        states = [state_of.get(value, now + 1) for value in arguments if value != gradient]
        if len(states) > 1 or (place and gradient not in arguments) or len(results) != 1:
            return f"operation {operation} is not one of a chain"
        if states and states[0] > now:
            return f"operation {operation} takes values in another order than that of a chain"
        if states:
            now = states[0]
        chain.groups[now].append(operation)
        before = chain.gradient if place else 0
        alone = 0 if states else chain.size  # the state is not needed any more
        chain.peaks[now] = max(chain.peaks[now], before + chain.gradient - alone)
        (gradient,) = results
        if place + 1 < len(calls) and (gradient not in problem.arguments[calls[place + 1]] or gradient in kept):
            return f"the next operation does not take what operation {operation} makes, or others do, too"
    return ""


class _Table:
    """The least cost of forward runs for every segment and memory, in units.

    rows[i][j][m]: to run the groups of states j to i, with state i in memory and m units besides.
    """

    def __init__(self, problem: Problem, chain: Chain, unit: int, room: int) -> None:
        self.chain = chain
        self.room = room
        self.work = 0.0
        count = len(chain.groups)
        self.sizes = [0, *[chain.size // unit] * (count - 1)]
        self.peaks = [peak // unit for peak in chain.peaks]
        self.held = [*[chain.gradient // unit] * (count - 1), 0]
        """State -> units of the gradient while it is waited for."""
        self.until = [0.0]
        """State -> the cost of all forward operations up to it."""
        for operation in chain.forward:
            self.until.append(self.until[-1] + problem.costs[operation])
        self.rows: list[list[array[float]]] = [[] for _ in range(count)]
        self._wants: list[list[int]] = [[] for _ in range(count)]
        """i, k - i - 1 -> units to go on from i to k, besides i, without gradients."""
        self._frees: list[int] = [0] * count
        """i -> the first group that is not empty, from i on: up to it, i is not needed once the way is begun."""
        splits: dict[int, list[int]] = {}
        for first in range(count - 1, -1, -1):
            if not first or chain.groups[first]:  # a checkpoint elsewhere is never best
                splits = self._fill(first, splits)

    def _fill(self, first: int, later: dict[int, list[int]]) -> dict[int, list[int]]:
        """The rows of segments that begin with this state; and where each is split best."""
        chain, sizes, room, count = self.chain, self.sizes, self.room, len(self.sizes)
        frees = first if chain.groups[first] or first + 1 == count else self._frees[first + 1]
        self._frees[first] = frees
        self._wants[first] = wants = []
        want = 0
        for state in range(first + 1, count):
            step = sizes[state] + (sizes[state - 1] - self._bonus(first, state) if state > first + 1 else 0)
            want = max(want, step)
            wants.append(want)
        mine = self.rows[first]
        peak = self.peaks[first] if chain.groups[first] else 0
        mine.append(array("d", [inf] * min(peak, room + 1) + [0.0] * (room + 1 - peak)))
        splits = {first: [first] * (room + 1)}
        enough = 0
        for last in range(first + 1, count):
            enough += sizes[last]
            peak = max(peak, self.peaks[last])
            if not chain.groups[last]:
                mine.append(mine[-1])
                splits[last] = splits[last - 1]
                continue
            row, splits[last] = self._row(first, last, enough + peak, splits[last - 1], later.get(last))
            mine.append(row)
        return splits

    def _row(
        self, first: int, last: int, enough: int, before: list[int], after: list[int] | None
    ) -> tuple[array[float], list[int]]:
        """For each memory the least cost of a segment, and the state where it is split; above `enough` it is the same.

        `before` and `after`: the splits of the segments without the last and without the first state.
        """
        rows, until, room, wants = self.rows, self.until, self.room, self._wants[first]
        mine, held, frees = rows[first], self.held[last], self._frees[first]
        row, places = array("d", [inf]) * (room + 1), [-1] * (room + 1)
        low, high = first + 1, last
        tried = 0
        for free in range(wants[0] + held, room + 1):
            if free > enough:  # nothing runs twice
                row[free:] = array("d", row[free - 1 : free]) * (room + 1 - free)
                places[free:] = places[free - 1 : free] * (room + 1 - free)
                break
            if last > first + 1:
                low, high = before[free], after[free] if after else last
                if low < 0 and last + 1 < len(self.sizes):  # less did not fit
                    continue
                low = max(low, first + 1)
                if high < low:
                    high = last if high < 0 else low
            best = inf
            for state in range(low, high + 1):
                if wants[state - first - 1] > free - held:
                    break
                if self.chain.groups[state]:
                    left = free - self.sizes[state]
                    if state <= frees:
                        left = min(room, left + self.sizes[first])
                    cost = until[state] + rows[state][last - state][left] + mine[state - 1 - first][free]
                    if cost < best:
                        best, places[free] = cost, state
            row[free] = best - until[first]
            tried += high - low + 4
        self.work += 5.0 + 0.25 * tried
        return row, places

    def _bonus(self, first: int, state: int) -> int:
        return self.sizes[first] if state <= self._frees[first] else 0

    def _split(self, first: int, last: int, free: int) -> int:
        """The state to go on to, so that the cost is what the table says."""
        sizes, until, rows = self.sizes, self.until, self.rows

        def cost(state: int) -> float:
            if not self.chain.groups[state] or self._wants[first][state - first - 1] > free - self.held[last]:
                return inf
            left = min(self.room, free - sizes[state] + self._bonus(first, state))
            return until[state] + rows[state][last - state][left] + rows[first][state - 1 - first][free]

        return min(range(first + 1, last + 1), key=cost)

    @property
    def least(self) -> float:
        """The least cost of all forward runs; inf: nothing fits."""
        return self.rows[0][-1][-1]

    def runs(self) -> list[int]:
        """The order of runs with the least cost."""
        chain = self.chain
        out: list[int] = []
        stack = [(0, len(self.sizes) - 1, self.room)]
        while stack:
            first, last, free = stack.pop()
            while last > first and not chain.groups[last]:
                last -= 1
            if last == first:
                out += chain.groups[first]
                continue
            state = self._split(first, last, free)
            out += chain.forward[first:state]
            stack.append((first, state - 1, free))
            stack.append((state, last, free - self.sizes[state] + self._bonus(first, state)))
        return out


# Uniform chains


def forward_runs(length: int, slots: int) -> int:
    """t(l, s) = r l - C(s + r, s + 1), r the least with C(s + r, s) >= l: the fewest forward runs that reverse a chain.

    `length` states are delivered last to first, from the first one, with memory for `slots` of them, the first
    included. O(r). Raises ValueError if there is no slot.
    """
    if slots < 1:
        raise ValueError(f"a chain cannot be reversed with {slots} slots; give it at least one")
    rounds = _rounds(length, slots)
    return rounds * length - comb(slots + rounds, slots + 1)


def optimum(n: int, budget: int) -> int:
    """OPT(n, B) = n + 2 + t(n - 1, B - 2): the least cost of `chain(n)` with memory for B values. Needs n >= 2, B >= 3.

    Checked against exhaustive search.
    """
    if n < 2 or budget < 3:
        raise ValueError(f"the formula is for n of at least 2 and a budget of at least 3, not {n} and {budget}")
    return n + 2 + forward_runs(n - 1, budget - 2)


def revolve(problem: Problem) -> tuple[list[int], float]:
    """The order of runs, and the least overhead there is (the order has it).

    The binomial split is chosen by the closed form, so O(runs). Raises PlanError if the program is not a uniform
    training chain (see `recompute._traces.chain`), or the budget holds less than three of its values.
    """
    if why := not_uniform(problem):
        raise PlanError(f"revolve is for uniform training chains: {why}; use method 'own'")
    n, model = problem.calls // 2, problem.model_cost
    forward, backward = problem.order[:n], problem.order[n:-1]
    size = problem.needs[forward[0]]
    units = min(problem.room // size, n + 1) if size else n + 1
    if n < 2 or units >= n:
        sequence = list(problem.order)
        if schedule(problem, sequence)[1] <= problem.room + problem.constant:
            return sequence, 1.0
    if n < 2 or units < 3:
        least = problem.constant + (3 if n > 2 else 2) * size
        raise PlanError(f"infeasible: this chain needs {least:,} bytes; give at least that")
    extra = (optimum(n, units) - 2 * n) * problem.costs[forward[0]]
    return [*_runs(forward, backward, units - 2), problem.final], (model + extra) / model if model else 1.0


def not_uniform(problem: Problem) -> str:
    """Why the program is not a uniform training chain; empty if it is. Sources may be arguments. O(operations)."""
    calls = problem.order[:-1]
    if len(calls) != problem.calls:
        return "values are got on the way"
    if len(calls) < 2 or len(calls) % 2:
        return f"{len(calls)} operations are not n forward and n backward ones"
    n = len(calls) // 2
    made: list[int] = []
    for place, operation in enumerate(calls):
        results = problem.results[operation]
        if len(results) != 1 or len(problem.makes[operation]) != 1:
            return f"operation {operation} does not make exactly one new value"
        expected = made[-1:]
        kept = 2 * n - place - 1  # b[i] needs f[i - 1]
        if place > n and kept:
            expected = [*expected, made[kept - 1]]
        if sorted(problem.arguments[operation]) != sorted(expected):
            return f"operation {operation} has other arguments than that of a chain"
        made.append(results[0])
    if problem.arguments[problem.final] != (made[-1],):
        return "the output is not the last gradient alone"
    sizes = {problem.needs[operation] for operation in calls}
    costs = {problem.costs[operation] for operation in calls[:n]}
    if len(sizes) > 1 or len(costs) > 1:
        return "its values differ in size, or its forward operations in cost"
    return ""


def _rounds(length: int, slots: int) -> int:
    """The least r with C(slots + r, slots) >= length."""
    rounds = 0
    while comb(slots + rounds, slots) < length:
        rounds += 1
    return rounds


def _runs(forward: list[int], backward: list[int], slots: int) -> list[int]:
    """Reverse the states f[0] to f[n-2]; the first time that the last is there, go on to f[n] and its gradient."""
    n = len(forward)
    out: list[int] = []
    stack = [(0, n - 1, slots)]  # (the first state, which is in memory; how many to deliver, last first; slots)
    turned = False
    while stack:
        first, length, free = stack.pop()
        if length == 1 or free == 1:
            for last in range(first + length - 1, first - 1, -1):
                out += forward[first:last]
                if not turned:
                    turned = True
                    out += [*forward[n - 2 :], backward[0]]
                out.append(backward[n - 1 - last])
            continue
        rounds = _rounds(length, free)
        step = max(1, length - comb(free + rounds - 1, free - 1), comb(free + rounds - 2, free) if rounds > 1 else 1)
        out += forward[first : first + step]
        stack += [(first, step, free), (first + step, length - step, free - 1)]
    return out
