"""The lock of `with lock:` that no exception from the handler of a signal leaves acquired.

Python 3.14 looks for signals between the end of `__enter__` and the beginning of the block that would release the lock;
other versions do not. There the lock is acquired by a function in Python, after whose return nothing is looked for, and
which releases the lock if the exception comes before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
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


def entering_if_free(lock: Any) -> Callable[[], bool]:
    """What a `with` may call to acquire an RLock unless another thread has it."""
    enter: Callable[[], bool] = getattr(lock, "enter_if_free", None) or partial(lock.acquire, blocking=False)
    return enter
