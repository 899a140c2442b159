"""Pictures for commands: where they go, checked before the work, and what they are drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recompute._cli.output import CommandError
from recompute._cli.planning import PlanJob, Planned, make_many, monotone
from recompute._live import Live, bar
from recompute._pictures.points import Floor, Point, points_of
from recompute._pictures.style import FORMATS, new_figure, save
from recompute._simulator.many import Job, cores, simulate_many
from recompute._simulator.replay import baseline
from recompute._simulator.run import Run
from recompute._simulator.simulate import by_amount
from recompute._traces.program import Program
from recompute.policies import DEFAULT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES: Final = ".9,.8,.7,.6,.5,.4,.3,.2,.1"
COMPARED: Final = "default,dtr-eq,dtr,dtr-local,msps,lru"


def target(output: str) -> Path:
    """Where a picture is to go. Raises CommandError if it could not be drawn, or not be written there."""
    path = Path(output)
    if path.suffix.lower() not in FORMATS:
        raise CommandError(f"the ending of {output!r} must be one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"there is no directory {path.absolute().parent} for the picture")
    try:
        new_figure(1, 1)
    except ImportError as error:
        raise CommandError(str(error), 1) from None
    return path


def write(figure: Figure, path: Path) -> Path:
    """Save a figure, with an error of one line."""
    try:
        return save(figure, path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}", 1) from None


def name_apart(programs: list[Program]) -> list[Program]:
    """The programs, with a number behind a name that occurred before: panels go by name."""
    seen: Counter[str] = Counter()
    for program in programs:
        seen[program.name] += 1
        if seen[program.name] > 1:
            program.name = f"{program.name} ({seen[program.name]})"
    return programs


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
    jobs: list[Job] = []
    for number in range(len(programs)):
        for policy in policies:
            learns = iterations is not None and policy in ("default", DEFAULT)
            rounds, extra = (iterations, {"effort": effort}) if learns else (None, {})
            jobs += [
                Job(number, {**by_amount(budget), "policy": policy, "search": search, **extra}, rounds)
                for search in searches
                for budget in budgets
            ]
        if tier is not None:
            jobs += [Job(number, {**by_amount(budget), "policy": "default", "tier": tier}) for budget in budgets]
    ready, whole = [0], sum(job.rounds for job in jobs)
    what, processes = ("replays", 1) if iterations is None else ("rounds", cores())
    with Live(lambda: [bar(ready[0], whole), f"{ready[0]} of {whole} {what}"]):
        done = simulate_many(programs, jobs, processes=processes, done=lambda count: ready.__setitem__(0, count))
        return list(done)


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
            for method in methods[number]:
                jobs += [PlanJob(number, method, budget, peak, **options) for budget in budgets]
    ready, share, best = [0], [0.0], [0.0]

    def watch(done: float, least: float) -> None:
        share[0], best[0] = done, least

    def parts() -> list[str]:
        told = [bar(ready[0], len(jobs)), f"{ready[0]} of {len(jobs)} plans"]
        if best[0]:
            told.append(f"this one {share[0]:.0%} searched, overhead {best[0]:.4f}")
        return told

    def done(count: int) -> None:
        ready[0], share[0], best[0] = count, 0.0, 0.0

    with Live(parts):
        return monotone(list(make_many(programs, jobs, done=done, progress=watch)))


def points(runs: Sequence[Run], plans: Sequence[Planned]) -> list[Point]:
    """What the picture of overheads is drawn from."""
    return points_of(runs) + [
        Point(plan.trace, plan.method, plan.budget_ratio, plan.overhead, "planner", plan.bound) for plan in plans
    ]


def floors(programs: Sequence[Program]) -> dict[str, Floor]:
    """What no schedule can do without, by trace."""
    return {program.name: Floor.of(program, sum(baseline(program).values())) for program in programs}
