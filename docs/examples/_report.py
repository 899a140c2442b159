"""How the examples speak: a bar while they work, aligned tables, figures as JSON, and a picture if one can be drawn."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import recompute as rc


class Advance(Protocol):
    """Told how many more steps are done, or begun, and something about them."""

    def __call__(self, steps: int, text: str = "") -> object: ...


@contextmanager
def progress(total: int | None, *, lines: int = 0) -> Iterator[Advance]:
    """A bar on stderr while the block runs, if rich is installed and somebody watches; else so many lines."""
    done = drawn = 0

    def tell(steps: int, text: str = "") -> None:
        nonlocal done
        done += steps
        if lines and total and (done == total or done % max(1, total // lines) == 0):
            print(f"step {done} of {total}: {text}", file=sys.stderr)

    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield tell
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield tell
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def draw(steps: int, text: str = "") -> None:
            nonlocal done, drawn
            done += steps
            if 500 * (done - drawn) >= (total or 0):  # drawing takes longer than a short step
                bar.update(task, completed=done, description=text)
                drawn = done

        yield draw


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, under the names of the columns."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in (columns, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def machine(*packages: str) -> dict[str, Any]:
    """Where figures were measured: the versions of Python and of packages, and the cores."""
    versions = {package: version(package) for package in packages}
    return {"python": platform.python_version(), **versions, "cores": os.cpu_count()}


def into_files(parser: argparse.ArgumentParser, drawn: str) -> argparse.ArgumentParser:
    """The same, with options for `write` and `show`."""
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON")
    parser.add_argument("--picture", metavar="PATH", help=f"draw {drawn}: .png, .svg or .pdf")
    return parser


def write(figures: dict[str, Any], path: str) -> None:
    """As JSON."""
    Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def show(draw: Callable[[], Path]) -> None:
    """Draw a picture and tell where it is, or why there is none."""
    try:
        print("picture:", draw())
    except ImportError:
        print("no picture: pip install '.[plot]' in a checkout", file=sys.stderr)
    except (ValueError, rc.BudgetError) as error:  # no such format; a budget that does not do
        print(f"no picture: {error}", file=sys.stderr)
