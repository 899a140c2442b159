"""`recompute run`: any script, under a default cache with a budget."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, get_args

from recompute import Cache, Disk, Stats, default_cache, set_default_cache
from recompute._background import threads_of_the_program
from recompute._budget import bytes_or_share, format_bytes, parse_budget
from recompute._cli import recording as recordings
from recompute._cli.caches import DEFAULT_PLACE, Caches, Followed
from recompute._cli.export import write
from recompute._cli.output import (
    CommandError,
    complain,
    hint,
    print_json,
    print_list,
    print_pairs,
    warn,
)
from recompute._cli.program import Ending, execute
from recompute._cli.recording import Script
from recompute._live import Live
from recompute._simulator.many import cores
from recompute._terminal import hooked, is_terminal
from recompute._watching import parts
from recompute.extend import TIER_COLUMNS
from recompute.policies import DEFAULT, POLICIES, SEARCHES, ReleaseMode
from recompute.text import seconds

NAME = "run"
HELP = "run a script within a memory budget"

_MOST: Final = 5  # functions in the report

_EXAMPLES: Final = """\
examples:
  recompute run --record train.py --epochs 3        run once without a budget; write train.recompute.json and a trace
  recompute run --budget 25% train.py --epochs 3    run within a quarter of the recorded peak
  recompute run --budget 1.5GiB --policy lru train.py
  recompute run --budget 512MB --disk 20GB train.py
  recompute run --budget 512MB --json -m package.train | tail -n 1

The script makes its values with recompute.pure and recompute.ap (or lift, map, ...), in the default cache or in caches
of its own, `with Cache(...):`. --budget replaces the budget of the script's own caches, and --record runs them without
one; all their other settings stay. The report goes to stderr and is about the cache with the largest peak. The script's
output is unchanged. The exit status is that of the script; 1 if the budget is too small, 2 if the command line is
wrong, 130 after an interrupt.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a script under a default cache with a memory budget, then report what that cost."
    parser.epilog = _EXAMPLES
    parser.usage = "recompute run [options] [-m] script [args ...]"
    add = parser.add_argument
    add("--budget", metavar="SIZE", help="512MB, 1.5GiB, none (default), or 25%% (0.25) of the peak of a recorded run")
    add("--policy", metavar="NAME", default=DEFAULT, choices=POLICIES, help=f"{', '.join(POLICIES)}; default {DEFAULT}")
    searches = ", ".join(name.replace(" ", "-") for name in SEARCHES)
    add("--search", metavar="NAME", default="exact", help=f"{searches}; default exact")
    modes = get_args(ReleaseMode)
    add("--release", metavar="MODE", default="eager", choices=modes, help=f"{', '.join(modes)}; default eager")
    add(
        "--disk",
        metavar="SIZE",
        nargs="?",
        const="",
        type=_disk_size,
        help="let evicted values move to a disk (at most SIZE, such as 50GB) where that is faster than recomputing",
    )
    add("--verify", action="store_true", help="check that functions are pure (slow)")
    add("--record", action="store_true", help="run without a budget and record the peak")
    add("--recording", metavar="PATH", type=Path, help="the recording; default SCRIPT.recompute.json in this directory")
    add(
        "--trace",
        metavar="PATH",
        type=Path,
        help="write a trace of the run; default with --record: SCRIPT.recompute.jsonl.gz",
    )
    add("--report", action="store_true", help="record, then write SCRIPT.report.html about what each budget would cost")
    add("--json", action="store_true", help="print the report as a JSON object, the last line of stdout")
    add("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add("script", help="a script, or a module with -m")
    add("args", nargs=argparse.REMAINDER, help="its arguments").required = False


def _disk_size(text: str) -> str:
    """What follows --disk; it may be the script."""
    try:
        bytes_or_share(text, "the size of the disk")
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; --disk without a size needs another option behind it, as in --disk --budget 512MB script.py"
        ) from None
    return text


@dataclass(frozen=True)
class RunReport:
    """All figures of a run. Times in seconds."""

    program: Script
    used: list[tuple[Followed, Stats]]
    """The caches of the program, the one with the largest peak first: it is the one that is recorded."""
    ending: Ending
    wall_time: float
    asked: str
    """How the budget was asked for, if not in bytes."""
    recording: Path | None
    """Where this run is recorded."""
    trace: Path | None
    """Where its events are."""

    @property
    def cache(self) -> Cache:
        return self.used[0][0].cache

    @property
    def stats(self) -> Stats:
        return self.used[0][1]


