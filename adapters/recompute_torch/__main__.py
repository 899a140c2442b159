"""`python -m recompute_torch budget "package:make_step"`: what budgets would cost a compiled step, before it trains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from recompute.text import List, Table, bytes_or_share, format_bytes, parse_budget

_SHARES: Final = "100%,90%,80%,70%,60%,50%,40%,30%,20%,10%"
_ABOUT: Final = """\
MAKE_STEP is "package.module:function" or "file.py:function": a function without arguments that returns the step, which
ends with the loss, and its inputs: a tuple, a mapping of keywords, or the only one. The step is traced and its
operators are timed; it does not run. Peaks are those of the plans, beside parameters and inputs."""


class _Wrong(Exception):
    """What was asked for cannot be done: the cure."""


def main(given: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for what cannot be planned."""
    parser = argparse.ArgumentParser(prog="python -m recompute_torch", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("budget", help="budget against time and peak", description=_ABOUT)
    command.add_argument("make_step", metavar="MAKE_STEP")
    command.add_argument(
        "--budgets", default=_SHARES, help="bytes or shares of the peak; %(default)s", metavar="A,B,..."
    )
    command.add_argument("--slower", type=float, default=1.1, metavar="TIMES", help="that a step may take; %(default)s")
    command.add_argument("--compiler", choices=("boxed", "inductor"), default="boxed")
    command.add_argument("--costs", choices=("measured", "estimated"), default="measured")
    command.add_argument("--effort", type=float, default=0.3, help="of planning, for each budget; 1 is ten seconds")
    options = parser.parse_args(given)
    try:
        print(_told(options))
    except (_Wrong, ValueError, TypeError) as error:
        print(f"python -m recompute_torch budget: {error}", file=sys.stderr)
        return 2
    return 0


def _told(options: argparse.Namespace) -> str:
    from recompute_torch._compile.backend import Options, ladder
    from recompute_torch._compile.partition import TooSmall

    budgets = [text.strip() for text in options.budgets.split(",")]
    for text in budgets:
        bytes_or_share(text)  # dynamo would put its own error around that of a wrong one
    amounts = [partial(_bytes, text) for text in budgets]
    step, inputs = _made(options.make_step)
    rungs = ladder(step, inputs, amounts, Options(None, 1.0, options.costs, options.effort, 1, options.compiler))
    plans = sorted([rung for rung in rungs if not isinstance(rung, TooSmall)], key=lambda plan: plan.budget)
    refused = [rung for rung in rungs if isinstance(rung, TooSmall)]
    pairs = [("too small", str(refused[0]))] if refused else []
    if not plans:
        return str(Table("no budget holds a plan", pairs))
    rows = [
        (
            format_bytes(plan.budget),
            f"{plan.budget / plan.plain:.0%}",
            format_bytes(plan.planned),
            f"{plan.overhead:.3f}",
            f"{1e3 * plan.work:.1f} ms",
            str(sum(plan.again.values())),
        )
        for plan in reversed(plans)
    ]
    first = plans[-1]
    pairs.insert(0, ("without a plan", f"{format_bytes(first.plain)} at the peak, {first.operators} operators"))
    fast = [plan for plan in plans if plan.overhead <= options.slower]
    best = min(fast, key=lambda plan: plan.budget) if fast else min(plans, key=lambda plan: plan.overhead)
    more = "" if options.compiler == "boxed" else f', compiler="{options.compiler}"'
    line = f'step = rt.compile(step, "{format_bytes(best.budget)}"{more})  # {best.overhead:.2f} times the compute'
    columns = ("budget", "of the peak", "peak", "overhead", "operators take", "run again")
    return f"{Table(options.make_step, pairs, [List(columns, rows, '>>>>>>')])}\n\n{line}"


def _bytes(budget: str, plain: int) -> int:
    """A budget, or a share of the plain peak; up to three digits, so that the line to paste says what was planned."""
    nbytes = parse_budget(budget, whole=plain)
    last: int = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // last) * last


def _made(name: str) -> tuple[Callable[..., Any], Any]:
    """The step and its inputs."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise _Wrong(f"MAKE_STEP is 'package.module:function' or 'file.py:function', not {name!r}")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise _Wrong(f"there is no file {where}")
        sys.path.insert(0, str(path.parent.resolve()))
        where = path.stem
    else:
        sys.path.insert(0, "")
    try:
        make = getattr(import_module(where), function)
    except ModuleNotFoundError as error:
        raise _Wrong(f"{error}; run it where `import {where}` works") from error
    except AttributeError as error:
        raise _Wrong(str(error)) from error
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise _Wrong(
            f"{name} is to return the step and its inputs, as in `return step, (x, y)`; it returned {made!r:.60}"
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
