"""A line that shows progress on a terminal, and is cleared while something else is written there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Event
from time import perf_counter
from typing import Any

from recompute._background import BackgroundThread
from recompute._interrupts import suppress
from recompute._locks import RLock
from recompute._terminal import columns, hooked, is_terminal, paint


class Live:
    """Inside the block, the last line of the terminal on stderr shows `parts()`, as many as fit; else nothing happens.

    The line is drawn by a daemon thread, first after `wait` seconds, then every `every` seconds if the text changed; an
    empty list draws nothing. `sys.stdout` and `sys.stderr` stay the objects they are, but where they are terminals
    their `write` first clears the line, and while something else stands in the last line it is not drawn.
    """

    def __init__(self, parts: Callable[[], Sequence[str]], *, wait: float = 1.0, every: float = 0.25) -> None:
        self._parts = parts
        self._wait = wait
        self._every = every
        self._stream: Any = sys.stderr
        self._write: Callable[[str], object] = lambda _: None
        self._lock = RLock()
        self._shown = ""
        self._line_is_free = True
        self._done = Event()
        self._process = os.getpid()
        self._thread = BackgroundThread("progress", self._draw_until_done)
        self._hooks = ExitStack()

    def __enter__(self) -> Live:
        if is_terminal(self._stream) and os.environ.get("TERM") != "dumb":
            self._write = self._stream.write
            for stream in {id(given): given for given in (sys.stdout, sys.stderr) if is_terminal(given)}.values():
                self._hooks.enter_context(hooked(stream, self._write_after_clearing))
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is None:
            return
        self._done.set()
        self._thread.join()
        try:
            with suppress(OSError, ValueError):
                self._clear()
        finally:
            self._hooks.close()

    def _write_after_clearing(self, text: str, write: Callable[[str], object]) -> object:
        if os.getpid() != self._process:  # a fork: the line is not its business, and the lock may be taken forever
            return write(text)
        with self._lock:
            self._clear()
            if text:
                self._line_is_free = text.endswith("\n")
            return write(text)

    def _draw_until_done(self) -> None:
        pause = self._wait
        while not self._done.wait(pause):
            start = perf_counter()
            try:
                parts = self._parts()
                with self._lock:
                    self._draw(parts)
            except Exception:  # the terminal has gone, or the figures cannot be had: the run matters more
                return
            pause = max(self._every, 20 * (perf_counter() - start))

    def _draw(self, parts: Sequence[str]) -> None:
        text = fit(parts, columns(self._stream) - 1)
        if text != self._shown and self._line_is_free:
            self._clear()
            self._write(paint(text, "2", self._stream))
            self._stream.flush()
            self._shown = text

    def _clear(self) -> None:
        if self._shown:
            self._write("\r" + " " * min(len(self._shown), columns(self._stream) - 1) + "\r")
            self._stream.flush()
            self._shown = ""


def bar(done: int, of: int, width: int = 20) -> str:
    """How much is done, as a picture."""
    full = width * done // max(1, of)
    return f"[{'#' * full}{'.' * (width - full)}]"


def fit(parts: Sequence[str], width: int) -> str:
    """As many of the parts, from the first, as fit into `width` columns; of a single one as much as fits."""
    text = "  ".join(parts)
    while len(text) > width and len(parts) > 1:
        parts = parts[:-1]
        text = "  ".join(parts)
    return text[:width]
