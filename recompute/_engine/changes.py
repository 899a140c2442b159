"""Changes: one lock, and under it changes that are whole or made good.

A change begins with `begin` and ends with `end`, both under the lock. One that is cut short in between, by an exception
from the handler of a signal or by a fork, is made good by whoever begins the next one. The garbage collector pauses
meanwhile: it would run destructors, which are the user's. It is the collector of the whole process, and so all caches
share one lock; a change takes microseconds, and nothing waits during one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from gc import disable, enable, isenabled
from threading import RLock
from typing import Any, Final


class Shared:
    """What the caches of a process have in common."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.change: object = None
        """Whose change is going on, or was cut short before the collector went on; None: nobody's."""
        self.collects = True
        """Whether the collector was enabled when that change began."""


shared: Final = Shared()


class _Change:
    """Ends a change with its block. Its methods are static, since `with` makes an object to bind one that is not."""

    @staticmethod
    def __enter__() -> None: ...

    @staticmethod
    def __exit__(kind: type[BaseException] | None, error: object, trace: object) -> None:
        change = shared.change
        if kind is None and isinstance(change, Changes):
            change.end()
            return
        _ = kind, error, trace  # as in `end`
        if shared.collects:
            enable()
        shared.change = None


_change: Final = _Change()


class Changes:
    """`with changes.lock, changes.begun(): ...` is a change; the path of every operation has `begin` and `end` instead.

    Nothing between the lock and `begin`, or between `end` and the lock, makes an object that the garbage collector
    tracks: it could run there, and destructors under the lock.
    """

    def __init__(self, make_good: Callable[[], None], prepare: Callable[[], None]) -> None:
        self.lock = shared.lock
        self.unfinished = False
        """A change has begun and not ended."""
        self.unlocked: dict[Any, None] = {}
        """Frames that have begun at once: while there are any, `prepare` is called when a change begins."""
        self._make_good = make_good
        self._prepare = prepare

    def begin(self) -> None:
        """A change begins: the lock is held, and destructors wait for its end."""
        if shared.change is None:
            shared.collects = isenabled()
        else:
            self._refuse_nested()  # before anything is touched
        shared.change = self
        disable()
        if self.unfinished:
            self._make_good()
        self.unfinished = True
        if self.unlocked:
            self._prepare()

    def end(self) -> None:
        """It has ended, and everything that is counted is right."""
        _ = (
            self,
            self,
            self,
        )  # memory for the three arguments of the lock's `__exit__`, which is kept for the next tuple
        if shared.collects:
            enable()
        shared.change = None
        self.unfinished = False

    def begun(self) -> _Change:
        """A change has begun: to be entered with the lock."""
        self.begin()
        return _change

    def pause(self, wait: Callable[[], object]) -> None:
        """In the middle of a change: what was changed so far is one by itself; then wait, and begin another."""
        self.end()
        try:
            wait()
        except BaseException:
            self.unfinished = True
            while not self.mine:  # an interrupt has come where `Condition.wait` had just let go of the lock
                with suppress(BaseException):  # another one, which is as good as the first
                    self.lock.acquire()
            raise
        self.begin()

    @property
    def mine(self) -> bool:
        """Whether this thread is in the middle of a change, of whichever cache."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # the library's Condition asks, too

    def distrust(self) -> None:
        """Have everything made good at the next beginning. Under the lock."""
        self.unfinished = True

    def _refuse_nested(self) -> None:
        if is_nested(self.lock):
            raise RuntimeError(
                "a cache is used by the handler of a signal that came in the middle of a change of one; let the "
                "handler only note the signal, and use the cache afterwards"
            )

    def after_fork(self) -> None:
        """In a child process: whatever another thread was in the middle of is unfinished."""
        self.lock = shared.lock
        self.unfinished = True


def after_fork() -> None:
    """In a child process, first: the lock may be held by a thread that is not here, in the middle of a change."""
    shared.lock = RLock()
    if shared.change is not None:
        shared.change = None
        if shared.collects:
            enable()


def is_nested(lock: Any) -> bool:
    """Whether this thread has the lock more than once."""
    if hasattr(lock, "_recursion_count"):  # as Condition relies on `_is_owned`
        return bool(lock._recursion_count() > 1)
    return " count=1 " not in repr(lock)  # before Python 3.11.5 nothing else tells
