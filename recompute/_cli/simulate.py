"""`recompute simulate`: what a recorded program would have cost under other budgets and policies."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Final, get_args

from recompute._budget import bytes_or_share, format_bytes
from recompute._cli.output import CommandError, print_json, print_list, print_text
from recompute._live import Live, bar
from recompute._simulator.tier import SimulatedTier
from recompute._tables import seconds
from recompute._traces.program import Program, TraceError
from recompute._traces.read import read
from recompute.extend import ReleaseMode
from recompute.policies import DEFAULT, POLICIES, SEARCHES, search_of

if TYPE_CHECKING:
    from recompute._simulator.run import Run

NAME = "simulate"
HELP = "replay a recorded program under other budgets and policies"

_EXAMPLES: Final = """\
examples:
  recompute simulate train.recompute.jsonl.gz --budget 50%
  recompute simulate unet.jsonl --budget 0.9,0.7,0.5,0.3 --policy default,dtr-eq,lru
  recompute simulate unet.jsonl --budget 4GB --policy all --json
  recompute simulate unet.jsonl --budget 0.5,0.3 --iterations 5
  recompute simulate unet.jsonl --budget 0.3 --tier 12GB/s,overlap

A trace is what `recompute run --record` or Cache(trace=...) wrote, or one in the format of the DTR authors' simulator.
A budget is a share of the peak of a run without a budget (0.4 or 40%), or bytes (512MB). Overhead is all compute
divided by the compute without eviction; a run is given up as thrashing above the limit, or as oom when something does
not fit. With --iterations the program is replayed several times in one cache, as rounds of one that repeats it: the
default policy plans the next rounds from the first one. With --tier what is dear to compute moves to a slower place;
the time of transfers counts as overhead, and transfers that overlap take as long as the link is busy after the end.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Replay recorded programs through the cache, with a virtual clock and nothing in memory."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="recorded programs, plain or gzip")
    add_budgets(parser)
    add_policies(parser)
    searches = ", ".join(name.replace(" ", "-") for name in SEARCHES)
    add("--search", metavar="NAME", default="exact", help=f"{searches}; default exact")
    modes = get_args(ReleaseMode)
    add("--release", metavar="MODE", default="eager", choices=modes, help=f"{', '.join(modes)}; default eager")
    add("--limit", metavar="OVERHEAD", default="2.0", help="give a run up above this overhead; default 2.0")
    add(
        "--machine",
        choices=("published", "library"),
        help="the habits of the published simulator, or the cache as it is; by default the former for published "
        "policies on published traces",
    )
    add_tier(parser)
    add_rounds(parser)
    add("--no-foresight", action="store_true", help="let each round be as if there had been none before")
    add("--processes", metavar="N", help="replays at a time; default one a core")
    add("--json", action="store_true", help="one JSON object a run on stdout")


def add_rounds(parser: argparse.ArgumentParser, what: str = "") -> None:
    """The options --iterations and --effort. `what` is repeated; by default the program."""
    add = parser.add_argument
    add("--iterations", metavar="N", help=f"rounds of {what or 'a program that repeats the recorded one'}")
    add("--effort", metavar="X", help="for the plan of a round; 1, the default, is about ten seconds")


_TIERS: Final = (
    "evicted bytes may move: 12GB/s, or 12GB/s,overlap if transfers do not stop the compute; further words: a latency "
    "(1ms), a limit (50GB), always"
)


def add_tier(parser: argparse.ArgumentParser, what: str = _TIERS) -> None:
    """The option --tier."""
    parser.add_argument("--tier", metavar="BANDWIDTH[,..]", help=what)


def tier(options: argparse.Namespace) -> str | None:
    """What `add_tier` asks for, checked."""
    if options.tier is not None:
        try:
            SimulatedTier.read(options.tier)
        except ValueError as error:
            raise CommandError(f"--tier: {error}") from None
    return None if options.tier is None else str(options.tier)


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """The option --budget, for several."""
    parser.add_argument(
        "--budget",
        metavar="SHARE[,..]",
        action="append",
        required=True,
        help="shares of the peak (0.4 or 40%%) or bytes (512MB); several with commas, or repeated",
    )


def add_policies(parser: argparse.ArgumentParser) -> None:
    """The option --policy, for several."""
    parser.add_argument(
        "--policy",
        metavar="NAME[,..]",
        action="append",
        help=f"{', '.join(POLICIES)}; all, or default ({DEFAULT}); several with commas, or repeated",
    )


