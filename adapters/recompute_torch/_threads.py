"""While a block is open: functions that are replaced, threads that take part, and Ctrl-C, which waits for an operator.

A mode belongs to the thread that entered it, but a tensor whose memory is gone must not meet an operator anywhere. So
while a block is open, a thread that is started begins by joining the blocks of the one that starts it. An interrupt in
the middle of an operator waits, so that no bookkeeping is cut short.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from threading import Thread, current_thread, main_thread
from traceback import walk_stack
from types import FrameType
from typing import Any, Final

from recompute.extend import BackgroundThread, RLock

Surrounded = tuple[Any, tuple[str, ...], Callable[[Callable[..., Any]], Any]]
"""An owner, names of functions of it, and what makes of such a function the one that stands in its place."""


_surrounding: Final[Any] = RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_surrounding._at_fork_reinit)  # another thread may have had it


class Surroundings:
    """Functions of others that are replaced while any block is open."""

    def __init__(self, *surrounded: Surrounded) -> None:
        self._surrounded = surrounded
        self._blocks: set[object] = set()
        self._there: list[tuple[Any, str, Any, Any]] = []  # owner, name, the function before, ours

    def open(self, block: object) -> None:
        """This one is open."""
        with _surrounding:
            self._blocks.add(block)
            if not self._there:
                for owner, names, surround in self._surrounded:
                    for name in names:
                        ours = surround(getattr(owner, name))
                        self._there.append((owner, name, vars(owner).get(name), ours))
                        setattr(owner, name, ours)

    def close(self, block: object) -> None:
        """This one is not. Can be called again, after an interrupt."""
        with _surrounding:
            self._blocks.discard(block)
            while self._there and not self._blocks:
                owner, name, before, ours = self._there[-1]
                if vars(owner).get(name) is ours:  # else it is wrapped in turn
                    if before is None:  # it is inherited
                        delattr(owner, name)
                    else:
                        setattr(owner, name, before)
                self._there.pop()


def starting(ask: Callable[[], list[Callable[[], Callable[[], object]]]], start: Callable[..., Any]) -> Any:
    """`Thread.start`, which asks what the thread is to do first: functions, each of which returns what it does last."""

    @wraps(start)
    def ours(thread: Thread) -> None:
        first = [] if isinstance(thread, BackgroundThread) else ask()
        if first:
            vars(thread)["_recompute"] = first, vars(thread).get("run")
            vars(thread)["run"] = _run
        start(thread)

    return ours


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
        before = signal.getsignal(signal.SIGINT)
        if current_thread() is main_thread() and callable(before) and before != self._arrived:
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
    frames = () if frame is None else walk_stack(frame)
    return any(str(outer.f_globals.get("__name__")).startswith(_BOOKS) for outer, _ in frames)
