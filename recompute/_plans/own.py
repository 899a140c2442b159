"""The library's own planner: orders of runs that fit, some of which know the future, then local search on the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from time import perf_counter
from typing import Final

from recompute._plans.chains import chained, revolve
from recompute._plans.exact import exact
from recompute._plans.future import replayed
from recompute._plans.improve import Search, fitted
from recompute._plans.liveness import cost_of, prune, schedule, settled
from recompute._plans.problem import Problem, numbered, woven
from recompute._plans.schedule import PlanError
from recompute._traces.program import Program, Step
from recompute._workers import workers

Progress = Callable[[float, float], None]
"""Hears the share of the planning that is done, and the least overhead so far."""

_ON_CHAINS: Final = 0.5  # of the effort, at most, for dynamic programming on a chain
_TINY: Final = 20  # operations: the optimum is searched for
_STATES: Final = 40_000
_STATE: Final = 30.0  # steps for each
_SMALL: Final = 1000  # operations: the program is made to fit, too
_MEDIUM: Final = 2000  # operations: it is made to fit if replays thrash
_SQUARES: Final = 2.0  # times the steps, of the operations of a larger one, that is too: it takes a tenth of a square
_FIRST: Final = 0.25  # of the effort, at most, for the schedules that the search begins with
_THRASHING: Final = 20.0  # times the cost of the program: the cache by itself is given up there
_DEAREST: Final = 10.0  # times the cost of the program: a replay above that is given up
_PATIENCE: Final = 1.5  # times the effort: when nothing has fitted by then, it is given up
_FITTED: Final = 6  # tries at most, once something fits
_AT_LEAST: Final = 3  # are tried, if nothing fits
_TRIES: Final = 30  # at most
_FINALISTS: Final = 4
_MUCH: Final = 2.0  # times the cost of the program, and the extra cost of another start: above both, one is given up
_TRYOUT: Final = 0.08  # of the effort, for each finalist
_HEAT: Final = 0.3  # of the mean cost of an operation: how much dearer a change may be at the start
_A_CALL: Final = 2000.0  # steps for each operation that a replay may take, whatever the effort; it mostly takes a tenth
_LARGER: Final = (1.01, 1.03, 1.06, 1.1, 1.2, 1.4, 1.7, 2.0)  # times a budget that is too small
_WORDS: Final = 2e6  # steps, after which only the last of them is tried
_STEPS: Final = 1e7  # of about a microsecond, that are one unit of effort


@dataclass(frozen=True)
class Effort:
    """When to stop, and what the random numbers are. Whatever comes first ends the search."""

    effort: float = 1.0
    """Of about ten seconds each, counted in steps: the same on every machine."""
    rounds: int | None = None
    """None: as many as the effort allows."""
    time_limit: float | None = None
    """Seconds. The plan then depends on the machine, if it gets so far."""
    seed: int = 0
    workers: int = 1
    """Processes; a script that asks for several guards its main part with `if __name__ == "__main__"`."""

    def __post_init__(self) -> None:
        if not 0 <= self.effort < inf:
            raise ValueError(f"effort is a number, 0 or more, not {self.effort!r}; 1 takes about ten seconds")


class Meter:
    """How much of the effort is spent."""

    def __init__(self, effort: Effort) -> None:
        self.steps = _STEPS * effort.effort
        """Of about a microsecond, that may be done."""
        self._start = perf_counter()
        self._limit = effort.time_limit
        self.work = 0.0
        """Steps done."""

    @property
    def share(self) -> float:
        """Of the effort; above 1 if more was done."""
        steps = self.work / self.steps if self.steps else inf
        if self._limit is None:
            return steps
        seconds = (perf_counter() - self._start) / self._limit if self._limit > 0 else inf
        return max(steps, seconds)


Online = Callable[[float], Sequence[int] | None]
"""Gives the order in which the cache itself runs the operations, which knows only the past, if its overhead is at most
that; None: it could not."""


@dataclass(frozen=True)
class Start:
    """An order of runs that fits, to begin with."""

    member: str
    """Of the portfolio: which one made it."""
    sequence: list[int]
    bound: float | None = None
    """The least overhead there is, if this has it."""


def own(
    problem: Problem, effort: Effort, progress: Progress | None = None, online: Online = lambda _: None
) -> tuple[list[int], float | None]:
    """The order of runs, and the least overhead there is where that is known (tiny programs, chains of one size).

    The best few of the `portfolio` are improved by large neighbourhood search (`Search`) for a part of the effort each,
    the best of these for the rest. So the result is never dearer than what `online` gives. The same effort and seed
    give the same order on every machine, unless a time limit ends it. Raises PlanError, with a budget that works, if
    nothing has been found to fit after one and a half times the effort.
    """
    if effort.workers > 1:
        efforts = [replace(effort, seed=effort.seed + number, workers=1) for number in range(effort.workers)]
        first = online(_THRASHING)
        with workers(effort.workers, _nothing) as pool:
            results = list(pool.map(_work, [(problem, effort, first) for effort in efforts]))
        return min(results, key=lambda result: cost_of(problem, result[0]))
    meter = Meter(effort)
    starts = list(portfolio(problem, meter, online))
    if not starts:
        raise _Infeasible(problem)
    if starts[-1].bound is not None:
        return starts[-1].sequence, starts[-1].bound
    starts.sort(key=lambda start: cost_of(problem, start.sequence))
    if meter.share >= 1:
        return starts[0].sequence, None
    improved = settled(problem, _search(problem, starts, effort, meter, progress))
    return improved if _fits(problem, improved) else starts[0].sequence, None


def online(
    program: Program,
    problem: Problem,
    limit: float = _THRASHING,
    *,
    seen: Callable[[Sequence[Step]], Iterable[Step]] = iter,
) -> list[int] | None:
    """The order of runs of the cache with its default policy, which knows only the past.

    None: it ran out of memory, or its overhead went above the limit. `seen`: its steps as the problem has them.
    """
    from recompute._simulator.replay import order_of_runs  # it imports the whole cache, which most planners do not need

    steps = order_of_runs(program, problem.room + problem.constant, limit)
    return None if steps is None else woven(problem, numbered(problem, seen(steps)))


def _fits(problem: Problem, sequence: Sequence[int]) -> bool:
    return schedule(problem, sequence)[1] <= problem.constant + problem.room


def _nothing() -> None:
    """A worker needs nothing before it works."""


def _work(given: tuple[Problem, Effort, Sequence[int] | None]) -> tuple[list[int], float | None]:
    problem, effort, online = given
    return own(problem, effort, online=lambda _: online)


def portfolio(problem: Problem, meter: Meter, online: Online = lambda _: None) -> Iterator[Start]:
    """Orders of runs that fit, while the effort for them lasts; one that is proved to be the best is the last.

    First those that are proved to be the best: of a tiny program by search over states (`exact`), of chains with values
    of one size by formula (`revolve`) or by dynamic programming (`chained`). Else what the cache does by itself,
    without runs that turn out to be superfluous (`online`), is among them. Then come DTR with the future known
    (`replayed`), and the program made to fit (`fitted`) a few times. Where the first two thrash, they are given up, and
    the last is there in any case.
    """
    best = (problem.model_cost or 1.0) * (1 + 1e-12)
    for start in _members(problem, meter, online):
        sequence = settled(problem, start.sequence)
        if _fits(problem, sequence):
            bound = 1.0 if cost_of(problem, sequence) <= best else start.bound
            yield replace(start, sequence=sequence, bound=bound)
            if bound is not None:
                return


def _members(problem: Problem, meter: Meter, online: Online) -> Iterator[Start]:
    plain = list(problem.order)
    if _fits(problem, plain):
        yield Start("program", plain, 1.0)
        return
    if problem.calls <= _TINY:
        optimal = exact(problem, min(_STATES, round(meter.steps / _STATE)))
        if optimal is not None:
            yield Start("exact", prune(problem, optimal), cost_of(problem, optimal) / (problem.model_cost or 1.0))
            return
    with suppress(PlanError):
        yield Start("revolve", *revolve(problem))
    spare: Start | None = None
    limit = _THRASHING
    if meter.share < 1:  # it does not count as work, as the run of the cache does not
        start, _ = _made_to_fit(problem, meter, 0)
        if start is not None and _fits(problem, settled(problem, start.sequence)):
            spare, limit = start, _hopeful(cost_of(problem, start.sequence) / (problem.model_cost or 1.0))
    known = online(limit)
    fits = known is not None
    if known is not None:
        yield Start("online", prune(problem, known))
        if meter.share >= 1:
            return
    with suppress(PlanError):
        sequence, bound, work = chained(problem, _ON_CHAINS * meter.steps)
        meter.work += work
        yield Start("chained", sequence, bound)
    most = max(_A_CALL * problem.calls, _PATIENCE * meter.steps - meter.work)
    order, work = replayed(problem, min(limit, _DEAREST), most)
    meter.work += work
    if order is not None:
        fits = True
        yield Start("future", prune(problem, order))
    if spare is not None and not fits:
        fits = True
        yield spare
    for number in range(_TRIES if problem.calls <= _SMALL else 0):
        if fits and (number >= _FITTED or meter.share > _FIRST):
            return
        if number >= _AT_LEAST and meter.share > _PATIENCE:
            return
        start, work = _made_to_fit(problem, meter, number)
        meter.work += work
        if start is not None:
            fits = True
            yield start


def _made_to_fit(problem: Problem, meter: Meter, number: int) -> tuple[Start | None, float]:
    """The program with runs put in until it fits, in one of many ways, and the work that took.

    None: it did not work, or the program is too large for it. Where replays thrash, it takes a hundredth of their work
    and is often the best.
    """
    if problem.calls > max(_MEDIUM, sqrt(_SQUARES * meter.steps)):
        return None, 0.0
    order, work = fitted(problem, problem.order, number)
    return (None if order is None else Start(f"fitted {number + 1}", prune(problem, order))), work


def _hopeful(overhead: float) -> float:
    """The overhead up to which another start may become better than one with this overhead."""
    return max(_MUCH, 1.0 + _MUCH * (overhead - 1.0))


def _search(
    problem: Problem,
    starts: Sequence[Start],
    effort: Effort,
    meter: Meter,
    progress: Progress | None,
) -> list[int]:
    """Improve the first few of the starts, of which the best comes first, then the best of these."""
    model = problem.model_cost or 1.0
    most = model * _hopeful(cost_of(problem, starts[0].sequence) / model)
    finalists: dict[float, Start] = {}
    for start in starts:
        cost = cost_of(problem, start.sequence)
        if cost <= most:
            finalists.setdefault(cost, start)
    searches = [Search(problem, start.sequence, effort.seed) for start in list(finalists.values())[:_FINALISTS]]
    heat = _HEAT * model / len(problem.order)
    done, begun = 0.0, meter.share
    best = searches[0]
    shares = [_TRYOUT] * len(searches)
    for search, share in [*zip(searches, shares, strict=True), (None, 1.0 - sum(shares))]:
        current = search or best
        current.restart()
        rounds = inf if effort.rounds is None else max(1, round(effort.rounds * share))
        for part in anneal(current, meter, heat, meter.share, begun + (1.0 - begun) * (done + share), rounds):
            if progress is not None:
                progress(min(1.0, done + share * part), min(best.best_cost, current.best_cost) / model)
        done += share
        if current.best_cost < best.best_cost:
            best = current
    if progress is not None:
        progress(1.0, best.best_cost / model)
    return best.best


def anneal(
    search: Search, meter: Meter, heat: float, start: float = 0.0, stop: float = 1.0, rounds: float = inf
) -> Iterator[float]:
    """Rounds of a search from one share of the effort to another, each with less heat than the one before.

    Now and then it yields which part is done.
    """
    number = 0
    while number < rounds and (now := meter.share) < stop and search.line.repeated():
        part = max(number / rounds, (now - start) / max(1e-9, stop - start))
        before = search.line.work
        search.round(heat * (1 - part) ** 2)
        meter.work += search.line.work - before
        if number % 20 == 0:
            yield part
        number += 1


class _Infeasible(PlanError):
    """A larger budget that works is computed when the text is read: that takes replays, and some callers only try."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem = problem

    @cached_property
    def _text(self) -> str:
        """Names a larger budget that works: the first of a few for which a replay finds a way. O(some replays)."""
        problem = self._problem
        budget = problem.constant + problem.room
        most = schedule(problem, problem.order)[1]
        tried = [larger for share in _LARGER if (larger := int(share * budget) + 1) < most]
        work = 0.0
        for larger in tried:
            if work < _WORDS or larger == tried[-1]:
                order, more = replayed(replace(problem, room=larger - problem.constant), limit=4.0)
                work += more
                if order is not None:
                    most = larger
                    break
        return f"infeasible: no way was found to run the program in {budget:,} bytes; give {most:,}, which are enough"

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[type[PlanError], tuple[str]]:
        return PlanError, (self._text,)
