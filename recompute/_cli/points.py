"""The table of points behind commands: programs under policies and planners, within budgets; made, shown and drawn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from recompute._budget import format_bytes, parse_budget
from recompute._cli.arguments import destination, writing
from recompute._cli.output import CommandError, print_list
from recompute._live import Live, bar
from recompute._pictures.overheads import Floor, Point, points_of
from recompute._pictures.style import FORMATS, new_figure, save
from recompute._plans.chains import not_uniform
from recompute._plans.fetching import tier_of
from recompute._plans.own import Progress
from recompute._plans.plan import OPTIONS, plan
from recompute._plans.problem import problem_of
from recompute._plans.schedule import PlanError, ProgramPlan
from recompute._plans.verify import verify
from recompute._simulator.many import Job, cores, simulate_many, spread
from recompute._simulator.published_replay import baseline
from recompute._simulator.run import Run
from recompute._simulator.simulate import by_amount
from recompute._traces.program import Program
from recompute.policies import DEFAULT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMALL: Final = 60  # operations that checkmate can be expected to solve
_WORTH_A_PROCESS: Final = 2_000  # operations: fewer are planned before another Python has started

# Replays


def jobs_of(
    programs: Sequence[Program],
    cases: Iterable[tuple[Mapping[str, Any], int | None]],
    budgets: Sequence[int | float],
) -> list[Job]:
    """All programs in all cases, (arguments of a replay, its rounds if any), within all budgets; in this order."""
    cases = list(cases)
    return [
        Job(number, {**by_amount(budget), **options}, iterations)
        for number in range(len(programs))
        for options, iterations in cases
        for budget in budgets
    ]


def run_all(programs: Sequence[Program], jobs: Sequence[Job], processes: int = 1) -> Iterator[Run]:
    """The runs of jobs; a line on the terminal shows how many are ready."""
    whole, ready = sum(job.rounds for job in jobs), [0]
    what = "replays" if all(job.iterations is None for job in jobs) else "rounds"
    with Live(lambda: [bar(ready[0], whole), f"{ready[0]} of {whole} {what}"]):
        done = lambda count: ready.__setitem__(0, count)
        yield from simulate_many(programs, jobs, processes=processes, done=done)


def replay_all(
    programs: Sequence[Program],
    policies: Sequence[str],
    budgets: Sequence[int | float],
    searches: Sequence[str] = ("exact",),
    *,
    iterations: int | None = None,
    effort: float = 1.0,
    tier: str | None = None,
) -> list[Run]:
    """All programs under all policies, searches and budgets, with progress; in this order.

    `iterations`: rounds of the default policy, the only one that learns from them, with plans of this `effort`.
    `tier`: where evicted bytes may go under the default policy, after all others.
    """
    cases: list[tuple[dict[str, Any], int | None]] = []
    for policy in policies:
        learns = iterations is not None and policy in ("default", DEFAULT)
        more = {"effort": effort} if learns else {}
        cases += [({"policy": policy, "search": name, **more}, iterations if learns else None) for name in searches]
    if tier is not None:
        cases.append(({"policy": "default", "tier": tier}, None))
    return list(run_all(programs, jobs_of(programs, cases, budgets), 1 if iterations is None else cores()))


# Plans


@dataclass(frozen=True)
class Planned:
    """One plan that was asked for. Bytes, and seconds of planning."""

    trace: str
    method: str
    budget_bytes: int
    budget_ratio: float
    seconds: float
    plan: ProgramPlan | None
    """Verified; None: there is none."""
    reason: str = ""
    """Why there is no plan, or what is to be said about it."""

    @property
    def status(self) -> Literal["ok", "infeasible", "timeout"]:
        if self.plan is not None:
            return "ok"
        return "timeout" if "time_limit" in self.reason else "infeasible"

    @property
    def overhead(self) -> float | None:
        return None if self.plan is None else self.plan.overhead

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        made = self.plan
        return {
            "trace": self.trace,
            "method": self.method,
            "status": self.status,
            "budget_bytes": self.budget_bytes,
            "budget_ratio": self.budget_ratio,
            "overhead": self.overhead,
            "peak_bytes": made and made.peak,
            "bound": made and made.bound,
            "computes": made and made.computes,
            "frees": made and len(made.steps) - made.computes - made.fetches,
            "fetches": made and made.fetches,
            "seconds": self.seconds,
        }


class PlanJob(NamedTuple):
    """One plan to be made: of the program with this number."""

    program: int
    method: str
    budget_bytes: int
    budget_ratio: float
    options: Mapping[str, Any]
    """Of `plan`; None, and those that the method does not have, are left out."""


def applicable(program: Program) -> list[str]:
    """The methods that make sense for a program: Revolve for uniform chains alone, Checkmate for small ones."""
    methods = ["own", "chen-sqrt", "chen-greedy"]
    if not not_uniform(problem_of(program, 1 << 62)):
        methods.append("revolve")
    if len(program.calls) <= _SMALL and find_spec("scipy") is not None:
        methods.append("checkmate")
    return methods


def tier_of_plans(text: str | None) -> str | None:
    """The tier from which plans can fetch: that of replays, unless plans know nothing of such a one."""
    try:
        if text is not None:
            tier_of(text)
    except ValueError:
        return None
    return text


def make(programs: Sequence[Program], job: PlanJob, progress: Progress | None = None) -> Planned:
    """One plan, verified. Raises CommandError if the planner cannot be used at all, or its plan is wrong."""
    program, method = programs[job.program], job.method
    given = {**job.options, "progress": progress}
    options = {name: value for name, value in given.items() if value is not None and name in OPTIONS[method]}
    asked = (program.name, method, job.budget_bytes, job.budget_ratio)
    start = perf_counter()
    try:
        made = plan(program, job.budget_bytes, method, **options)
    except PlanError as error:
        return Planned(*asked, perf_counter() - start, None, str(error))
    except (ImportError, ValueError) as error:
        raise CommandError(f"{method}: {error}", 1) from None
    seconds = perf_counter() - start
    try:
        peak, overhead = verify(program, made)
    except PlanError as error:
        raise CommandError(f"the plan of {method} for {program.name} is wrong: {error}; please report it", 1) from None
    return Planned(*asked, seconds, replace(made, peak=peak, overhead=overhead), made.note)


def plan_all(
    programs: Sequence[Program],
    methods: Sequence[Sequence[str]],
    budgets: Sequence[int | float],
    **options: Any,
) -> list[Planned]:
    """All programs by their methods under all budgets, with progress; in this order; see `monotone`."""
    jobs: list[PlanJob] = []
    for number, program in enumerate(programs):
        if methods[number]:
            peak = sum(baseline(program).values())
            sizes = [parse_budget(budget, whole=peak) for budget in budgets]
            ratios = [budget if isinstance(budget, float) else budget / max(1, peak) for budget in budgets]
            for method in methods[number]:
                jobs += [PlanJob(number, method, *size, options) for size in zip(sizes, ratios, strict=True)]
    made: list[Planned] = []
    now = [0.0, 0.0]  # of the plan at hand: the share of the search, and the least overhead

    def watch(share: float, least: float) -> None:
        now[:] = share, least

    def parts() -> list[str]:
        told = [bar(len(made), len(jobs)), f"{len(made)} of {len(jobs)} plans"]
        if now[1]:
            told.append(f"this one {now[0]:.0%} searched, overhead {now[1]:.4f}")
        return told

    operations = sum(len(programs[job.program].calls) for job in jobs)
    processes = min(len(jobs), cores(), max(1, operations // _WORTH_A_PROCESS))
    with Live(parts):
        work = make if processes > 1 else partial(make, progress=watch)
        for planned in spread(work, list(programs), jobs, processes):
            made.append(planned)
            now[:] = 0.0, 0.0
    plans = iter(made)
    return [plan for names in methods for plan in monotone(list(islice(plans, len(names) * len(budgets))))]


def monotone(plans: Sequence[Planned]) -> list[Planned]:
    """The same plans of one program, but none of the own method costs more than another one for a smaller budget.

    What fits into less memory fits into more: that plan takes the place of one that costs more, or that is not there.
    """
    cheapest: ProgramPlan | None = None
    kept = list(plans)
    for number in sorted(range(len(plans)), key=lambda number: plans[number].budget_bytes):
        planned = plans[number]
        if planned.method != "own":
            continue
        if cheapest is None or (planned.plan is not None and planned.plan.overhead <= cheapest.overhead):
            cheapest = planned.plan
        else:
            kept[number] = replace(
                planned,
                reason=f"that for {format_bytes(cheapest.budget)}, which has a lower overhead than the one found",
                plan=replace(cheapest, budget=planned.budget_bytes, bound=None),
            )
    return kept


# As text


def percent(figures: Run | Planned) -> str:
    """Its budget, as a share of the peak."""
    return f"{100 * figures.budget_ratio:.4g}%"


def cell(figures: Run | Planned) -> str:
    """Its overhead, or why there is none."""
    return figures.status if figures.overhead is None else f"{figures.overhead:.3f}"


def print_overheads(corner: str, heads: Sequence[str], figures: Sequence[Run | Planned]) -> None:
    """A row for each policy and planner, a column for each budget."""
    columns = len(heads)
    rows = [
        [one.policy if isinstance(one, Run) else one.method, *map(cell, figures[start:][:columns])]
        for start in range(0, len(figures), columns)
        for one in (figures[start],)
    ]
    print_list([corner, *heads], rows, sys.stdout, "<" + ">" * columns)


# As a picture


def target(output: str) -> Path:
    """Where a picture is to go. Raises CommandError if it could not be drawn, or not be written there."""
    path = destination(output, "picture", FORMATS)
    try:
        new_figure(1, 1)
    except ImportError as error:
        raise CommandError(str(error), 1) from None
    return path


def write(figure: Figure, path: Path) -> Path:
    """Save a figure, with an error of one line."""
    with writing(path):
        return save(figure, path)


def name_apart(programs: list[Program]) -> list[Program]:
    """The programs, with a number behind a name that occurred before: panels go by name."""
    seen: Counter[str] = Counter()
    for program in programs:
        seen[program.name] += 1
        if seen[program.name] > 1:
            program.name = f"{program.name} ({seen[program.name]})"
    return programs


def points(runs: Sequence[Run], plans: Sequence[Planned]) -> list[Point]:
    """The points of the picture of overheads."""
    drawn = points_of(runs)
    for one in plans:
        bound = None if one.plan is None else one.plan.bound
        drawn.append(Point(one.trace, one.method, one.budget_ratio, one.overhead, "planner", bound))
    return drawn


def floors(programs: Sequence[Program]) -> dict[str, Floor]:
    """The least memory of any schedule, by trace."""
    return {program.name: Floor.of(program, sum(baseline(program).values())) for program in programs}
