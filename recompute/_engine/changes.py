"""Changes: one lock, and under it changes that are whole or made good.

A change that is cut short, by an exception from the handler of a signal or by a fork, is made good when the next one
begins. The garbage collector does not start meanwhile: it would run destructors, which are the user's. Its switch is
the program's: it is turned only around compiled code that runs no Python, so that no other thread runs meanwhile and
sees it. Any other change raises the threshold of the youngest generation, which costs more, and lowers it again unless
the program has set another one meanwhile. Both are those of the whole process, and so all caches share one lock; a
change takes microseconds, and nothing waits during one.

In the middle of a change a thread cannot begin another one: the handler of a signal is told so by an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from gc import get_threshold, set_threshold
from typing import Any, Final

from recompute import _cython as cython
from recompute._locks import RLock, gate, gate_if_free

if cython.compiled:
    import cython  # read by Cython, and never run
if not cython.compiled:
    from gc import disable, enable, isenabled  # compiled, they are the interpreter's, see the .pxd

_PAUSED: Final = (1 << 31) - 1
"""The threshold of the collector during a change: it never starts."""


class Call:
    """Lives as long as the call that made it: what refers weakly to it tells whether that call goes on."""

    __slots__ = ("__weakref__",)


class Shared:
    """What the caches of a process have in common."""

    __slots__ = ("changing", "if_free", "is_mine", "lock", "off", "raised", "threshold", "waiting")

    def __init__(self) -> None:
        self.off = False
        """The collector was switched off for the change that is going on."""
        self.raised = False
        """Its threshold was raised for that change."""
        self.threshold = get_threshold()[0]
        """Of the collector's youngest generation, as the program has set it."""
        self.renew()

    def renew(self) -> None:
        lock: Any = RLock()
        self.lock = lock
        self.is_mine: Callable[[], bool] = lock._is_owned  # on which the library's Condition relies, too
        """Whether this thread is in the middle of a change."""
        self.waiting = gate(lock.__enter__, lock.__exit__)
        self.if_free = gate_if_free(lock)
        self.changing: Changes | None = None
        """Whose change is going on."""

    def look(self) -> None:
        """See what threshold the program has set. Without the lock: it makes a tuple, and the collector may start."""
        (threshold, _, _) = get_threshold()
        if threshold != _PAUSED:
            self.threshold = threshold

    def pause(self) -> None:
        """Raise the threshold: the collector does not start."""
        self.raised = True
        set_threshold(_PAUSED)

    def resume(self) -> None:
        """The collector may start again."""
        if self.off:
            self.off = False
            enable()
        elif self.raised:
            self.raised = False
            if get_threshold()[0] == _PAUSED:
                set_threshold(self.threshold)

    def calls_python(self) -> None:
        """A change that has switched the collector off is about to run Python: leave the switch alone."""
        if self.off:
            self.look()
            self.pause()
            self.off = False
            enable()

    def after_fork(self) -> None:
        """In a child process, first: the lock may be held by a thread that is not here, in the middle of a change."""
        if not self.is_mine():  # else the handler of a signal forks: this change goes on
            self.renew()
            self.resume()


shared: Final = Shared()


class Changes:
    """`with changes.alone(), changes.begun(): ...` is a change."""

    __slots__ = ("__weakref__", "_make_good", "_shared", "atomic", "unfinished")

    def __init__(self, make_good: Callable[[], None]) -> None:
        self.atomic = False
        """Whether compiled code changes this by itself: it tells no listener and asks no tier."""
        self.unfinished = False
        """A change has begun and not ended."""
        self._shared = shared
        self._make_good = make_good

    @property
    def lock(self) -> Any:
        """An RLock."""
        return self._shared.lock

    def is_mine(self) -> bool:
        """Whether this thread is in the middle of a change, of whichever cache."""
        return self._shared.is_mine()

    def alone(self) -> Any:
        """The lock, to be entered. Raises RuntimeError in the middle of another change."""
        if self._shared.is_mine():
            raise RuntimeError(
                "a cache is used by the handler of a signal that came in the middle of a change of one; let the "
                "handler only note the signal, and use the cache afterwards"
            )
        if not self.atomic:
            self._shared.look()
        return self._shared.waiting

    def begun(self, python: bool = False) -> Any:
        """A change begins: to be entered with the lock. `python`: it is made by code that is not compiled."""
        if not self.atomic:
            self._shared.pause()
        elif isenabled():
            self._shared.off = True
            disable()
            if python:
                self._shared.calls_python()
        if self.unfinished:
            self._shared.calls_python()
            self._make_good()
        self.unfinished = True
        self._shared.changing = self
        return _change

    def pause(self, wait: Callable[[], object]) -> None:
        """In the middle of a change: what was changed so far is one by itself; then wait, and begin another."""
        self.unfinished = False
        self._shared.resume()
        try:
            wait()
        except BaseException:
            self.unfinished = True
            while not self.is_mine():  # an interrupt came where `Condition.wait` had just released the lock
                with suppress(BaseException):  # another one, which is as good as the first
                    self.lock.acquire()
            raise
        self.begun(python=True)

    def calls_python(self) -> None:
        """In the middle of a change, before something that is not compiled."""
        self._shared.calls_python()

    def distrust(self) -> None:
        """Have everything made good when the next change begins. Under the lock."""
        self.unfinished = True


class Change:
    """Ends a change with its block. Its methods are static for the reason of `gate`."""

    __slots__ = ()

    @staticmethod
    def __enter__() -> None: ...

    @staticmethod
    def __exit__(kind: type[BaseException] | None, error: object, trace: object) -> None:
        _ = kind, error, trace  # memory for the arguments of the lock's `__exit__`, which is kept for the next tuple
        _end(shared, kind is None)


def _end(here: Shared, whole: bool) -> None:
    changing = here.changing
    here.changing = None
    if whole and changing is not None:
        changing.unfinished = False
    here.resume()


_change: Final = Change()

COMPILED: Final = bool(cython.compiled)
"""Whether this file is."""
