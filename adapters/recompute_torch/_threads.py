"""Threads and interrupts while a block is open: a new thread takes part, and Ctrl-C waits for the end of an operator.

A mode belongs to the thread that entered it, but a tensor whose memory is gone must not meet an operator anywhere. So
while a block is open, a thread that is started begins by joining the blocks of the one that starts it. An interrupt in
the middle of an operator waits, so that no bookkeeping is cut short.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import wraps
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any, Final

from recompute.extend import BackgroundThread


class Threads:
    """Asks, as a thread is started, what it is to do first: functions, each of which returns what it is to do last.

    From `open` to as many calls of `close`.
    """

    def __init__(self, ask: Callable[[], list[Callable[[], Callable[[], object]]]]) -> None:
        self._ask = ask
        self._times = 0
        self._start: Any = None  # as it was before
        self._ours: Any = None

    def open(self) -> None:
        """From now on."""
        self._times += 1
        if self._times == 1:
            ask, start = self._ask, Thread.start

            @wraps(start)
            def ours(thread: Thread) -> None:
                first = [] if isinstance(thread, BackgroundThread) else ask()
                if first:
                    vars(thread)["_recompute"] = first, vars(thread).get("run")
                    vars(thread)["run"] = _run
                start(thread)

            self._start, self._ours = start, ours
            Thread.start = ours  # type: ignore[method-assign, assignment]  # until `close`

    def close(self) -> None:
        """Once for each `open`."""
        self._times -= 1
        if not self._times and Thread.start is self._ours:  # else it is wrapped in turn, and asks for nothing
            Thread.start = self._start  # type: ignore[method-assign]  # as it was


def _run() -> None:
    """Instead of the `run` of the thread that it is called in."""
    thread: Any = current_thread()
    first, run = vars(thread).pop("_recompute")
    if run is None:
        del thread.run
    else:
        thread.run = run
    last = [function() for function in first]
    del first
    try:
        thread.run()
    finally:
        for function in last:
            function()


_BOOKS: Final = (f"{__name__.rpartition('.')[0]}.", "recompute.")
"""Modules that keep books: those of the cache are called from the destruction of tensors, too."""


class Interrupts:
    """SIGINT while a block is open. A second one does not wait: the operator may be a long chain of repeated runs."""

    def __init__(self) -> None:
        self.waiting = False
        """One has come and waits: who sees that calls `deliver` when the books are complete."""
        self._before: Any = None

    def hold(self) -> None:
        """Begin to hold them. Python gives signals to the main thread alone: in others, nothing is to be done."""
        if current_thread() is main_thread() and callable(before := signal.getsignal(signal.SIGINT)):
            self._before = before
            signal.signal(signal.SIGINT, self._arrived)

    def release(self) -> None:
        """Restore the handler, unless the program has set one meanwhile. What waits is still to be delivered."""
        if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) == self._arrived:
            signal.signal(signal.SIGINT, self._before)

    def deliver(self) -> None:
        """Do what would have been done when it came: raise KeyboardInterrupt, mostly."""
        if self.waiting and current_thread() is main_thread():
            self.waiting = False
            self._before(signal.SIGINT, sys._getframe(1))

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.waiting or not _in_the_books(frame):
            self.waiting = False
            self._before(number, frame)
        else:
            self.waiting = True


def _in_the_books(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_BOOKS):
            return True
        frame = frame.f_back
    return False
