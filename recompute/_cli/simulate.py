"""`recompute simulate`: the cost of a recorded program under other budgets and policies."""

from __future__ import annotations

import argparse
import sys
from typing import Final, get_args

from recompute._budget import format_bytes
from recompute._cli import arguments
from recompute._cli.output import CommandError, print_json, print_list, print_text
from recompute._cli.points import cell, jobs_of, percent, print_overheads, run_all
from recompute._pictures.overheads import Floor
from recompute._simulator.many import cores
from recompute._simulator.neighbourhoods import knows
from recompute._simulator.run import Run
from recompute._traces.program import Program
from recompute.policies import ReleaseMode, policy_of
from recompute.text import seconds

NAME = "simulate"
HELP = "replay a recorded program under other budgets and policies"

_EXAMPLES: Final = """\
examples:
  recompute simulate train.recompute.jsonl.gz                  which budget? overheads from 90% down to 5%
  recompute simulate train.recompute.jsonl.gz --budget 50%
  recompute simulate unet.jsonl --budget 0.9,0.7,0.5,0.3 --policy default,dtr-eq,lru
  recompute simulate unet.jsonl --budget 4GB --policy all --json
  recompute simulate unet.jsonl --budget 0.5,0.3 --iterations 5
  recompute simulate unet.jsonl --budget 0.3 --tier 12GB/s,overlap

A trace comes from `recompute run --record` or Cache(trace=...), or has the format of the DTR authors' simulator. A
budget is a share of the peak of a run without a budget (0.4 or 40%), or bytes (512MB). Overhead is all compute divided
by the compute without eviction. A run ends as `thrash` when its overhead exceeds the limit, and as `oom` when something
does not fit. Without --budget the result is a table of budgets, and the limit is 20. If a single budget was given and
does not work, the exit status is 1.

With --iterations the program is replayed several times in one cache, as the rounds of a program that repeats; the
default policy plans the next rounds from the first one. With --tier, values that are expensive to compute move to a
slower tier. The time of transfers counts as overhead; of transfers that overlap, only the time after the end of the
program counts.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Replay recorded programs in the cache, with a virtual clock and without any data."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="recorded programs, plain or gzipped; -: standard input")
    arguments.add_budgets(parser, required=False, default="; default: shares from 90%% to 5%%")
    arguments.add_policies(parser)
    add("--search", metavar="NAME", default="exact", help=arguments.SEARCH_HELP)
    modes = get_args(ReleaseMode)
    add("--release", metavar="MODE", default="eager", choices=modes, help=f"{', '.join(modes)}; default eager")
    add("--limit", metavar="OVERHEAD", help="give up a run above this overhead; default 2.0, or 20 without --budget")
    add(
        "--machine",
        choices=("published", "library"),
        help="behave like the published simulator or like this library; default: published for published policies on "
        "published traces without a tier, else library",
    )
    arguments.add_tier(parser)
    arguments.add_rounds(parser, "how many rounds, for a program that repeats the recorded one")
    add("--no-foresight", action="store_true", help="do not learn from earlier rounds")
    add("--processes", metavar="N", help="how many replays at a time; default one per core")
    add("--json", action="store_true", help="print a JSON object per run on stdout")


_LADDER: Final = ".9,.8,.7,.6,.5,.4,.3,.2,.1,.05"
_HIGH: Final = "20"
"""The limit of a ladder: what costs more is said to do so."""


def run(options: argparse.Namespace) -> int:
    ladder = options.budget is None
    limit = arguments.number(options.limit or (_HIGH if ladder else "2.0"))
    if not limit >= 1:
        raise CommandError(f"--limit is an overhead, at least 1, not {options.limit!r}")
    (search,) = arguments.searches([options.search])
    wanted, chosen = arguments.budgets(options.budget, _LADDER), arguments.policies(options.policy)
    common = {"search": search, "release": options.release, "limit": limit, "machine": options.machine}
    common["tier"] = arguments.tier(options)
    if options.machine == "published":
        _check_published(chosen, common["tier"])
    processes = cores() if options.processes is None else arguments.count("--processes", options.processes)
    iterations, effort = arguments.rounds(options)
    if options.no_foresight and iterations is None:
        raise CommandError("--no-foresight needs --iterations")
    if iterations is not None:
        common |= {"foresight": not options.no_foresight, "effort": effort}
    programs = arguments.load(options.traces)
    jobs = jobs_of(programs, [({"policy": policy, **common}, iterations) for policy in chosen], wanted)
    runs: list[list[Run]] = []  # of each job
    for run in run_all(programs, jobs, processes):
        if options.json:
            print_json(run.as_dict())
        if run.iteration == 1:
            runs.append([])
        runs[-1].append(run)
    if not options.json:
        per_program = len(chosen) * len(wanted)
        for number, program in enumerate(programs):
            _show(program, runs[number * per_program :][:per_program], wanted, iterations, limit if ladder else 0.0)
    return int(len(jobs) == 1 and runs[0][-1].status != "ok")


def _check_published(chosen: list[str], tier: str | None) -> None:
    """Tiers and the library's own policies need the library's machine."""
    unknown = [name for name in chosen if not knows(policy_of(name))]  # type: ignore[arg-type]  # checked names
    if unknown or tier is not None:
        what = "tiers" if tier is not None else f"the policy {unknown[0]!r}"
        raise CommandError(f"--machine published does not know {what}; use --machine library, or leave it out")


def _show(
    program: Program, runs_of_jobs: list[list[Run]], asked: list[int | float], iterations: int | None, ladder: float
) -> None:
    """The runs of each job, of so many budgets in a row: rounds if there are `iterations`.

    `ladder`: the limit of a ladder; 0: it is none.
    """
    runs = [first for first, *_ in runs_of_jobs]
    whole = runs[0].baseline_peak_bytes
    least = f"needs at least {format_bytes(round(Floor.of(program, whole).operation * whole))}, " if ladder else ""
    print_text(
        f"{program.name}: {len(program.calls):,} operations, peak {format_bytes(whole)}, {least}"
        f"{seconds(runs[0].model_time)} of compute without eviction",
        sys.stdout,
    )
    if iterations is not None:
        _show_rounds(runs_of_jobs, iterations)
    elif ladder:
        _show_ladder(runs, len(asked), ladder)
    elif len(asked) > 1:
        columns = zip(asked, runs, strict=False)  # each by the name by which it was asked for
        heads = [format_bytes(budget) if isinstance(budget, int) else percent(run) for budget, run in columns]
        print_overheads("overhead", heads, runs)
    else:
        _show_runs(runs)
    print()


def _show_rounds(runs_of_jobs: list[list[Run]], iterations: int) -> None:
    """The overhead of each round, a row for each policy and budget; after a failure there are no more."""
    rows: list[list[str]] = []
    for runs in runs_of_jobs:
        cells = [cell(run) for run in runs]
        rows.append([runs[0].policy, _budget(runs[0]), *cells, *[""] * (iterations - len(cells))])
    names = ["overhead", "budget", "round 1", *[str(number) for number in range(2, iterations + 1)]]
    print_list(names, rows, sys.stdout, "<>" + ">" * iterations)


def _show_ladder(runs: list[Run], rungs: int, limit: float) -> None:
    """A row for each budget, a column for each policy."""

    def rung(run: Run) -> str:
        return cell(run) if run.status == "ok" else f"> {limit:g}" if run.status == "thrash" else "does not fit"

    rows = [
        (percent(run), format_bytes(run.budget_bytes), *map(rung, runs[number::rungs]))
        for number, run in enumerate(runs[:rungs])
    ]
    names = [run.policy for run in runs[::rungs]]
    heads = ["overhead"] if len(names) == 1 else [f"overhead, {name}" for name in names]
    print_list(["budget", "bytes", *heads], rows, sys.stdout, ">>" + ">" * len(names))


def _show_runs(runs: list[Run]) -> None:
    """All figures, a row for each run."""
    rows = [
        (
            run.policy,
            _budget(run),
            cell(run),
            format_bytes(run.peak_bytes),
            f"{run.evictions:,}",
            f"{run.rematerializations:,}",
            seconds(run.seconds),
        )
        for run in runs
    ]
    names = ["policy", "budget", "overhead", "peak", "evictions", "rematerializations", "simulated in"]
    print_list(names, rows, sys.stdout, "<>>>>>>")


def _budget(run: Run) -> str:
    return f"{format_bytes(run.budget_bytes)} ({percent(run)})"
