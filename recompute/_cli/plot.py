"""`recompute plot`: pictures of recorded programs, under policies and planners, and of the uniform chain."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recompute._budget import format_bytes, parse_budget
from recompute._cli import arguments
from recompute._cli.output import CommandError, print_json, warn
from recompute._cli.points import floors, name_apart, plan_all, points, replay_all, run_all, target, write
from recompute._live import Live, bar
from recompute._pictures.bars import Moment, moments, plan_events
from recompute._pictures.chain import REGIMES, ChainPoint, chain_cost
from recompute._pictures.memory import memory
from recompute._pictures.overheads import accesses, overhead
from recompute._pictures.residency import residency
from recompute._pictures.style import short
from recompute._simulator.many import Job
from recompute._simulator.published_replay import baseline
from recompute._simulator.simulate import by_amount, simulate
from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.events import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "plot"
HELP = "draw a recorded program: residency of values, memory, overhead, accesses"

_SIZES: Final = "16,32,64,128,256,512"
_LEAST: Final = "0.1%"
_CHAIN_LIMIT: Final = 16.0  # the overhead above which a chain is given up: those without neighbourhoods grow fast

_EXAMPLES: Final = f"""\
kinds:
  residency   a row for each value, a bar while it is in memory; one trace, one budget, one policy or method
  memory      bytes over time against the budget; one trace, one budget, several policies and methods
  overhead    overhead against budget, a panel for each trace; policies and methods
  accesses    candidates scored against budget, a panel for each trace; policies and searches
  chain       cost of a uniform training chain against its length, compared with the optimum; no trace

examples:
  recompute plot residency unet.jsonl --budget 50%
  recompute plot memory unet.jsonl --budget 0.4 --policy default,lru --output memory.svg
  recompute plot overhead unet.jsonl resnet32.jsonl --policy default,dtr-eq --method own
  recompute plot overhead unet.jsonl --policy default --iterations 3
  recompute plot accesses unet.jsonl --policy dtr-eq,dtr --search exact,sample
  recompute plot chain --sizes {_SIZES},1024
