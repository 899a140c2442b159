"""`recompute demo`: a real program, without a budget and within a small one, side by side."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import EntryPoint
from time import perf_counter
from typing import Any, Final

from recompute._budget import bytes_or_share
from recompute._cli.arguments import count
from recompute._cli.output import CommandError, print_json, print_list
from recompute._cli.plugins import DISTRIBUTION, NOT_INSTALLED, how_to_get, missing_package, plugins, version_of
from recompute._live import Live, bar
from recompute._terminal import is_terminal

NAME = "demo"
HELP = "see it work on real input"
GROUP: Final = "recompute.demos"
_EVERY: Final = 3.0  # seconds from line to line where stderr is no terminal

_EXAMPLES: Final = """\
examples:
  recompute demo                         compare two real texts: a table of 500 MB in a tenth of that; seconds
  recompute demo letters --budget 5%     find vowels and consonants in real text; minutes
  recompute demo --budget 5% --picture blocks.png
  recompute demo --list

The picture needs the extra plot. Progress is shown on the terminal; without one, as a line on stderr every few seconds.

Demos are plug-ins: entry points in the group recompute.demos.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a real program twice, without a budget and within a small one, and compare."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("name", nargs="?", default="edits", help="which demo; default edits")
    add("--budget", metavar="SHARE", default="10%", help="share of the peak memory without a budget; default 10%%")
    add("--iterations", metavar="N", help="how many iterations; by default, the demo decides")
    add(
        "--picture",
        metavar="PATH",
        default="recompute-demo.png",
        help="where to write the picture, or none; default %(default)s",
    )
    add("--json", action="store_true", help="print only the figures, as a JSON object on stdout")
    add("--list", action="store_true", help="list the demos and exit")


def run(options: argparse.Namespace) -> int:
    points = plugins(GROUP)
    if options.list:
        return _list(points, as_json=options.json)
    point = _choose(points, options.name)
    budget = _share(options.budget)
    extra = {} if options.iterations is None else {"iterations": count("--iterations", options.iterations)}
    demo = _load(point)
    if extra and "iterations" not in inspect.signature(demo).parameters:
        raise CommandError(f"the demo {point.name!r} has no iterations")
    progress = _Progress()

    def quiet(*_: object) -> None:
        return

    with Live(lambda: progress.parts, wait=0.1, every=0.1):
        try:
            figures = demo(
                budget=budget,
                picture=None if options.picture.lower() == "none" else options.picture,
                echo=quiet if options.json else print,
                progress=progress.hear,
                **extra,
            )
        except ModuleNotFoundError as error:
            raise _missing(point, error) from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise CommandError(str(error), 1) from None
    if options.json:
        print_json(figures)
    return 0


class _Progress:
    """The progress of a demo: parts of a line on a terminal; elsewhere a line on stderr every few seconds."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._watched = is_terminal(sys.stderr)
        self._next = perf_counter() + _EVERY

    def hear(self, text: str, share: float | None = None) -> None:
        """Take a few words, and the share of the whole that is done."""
        self.parts = [text] if share is None else [bar(round(100 * share), 100), f"{share:4.0%}", text]
        if not self._watched and perf_counter() >= self._next:
            print("recompute demo:", *self.parts, file=sys.stderr, flush=True)
            self._next = perf_counter() + _EVERY


def _list(points: list[EntryPoint], *, as_json: bool) -> int:
    if as_json:
        print_json({"demos": {point.name: point.value for point in points}})
    elif points:
        print_list(["demo", "module"], [(point.name, point.value) for point in points], sys.stdout)
    else:
        raise _unknown(points, None)
    return 0


def _choose(points: list[EntryPoint], name: str) -> EntryPoint:
    for point in points:
        if point.name == name:
            return point
    raise _unknown(points, name)


def _unknown(points: list[EntryPoint], name: str | None) -> CommandError:
    if version_of(DISTRIBUTION) is None:
        return CommandError(NOT_INSTALLED, 1)
    known = ", ".join(dict.fromkeys(point.name for point in points))
    if name is None or not known:
        return CommandError("there are no demos", 1)
    return CommandError(f"there is no demo {name!r}; choose from {known}")


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        demo = point.load()
    except ModuleNotFoundError as error:
        raise _missing(point, error) from None
    except Exception as error:
        raise CommandError(f"the demo {point.name!r} cannot be loaded: {type(error).__name__}: {error}", 1) from None
    if not callable(demo):
        raise CommandError(f"the demo {point.name!r} cannot be loaded: {point.value} is not a function", 1)
    return demo  # type: ignore[no-any-return]  # an entry point is anything


def _missing(point: EntryPoint, error: ModuleNotFoundError) -> CommandError:
    package = missing_package(error)
    if package is None:
        return CommandError(f"the demo {point.name!r} cannot be loaded: {error}", 1)
    return CommandError(f"the demo {point.name!r} needs {package}: {how_to_get(package)}", 1)


def _share(text: str) -> float:
    """0.05 from "5%" or "0.05"."""
    with suppress(ValueError):
        share = bytes_or_share(text)
        if isinstance(share, float):
            return share
    raise CommandError(f"the budget of a demo is a share of its memory, such as 5%, not {text!r}")
