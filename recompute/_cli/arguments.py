"""Arguments that several commands take: each option once, and what its text means, or an error of one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, nan
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Any, Final

from recompute._budget import bytes_or_share
from recompute._cli.output import CommandError
from recompute._live import Live
from recompute._plans.plan import METHODS, OPTIONS
from recompute._simulator.tier import SimulatedTier
from recompute._traces.program import Program
from recompute._traces.read import read
from recompute.policies import DEFAULT, POLICIES, SEARCHES, search_of

SHARES: Final = ".9,.8,.7,.6,.5,.4,.3,.2,.1"
COMPARED: Final = "default,dtr-eq,dtr,dtr-local,msps,lru"
SEARCH_HELP: Final = f"{', '.join(name.replace(' ', '-') for name in SEARCHES)}; default exact"
TIMED: Final = tuple(method for method in METHODS if "time_limit" in OPTIONS[method])
"""The methods that take a time limit."""
_TIME_LIMIT_SECONDS: Final = 20.0
_TIER_HELP: Final = (
    "let evicted bytes move: 12GB/s, or 12GB/s,overlap if transfers do not stop the compute; optional words: a latency "
    "(1ms), a limit (50GB), always"
)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """A file that cannot be read, or is wrong, is an error of one line."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}", 1) from None
    except ValueError as error:
        raise CommandError(str(error), 1) from None


@contextmanager
def standard_input(options: argparse.Namespace) -> Iterator[None]:
    """Where a trace is `-`, it is standard input, put into a file: some commands read it more than once."""
    several = "traces" in options
    given = options.traces if several else [getattr(options, "trace", None)]
    if "-" not in given:
        yield
        return
    if sys.stdin is None:
        raise CommandError("standard input is closed: give a file as the trace")
    with TemporaryDirectory() as folder:
        path = Path(folder, "standard input")
        with path.open("wb") as file:
            copyfileobj(sys.stdin.buffer, file)
        given = [str(path) if one == "-" else one for one in given]
        if several:
            options.traces = given
        else:
            (options.trace,) = given
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file that cannot be written is an error of one line."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}", 1) from None


def destination(output: str, what: str, endings: Sequence[str] = (), said: str = "") -> Path:
    """Where a file is to go. Raises CommandError, before the work, for a wrong ending or a missing directory."""
    if output == "-":
        raise CommandError(f"the {what} goes to a file, not to standard output: give its name (./- if that is meant)")
    path = Path(output)
    if endings and path.suffix.lower() not in endings:
        raise CommandError(f"the ending of {output!r} must be {said or 'one of ' + ', '.join(endings)}")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"there is no directory {path.absolute().parent} for the {what}")
    return path


def load(paths: Sequence[str]) -> list[Program]:
    """The programs of these traces."""
    programs: list[Program] = []
    with Live(lambda: [f"reading {paths[min(len(programs), len(paths) - 1)]}"]):
        for path in paths:
            with reading(path):
                programs.append(read(path))
    return programs


def names(given: Sequence[str] | None, default: str) -> list[str]:
    """Several in one text, separated by commas, and in several texts."""
    return [name.strip() for text in given or [default] for name in text.split(",")]


def count(name: str, text: str, least: int = 1) -> int:
    """A whole number."""
    if not text.isdecimal() or int(text) < least:
        raise CommandError(f"{name} must be a whole number, at least {least}, not {text!r}")
    return int(text)


