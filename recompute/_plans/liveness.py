"""From the order of runs alone to a full schedule: each storage is freed as soon as no later run needs it."""

from __future__ import annotations

from collections.abc import Sequence

from recompute._plans.problem import Problem
from recompute._plans.schedule import Action
from recompute._traces.program import total


def prune(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """The sequence of operations without repeated runs whose results are not used. O(arguments)."""
    problem.rest()
    needed = bytearray(len(problem.storages))
    first = _first_runs(problem, sequence)
    kept: list[int] = []
    for position in range(len(sequence) - 1, -1, -1):
        operation = sequence[position]
        results = problem.results[operation]
        if first[position] or any(needed[value] for value in results):
            kept.append(operation)
            for value in results:
                needed[value] = 0
            for value in problem.arguments[operation]:
                needed[value] = 1
    kept.reverse()
    return kept


def settled(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """The same runs; what the program does between two calls comes as early as it can, as `verify` has it.

    A program that is about to make a source does so before anything runs again for the calls that follow. O(arguments).
    """
    made = [-1] * len(problem.storages)  # value -> the position after which it is there
    following: list[list[int]] = [[] for _ in range(len(sequence) + 1)]  # after each position; the last: before all
    first = _first_runs(problem, sequence)
    begun = -1  # the position of the last step of the program
    for position, operation in enumerate(sequence):
        at = position
        if operation >= problem.calls and operation != problem.final:
            at = max([begun, *[made[value] for value in problem.arguments[operation]]])
            following[at].append(operation)
        if first[position]:
            begun = at
        for value in problem.results[operation]:
            made[value] = at
    order = following[-1]
    for position, operation in enumerate(sequence):
        if operation < problem.calls or operation == problem.final:
            order.append(operation)
        order += following[position]
    return order


def schedule(problem: Problem, sequence: Sequence[int]) -> tuple[tuple[Action, ...], int]:
    """The steps, and the peak in bytes, sources included, of running the operations in this order. O(arguments).

    A use of a value is served by the last run before it that made the value; in between its storage stays.
    """
    problem.rest()
    frees = frees_after(problem, sequence)
    sizes, needs, makes = problem.sizes, problem.needs, problem.makes
    resident = bytearray(problem.fixed)
    steps: list[Action] = []
    used = peak = problem.constant
    for operation, freed in zip(sequence, frees, strict=True):
        if operation < problem.calls:
            steps.append(("compute", operation))
        if problem.results[operation]:
            peak = max(peak, used + needs[operation])
            for storage in makes[operation]:
                if not resident[storage]:
                    resident[storage] = 1
                    used += sizes[storage]
        for storage in freed:
            if resident[storage]:
                resident[storage] = 0
                used -= sizes[storage]
                steps.append(("free", storage))
    return tuple(steps), peak


def cost_of(problem: Problem, sequence: Sequence[int]) -> float:
    """The cost of all runs."""
    costs = problem.costs
    return total([costs[operation] for operation in sequence])


def frees_after(problem: Problem, sequence: Sequence[int]) -> list[list[int]]:
    """Position -> the storages that are dead after it. Nothing is after the use of the outputs."""
    needed = bytearray(len(problem.storages))
    alive = [0] * len(problem.sizes)  # storage -> values on it that are needed
    storages, fixed = problem.storages, problem.fixed
    frees: list[list[int]] = []
    for position in range(len(sequence) - 1, -1, -1):
        operation = sequence[position]
        arguments, results = problem.arguments[operation], problem.results[operation]
        touched = {storages[value] for value in results}
        touched.update([storages[value] for value in arguments])
        frees.append([storage for storage in sorted(touched) if not alive[storage] and not fixed[storage]])
        for value in results:
            if needed[value]:
                needed[value] = 0
                alive[storages[value]] -= 1
        for value in arguments:
            if not needed[value]:
                needed[value] = 1
                alive[storages[value]] += 1
    frees.reverse()
    if sequence and sequence[-1] == problem.final:
        frees[-1] = []
    return frees


def outputs_used(problem: Problem, sequence: Sequence[int]) -> list[tuple[int, ...]]:
    """Position -> the numbers of the outputs that are used before they are made again."""
    needed = bytearray(len(problem.storages))
    used: list[tuple[int, ...]] = []
    for operation in reversed(sequence):
        results = problem.results[operation]
        used.append(tuple([number for number, value in enumerate(results) if needed[value]]))
        for value in results:
            needed[value] = 0
        for value in problem.arguments[operation]:
            needed[value] = 1
    used.reverse()
    return used


def _first_runs(problem: Problem, sequence: Sequence[int]) -> bytearray:
    """Position -> whether the operation runs there for the first time."""
    seen = bytearray(len(problem.costs))
    first = bytearray(len(sequence))
    for position, operation in enumerate(sequence):
        if not seen[operation]:
            seen[operation] = first[position] = 1
    return first
