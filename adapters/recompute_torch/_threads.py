"""Threads and interrupts while a block is open: a new thread takes part, and Ctrl-C waits for the end of an operator.

A mode belongs to the thread that entered it, but a tensor whose memory is gone must not meet an operator anywhere. The
hook by which Python tells profilers of new threads tells of them here too; it is gone after their first event. An
interrupt in the middle of an operator waits, so that no bookkeeping is cut short.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final

from recompute.extend import BackgroundThread


class Threads:
    """Calls a function at the beginning of each new thread, until it is closed."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._before = threading.getprofile()
        self._open = True
        threading.setprofile(self._first)

    def _first(self, frame: Any, event: Any, argument: Any) -> None:
        sys.setprofile(self._before)
        if self._before is not None:
            self._before(frame, event, argument)
        if self._open and not isinstance(threading.current_thread(), BackgroundThread):
            self._begin()

    def close(self) -> None:
        """Threads that start later take no part."""
        self._open = False
        if threading.getprofile() == self._first:
            threading.setprofile(self._before)


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
