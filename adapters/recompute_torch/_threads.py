"""Threads that are started inside a block take part in it.

A mode belongs to the thread that entered it, but a tensor whose memory is gone must not meet an operator anywhere. The
hook by which Python tells profilers of new threads tells of them here too; it is gone after their first event.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

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
        """Threads that start from now on are none of our business."""
        self._open = False
        if threading.getprofile() == self._first:
            threading.setprofile(self._before)
