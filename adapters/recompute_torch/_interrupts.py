"""An interrupt (Ctrl-C) in the middle of an operator waits for its end, so that no bookkeeping is cut short."""

from __future__ import annotations

import signal
import sys
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final

_BOOKS: Final = (f"{__name__.rpartition('.')[0]}.", "recompute.")
"""Modules that keep books: those of the cache are called from the destruction of tensors, too."""


class Interrupts:
    """SIGINT while a block is open. A second one does not wait: the operator may be a long chain of repeated runs."""

    def __init__(self) -> None:
        self.waiting = False
        """One has come and waits: who sees that calls `deliver` when the books are complete."""
        self._before: Any = None

    def hold(self) -> None:
        """From now on. Python gives signals to the main thread alone: in others, nothing is to be done."""
        if current_thread() is main_thread() and callable(before := signal.getsignal(signal.SIGINT)):
            self._before = before
            signal.signal(signal.SIGINT, self._arrived)

    def let_go(self) -> None:
        """As it was, unless the program has set a handler of its own meanwhile. What waits is still to be delivered."""
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
