"""Changes: one lock, and under it changes that are whole or made good.

A change begins with `begin` and ends with `end`, both under the lock. One that is cut short in between, by an exception
from the handler of a signal or by a fork, is made good by whoever begins the next one. The garbage collector waits
meanwhile: it would run destructors, which are the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from gc import disable, enable, isenabled
from threading import RLock, get_ident
from typing import Any


class Changes:
    """`with changes.lock, changes: ...` is a change; on the path of every operation, `begin` and `end` are called."""

    def __init__(self, make_good: Callable[[], None], prepare: Callable[[], None]) -> None:
        self.lock = RLock()
        self.unfinished = False
        """A change has begun and not ended."""
        self._make_good = make_good
        self._prepare = prepare

    def begin(self) -> None:
        """A change begins: the lock is held, and destructors wait for its end."""
        unfinished = self.unfinished
        if unfinished:
            self._refuse_nested()  # before anything is touched
        if not _going:
            _collector.wanted = isenabled()
        _going[get_ident()] = self
        disable()
        self.unfinished = True
        if unfinished:
            self._make_good()
        self._prepare()

    def end(self) -> None:
        """It has ended, and everything that is counted is right."""
        self._resume()
        self.unfinished = False

    def _resume(self) -> None:
        """The collector goes on, unless another cache is in the middle of a change."""
        if len(_going) == 1 and _collector.wanted:
            enable()
        _going.pop(get_ident(), None)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._resume()
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

    def _refuse_nested(self) -> None:
        if self.lock._recursion_count() > 1:  # type: ignore[attr-defined]  # as Condition relies on `_is_owned`
            raise RuntimeError(
                "the cache is used by the handler of a signal that came in the middle of a change of it; let the "
                "handler only note the signal, and use the cache afterwards"
            )

    def after_fork(self) -> None:
        """In a child process: the lock may be held by a thread that is not here, in the middle of a change."""
        self.lock = RLock()
        self.unfinished = True
        if _going:
            _going.clear()  # none of these threads is here
            if _collector.wanted:
                enable()


class _Collector:
    wanted = True


_collector = _Collector()
"""Whether the garbage collector was enabled when the first of the changes began that are going on."""

_going: dict[int, Changes | None] = {}
"""The changes that are going on, of all caches, by thread."""


def without_collector(function: Callable[[Any], object], argument: Any) -> None:
    """Call a function of the interpreter's while the collector is paused, as in a change."""
    if not _going:
        _collector.wanted = isenabled()
    _going[get_ident()] = None
    disable()
    function(argument)
    if len(_going) == 1 and _collector.wanted:
        enable()
    _going.pop(get_ident(), None)
