"""One way to ask for a plan, whatever the method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Final

from recompute._budget import bytes_or_peak, parse_budget
from recompute._plans.chains import revolve
from recompute._plans.checkmate import checkmate
from recompute._plans.chen import chen_greedy, chen_sqrt
from recompute._plans.fetching import plan_with_tier
from recompute._plans.liveness import cost_of, schedule
from recompute._plans.own import Effort, Online, Progress, online, own
from recompute._plans.problem import Problem, check_least, problem_of, woven
from recompute._plans.schedule import PlanError, ProgramPlan
from recompute._plans.verify import verify
from recompute._traces.program import Program

OPTIONS: Final[dict[str, frozenset[str]]] = {
    "own": frozenset({"effort", "seed", "rounds", "time_limit", "workers", "progress", "tier", "known"}),
    "chen-sqrt": frozenset(),
    "chen-greedy": frozenset({"trials"}),
    "revolve": frozenset(),
    "checkmate": frozenset({"time_limit", "operations", "most"}),
}
"""Method -> its options."""

_ALWAYS_THERE: Final = frozenset({"revolve", "checkmate"})
"""The methods for which sources take memory from the first operation to the last."""

METHODS: Final[tuple[str, ...]] = tuple(OPTIONS)
"""The names of the methods."""


def plan(
    program: Program,
    budget: int | str | None = None,
    method: str = "own",
    *,
    of_peak: float | str | None = None,
    **options: Any,
) -> ProgramPlan:
    """A schedule that runs the program within a budget, and recomputes what it must.

    Parameters
    ----------
    budget, of_peak
        Bytes ("512MB"), the program's sources included; or instead a share (0.4, "40%") of its peak: of the bytes that
        a run without a budget has in use at its worst moment (see `recompute.simulator.baseline`).
    method
        "own": the library's planner, whose plans never cost more than what the cache does by itself within the same
        budget. Options: `effort` (1 is about ten seconds, counted in steps, so that a plan does not depend on the
        machine), `rounds`, `time_limit` (seconds), whichever ends first, `seed`, `workers` (processes, each with a seed
        of its own), `known` (plans of the same program: of those that fit, none costs less than the result; so give it
        those for smaller budgets), `progress(share done, least overhead so far)`, `tier` ("12GB/s", "200MB/s,1ms"):
        results may be fetched, where that is cheaper; transfers stop the compute, and sources stay in memory.
        "chen-sqrt", "chen-greedy": segments of the forward pass. Option of the second: `trials`.
        "revolve": the optimum on uniform training chains, and for no other program.
        "checkmate": integer programming, for some 60 operations. Options: `time_limit` (seconds), `operations` (merge
        neighbours until that many are left), `most` (an error above that).

    Raises PlanError, with advice, if there is no such plan or none was found; ValueError for a wrong argument, or a
    program on several devices; ImportError if the method's solver is not installed.
    """
    _check(method, options)
    size = _size(program, budget, of_peak)
    others: Sequence[ProgramPlan] = options.pop("known", ())
    if others:
        return _with_known(program, size, others, method, options)
    return _planned(program, size, method, options)


def _planned(program: Program, size: int, method: str, options: dict[str, Any]) -> ProgramPlan:
    start = perf_counter()
    problem = problem_of(program, size)
    check_least(problem)
    tier = options.pop("tier", None)
    if tier is not None:
        return replace(plan_with_tier(program, size, tier, options), seconds=perf_counter() - start)
    if method in _ALWAYS_THERE:
        if any(kind == "detach" for kind, _ in program.steps):
            raise PlanError(f"{method} takes no program that detaches values; use method 'own'")
        order, bound, note = _run(problem_of(program, size, lifetimes=False), _turn(program), method, options)
        sequence: Sequence[int] = woven(problem, order)
    else:
        sequence, bound, note = _run(problem, _turn(program), method, options, partial(online, program, problem))
    return plan_of(program, problem, method, sequence, start, bound, note)


def plan_of(
    program: Program,
    problem: Problem,
    method: str,
    sequence: Sequence[int],
    start: float,
    bound: float | None = None,
    note: str = "",
) -> ProgramPlan:
    """The plan that an order of runs is; `start`: what `perf_counter` said when the planning began."""
    steps, peak = schedule(problem, sequence)
    model = problem.model_cost
    overhead = cost_of(problem, sequence) / model if model else 1.0
    budget, seconds = problem.room + problem.constant, perf_counter() - start
    return ProgramPlan(program.name, method, budget, steps, peak, overhead, bound, seconds, note)


def _check(method: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a method, or an option of it, that does not exist."""
    if method not in OPTIONS:
        raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
    for option in options:
        if option not in OPTIONS[method]:
            known = ", ".join(sorted(OPTIONS[method])) or "none"
            raise ValueError(f"method {method!r} has no option {option!r}; known: {known}")


