"""`recompute compare`: policies and planners on a recorded program, over budgets, as a table and a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from recompute._cli.figures import COMPARED, SHARES, floors, name_apart, plan_all, points, replay_all, target, write
from recompute._cli.output import print_json, print_list, print_text
from recompute._cli.planning import Planned, add_methods, applicable, limits, methods, tier_of_plans
from recompute._cli.simulate import add_policies, add_tier, budgets, load, policies, tier
from recompute._pictures.overhead import overhead
from recompute._simulator.run import Run
from recompute._traces.program import Program

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
    add("traces", metavar="TRACE", nargs="+", help="recorded programs, plain or gzipped; one panel each")
    add("--budget", metavar="SHARE[,..]", action="append", help="shares of the peak or bytes; default .9, .8 to .1")
    add_policies(parser)
    add_tier(parser)
    add_methods(parser, "those that apply; none for no plans")
    add(
        "--output",
        metavar="FILE",
        default="compare.png",
        help="the picture (.png, .svg or .pdf), or none; default %(default)s",
    )
    add("--json", action="store_true", help="print a JSON object per replay or plan on stdout, as simulate and plan do")


def run(options: argparse.Namespace) -> int:
    path = None if options.output.lower() == "none" else target(options.output)
    wanted = budgets(options.budget or [SHARES])
    chosen, limit = policies(options.policy or [COMPARED]), limits(options)
    named = None if options.method is None else methods(options.method)
    programs = name_apart(load(options.traces))
    planned = [applicable(program) if named is None else named for program in programs]
    runs = replay_all(programs, chosen, wanted, tier=(below := tier(options)))
    plans = plan_all(programs, planned, wanted, tier=tier_of_plans(below), **limit)
    if options.json:
        for figures in [run.as_dict() for run in runs] + [plan.as_dict() for plan in plans]:
            print_json(figures)
    else:
        for number, program in enumerate(programs):
            count, before = (
                (len(chosen) + (below is not None)) * len(wanted),
                sum(map(len, planned[:number])) * len(wanted),
            )
            own = plans[before:][: len(planned[number]) * len(wanted)]
            _show(program, runs[number * count :][:count], own, len(wanted))
    if path is not None:
        figure = overhead(points(runs, plans), floors=floors(programs))
        print(write(figure, path), file=sys.stderr if options.json else sys.stdout)
    return 0


def _show(program: Program, runs: Sequence[Run], plans: Sequence[Planned], columns: int) -> None:
    print_text(f"{program.name}: {len(program.calls):,} operations; overhead of policies, then of planners", sys.stdout)
    cells: list[tuple[str, float, float | None, str]]
    cells = [(run.policy, run.budget_ratio, run.overhead, run.status) for run in runs]
    cells += [(plan.method, plan.budget_ratio, plan.overhead, plan.status) for plan in plans]
    rows = [
        [
            cells[start][0],
            *[status if cost is None else f"{cost:.3f}" for _, _, cost, status in cells[start:][:columns]],
        ]
        for start in range(0, len(cells), columns)
    ]
    heads = [f"{100 * ratio:.4g}%" for _, ratio, _, _ in cells[:columns]]
    print_list(["", *heads], rows, sys.stdout, "<" + ">" * columns)
    print()