def number(text: str) -> float:
    """NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return nan


def add_budgets(parser: argparse.ArgumentParser, *, required: bool = True, default: str = "") -> None:
    """The option --budget, for several."""
    parser.add_argument(
        "--budget",
        metavar="SHARE[,..]",
        action="append",
        required=required,
        help="shares of the peak (0.4 or 40%%) or bytes (512MB); several separated by commas, or repeated" + default,
    )


def budgets(given: Sequence[str] | None, default: str = SHARES) -> list[int | float]:
    """Bytes (int) or shares of the peak (float)."""
    try:
        return [bytes_or_share(name) for name in names(given, default)]
    except ValueError as error:
        raise CommandError(str(error)) from None


def one_budget(text: str | None) -> int | float | None:
    """Bytes or a share of the peak; None if none was asked for."""
    if text is None:
        return None
    wanted = budgets([text])
    if len(wanted) != 1:
        raise CommandError(f"--budget is one budget, not {text!r}")
    return wanted[0]


def add_policies(parser: argparse.ArgumentParser) -> None:
    """The option --policy, for several."""
    parser.add_argument(
        "--policy",
        metavar="NAME[,..]",
        action="append",
        help=f"{', '.join(POLICIES)}; all, or default ({DEFAULT}); several separated by commas, or repeated",
    )


def policies(given: Sequence[str] | None, default: str = "default") -> list[str]:
    """Each once, as they were asked for."""
    chosen = [policy for name in names(given, default) for policy in (POLICIES if name == "all" else [name])]
    for name in chosen:
        if name not in POLICIES and name != "default":
            raise CommandError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}, all, default")
    return list(dict.fromkeys(chosen))


def searches(given: Sequence[str] | None) -> list[str]:
    """Each once."""
    chosen = list(dict.fromkeys(names(given, "exact")))
    for name in chosen:
        try:
            search_of(name)  # type: ignore[arg-type]  # any text, which is checked there
        except ValueError as error:
            raise CommandError(str(error)) from None
    return chosen


def add_tier(parser: argparse.ArgumentParser, text: str = _TIER_HELP) -> None:
    """The option --tier, with this help."""
    parser.add_argument("--tier", metavar="BANDWIDTH[,..]", help=text)


def tier(options: argparse.Namespace) -> str | None:
    text: str | None = options.tier
    try:
        if text is not None:
            SimulatedTier.read(text)
    except ValueError as error:
        raise CommandError(f"--tier: {error}") from None
    return text


def add_rounds(parser: argparse.ArgumentParser, text: str) -> None:
    """The options --iterations, with this help, and --effort."""
    add = parser.add_argument
    add("--iterations", metavar="N", help=text)
    add("--effort", metavar="X", help="effort of planning a round; default 1, about ten seconds")


def rounds(options: argparse.Namespace) -> tuple[int | None, float]:
    """How many rounds, if any, and the effort of a plan."""
    if options.iterations is None:
        if options.effort is not None:
            raise CommandError("--effort needs --iterations")
        return None, 1.0
    iterations, effort = count("--iterations", options.iterations), number(options.effort or "1")
    if not 0 <= effort < inf:
        raise CommandError(
            f"--effort is a number, at least 0, not {options.effort!r}; 1 is about ten seconds of planning"
        )
    return iterations, effort


def add_methods(parser: argparse.ArgumentParser, default: str) -> None:
    """The options --method, for several, --time-limit and --operations."""
    add = parser.add_argument
    add(
        "--method",
        metavar="NAME[,..]",
        action="append",
        help=f"planners: {', '.join(METHODS)}; all; several separated by commas, or repeated; default {default}",
    )
    add(
        "--time-limit",
        metavar="SECONDS",
        help=f"time for each plan of {' and '.join(TIMED)}; the first plan of own, which takes some .1 ms for each "
        f"operation of the trace, is always made; default {_TIME_LIMIT_SECONDS:g}",
    )
    add("--operations", metavar="N", help="merge the program into N operations before checkmate plans it")


def methods(given: Sequence[str] | None, default: str = "none") -> list[str]:
    """Each once; `none` stands for none."""
    chosen = [name for name in names(given, default) if name != "none"]
    chosen = [method for name in chosen for method in (METHODS if name == "all" else [name])]
    for name in chosen:
        if name not in METHODS:
            raise CommandError(f"unknown method {name!r}; choose from {', '.join(METHODS)}, all")
    return list(dict.fromkeys(chosen))


def limits(options: argparse.Namespace, methods: Sequence[str] | None = None) -> dict[str, Any]:
    """`time_limit` and `operations` of plans by these methods; None: by whichever apply."""
    if options.operations is not None and methods is not None and "checkmate" not in methods:
        raise CommandError("--operations is for the method checkmate: ask for it with --method checkmate")
    if options.time_limit is not None and methods is not None and not set(methods).intersection(TIMED):
        raise CommandError(
            f"--time-limit is for the methods {' and '.join(TIMED)}: ask for one with --method {TIMED[0]}"
        )
    limit = _TIME_LIMIT_SECONDS if options.time_limit is None else number(options.time_limit)
    if not 0 < limit < inf:
        raise CommandError(f"--time-limit must be seconds above zero, not {options.time_limit!r}")
    merged = None if options.operations is None else count("--operations", options.operations, 2)
    return {"time_limit": limit, "operations": merged}