def _with_known(
    program: Program, size: int, known: Sequence[ProgramPlan], method: str, options: dict[str, Any]
) -> ProgramPlan:
    """A plan, or the cheapest of those known that fit, if that costs less or there is no other."""
    fitting: list[ProgramPlan] = []
    for other in known:
        peak, overhead = verify(program, other)
        if peak <= size and other.tier in ("", options.get("tier")):
            fitting.append(replace(other, budget=size, peak=peak, overhead=overhead, bound=None))
    cheapest = min(fitting, key=lambda made: made.overhead, default=None)
    try:
        made = _planned(program, size, method, options)
    except PlanError:
        if cheapest is None:
            raise
        return cheapest
    return made if cheapest is None or made.overhead <= cheapest.overhead else cheapest


def ladder(
    program: Program,
    budgets: Sequence[int | str] = (),
    *,
    of_peak: Sequence[float | str] = (),
    **options: Any,
) -> list[ProgramPlan | PlanError]:
    """The own method's plans under several budgets, none of which costs more than that for a smaller budget.

    First those for bytes, then those for shares of the peak, each in the given order. A plan for a smaller budget is
    always a candidate: so cost is monotone by construction. Options of `plan`. In the place of a plan that could not be
    made stands its error.
    """
    sizes = [_size(program, budget, None) for budget in budgets]
    sizes += [_size(program, None, share) for share in of_peak]
    plans: dict[int, ProgramPlan | PlanError] = {}
    known: list[ProgramPlan] = list(options.pop("known", ()))
    for size in sorted(set(sizes)):
        try:
            made = plan(program, size, known=known, **options)
        except PlanError as error:
            plans[size] = error
        else:
            plans[size] = made
            known.append(made)
    return [plans[size] for size in sizes]


def _run(
    problem: Problem, turn: int | None, method: str, options: dict[str, Any], known: Online = lambda _: None
) -> tuple[Sequence[int], float | None, str]:
    """The order of runs, the proved least overhead, and what else is to be said."""
    if method == "chen-sqrt":
        return chen_sqrt(problem, turn), None, ""
    if method == "chen-greedy":
        return chen_greedy(problem, turn, **options), None, ""
    if method == "revolve":
        return *revolve(problem), ""
    if method == "checkmate":
        sequence, bound, left = checkmate(problem, **options)
        if left == len(problem.order):
            return sequence, bound, ""
        return sequence, None, f"merged to {left} operations, of which no schedule has an overhead below {bound:.4f}"
    progress: Progress | None = options.pop("progress", None)
    effort = Effort(**options)
    return *own(problem, effort, progress, known), ""


def _size(program: Program, budget: int | str | None, of_peak: float | str | None) -> int:
    """Bytes."""

    def peak() -> int:  # what it imports is the whole cache, which plans do not need
        from recompute._simulator.published_replay import baseline

        return sum(baseline(program).values())

    return parse_budget(bytes_or_peak(budget, of_peak), whole=peak)


def _turn(program: Program) -> int | None:
    """The call that begins the backward pass, where the program says so."""
    return next((number for number, text in program.marks if text == "BACKWARD"), None)
