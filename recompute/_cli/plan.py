"""`recompute plan`: whole schedules for a recorded program, made in advance and checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from recompute._budget import format_bytes
from recompute._cli import arguments
from recompute._cli.output import CommandError, print_json, print_list, print_text
from recompute._cli.points import Planned, percent, plan_all, tier_of_plans
from recompute._traces.program import Program
from recompute.text import seconds

NAME = "plan"
HELP = "plan a recorded program in advance: what to compute and free, and when"

_EXAMPLES: Final = """\
examples:
  recompute plan train.recompute.jsonl.gz --budget 50%
  recompute plan unet.jsonl --budget 0.6,0.4 --method all --time-limit 60
  recompute plan unet.jsonl --budget 0.4 --output plan.jsonl
  recompute plan unet.jsonl --budget 0.3 --tier 50GB/s

A budget is a share of the peak of a run without one (0.4 or 40%), or bytes (512MB). Overhead is all compute divided by
the compute without recomputation. The bound is the lowest possible overhead, if the method proved one. A verifier
checks every plan step by step before it is shown. The file has a line about the plan, then a line for each step.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Plan recorded programs within a budget, with the whole program known in advance."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="+", help="recorded programs, plain or gzipped; -: standard input")
    arguments.add_budgets(parser)
    arguments.add_tier(parser, "let the method own fetch evicted results: 12GB/s, or with a latency 12GB/s,1ms")
    arguments.add_methods(parser, "own")
    add("--output", metavar="FILE", help="write the plan; with several methods, the one with the lowest overhead")
    add("--json", action="store_true", help="print a JSON object per plan on stdout")


def run(options: argparse.Namespace) -> int:
    wanted, chosen = arguments.budgets(options.budget), arguments.methods(options.method, "own")
    limit, below = arguments.limits(options, chosen), arguments.tier(options)
    if not chosen:
        raise CommandError("--method names no method")
    if below is not None and "own" not in chosen:
        raise CommandError("--tier is for the method own: ask for it with --method own")
    output = None if options.output is None else arguments.destination(options.output, "plan")
    if output is not None and len(wanted) * len(options.traces) > 1:
        raise CommandError("--output takes one plan: give one trace and one budget")
    programs = arguments.load(options.traces)
    if below is not None and tier_of_plans(below) is None:
        raise CommandError(
            "plans support only tiers without a limit whose transfers stop the compute, such as --tier 12GB/s"
        )
    plans = plan_all(programs, [chosen] * len(programs), wanted, tier=below, **limit)
    if options.json:
        for planned in plans:
            print_json(planned.as_dict())
    else:
        count = len(chosen) * len(wanted)
        for number, program in enumerate(programs):
            _show(program, plans[number * count :][:count])
    if output is not None:
        _write(plans, output, quiet=options.json)
    return 0 if any(planned.status == "ok" for planned in plans) else 1


def _write(plans: Sequence[Planned], output: Path, *, quiet: bool) -> None:
    made = [planned.plan for planned in plans if planned.plan is not None]
    if not made:
        raise CommandError(f"there is no plan to write to {output}", 1)
    best = min(made, key=lambda planned: planned.overhead)
    with arguments.writing(output):
        best.save(output)
    if not quiet:
        print_text(f"the plan of {best.method}, {len(best.steps):,} steps, is in {output}", sys.stdout)


def _show(program: Program, plans: Sequence[Planned]) -> None:
    print_text(f"{program.name}: {len(program.calls):,} operations", sys.stdout)
    rows: list[list[str]] = []
    for planned in plans:
        made = planned.plan
        rows.append(
            [
                planned.method,
                f"{format_bytes(planned.budget_bytes)} ({percent(planned)})",
                planned.status if made is None else f"{made.overhead:.4f}",
                "" if made is None or made.bound is None else f"{made.bound:.4f}",
                "" if made is None else format_bytes(made.peak),
                "" if made is None else f"{made.computes:,}",
                seconds(planned.seconds),
            ]
        )
    print_list(["method", "budget", "overhead", "bound", "peak", "runs", "planned in"], rows, sys.stdout, "<>>>>>>")
    told = {(planned.method, planned.reason): planned for planned in plans if planned.reason}
    if told:
        print()
    for planned in told.values():
        print_text(f"  {planned.method}, {percent(planned)}: {planned.reason}", sys.stdout)
    print()
