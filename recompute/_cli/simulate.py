"""`recompute simulate`: what a recorded program would have cost under other budgets and policies."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Final, get_args

from recompute._budget import bytes_or_share, format_bytes
from recompute._cli.output import CommandError, print_json, print_list, print_text
from recompute._live import Live, bar
from recompute._pictures.points import Floor
from recompute._simulator.tier import SimulatedTier
from recompute._simulator.victims import knows
from recompute._tables import seconds
from recompute._traces.program import Program, TraceError
from recompute._traces.read import read
from recompute.policies import DEFAULT, POLICIES, SEARCHES, ReleaseMode, policy_of, search_of

if TYPE_CHECKING:
    from recompute._simulator.run import Run

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
    add("traces", metavar="TRACE", nargs="+", help="recorded programs, plain or gzipped")
    add_budgets(parser, required=False)
    add_policies(parser)
    searches = ", ".join(name.replace(" ", "-") for name in SEARCHES)
    add("--search", metavar="NAME", default="exact", help=f"{searches}; default exact")
    modes = get_args(ReleaseMode)
    add("--release", metavar="MODE", default="eager", choices=modes, help=f"{', '.join(modes)}; default eager")
    add("--limit", metavar="OVERHEAD", help="give up a run above this overhead; default 2.0, or 20 without --budget")
    add(
        "--machine",
        choices=("published", "library"),
        help="behave like the published simulator or like this library; default: published for published policies on "
        "published traces without a tier, else library",
    )
    add_tier(parser)
    add_rounds(parser)
    add("--no-foresight", action="store_true", help="do not learn from earlier rounds")
    add("--processes", metavar="N", help="how many replays at a time; default one per core")
    add("--json", action="store_true", help="print a JSON object per run on stdout")


def add_rounds(parser: argparse.ArgumentParser, what: str = "") -> None:
    """The options --iterations and --effort. `what`: the help of the first."""
    add = parser.add_argument
    add("--iterations", metavar="N", help=what or "how many rounds, for a program that repeats the recorded one")
    add("--effort", metavar="X", help="effort of planning a round; default 1, about ten seconds")


_LADDER: Final = ".9,.8,.7,.6,.5,.4,.3,.2,.1,.05"
_HIGH: Final = "20"
"""The limit of a ladder: what costs more is said to do so."""

_TIERS: Final = (
    "let evicted bytes move: 12GB/s, or 12GB/s,overlap if transfers do not stop the compute; optional words: a latency "
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


def add_budgets(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The option --budget, for several."""
    parser.add_argument(
        "--budget",
        metavar="SHARE[,..]",
        action="append",
        required=required,
        help="shares of the peak (0.4 or 40%%) or bytes (512MB); several separated by commas, or repeated"
        + ("" if required else "; default: shares from 90%% to 5%%"),
    )


def add_policies(parser: argparse.ArgumentParser) -> None:
    """The option --policy, for several."""
    parser.add_argument(
        "--policy",
        metavar="NAME[,..]",
        action="append",
        help=f"{', '.join(POLICIES)}; all, or default ({DEFAULT}); several separated by commas, or repeated",
    )


def run(options: argparse.Namespace) -> int:
    from recompute._simulator.many import Job, cores, simulate_many  # process pools: not for every command
    from recompute._simulator.simulate import by_amount

    try:
        search_of(options.search)
    except ValueError as error:
        raise CommandError(str(error)) from None
    ladder = options.budget is None
    limit = _limit(options.limit or (_HIGH if ladder else "2.0"))
    common = {
        "search": options.search,
        "release": options.release,
        "limit": limit,
        "machine": options.machine,
        "tier": tier(options),
    }
    wanted, chosen = budgets(options.budget or [_LADDER]), policies(options.policy)
    if options.machine == "published":
        _check_published(chosen, common["tier"])
    processes = cores() if options.processes is None else count("--processes", options.processes)
    iterations, effort = rounds(options)
    if options.no_foresight and iterations is None:
        raise CommandError("--no-foresight needs --iterations")
    if iterations is not None:
        common |= {"foresight": not options.no_foresight, "effort": effort}
    programs = load(options.traces)
    jobs = [
        Job(number, {**by_amount(budget), "policy": policy, **common}, iterations)
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
            _show(program, runs[number * per_program :][:per_program], wanted, iterations, limit if ladder else 0.0)
    return int(len(jobs) == 1 and runs[0][-1].status != "ok")


def _check_published(chosen: list[str], tier: str | None) -> None:
    """What the published machine does not have needs the library's."""
    unknown = [name for name in chosen if not knows(policy_of(name))]  # type: ignore[arg-type]  # checked names
    if unknown or tier is not None:
        what = "tiers" if tier is not None else f"the policy {unknown[0]!r}"
        raise CommandError(f"--machine published does not know {what}; use --machine library, or leave it out")


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
        raise CommandError("--effort needs --iterations")
    return None, 1.0


def _effort(text: str) -> float:
    try:
        effort = float(text)
    except ValueError:
        effort = -1.0
    if not 0 <= effort < math.inf:
        raise CommandError(f"--effort is a number, at least 0, not {text!r}; 1 is about ten seconds of planning")
    return effort


def _show(
    program: Program, found: list[list[Run]], asked: list[int | float], iterations: int | None, ladder: float
) -> None:
    """The runs of each job, of so many budgets in a row: rounds if there are `iterations`.

    `ladder`: the limit of a ladder; 0: it is none.
    """
    runs = [first for first, *_ in found]
    whole = runs[0].baseline_peak_bytes
    least = f"needs at least {format_bytes(round(Floor.of(program, whole).operation * whole))}, " if ladder else ""
    print_text(
        f"{program.name}: {len(program.calls):,} operations, peak {format_bytes(whole)}, {least}"
        f"{seconds(runs[0].model_time)} of compute without eviction",
        sys.stdout,
    )
    if iterations is not None:
        _show_rounds(found, iterations)
    elif ladder:
        _show_ladder(runs, len(asked), ladder)
    elif len(asked) > 1:
        _show_overheads(runs, asked)
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


def _show_ladder(runs: list[Run], rungs: int, limit: float) -> None:
    """A row for each budget, a column for each policy."""
    rows = [
        (_head(run), format_bytes(run.budget_bytes), *[_rung(other, limit) for other in runs[number::rungs]])
        for number, run in enumerate(runs[:rungs])
    ]
    names = [run.policy for run in runs[::rungs]]
    heads = ["overhead"] if len(names) == 1 else [f"overhead, {name}" for name in names]
    print_list(["budget", "bytes", *heads], rows, sys.stdout, ">>" + ">" * len(names))


def _rung(run: Run, limit: float) -> str:
    if run.overhead is not None:
        return f"{run.overhead:.3f}"
    return f"> {limit:g}" if run.status == "thrash" else "does not fit"


def _show_overheads(runs: list[Run], asked: list[int | float]) -> None:
    """A row for each policy, a column for each budget, with the name by which it was asked for."""
    columns = len(asked)
    rows = [
        (runs[start].policy, *[_cell(run) for run in runs[start : start + columns]])
        for start in range(0, len(runs), columns)
    ]
    heads = [
        format_bytes(budget) if isinstance(budget, int) else _head(run)
        for budget, run in zip(asked, runs[:columns], strict=True)
    ]
    print_list(["overhead", *heads], rows, sys.stdout, "<" + ">" * columns)


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