def run(options: argparse.Namespace) -> int:
    from recompute._simulator.many import Job, cores, simulate_many  # process pools: not for every command

    try:
        search_of(options.search)
    except ValueError as error:
        raise CommandError(str(error)) from None
    common = {
        "search": options.search,
        "release": options.release,
        "limit": _limit(options.limit),
        "machine": options.machine,
        "tier": tier(options),
    }
    wanted, chosen = budgets(options.budget), policies(options.policy)
    processes = cores() if options.processes is None else count("--processes", options.processes)
    iterations, effort = rounds(options)
    if options.no_foresight and iterations is None:
        raise CommandError("--no-foresight is of rounds, and needs --iterations")
    if iterations is not None:
        common |= {"foresight": not options.no_foresight, "effort": effort}
    programs = load(options.traces)
    jobs = [
        Job(number, budget, {"policy": policy, **common}, iterations)
        for number in range(len(programs))
        for policy in chosen
        for budget in wanted
    ]
    ready, whole = [0], sum(job.rounds for job in jobs)
    what = "replays" if iterations is None else "rounds"
    runs: list[list[Run]] = []  # of each job
    with Live(lambda: [bar(ready[0], whole), f"{ready[0]} of {whole} {what}"]):
        for run in simulate_many(programs, jobs, processes=processes, done=lambda count: ready.__setitem__(0, count)):
            if options.json:
                print_json(run.as_dict())
            if run.iteration == 1:
                runs.append([])
            runs[-1].append(run)
    if not options.json:
        per_program = len(chosen) * len(wanted)
        for number, program in enumerate(programs):
            _show(program, runs[number * per_program :][:per_program], len(wanted), iterations)
    return 0


def load(paths: list[str]) -> list[Program]:
    """The programs, with an error of one line for what is no trace."""
    programs: list[Program] = []
    with Live(lambda: [f"reading {paths[min(len(programs), len(paths) - 1)]}"]):
        for path in paths:
            try:
                programs.append(read(path))
            except TraceError as error:
                raise CommandError(str(error), 1) from None
            except OSError as error:
                raise CommandError(f"{path} cannot be read: {error.strerror or error}", 1) from None
    return programs


def budgets(given: list[str]) -> list[int | float]:
    """Bytes (int) or shares of the peak (float) from the command line."""
    try:
        return [bytes_or_share(part) for text in given for part in text.split(",")]
    except ValueError as error:
        raise CommandError(str(error)) from None


def policies(given: list[str] | None) -> list[str]:
    """Names from the command line, each once, as they were asked for."""
    names = [name.strip() for text in given or ["default"] for name in text.split(",")]
    names = [policy for name in names for policy in (POLICIES if name == "all" else [name])]
    for name in names:
        if name not in POLICIES and name != "default":
            raise CommandError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}, all, default")
    return list(dict.fromkeys(names))


def _limit(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit >= 1:
        raise CommandError(f"--limit is an overhead, at least 1, not {text!r}")
    return limit


def count(name: str, text: str) -> int:
    """A whole number, at least 1, from the command line."""
    if not text.isdecimal() or not int(text):
        raise CommandError(f"{name} must be a whole number, at least 1, not {text!r}")
    return int(text)


def rounds(options: argparse.Namespace) -> tuple[int | None, float]:
    """What `add_rounds` asks for: how many rounds, if any, and the effort of a plan."""
    if options.iterations is not None:
        return count("--iterations", options.iterations), _effort(options.effort or "1")
    if options.effort is not None:
        raise CommandError("--effort is of rounds, and needs --iterations")
    return None, 1.0


def _effort(text: str) -> float:
    try:
        effort = float(text)
    except ValueError:
        effort = -1.0
    if not 0 <= effort < math.inf:
        raise CommandError(f"--effort is a number, at least 0, not {text!r}; 1 is about ten seconds of planning")
    return effort


def _show(program: Program, found: list[list[Run]], columns: int, iterations: int | None) -> None:
    """The runs of each job, of so many budgets in a row: rounds if there are `iterations`."""
    runs = [first for first, *_ in found]
    peak = format_bytes(runs[0].baseline_peak_bytes)
    print_text(
        f"{program.name}: {len(program.calls):,} operations, peak {peak}, "
        f"{seconds(runs[0].model_time)} of compute without eviction",
        sys.stdout,
    )
    if iterations is not None:
        _show_rounds(found, iterations)
    elif columns > 1:
        _show_overheads(runs, columns)
    else:
        _show_runs(runs)
    print()


def _show_rounds(found: list[list[Run]], iterations: int) -> None:
    """The overhead of each round, a row for each policy and budget; after a failure there are no more."""
    rows: list[list[str]] = []
    for runs in found:
        cells = [_cell(run) for run in runs]
        rows.append([runs[0].policy, _budget(runs[0]), *cells, *[""] * (iterations - len(cells))])
    names = ["overhead", "budget", "round 1", *[str(number) for number in range(2, iterations + 1)]]
    print_list(names, rows, sys.stdout, "<>" + ">" * iterations)


def _show_overheads(runs: list[Run], columns: int) -> None:
    """A row for each policy, a column for each budget."""
    rows = [
        (runs[start].policy, *[_cell(run) for run in runs[start : start + columns]])
        for start in range(0, len(runs), columns)
    ]
    print_list(["overhead", *[_head(run) for run in runs[:columns]]], rows, sys.stdout, "<" + ">" * columns)


def _show_runs(runs: list[Run]) -> None:
    """What there is to know about each run, a row for each."""
    rows = [
        (
            run.policy,
            _budget(run),
            _cell(run),
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
    return f"{format_bytes(run.budget_bytes)} ({_head(run)})"


def _head(run: Run) -> str:
    return f"{100 * run.budget_ratio:.4g}%"


def _cell(run: Run) -> str:
    return run.status if run.overhead is None else f"{run.overhead:.3f}"