def run(options: argparse.Namespace) -> int:
    program = Script(options.script, tuple(options.args), options.module)
    path: Path = options.recording or program.recording()
    if not program.module and not Path(program.name).exists():
        raise CommandError(f"there is no script {program.name}")
    budget, asked = _budget(options, program, path)
    trace: Path | None = options.trace or (program.trace(path) if options.record or options.report else None)
    try:
        tiers = () if options.disk is None else (Disk(options.disk or None),)
        cache = Cache(
            budget,
            policy=options.policy,
            search=options.search,
            release=options.release,
            verify=options.verify,
            tiers=tiers,
        )
        caches = Caches(cache, trace, tiers, budget_given=options.record or budget is not None)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"the trace cannot be written to {trace}: {error.strerror}; choose --trace PATH") from None

    folder = os.getcwd()
    ending, wall_time, line_is_open = _execute(program, caches, watch_stdout=options.json)
    with _inside(folder):  # what is written is where the command was given
        used = caches.end()
        stats = used[0][1]
        problem = ending.error or ("" if stats.peak else "the cache held nothing")
        if options.record and not problem:
            problem = recordings.write(path, program, stats, wall_time)
        recorded = path if options.record and not problem else None
        if trace is not None and options.record and not recorded:
            for followed, _ in used:
                if followed.trace is not None:
                    followed.trace.unlink(missing_ok=True)
            trace = None
        report = RunReport(program, used, ending, wall_time, asked, recorded, trace)
        if not ending.ours and (stats.operations or not ending.error):
            _show(report)
            if caches.passed_over:
                warn(f"{program.name} made {caches.passed_over:,} more caches, which were not observed")
        if options.json:
            print("\n" * line_is_open, end="")
            print_json(_figures(report))
        if options.report and trace is not None and stats.operations:
            _write_page(trace, program)
    if options.record and not recorded:
        return complain(f"nothing was recorded: {problem}", ending.status or 1)
    return ending.status


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """The current directory is this one. Afterwards it is again what the program made it, for what runs at its exit."""
    try:
        before = os.getcwd()
    except FileNotFoundError:  # the program removed it
        before = folder
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _write_page(trace: Path, program: Script) -> None:
    """The page about a run that was recorded just now, beside it."""
    from recompute._cli.report import made

    page = Path(f"{program.recording().name.removesuffix('.recompute.json')}.report.html")
    report, interrupted = made(str(trace), processes=cores())
    write(page, [report.html().encode()])
    hint(f"{page} shows what each budget would cost{' (interrupted: only some)' if interrupted else ''}")


def _execute(program: Script, caches: Caches, *, watch_stdout: bool) -> tuple[Ending, float, bool]:
    """Run it under its caches: how it ended, the seconds it took, and whether its last line is open."""
    last = ["\n"]

    def remember(text: str, write: Callable[[str], object]) -> object:
        last[0] = text or last[0]
        return write(text)

    before = default_cache()
    others = threads_of_the_program()
    set_default_cache(caches.all[0].cache)
    start = perf_counter()
    try:
        watched = hooked(sys.stdout, remember) if watch_stdout else nullcontext()
        with watched, caches.following(), Live(lambda: parts(caches.busy())):
            ending = execute(program)
    finally:
        if threads_of_the_program() <= others:
            set_default_cache(before)
        else:
            warn("threads of the script are still running: the figures are as of now")
    return ending, perf_counter() - start, not last[0].endswith("\n")


def _budget(options: argparse.Namespace, program: Script, path: Path) -> tuple[Any, str]:
    """The budget for the cache, and how to show where it comes from."""
    text: str | None = options.budget
    limited = text is not None and text.strip().lower() != "none"
    if options.record:
        if limited:
            raise CommandError("--record measures a run without a budget; leave out one of --record and --budget")
        recordings.check_writable(path)
    try:
        number = bytes_or_share(text) if limited else None
    except ValueError as error:
        raise CommandError(str(error)) from None
    if options.recording is not None and not options.record and not isinstance(number, float):
        raise CommandError(
            "--recording names a file that this run would neither write nor read: add --record to write it, or a share "
            "such as --budget 50% to read it"
        )
    if text is None or not isinstance(number, float):
        return number, ""
    recording = recordings.read(path, program)
    if recording.args != program.args:
        warn(recordings.differing(recording.args, program.args))
    budget = {device: parse_budget(number, whole=peak) for device, peak in recording.peak.items() if peak}
    return budget, f" ({text.strip()} of {format_bytes(sum(recording.peak.values()))})"


def _total(cache: Cache) -> int | None:
    """The budget in bytes, over all devices; None: unlimited."""
    budget = cache.budget
    return sum(budget.values()) if isinstance(budget, Mapping) else budget


