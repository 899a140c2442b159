"""The library's own planner: the best of several schedules that know the future, then local search on the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from time import perf_counter
from typing import Final

from recompute._plans.chen import chen_greedy, chen_sqrt
from recompute._plans.exact import beam, exact
from recompute._plans.future import Replay, Score
from recompute._plans.improve import Search, fitted
from recompute._plans.liveness import cost_of, prune, schedule
from recompute._plans.problem import Problem
from recompute._plans.revolve import revolve
from recompute._plans.schedule import PlanError
from recompute._workers import workers

Progress = Callable[[float, float], None]
"""Hears the share of the planning that is done, and the least overhead so far."""

_SCORES: Final = tuple(
    Score(time=time, below=below, through=through)
    for time, (below, through) in product((0.5, 0.25, 1.0, 0.0, 2.0), ((0.3, True), (0.0, True), (0.0, False)))
)
_TINY: Final = 20  # operations: the optimum is searched for
_STATES: Final = 40_000
_MODEST: Final = 60  # operations: a beam of states is searched
_BEAM: Final = 200
_SMALL: Final = 1000  # operations: the schedule without a budget is made to fit, too
_FIRST: Final = 0.25  # of the time, at most, for the schedules that the search begins with
_PATIENCE: Final = 1.5  # times the time: when nothing has fitted by then, it is given up,
_PATIENT: Final = 2.0  # seconds, at least
_AT_LEAST: Final = 3  # scores are tried in any case
_ROUNDS: Final = 100  # for each operation, unless the caller says how many
_FINALISTS: Final = 4
_TRYOUT: Final = 0.08  # of the effort, for each finalist
_HEAT: Final = 0.3  # of the mean cost of an operation: how much dearer a change may be at the start


@dataclass(frozen=True)
class Effort:
    """When to stop, and what the random numbers are."""

    rounds: int | None = None
    """None: a hundred for each operation."""
    time_limit: float = 30.0
    """Seconds."""
    seed: int = 0
    workers: int = 1
    """Processes; a script that asks for several guards its main part with `if __name__ == "__main__"`."""


def own(
    problem: Problem, turn: int | None, effort: Effort, progress: Progress | None = None
) -> tuple[list[int], float | None]:
    """The order of runs, and the least overhead there is where that is known (uniform chains).

    A tiny program is solved by search over states (`exact`). Else a portfolio: DTR with the future known under a grid
    of scores (`Score`), the program made to fit (`fitted`), Chen's segments, Revolve, and on small programs a beam of
    states (`beam`). The best few are improved by large neighbourhood search (`Search`) for a part of the effort each,
    the best of these for the rest. O(rounds x operations) about; stops after `rounds` or `time_limit`. The same seed
    gives the same order if the rounds end it. Raises PlanError, with a budget that works, if nothing has been found to
    fit after one and a half times the limit, or two seconds.
    """
    if effort.workers > 1:
        efforts = [Effort(effort.rounds, effort.time_limit, effort.seed + number) for number in range(effort.workers)]
        with workers(effort.workers, _nothing) as pool:
            found = list(pool.map(_work, [(problem, turn, effort) for effort in efforts]))
        return min(found, key=lambda each: cost_of(problem, each[0]))
    start = perf_counter()
    if problem.calls <= _TINY:
        optimal = exact(problem, _STATES)
        if optimal is not None:
            cost = cost_of(problem, optimal)
            return optimal, cost / problem.model_cost if problem.model_cost else 1.0
    model = problem.model_cost or 1.0
    starts: list[tuple[float, list[int]]] = []
    for sequence, bound in _portfolio(problem, turn, start + max(_PATIENCE * effort.time_limit, _PATIENT)):
        if starts and perf_counter() - start > _FIRST * effort.time_limit:
            break
        if bound is not None or not starts:
            if schedule(problem, sequence)[1] > problem.constant + problem.room:
                continue
            if bound is not None:
                return sequence, bound
        starts.append((cost_of(problem, sequence), sequence))
        if starts[-1][0] <= model * (1 + 1e-12):
            return sequence, 1.0
    if not starts:
        raise _Infeasible(problem)
    return _search(problem, starts, effort, start + effort.time_limit, progress), None


def _nothing() -> None:
    """What a worker needs before it works."""


def _work(given: tuple[Problem, int | None, Effort]) -> tuple[list[int], float | None]:
    return own(*given)


def _portfolio(problem: Problem, turn: int | None, until: float) -> Iterator[tuple[list[int], float | None]]:
    """Orders of runs that fit, with the least overhead where one is proved to have it; about `until` some time."""
    plain = list(problem.order)
    if schedule(problem, plain)[1] <= problem.constant + problem.room:
        yield plain, 1.0
        return
    with suppress(PlanError):
        yield revolve(problem)
    replay = Replay(problem)
    limit = 10.0
    for number, score in enumerate(_SCORES):
        if number >= _AT_LEAST and perf_counter() > until:
            break
        sequence = replay.run(score, limit=limit)
        if sequence is not None:
            limit = min(limit, 1.5 * cost_of(problem, sequence) / (problem.model_cost or 1.0))
            yield prune(problem, sequence), None
    if problem.calls <= _MODEST:
        sequence = beam(problem, _BEAM, _STATES // 8)
        if sequence is not None:
            yield prune(problem, sequence), None
    if problem.calls <= _SMALL:
        for trial in range(4 if limit < 10.0 else 30):
            if trial and perf_counter() > until:
                break
            sequence = fitted(problem, plain, trial)
            if sequence is not None:
                yield prune(problem, sequence), None
    for segments in (chen_sqrt, chen_greedy):
        with suppress(PlanError):
            yield segments(problem, turn), None


def _search(
    problem: Problem,
    starts: Sequence[tuple[float, list[int]]],
    effort: Effort,
    until: float,
    progress: Progress | None,
) -> list[int]:
    """Improve the best few of the starts, then the best of these."""
    searches: list[Search] = []
    seen: set[float] = set()
    for cost, sequence in sorted(starts, key=lambda each: each[0]):
        if cost not in seen and len(searches) < _FINALISTS:
            seen.add(cost)
            searches.append(Search(problem, sequence, effort.seed))
    began = perf_counter()
    model = problem.model_cost or 1.0
    done = 0.0
    best = searches[0]
    shares = [_TRYOUT] * len(searches)
    for search, share in [*zip(searches, shares, strict=True), (None, 1.0 - sum(shares))]:
        current = search or best
        current.restart()
        rounds = max(1, round((effort.rounds or _ROUNDS * problem.calls) * share))
        stop = began + (until - began) * (done + share)
        start = perf_counter()
        for number in range(rounds):
            now = perf_counter()
            if now >= stop:
                break
            part = max(number / rounds, (now - start) / max(1e-9, stop - start))
            heat = _HEAT * model / len(problem.order) * (1 - part) ** 2
            current.round(heat)
            if progress is not None and number % 20 == 0:
                progress(min(1.0, done + share * part), min(best.best_cost, current.best_cost) / model)
        done += share
        if current.best_cost < best.best_cost:
            best = current
    if progress is not None:
        progress(1.0, best.best_cost / model)
    return best.best


class _Infeasible(PlanError):
    """What to give instead is found out when somebody reads it: that takes replays, and some who plan only try."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem = problem

    @cached_property
    def _text(self) -> str:
        return _infeasible(self._problem)

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[type[PlanError], tuple[str]]:
        return PlanError, (self._text,)


def _infeasible(problem: Problem) -> str:
    """Says which larger budget works, within a percent of the least that a few policies need. O(some replays)."""
    budget = problem.constant + problem.room
    low, high = budget, max(2 * budget, schedule(problem, problem.order)[1])
    room = problem.room
    replay = Replay(problem)
    try:
        while high - low > max(1, high // 100):
            middle = (low + high) // 2
            problem.room = middle - problem.constant
            if any(replay.run(score, limit=4.0) is not None for score in _SCORES[:_AT_LEAST]):
                high = middle
            else:
                low = middle
    finally:
        problem.room = room
    return f"infeasible: no way was found to run the program in {budget:,} bytes; give {high:,}, which are enough"
