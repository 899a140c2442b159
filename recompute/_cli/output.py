"""Output of the commands: tables (as wide as the terminal, if it is one), or one JSON object for scripts."""

from __future__ import annotations

import _thread
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from recompute._terminal import columns as columns_of
from recompute._terminal import is_terminal, paint
from recompute.text import fitted, folded


class CommandError(Exception):
    """One clear line for the user, and the exit status (2: the command line or its files are wrong)."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def complain(message: str, status: int) -> int:
    """Print an error as one line on stderr (a terminal may need more); returns `status`."""
    _say("error", "31", message)
    return status


def warn(message: str) -> None:
    """Print a warning as one line on stderr."""
    _say("warning", "33", message)


def hint(message: str) -> None:
    """Print advice as one line on stderr."""
    _say("hint", "36", message)


def _say(what: str, colour: str, message: str) -> None:
    start = f"recompute: {what}:"
    line, *others = _wrapped(f"{start} {' '.join(message.split())}", sys.stderr)
    with suppress(BrokenPipeError):
        print(line.replace(start, paint(start, f"1;{colour}", sys.stderr), 1), *others, sep="\n", file=sys.stderr)


def _wrapped(text: str, stream: TextIO) -> list[str]:
    """One line, or on a terminal as many as it takes, each of whole words."""
    if not is_terminal(stream):
        return [text]
    return folded(text, columns_of(stream))


def print_json(figures: object) -> None:
    """Print one JSON object, on one line, on stdout."""
    print(json.dumps(figures, default=str), flush=True)


def print_pairs(title: str, pairs: Sequence[tuple[str, str]], stream: TextIO) -> None:
    """Print labels and values under a title."""
    for line in _wrapped(title, stream):
        print(paint(line, "1", stream), file=stream)
    _print_table([], pairs, "<<", stream)


def print_text(text: str, stream: TextIO) -> None:
    """Print one line."""
    print(*_wrapped(text, stream), sep="\n", file=stream)


def print_list(columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO, align: str = "") -> None:
    """Print an empty line, and rows under column names. `align`: "<" or ">" for each column; by default all "<"."""
    print(file=stream)
    _print_table(columns, rows, align or "<" * len(columns), stream)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], align: str, stream: TextIO) -> None:
    width = columns_of(stream) if is_terminal(stream) else sys.maxsize
    for line in fitted(
        columns, rows, align, width, lambda text: paint(text, "36", stream), lambda text: paint(text, "2", stream)
    ):
        print(line, file=stream)


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
def no_interrupt_lost() -> Iterator[None]:
    """Python ignores what a destructor raises, also a Ctrl-C that falls into one: raise that again after it."""
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(interrupt_after, (sys._getframe(),))
        else:
            before(lost)

    def interrupt_after(call: FrameType) -> None:
        """When a call is over: inside of it, an interrupt would be lost, too."""
        while True:
            try:
                call.clear()
                break
            except RuntimeError:  # it still runs
                time.sleep(0.001)
        _thread.interrupt_main()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