def _show(report: RunReport) -> None:
    """The tables, on stderr."""
    program, stats, ending = report.program, report.stats, report.ending
    total = _total(report.cache)
    pairs = [
        ("budget", "none" if total is None else format_bytes(total) + report.asked),
        ("peak", format_bytes(stats.peak)),
        ("overshoot", format_bytes(stats.overshoot)),
        ("operations", f"{stats.operations:,}"),
        ("evictions", f"{stats.evictions:,}"),
        ("rematerializations", f"{stats.rematerializations:,}"),
        *stats.spent,
        ("overhead", f"{stats.overhead:.3f}"),
        ("wall time", seconds(report.wall_time)),
        *([("process", f"{format_bytes(resident)} resident at peak")] if (resident := most_resident()) else []),
    ]
    first = report.used[0][0]
    if first.own_budget is not None:
        pairs[0] = ("budget", f"{pairs[0][1]}, instead of the script's own")
    if first.place != DEFAULT_PLACE:
        pairs.insert(0, ("cache", f"made at {first.place}"))
    if report.recording is not None:
        pairs.append(("recording", str(report.recording)))
    if report.trace is not None:
        pairs.append(("trace", str(report.trace)))
    if ending.status == 130 and is_terminal(sys.stderr):
        print(file=sys.stderr)  # after ^C
    name = f"-m {program.name}" if program.module else program.name
    problem = f": {ending.error}" if ending.error else ""
    print_pairs(f"recompute run {name}{problem}", pairs, sys.stderr)
    if len(stats.pools) > 1:
        devices = [
            (
                pool.device,
                "none" if pool.budget is None else format_bytes(pool.budget),
                format_bytes(pool.peak),
                format_bytes(pool.overshoot),
            )
            for pool in stats.pools
        ]
        print_list(["device", "budget", "peak", "overshoot"], devices, sys.stderr, "<>>>")
    if stats.tiers:
        print_list(TIER_COLUMNS, [tier.row for tier in stats.tiers], sys.stderr, "<>>>>")
    if stats.recomputed:
        most = [(again.function, f"{again.times:,}", seconds(again.seconds)) for again in stats.recomputed[:_MOST]]
        print_list(["recomputed most", "times", "time"], most, sys.stderr, "<>>")
    if len(report.used) > 1:
        _show_others(report)
    if not stats.operations:
        warn(f"{program.name} made nothing in a cache")
    elif stats.remat_time > stats.model_time and stats.rematerializations > stats.operations:
        hint(_advice(report))
    elif report.recording is not None and report.trace is not None:
        hint(f"to see what less memory costs: recompute simulate {report.trace}")
    elif total is None and not report.ending.error:
        hint(f"to see what less memory costs, record it: {program.command(program.recording())}")


def most_resident() -> int:
    """Bytes of memory that this process has had at most, libraries and all; 0 where the system does not say."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _show_others(report: RunReport) -> None:
    """The caches beside the one that the report is about."""
    rows = [
        (
            followed.place,
            format_bytes(stats.peak),
            f"{stats.operations:,}",
            f"{stats.evictions:,}",
            f"{stats.overhead:.3f}",
            "" if followed.trace is None else str(followed.trace),
        )
        for followed, stats in report.used[1:_MOST]
    ]
    print_list(["other caches", "peak", "operations", "evictions", "overhead", "trace"], rows, sys.stderr, "<>>>><")
    if report.recording is not None:
        warn(f"{report.recording} covers only the cache with the largest peak")


def _advice(report: RunReport) -> str:
    """Advice for a run that computes most things again."""
    stats = report.stats
    share = stats.remat_time / (stats.model_time + stats.remat_time)
    kinds = {
        "sources": sum(pool.sources for pool in stats.pools),
        "pinned values": sum(pool.pinned for pool in stats.pools),
        "values that the script still holds": stats.held,
    }
    kept = ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in kinds.items() if size)
    free = f"; {kept} cannot be evicted" if kept else ""
    return (
        f"{share:.0%} of the compute was repeated, which a larger budget avoids{free}; to find one that is enough: "
        f"{report.program.command(report.program.recording())}, then recompute simulate on the trace that it writes"
    )


def _figures(report: RunReport) -> dict[str, Any]:
    """The JSON object: all of `Stats`, and what surrounds it. Bytes and seconds."""
    program, cache, stats, ending = report.program, report.cache, report.stats, report.ending
    figures = asdict(stats)
    figures["recomputed"] = figures["recomputed"][:_MOST]
    return {
        "script": program.name,
        "cache": report.used[0][0].place,
        "args": list(program.args),
        "module": program.module,
        "status": ending.status,
        "error": ending.error,
        "budget": _total(cache),
        "policy": cache.policy.name,
        "search": cache.search.name,
        "release": cache.release,
        "recording": None if report.recording is None else str(report.recording),
        "trace": None if report.trace is None else str(report.trace),
        **figures,
        "overhead": stats.overhead,
        "compute_time": stats.model_time + stats.remat_time,
        "wall_time": report.wall_time,
        "resident": most_resident(),
    }
