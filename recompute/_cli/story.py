"""`recompute story`: the history of a value of a recorded run, with reasons; or the functions recomputed most."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Final

from recompute._cli import arguments
from recompute._cli.output import print_json, print_text, warn
from recompute._live import Live

NAME = "story"
HELP = "why a value of a recorded run was evicted, and what it was recomputed for"

_MOST: Final = 10

_EXAMPLES: Final = """\
examples:
  recompute story train.recompute.jsonl.gz                          what is recomputed most, and what would help
  recompute story train.recompute.jsonl.gz 17 --budget 50%          a value by its number: `value.number`
  recompute story train.recompute.jsonl.gz train.py:31              everything that this line made

The run is replayed within its own budget, or the one given, with a log of what happens to each value. A replay that
takes more than 20 times the compute is given up there.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what happened to a value of a recorded run, a line per event: made, evicted, recomputed."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("trace", metavar="RUN", help="a recorded program, plain or gzipped; -: standard input")
    add("value", metavar="VALUE", nargs="?", help="a number, a file:line or a function; default: the most recomputed")
    add("--budget", metavar="SHARE", help="a share of the peak (0.4 or 40%%) or bytes (512MB); default as recorded")
    add("--json", action="store_true", help="print a JSON object per value, or per function, on stdout")


def run(options: argparse.Namespace) -> int:
    from recompute._sight.story import Replayed

    wanted = arguments.one_budget(options.budget)
    (program,) = arguments.load([options.trace])
    with Live(lambda: [f"replaying {program.name}"]), arguments.reading(options.trace):
        replayed = Replayed(program, wanted)
    if replayed.status != "ok":
        warn(f"the run ends early within this budget ({replayed.status}); the story ends there, too")
    if options.value is None:
        why = replayed.why()
        for figures in why.as_dicts() if options.json else ():
            print_json(figures)
        if not options.json:
            for line in str(why).splitlines():
                print_text(line, sys.stdout)
        return 0
    with arguments.reading(options.trace):
        values = replayed.find(options.value)
    for number, value in enumerate(values[:_MOST]):
        told = replayed.tell(value)
        if options.json:
            steps = [{**asdict(step), "words": step.words, "choice": _choice(step)} for step in told.steps]
            print_json(
                {"value": told.number, "function": told.function, "place": told.place, "now": told.now, "steps": steps}
            )
        else:
            print("\n" * bool(number), end="")
            for line in str(told).splitlines():
                print_text(line, sys.stdout)
    if len(values) > _MOST:
        warn(f"{options.value} made {len(values):,} values; these are the first {_MOST}")
    return 0


def _choice(step: object) -> dict[str, object] | None:
    choice = getattr(step, "choice", None)
    if choice is None:
        return None
    figures = {name: getattr(choice, name) for name in ("cost", "neighbours", "size", "staleness", "pressure", "score")}
    return {**figures, "policy": choice.policy.name}
