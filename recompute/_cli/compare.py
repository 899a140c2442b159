"""`recompute compare`: policies and planners on a recorded program, over budgets, as a table and a picture."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from recompute._cli import arguments
from recompute._cli.output import print_json, print_text
from recompute._cli.points import (
    Planned,
    applicable,
    floors,
    name_apart,
    percent,
    plan_all,
    points,
    print_overheads,
    replay_all,
    target,
    tier_of_plans,
    write,
)
from recompute._pictures.overheads import overhead
from recompute._simulator.run import Run

NAME = "compare"
HELP = "compare policies and planners on a recorded program"

_EXAMPLES: Final = """\
examples:
  recompute compare train.recompute.jsonl.gz
  recompute compare unet.jsonl --budget 0.6,0.4,0.2 --policy default,lru --method own --output unet.svg
  recompute compare unet.jsonl --method none --output none --json
  recompute compare unet.jsonl --method none --tier 12GB/s,overlap

Figures are overheads: all compute divided by the compute without recomputation. oom: something did not fit; thrash:
more than twice the compute; infeasible: the method has no plan; timeout: it found none in time.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Replay recorded programs under policies, plan them in advance, and compare what both cost."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add(
        "traces",
        metavar="TRACE",
        nargs="+",
        help="recorded programs, a panel each; -: standard input",
    )
    add("--budget", metavar="SHARE[,..]", action="append", help="shares of the peak or bytes; default .9, .8 to .1")
    arguments.add_policies(parser)
    arguments.add_tier(parser)
    arguments.add_methods(parser, "those that apply; none for no plans")
    add(
        "--output",
        metavar="FILE",
        default="compare.png",
        help="the picture (.png, .svg or .pdf), or none; default %(default)s",
    )
    add("--json", action="store_true", help="print a JSON object per replay or plan on stdout, as simulate and plan do")


def run(options: argparse.Namespace) -> int:
    path = None if options.output.lower() == "none" else target(options.output)
    wanted = arguments.budgets(options.budget)
    chosen = arguments.policies(options.policy, arguments.COMPARED)
    named = None if options.method is None else arguments.methods(options.method)
    limit = arguments.limits(options, named)
    programs = name_apart(arguments.load(options.traces))
    planned = [applicable(program) if named is None else named for program in programs]
    runs = replay_all(programs, chosen, wanted, tier=(below := arguments.tier(options)))
    plans = plan_all(programs, planned, wanted, tier=tier_of_plans(below), **limit)
    if options.json:
        for figures in [run.as_dict() for run in runs] + [plan.as_dict() for plan in plans]:
            print_json(figures)
    else:
        everything: list[Run | Planned] = [*runs, *plans]
        for program in programs:
            mine = [figures for figures in everything if figures.trace == program.name]
            told = f"{program.name}: {len(program.calls):,} operations; overhead of policies, then of planners"
            print_text(told, sys.stdout)
            print_overheads("", [percent(point) for point in mine[: len(wanted)]], mine)
            print()
    if path is not None:
        figure = overhead(points(runs, plans), floors=floors(programs))
        print(write(figure, path), file=sys.stderr if options.json else sys.stdout)
    return 0
