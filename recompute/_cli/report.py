"""`recompute report`: one page that says what each budget would cost."""

from __future__ import annotations

import argparse
import sys
from math import inf
from typing import TYPE_CHECKING, Any, Final

from recompute._cli import arguments
from recompute._cli.export import write
from recompute._cli.output import CommandError, print_json, print_text, warn
from recompute._live import Live, bar
from recompute._simulator.many import cores

if TYPE_CHECKING:
    from recompute._sight.report import Report

NAME = "report"
HELP = "write a page about what each budget would cost"

_ENDINGS: Final = (".html", ".htm", ".svg")
_BUDGETS: Final = 20
_MOST: Final = 50
_SECONDS: Final = 60.0

_EXAMPLES: Final = """\
examples:
  recompute report train.recompute.jsonl.gz -o report.html
  recompute report train.recompute.jsonl.gz --tier 12GB/s,overlap --seconds 300
  recompute report train.recompute.jsonl.gz -o curve.svg             only the curve
  recompute run --report train.py                                    record, then report

The page shows overhead against budget, the run within each budget, what holds the memory, what is recomputed, and a
line of code to paste. It is one file that loads nothing from elsewhere. An interrupt stops the work; the page then has
what was ready.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Replay and plan a recorded run within many budgets, and write a page about them."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("trace", metavar="RUN", help="a recorded program, plain or gzipped; -: standard input")
    add(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help="the page, or an .svg file for only its curve; default %(default)s",
    )
    add(
        "--seconds",
        metavar="S",
        default=f"{_SECONDS:g}",
        help="time for all plans together; 0 for no plans; default %(default)s",
    )
    add("--budgets", metavar="N", default=str(_BUDGETS), help="how many budgets the page offers; default %(default)s")
    arguments.add_tier(parser)
    add("--processes", metavar="N", help="how many replays at a time; default one per core")
    add("--json", action="store_true", help="print the figures as a JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    path = arguments.destination(options.output, "page", _ENDINGS, ".html, or .svg for only the curve")
    given: dict[str, Any] = {
        "seconds": arguments.number(options.seconds),
        "tier": arguments.tier(options),
        "budgets": arguments.count("--budgets", options.budgets),
        "processes": cores() if options.processes is None else arguments.count("--processes", options.processes),
    }
    if not 0 <= given["seconds"] < inf:
        raise CommandError(f"--seconds is a number, at least 0, not {options.seconds!r}")
    if not 2 <= given["budgets"] <= _MOST:
        raise CommandError(f"--budgets must be at least 2, and at most {_MOST}")
    report, interrupted = made(options.trace, **given)
    text = report.svg() if path.suffix.lower() == ".svg" else report.html()
    write(path, [text.encode()])
    if options.json:
        print_json({**report.as_dict(), "output": str(path)})
    else:
        print_text(str(path), sys.stdout)
    if interrupted:
        warn(f"interrupted: {len(report.study.looks)} of {len(report.study.budgets)} budgets are in {path}")
        return 130
    return 0


def made(trace: str, **options: Any) -> tuple[Report, bool]:
    """A report with progress on the terminal, and whether an interrupt has ended it early."""
    from recompute._sight.report import report

    state: list[Any] = ["reading", 0, 1]
    begun: list[Report] = []

    def progress(done: int, of: int, what: str) -> None:
        state[:] = [what, done, of]

    def parts() -> list[str]:
        what, done, of = state
        told = [bar(done, of), f"{what} {done} of {of}"]
        works = [look for look in begun[0].study.looks if look.overhead is not None] if begun else []
        if works:
            told.append(f"least so far {works[0].share:.0%} at overhead {works[0].overhead:.2f}")
        return told

    try:
        with Live(parts), arguments.reading(trace):
            return report(trace, progress=progress, so_far=begun.append, **options), False
    except KeyboardInterrupt:
        if not begun or not begun[0].study.looks:
            raise
        return begun[0], True
