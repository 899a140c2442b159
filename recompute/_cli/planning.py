"""Plans for commands: each is made, judged by the verifier and turned into figures; what fails is a figure too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Final, Literal

from recompute._budget import format_bytes, parse_budget
from recompute._cli.output import CommandError
from recompute._plans.fetching import Prices
from recompute._plans.plan import METHODS, plan
from recompute._plans.problem import problem_of
from recompute._plans.revolve import Chain, find_chain
from recompute._plans.schedule import PlanError, ProgramPlan
from recompute._plans.verify import verify
from recompute._simulator.many import cores
from recompute._traces.program import Program
from recompute._workers import workers

TIME_LIMIT: Final = 20.0
_TIMED: Final = ("own", "checkmate")
_SMALL: Final = 60  # operations that checkmate can be expected to solve
_WORTH_A_PROCESS: Final = 2_000  # operations: fewer are planned before another Python has started

Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Planned:
    """One plan that was asked for. Bytes, and seconds of planning."""

    trace: str
    method: str
    status: Literal["ok", "infeasible", "timeout"]
    budget_bytes: int
    budget_ratio: float
    overhead: float | None
    peak_bytes: int | None
    bound: float | None
    computes: int | None
    frees: int | None
    fetches: int | None
    seconds: float
    reason: str = ""
    """Why there is no plan, or what is to be said about it."""
    plan: ProgramPlan | None = None

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {name: getattr(self, name) for name in list(self.__dataclass_fields__)[:-2]}


@dataclass(frozen=True)
class PlanJob:
    """One plan to be made: of the program with this number."""

    program: int
    method: str
    budget: int | float
    """As it was asked for: bytes, or a share."""
    peak: int
    """Of the program without a budget."""
    time_limit: float
    operations: int | None = None
    """Checkmate merges the program to so many."""
    tier: str | None = None
    """What the plan of the own method may fetch from."""

    @property
    def size(self) -> int:
        """The budget in bytes."""
        return parse_budget(self.budget, whole=self.peak)


def add_methods(parser: argparse.ArgumentParser, default: str) -> None:
    """The options --method, for several, --time-limit and --operations."""
    add = parser.add_argument
    add(
        "--method",
        metavar="NAME[,..]",
        action="append",
        help=f"planners: {', '.join(METHODS)}; all; several separated by commas, or repeated; default {default}",
    )
    add(
        "--time-limit",
        metavar="SECONDS",
        default=str(TIME_LIMIT),
        help=f"time for each plan of {' and '.join(_TIMED)}; default {TIME_LIMIT:g}",
    )
    add("--operations", metavar="N", help="merge the program into N operations before checkmate plans it")


def methods(given: Sequence[str]) -> list[str]:
    """Names from the command line, each once; `none` stands for none."""
    names = [name.strip() for text in given for name in text.split(",")]
    names = [method for name in names if name != "none" for method in (METHODS if name == "all" else [name])]
    for name in names:
        if name not in METHODS:
            raise CommandError(f"unknown method {name!r}; choose from {', '.join(METHODS)}, all")
    return list(dict.fromkeys(names))


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """`time_limit` and `operations` from the command line."""
    try:
        limit = float(options.time_limit)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise CommandError(f"--time-limit must be seconds above zero, not {options.time_limit!r}")
    count = options.operations
    if count is not None and (not count.isdecimal() or int(count) < 2):
        raise CommandError(f"--operations must be a whole number, at least 2, not {count!r}")
    return {"time_limit": limit, "operations": None if count is None else int(count)}


def applicable(program: Program) -> list[str]:
    """The methods that make sense for a program: Revolve for uniform chains alone, Checkmate for small ones."""
    names = ["own", "chen-sqrt", "chen-greedy"]
    if isinstance(find_chain(problem_of(program, 1 << 62)), Chain):
        names.append("revolve")
    if len(program.calls) <= _SMALL and find_spec("scipy") is not None:
        names.append("checkmate")
    return names


def tier_of_plans(text: str | None) -> str | None:
    """The tier from which plans can fetch: that of replays, unless plans know nothing of such a one."""
    try:
        if text is not None:
            Prices.of(text, Program(""))
    except ValueError:
        return None
    return text


def make(program: Program, job: PlanJob, progress: Progress | None = None) -> Planned:
    """One plan, verified. Raises CommandError if the planner cannot be used at all, or its plan is wrong."""
    options: dict[str, Any] = {"time_limit": job.time_limit} if job.method in _TIMED else {}
    if job.method == "own" and progress is not None:
        options["progress"] = progress
    if job.method == "own" and job.tier is not None:
        options["tier"] = job.tier
    if job.method == "checkmate" and job.operations is not None:
        options["operations"] = job.operations
    size = job.size
    ratio = job.budget if isinstance(job.budget, float) else size / max(1, job.peak)
    start = perf_counter()
    try:
        found = plan(program, size, job.method, **options)
    except PlanError as error:
        status: Literal["infeasible", "timeout"] = "timeout" if "time_limit" in str(error) else "infeasible"
        seconds = perf_counter() - start
        nothing = (None, None, None, None, None, None)
        return Planned(program.name, job.method, status, size, ratio, *nothing, seconds, str(error))
    except (ImportError, ValueError) as error:
        raise CommandError(f"{job.method}: {error}", 1) from None
    seconds = perf_counter() - start
    try:
        peak, overhead = verify(program, found)
    except PlanError as error:
        raise CommandError(
            f"the plan of {job.method} for {program.name} is wrong: {error}; please report it", 1
        ) from None
    computes = found.computes
    return Planned(
        trace=program.name,
        method=job.method,
        status="ok",
        budget_bytes=size,
        budget_ratio=ratio,
        overhead=overhead,
        peak_bytes=peak,
        bound=found.bound,
        computes=computes,
        frees=len(found.steps) - computes - found.fetches,
        fetches=found.fetches,
        seconds=seconds,
        reason=found.note,
        plan=found,
    )


def make_many(
    programs: Sequence[Program],
    jobs: Sequence[PlanJob],
    *,
    done: Callable[[int], None],
    progress: Progress | None = None,
) -> Iterator[Planned]:
    """The plans of `jobs`, in order, on the cores there are; `done` is told how many are ready.

    `progress` hears how far the plan at hand is, if there is only one at a time. Raises CommandError, see `make`.
    """
    work = sum(len(programs[job.program].calls) for job in jobs)
    count = min(len(jobs), cores(), max(1, work // _WORTH_A_PROCESS))
    if count <= 1:
        for number, job in enumerate(jobs, 1):
            yield make(programs[job.program], job, progress)
            done(number)
        return
    with workers(count, _start, list(programs)) as pool:
        futures = [pool.submit(_work, job) for job in jobs]
        for number, future in enumerate(futures, 1):
            yield future.result()
            done(number)


def monotone(plans: Sequence[Planned]) -> list[Planned]:
    """The same, but none of the own method costs more than another one of its program for a smaller budget.

    What fits into less memory fits into more: that plan takes the place of one that costs more, or that is not there.
    """
    best: dict[str, Planned] = {}
    kept = list(plans)
    for number in sorted(range(len(plans)), key=lambda number: plans[number].budget_bytes):
        planned = plans[number]
        if planned.method != "own":
            continue
        less = best.get(planned.trace)
        if less is None or less.overhead is None or less.plan is None:
            if planned.overhead is not None:
                best[planned.trace] = planned
        elif planned.overhead is not None and planned.overhead <= less.overhead:
            best[planned.trace] = planned
        else:
            kept[number] = replace(
                less,
                budget_bytes=planned.budget_bytes,
                budget_ratio=planned.budget_ratio,
                bound=None,
                seconds=planned.seconds,
                reason=f"that for {format_bytes(less.budget_bytes)}, which has a lower overhead than the one found",
                plan=replace(less.plan, budget=planned.budget_bytes, bound=None),
            )
    return kept


_here: list[Program] = []
"""In a worker: the programs, sent once."""


def _start(programs: list[Program]) -> None:
    _here[:] = programs


def _work(job: PlanJob) -> Planned:
    return make(_here[job.program], job)
