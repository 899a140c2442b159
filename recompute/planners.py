"""Schedules made in advance: `plan(program, of_peak=0.4)` says what to compute and to free; `verify` checks a plan.

`ladder` plans for several budgets, so that more memory never costs more.
`least` and `peak` say between which budgets a plan is worth searching for; `replan` starts from a known order of runs.
`ProgramBuilder` and `last_uses` make a program of any graph, as the compilers of adapters do; `smallest` finds by
bisection what just fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from recompute._plans.improve import Search, fitted
from recompute._plans.liveness import prune, schedule
from recompute._plans.own import Effort, Meter, anneal
from recompute._plans.plan import METHODS, ladder, plan, plan_of
from recompute._plans.problem import check_least, problem_of, woven
from recompute._plans.schedule import Plan, PlanError, ProgramPlan
from recompute._plans.verify import verify
from recompute._traces.program import Program, ProgramBuilder, last_uses

_HEAT: Final = 0.1  # of the mean cost of an operation: how much dearer a change of a known order may be at first


def least(program: Program) -> int:
    """Bytes, sources included, that some single operation needs: no plan does with less. O(program)."""
    return problem_of(program, 0).least


def peak(program: Program) -> int:
    """Bytes in use at the worst moment, sources included, if each operation runs once, in order. O(program)."""
    problem = problem_of(program, 0)
    return schedule(problem, problem.order)[1]


def replan(program: Program, budget: int, order: Sequence[int], effort: float, seed: int = 0) -> ProgramPlan | None:
    """A plan that a known order of runs leads to, made to fit in bytes and improved; None: it could not be made to fit.

    `order`: numbers of calls, such as another plan of the same program has. `effort`: as of `plan`, so the same order
    comes of it on every machine. Raises PlanError if no plan can fit.
    """
    start = perf_counter()
    problem = problem_of(program, budget)
    check_least(problem)
    meter = Meter(Effort(effort))
    fits, meter.work = fitted(problem, woven(problem, order), seed)
    if fits is None:
        return None
    search = Search(problem, fits, seed)
    for _ in anneal(search, meter, _HEAT * problem.model_cost / max(1, len(problem.order))):
        pass
    return plan_of(program, problem, "own", prune(problem, search.best), start)


def smallest(fits: Callable[[int], bool], low: int, high: int, *, within: float = 1, tries: int | None = None) -> int:
    """About the least number that fits, above `low`, which does not, up to `high`, which does; neither is tried.

    It is found to `within` so many, or in so many `tries` at most. Where some number does not fit although a lower one
    does, the result fits, too, and need not be the least. O(log((high - low) / within)) calls of `fits`.
    """
    while high - low > max(1, within) and tries != 0:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
        tries = None if tries is None else tries - 1
    return high


__all__ = [
    "METHODS",
    "Plan",
    "PlanError",
    "ProgramBuilder",
    "ProgramPlan",
    "ladder",
    "last_uses",
    "least",
    "peak",
    "plan",
    "replan",
    "smallest",
    "verify",
]
