"""Locks that no exception from the handler of a signal leaves acquired.

Python 3.14 looks for signals between the end of `__enter__` and the beginning of the block that would release the lock;
other versions do not. There the lock is acquired by a function in Python, after whose return nothing is looked for, and
which releases the lock if the exception comes before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from sys import exception
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info[:2] != (3, 14):
    from threading import RLock as RLock
else:

    class RLock(type(threading.RLock())):
        """An RLock that is safe in Python 3.14."""

        __slots__ = ()

        def __enter__(self) -> bool:
            return self._acquire(blocking=True)

        def enter_if_free(self) -> bool:
            """Acquire it unless another thread has it."""
            return self._acquire(blocking=False)

        def _acquire(self, *, blocking: bool) -> bool:
            before = self._recursion_count()
            try:
                return self.acquire(blocking)
            except BaseException:
                if self._recursion_count() > before:
                    self.release()
                raise


def gate(enter: Callable[[], object], leave: Callable[..., object]) -> Any:
    """What a `with` enters and leaves by functions that are not written in Python, and for which it makes no object.

    So no line of Python runs as a lock is acquired and released, where an interrupt could keep it from one or the
    other.
    """
    return type("Gate", (), {"__slots__": (), "__enter__": staticmethod(enter), "__exit__": staticmethod(leave)})()


def gate_if_free(lock: Any) -> Any:
    """A gate that acquires an RLock unless another thread has it; then the end is a RuntimeError."""
    return gate(getattr(lock, "enter_if_free", None) or partial(lock.acquire, blocking=False), lock.__exit__)


def do_if_free(free: Any, action: Callable[[], object]) -> bool:
    """Do this inside of a `gate_if_free`; False: another thread is there, and nothing was done."""
    entered, handled = False, exception()
    try:
        with free as entered:
            if entered:
                action()
    except RuntimeError as error:
        if entered:
            raise
        came = error.__context__
        if came is not None and came is not handled:  # an interrupt, not what a caller is handling
            raise came from None
    return entered