"""


_ONLY: Final = {
    "budget": ("residency", "memory", "overhead", "accesses"),
    "search": ("residency", "memory", "overhead", "accesses"),
    "method": ("residency", "memory", "overhead"),
    "time_limit": ("residency", "memory", "overhead"),
    "operations": ("residency", "memory", "overhead"),
    "least": ("residency",),
    "iterations": ("overhead",),
    "effort": ("overhead",),
    "sizes": ("chain",),
}
"""Option -> the kinds that it is for; the others are for all."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draw recorded programs as they run with policies and plans."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("kind", metavar="KIND", help=", ".join(_KINDS))
    add("traces", metavar="TRACE", nargs="*", help="recorded programs, plain or gzipped; -: standard input")
    add(
        "--budget",
        metavar="SHARE[,..]",
        action="append",
        help="shares of the peak or bytes; default 0.5, or .9 to .1 for overhead and accesses",
    )
    arguments.add_policies(parser)
    add("--search", metavar="NAME[,..]", action="append", help=arguments.SEARCH_HELP)
    arguments.add_methods(parser, "none")
    add(
        "--least",
        metavar="SHARE",
        help=f"residency: only values of at least this share of the peak; default {_LEAST}".replace("%", "%%"),
    )
    arguments.add_rounds(parser, "rounds of the default policy; overhead: the last round gets a line of its own")
    add("--sizes", metavar="N[,..]", help=f"chain: the lengths; default {_SIZES}")
    add("--output", metavar="FILE", help="the picture (.png, .svg or .pdf); default KIND.png")
    add("--json", action="store_true", help="print the kind and the path of the picture as a JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    draw = _KINDS.get(options.kind)
    if draw is None:
        raise CommandError(f"unknown kind {options.kind!r}; choose from {', '.join(_KINDS)}")
    if (options.kind == "chain") == bool(options.traces):
        raise CommandError("chain needs no trace" if options.traces else f"{options.kind} needs a trace")
    for option, kinds in _ONLY.items():
        if options.kind not in kinds and getattr(options, option) is not None:
            raise CommandError(f"--{option.replace('_', '-')} is for {', '.join(kinds)}, not for {options.kind}")
    path: Path = target(options.output or f"{options.kind}.png")
    try:
        figure = draw(options)
    except ValueError as error:
        raise CommandError(str(error), 1) from None
    written = write(figure, path)
    if options.json:
        print_json({"kind": options.kind, "picture": str(written)})
    else:
        print(written)
    return 0


def _residency(options: argparse.Namespace) -> Figure:
    names = _names(options)
    asked = _LEAST if options.least is None else options.least
    least = arguments.budgets([asked])[0] if asked.strip("0.%") else 0.0
    if not isinstance(least, float):
        raise CommandError(f"--least is a share of the peak, such as {_LEAST}, not {asked!r}")
    if len(names) != 1:
        raise CommandError(f"residency takes one policy or method, not {', '.join(names)}")
    watched = _watch(options, names)
    ((name, events),) = watched.events.items()
    return residency(
        events,
        title=f"{watched.title} · {name}",
        budget=watched.budget,
        least=least,
        marks=watched.marks[name],
        unit=watched.program.unit,
    )


def _memory(options: argparse.Namespace) -> Figure:
    watched = _watch(options, _names(options))
    whole: list[Event] = []
    simulate(watched.program, 1 << 62, policy="none", listener=whole.append, peak=watched.peak)
    return memory(
        watched.events,
        budget=watched.budget,
        whole=whole,
        title=watched.title,
        marks=watched.marks,
        unit=watched.program.unit,
    )


class _Watched:
    """One program under one budget: what happened under each name."""

    def __init__(self, program: Program, budget: int | float) -> None:
        self.program = program
        self.peak = baseline(program)
        whole = sum(self.peak.values())
        self.budget = parse_budget(budget, whole=whole)
        share = 100 * self.budget / max(1, whole)
        self.title = f"{short(program.name)} in {format_bytes(self.budget)}, {share:.3g}% of its peak"
        self.events: dict[str, list[Event]] = {}
        self.marks: dict[str, Sequence[Moment]] = {}

    def add(self, name: str, events: list[Event]) -> None:
        self.events[name] = events
        self.marks[name] = moments(events, self.program.marks)


def _names(options: argparse.Namespace) -> list[str]:
    """Policies and methods; the default policy if none is named."""
    chosen = arguments.methods(options.method)
    return [*(arguments.policies(options.policy) if options.policy or not chosen else []), *chosen]


def _watch(options: argparse.Namespace, names: Sequence[str]) -> _Watched:
    planners = arguments.methods(options.method)
    wanted, limit, searches = (
        arguments.budgets(options.budget, "0.5"),
        arguments.limits(options, planners),
        arguments.searches(options.search),
    )
    if len(wanted) != 1 or len(options.traces) != 1 or len(searches) != 1:
        raise CommandError(f"{options.kind} takes one trace, one budget and one search")
    (program,) = arguments.load(options.traces)
    watched = _Watched(program, wanted[0])
    at = [0]

    def state(name: str) -> list[str]:
        return [bar(at[0], len(program.steps)), f"{name} under {wanted[0]}"]

    for name in names:
        if name in planners:
            continue
        events: list[Event] = []
        with Live(partial(state, name)):
            result = simulate(
                program,
                **by_amount(wanted[0]),
                policy=name,
                search=searches[0],
                listener=events.append,
                progress=lambda step: at.__setitem__(0, step),
                peak=watched.peak,
            )
        if result.overhead is None:
            warn(f"{name} does not finish ({result.status}); the picture ends there, too")
        told = result.status if result.overhead is None else f"overhead {result.overhead:.3f}"
        watched.add(f"{name} ({told})", events)
    for planned in plan_all([program], [planners], wanted, **limit):
        if planned.plan is not None:
            watched.add(f"{planned.method} (overhead {planned.overhead:.3f})", plan_events(program, planned.plan))
        elif len(names) > 1:
            warn(f"{planned.method} is left out: {planned.reason}")
        else:
            raise CommandError(f"{planned.method}: {planned.reason}", 1)
    return watched


def _overhead(options: argparse.Namespace) -> Figure:
    chosen, planned = (
        arguments.policies(options.policy, arguments.COMPARED),
        arguments.methods(options.method),
    )
    wanted, limit = arguments.budgets(options.budget), arguments.limits(options, planned)
    searches = arguments.searches(options.search)
    if len(searches) > 1:
        raise CommandError(f"{options.kind} takes one search, not {', '.join(searches)}")
    iterations, effort = arguments.rounds(options)
    programs = name_apart(arguments.load(options.traces))
    runs = replay_all(programs, chosen, wanted, searches, iterations=iterations, effort=effort)
    plans = plan_all(programs, [planned] * len(programs), wanted, **limit)
    return overhead(points(runs, plans), floors=floors(programs))


def _accesses(options: argparse.Namespace) -> Figure:
    wanted, searches = (
        arguments.budgets(options.budget),
        arguments.searches(options.search),
    )
    chosen = arguments.policies(options.policy, arguments.COMPARED)
    return accesses(replay_all(name_apart(arguments.load(options.traces)), chosen, wanted, searches))


def _chain(options: argparse.Namespace) -> Figure:
    sizes = [text.strip() for text in (options.sizes or _SIZES).split(",")]
    for text in sizes:
        if not text.isdecimal() or int(text) < 3:
            raise CommandError(f"--sizes are whole numbers, at least 3, not {text!r}")
    return chain_cost(
        chain_points([int(text) for text in sizes], arguments.policies(options.policy, arguments.COMPARED))
    )


def chain_points(sizes: Sequence[int], names: Sequence[str]) -> list[ChainPoint]:
    """The uniform chain of these lengths under policies, in every regime of the budget, with progress."""
    programs = [chain(n) for n in sizes]
    cases = [(name, number, regime) for regime in REGIMES for name in names for number in range(len(sizes))]
    jobs = [
        Job(number, {"budget": max(2, REGIMES[regime](sizes[number])), "policy": name, "limit": _CHAIN_LIMIT})
        for name, number, regime in cases
    ]
    return [
        ChainPoint(name, sizes[number], regime, None if run.overhead is None else run.overhead * 2 * sizes[number])
        for (name, number, regime), run in zip(cases, run_all(programs, jobs), strict=True)
    ]


_KINDS: Final[Mapping[str, Callable[[argparse.Namespace], Any]]] = {
    "residency": _residency,
    "memory": _memory,
    "overhead": _overhead,
    "accesses": _accesses,
    "chain": _chain,
}
