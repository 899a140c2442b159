"""Griewank and Walther's binomial schedule: the optimum on a uniform training chain (Algorithm 799, revolve)."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from recompute._plans.liveness import schedule
from recompute._plans.problem import Problem
from recompute._plans.schedule import PlanError


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
    training chain (see `chain`), or the budget holds less than three of its values.
    """
    found = find_chain(problem)
    if isinstance(found, str):
        raise PlanError(f"revolve is for uniform training chains: {found}; use method 'own'")
    n = len(found.forward)
    units = min(problem.room // found.size, n + 1) if found.size else n + 1
    if n < 2 or units >= n:
        sequence = list(problem.order)
        if schedule(problem, sequence)[1] <= problem.room + problem.constant:
            return sequence, 1.0
    if n < 2 or units < 3:
        least = problem.constant + (3 if n > 2 else 2) * found.size
        raise PlanError(f"infeasible: this chain needs {least:,} bytes; give at least that")
    sequence = _runs(found, n, units - 2)
    sequence.append(problem.final)
    model = problem.model_cost
    extra = (optimum(n, units) - 2 * n) * found.cost
    return sequence, (model + extra) / model if model else 1.0


@dataclass
class Chain:
    """A uniform training chain inside a problem."""

    forward: list[int]
    """f[1] to f[n]."""
    backward: list[int]
    """b[n] to b[1]."""
    size: int
    """Bytes of each value."""
    cost: float
    """Of each forward operation."""


def find_chain(problem: Problem) -> Chain | str:
    """The chain that the program is, or why it is none. Sources may be arguments anywhere. O(operations)."""
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
        if place < n:
            expected = made[-1:]
        else:
            kept = 2 * n - place - 1  # b[i] needs f[i - 1]
            expected = made[-1:] + (made[kept - 1 : kept] if place > n and kept else [])
        if sorted(problem.arguments[operation]) != sorted(expected):
            return f"operation {operation} has other arguments than that of a chain"
        made.append(results[0])
    if problem.arguments[problem.final] != (made[-1],):
        return "the output is not the last gradient alone"
    sizes = {problem.sizes[problem.storages[value]] for value in made}
    costs = {problem.costs[operation] for operation in calls[:n]}
    if len(sizes) > 1 or len(costs) > 1:
        return "its values differ in size, or its forward operations in cost"
    return Chain(calls[:n], calls[n:], sizes.pop(), costs.pop())


def _rounds(length: int, slots: int) -> int:
    """The least r with C(slots + r, slots) >= length."""
    rounds = 0
    while comb(slots + rounds, slots) < length:
        rounds += 1
    return rounds


def _runs(chain: Chain, n: int, slots: int) -> list[int]:
    """Reverse the states f[0] to f[n-2]; the first time that the last is there, go on to f[n] and its gradient."""
    forward, backward = chain.forward, chain.backward
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
