"""Chen et al.'s checkpointing in segments (Training Deep Nets with Sublinear Memory Cost, 2016), on any program."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from recompute._plans.liveness import cost_of, prune, schedule
from recompute._plans.problem import Problem
from recompute._plans.schedule import PlanError
from recompute._plans.timeline import Timeline


def chen_sqrt(problem: Problem, turn: int | None) -> list[int]:
    """The order of runs with the forward pass cut into segments of equally many operations, the square root of all.

    See `segmented` for what that means on a general graph. `turn`: see there. O(arguments).
    Raises PlanError, with the least budget that would do, if it does not fit.
    """
    forward = _forward(problem, turn)
    count = max(1, isqrt(forward))
    cuts = [forward * number // count for number in range(1, count)]
    return _best(problem, iter([segmented(problem, forward, cuts)]), "chen-sqrt")


def chen_greedy(problem: Problem, turn: int | None, trials: int = 60) -> list[int]:
    """As `chen_sqrt`, but a segment ends when what it made exceeds a number of bytes: the best of many such numbers.

    The numbers go down in equal ratios from all of the forward pass to its largest operation. O(trials x arguments).
    """
    forward = _forward(problem, turn)
    made = [problem.needs[operation] if operation < problem.calls else 0 for operation in problem.order[:forward]]
    whole, largest = sum(made), max([1, *made])
    ratio = (max(whole, largest) / largest) ** (1 / max(1, trials - 1))

    def candidates() -> Iterator[list[int]]:
        seen = set()
        for trial in range(trials):
            most = max(whole, largest) / ratio**trial
            cuts, bytes_made = [], 0
            for place, size in enumerate(made):
                if bytes_made and bytes_made + size > most:
                    cuts.append(place)
                    bytes_made = 0
                bytes_made += size
            if tuple(cuts) not in seen:
                seen.add(tuple(cuts))
                yield segmented(problem, forward, cuts)

    return _best(problem, candidates(), "chen-greedy")


def segmented(problem: Problem, forward: int, cuts: list[int]) -> list[int]:
    """The order of runs when the first `forward` operations are cut into segments in front of the places `cuts`.

    A value made in one segment and used in another one of the forward pass is a checkpoint: it stays until its last
    use. All others are dropped when their segment ends. The first later operation that needs a dropped one has those
    of the same segment that are still needed run again together, in program order; they stay until their last use.
    Later operations, the backward pass, run once and drop nothing early. O(arguments).
    """
    order, makers = problem.order, problem.makers
    segment: dict[int, int] = {}  # operation -> segment of the forward pass
    number = 0
    marks = set(cuts)
    for place in range(forward):
        number += place in marks
        segment[order[place]] = number
    last_use: dict[int, int] = {}
    kept: set[int] = set()
    for place, operation in enumerate(order):
        for value in problem.arguments[operation]:
            last_use[value] = place
            of = segment.get(makers[value], -1)
            if place < forward and segment[operation] != of:
                kept.add(value)
    last = number
    members: list[list[int]] = [[] for _ in range(last + 1)]
    for place in range(forward):
        members[segment[order[place]]].append(order[place])
    dropped = {
        value
        for place in range(forward)
        for value in problem.results[order[place]]
        if value not in kept and segment[order[place]] != last and not problem.once[order[place]]
    }
    out = list(order[:forward])
    for place in range(forward, len(order)):
        for value in problem.arguments[order[place]]:
            if value in dropped:
                out += _again(problem, members[segment[makers[value]]], dropped, last_use, place)
        out.append(order[place])
    return prune(problem, out)


def _again(problem: Problem, members: list[int], dropped: set[int], last_use: dict[int, int], place: int) -> list[int]:
    """The runs that bring back what is dropped of a segment and used from `place` on."""
    missing = {
        value
        for operation in members
        for value in problem.results[operation]
        if value in dropped and last_use.get(value, -1) >= place
    }
    runs = []
    for operation in reversed(members):
        if any(value in missing for value in problem.results[operation]):
            runs.append(operation)
            missing.update([value for value in problem.arguments[operation] if value in dropped])
    dropped -= missing
    return runs[::-1]


def _forward(problem: Problem, turn: int | None) -> int:
    """How many operations come before the backward pass, which begins with the call `turn`.

    Where the program does not say, it begins when the memory of the program as it is has its peak.
    """
    if turn is not None and turn in problem.order:
        return problem.order.index(turn)
    memory = Timeline(problem, problem.order).memory
    return memory.index(max(memory)) + 1


def _best(problem: Problem, sequences: Iterator[list[int]], method: str) -> list[int]:
    """The cheapest that fits."""
    budget = problem.room + problem.constant
    best: list[int] | None = None
    cost, least = 0.0, 0
    for sequence in sequences:
        peak = schedule(problem, sequence)[1]
        least = min(least or peak, peak)
        if peak <= budget and (best is None or cost_of(problem, sequence) < cost):
            best, cost = sequence, cost_of(problem, sequence)
    if best is None:
        raise PlanError(
            f"infeasible: {method} needs {least:,} bytes, but the budget is {budget:,}; give at least that, "
            "or use method 'own'"
        )
    return best
