"""Changes: one lock, and under it changes that are whole or made good.

A change begins with `begin` and ends with `end`, both under the lock. One that is cut short in between, by an exception
from the handler of a signal or by a fork, is made good by whoever begins the next one. The garbage collector waits
meanwhile: it would run destructors, which are the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from gc import disable, enable, isenabled
from threading import RLock


class Changes:
    """`with changes.lock, changes: ...` is a change; on the path of every operation, `begin` and `end` are called."""

    def __init__(self, make_good: Callable[[], None], prepare: Callable[[], None]) -> None:
        self.lock = RLock()
        self.unfinished = False
        """A change has begun and not ended."""
        self._collects = True  # whether the garbage collector was enabled when it began
        self._make_good = make_good
        self._prepare = prepare

    def begin(self) -> None:
        """A change begins: the lock is held, and destructors wait for its end."""
        if self.unfinished:
            self._repair()
        else:
            self._collects = isenabled()
            self.unfinished = True
        disable()
        self._prepare()

    def end(self) -> None:
        """It has ended, and everything that is counted is right."""
        if self._collects:
            enable()
        self.unfinished = False

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._collects:
            enable()
        if kind is None:
            self.unfinished = False

    def pause(self, wait: Callable[[], object]) -> None:
        """In the middle of a change: what was changed so far is one by itself; then wait, and begin another."""
        self.end()
        try:
            wait()
        except BaseException:
            self.unfinished = True
            raise
        self.begin()

    @property
    def mine(self) -> bool:
        """Whether this thread is in the middle of one."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # the library's Condition asks, too

    def distrust(self) -> None:
        """Have everything made good at the next beginning. Under the lock."""
        self.unfinished = True

    def _repair(self) -> None:
        lock = self.lock
        lock.release()
        nested = self.mine
        lock.acquire()
        if nested:
            raise RuntimeError(
                "the cache is used by the handler of a signal that came in the middle of a change of it; let the "
                "handler only note the signal, and use the cache afterwards"
            )
        if self.unfinished:  # no other thread was faster
            disable()
            self._make_good()
        self.unfinished = True

    def after_fork(self) -> None:
        """In a child process: the lock may be held by a thread that is not here, in the middle of a change."""
        self.lock = RLock()
        if not self.unfinished:
            self._collects = isenabled()
        elif self._collects:
            enable()
        self.unfinished = True
