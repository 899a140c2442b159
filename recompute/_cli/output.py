"""What the commands print: tables (with rich on a terminal, plain elsewhere) or one JSON object for scripts."""

from __future__ import annotations

import _thread
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class CommandError(Exception):
    """One clear line for the user, and the exit status (2: the command line or its files are wrong)."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def complain(message: str, status: int) -> int:
    """Print an error as one line on stderr; returns `status`."""
    _say("error", "31", message)
    return status


def warn(message: str) -> None:
    """Print a warning as one line on stderr."""
    _say("warning", "33", message)


def _say(what: str, colour: str, message: str) -> None:
    with suppress(BrokenPipeError):
        print(paint(f"recompute: {what}:", f"1;{colour}", sys.stderr), " ".join(message.split()), file=sys.stderr)


def print_json(figures: object) -> None:
    """Print one JSON object, on one line, on stdout."""
    print(json.dumps(figures, default=str), flush=True)


def print_pairs(title: str, pairs: Sequence[tuple[str, str]], stream: TextIO) -> None:
    """Print labels and values under a title."""
    print(paint(title, "1", stream), file=stream)
    _print_table([], pairs, "<<", stream)


def print_list(columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO, align: str = "") -> None:
    """Print an empty line, and rows under column names. `align`: "<" or ">" for each column; by default all "<"."""
    print(file=stream)
    _print_table(columns, rows, align or "<" * len(columns), stream)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], align: str, stream: TextIO) -> None:
    console = _console(stream)
    if console is None:
        lines = [columns, *rows] if columns else rows
        widths = [max(len(line[at]) for line in lines) for at in range(len(align))]
        for line in lines:
            cells = [f"{cell:{side}{width}}" for cell, side, width in zip(line, align, widths, strict=True)]
            print("  " + "  ".join(cells).rstrip(), file=stream)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(columns), header_style="dim", padding=(0, 0, 0, 2))
    for number, side in enumerate(align):
        table.add_column(
            columns[number] if columns else "",
            justify="right" if side == ">" else "left",
            style="cyan" if number == 0 else "",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    console.print(table)


def _console(stream: TextIO) -> Console | None:
    """Rich, if there is a terminal and rich is installed."""
    if not is_terminal(stream):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")


def is_terminal(stream: Any) -> bool:
    """Whether somebody watches this stream."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def paint(text: str, code: str, stream: Any) -> str:
    """`text` in the colour that an ANSI code stands for, where that can be seen and is wanted."""
    plain = not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or os.name == "nt" else f"\x1b[{code}m{text}\x1b[0m"


def flush(stream: Any) -> None:
    """Flush a stream that may be missing or closed. Raises BrokenPipeError if its reader has gone."""
    with suppress(AttributeError, ValueError):
        stream.flush()


def reader_gone(stream: Any) -> bool:
    """Whether the other end of a pipe is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, ValueError, OSError):  # not a pipe, or a system without poll
        return False


def silence(stream: Any) -> None:
    """The reader of this stream has gone: send the rest nowhere, so that the interpreter's exit is quiet too."""
    with suppress(AttributeError, ValueError, OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


@contextmanager
def hooked(stream: Any, hook: Callable[[str, Callable[[str], object]], object]) -> Iterator[None]:
    """Inside the block, `stream.write(text)` is `hook(text, write)`. The stream stays the object it is."""
    before = vars(stream).get("write") if hasattr(stream, "__dict__") else None
    try:
        write = stream.write
        stream.write = lambda text: hook(text, write)
    except AttributeError:  # there is none, or it does not allow it
        yield
        return
    try:
        yield
    finally:
        if before is None:
            del stream.write
        else:
            stream.write = before


def seconds(time: float) -> str:
    """A duration for people."""
    if time < 1:
        return f"{time * 1000:.3g} ms" if time >= 1e-3 else f"{time * 1000:.3f} ms"
    if time < 120:
        return f"{time:.3g} s"
    whole = round(time)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


@contextmanager
def no_interrupt_lost() -> Iterator[None]:
    """Python ignores what a destructor raises, also a Ctrl-C that falls into one: raise that again a bit later."""
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            later = threading.Timer(0.01, _thread.interrupt_main)
            later.daemon = True
            later.start()
        else:
            before(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
