"""Evicting ahead: what has to be written to a tier leaves memory before its room is needed, in a thread of its own.

So the program waits for a transfer only where the tier is slower than the program: then it writes, too.
"""

from __future__ import annotations

import atexit
from _thread import start_new_thread
from collections.abc import Iterator
from math import inf
from threading import Condition, get_ident
from typing import TYPE_CHECKING, Final
from weakref import WeakSet, finalize, ref

from recompute._engine.graph import copy_of

if TYPE_CHECKING:
    from recompute._engine.engine import Engine
    from recompute._engine.graph import Storage
    from recompute._engine.pool import Pool

_SHARE: Final = 1 / 8
"""Of a budget, which is kept free at most."""

_TIMES: Final = 2
"""As much is kept free as this many of the largest value for whose transfer the program had to wait."""

_PATIENCE: Final = 10.0
"""Seconds that the end of the process waits for a transfer that is going on."""


class Ahead:
    """What keeps some memory of an engine free: begins with the first transfer for which the program has waited."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)
        self._free: dict[str, int] = {}
        """Device -> bytes to be kept free."""
        self._signals: _Signals | None = None
        """None: there is no thread."""

    @property
    def is_here(self) -> bool:
        """Whether its thread is the one that asks."""
        return self._signals is not None and self._signals.thread == get_ident()

    def waited(self, pool: Pool, nbytes: int) -> None:
        """The program has waited until so many bytes were written. Without the lock."""
        if pool.limit == inf or pool.tiers is None or not any(store.ahead for store in pool.tiers.stores):
            return
        self._free[pool.device] = max(self._free.get(pool.device, 0), min(_TIMES * nbytes, int(pool.limit * _SHARE)))
        engine = self._engine()
        if self._signals is None and engine is not None:
            self._signals = signals = _Signals()
            finalize(engine, signals.end).atexit = False
            start_new_thread(self._work, (signals,))  # not `Thread.start`: Ctrl-C there can come out as a RuntimeError
        if self._signals is not None:
            self._signals.ask()

    def wait(self) -> None:
        """Until nothing is left to be evicted ahead. Without the lock."""
        if self._signals is not None and not self.is_here:
            self._signals.wait()

    def end(self) -> None:
        """The thread ends, until the program has to wait again."""
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.end()

    def after_fork(self) -> None:
        """The thread is not in the child."""
        self._signals = None

    def _work(self, signals: _Signals) -> None:
        signals.thread = get_ident()
        for _ in signals.asked():
            engine = self._engine()
            try:
                if engine is not None:
                    self._evict(engine, signals)
            except Exception as error:  # of an adapter: the next use of the cache raises it
                if engine is not None:
                    engine.finalizer.interrupts.append((0, error))
            finally:
                del engine

    def _evict(self, engine: Engine, signals: _Signals) -> None:
        for device, free in list(self._free.items()):
            pool = engine.memory.pools[device]
            while not signals.over and pool.used + free > pool.limit:
                found = False
                with engine.changes.alone(), engine.changes.begun(python=True):
                    if engine.memory.advice is None:
                        for victim in engine.memory.victims(pool, free, engine.meter.now):
                            if victim.resident and not victim.locks and _must_be_written(victim):
                                found = engine.evict(victim, "pressure")
                                break  # one by one, or other threads would help, and wait
                engine.settling.settle()
                if not found:  # the next one needs no transfer
                    break


def _must_be_written(storage: Storage) -> bool:
    tiers = storage.pool.tiers
    return tiers is not None and copy_of(storage) is None and tiers.moves(storage)


class _Signals:
    """Between the thread and the others."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.over = False
        self._changed = Condition()
        self._times = self._done = 0
        """How often it was asked to look, and for how many of these it has."""
        _all.add(self)

    def ask(self) -> None:
        """Let the thread look what there is to do."""
        with self._changed:
            self._times += 1
            self._changed.notify_all()

    def asked(self) -> Iterator[None]:
        """For the thread: once for each time that it has to look, until it is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._times)
                times = self._times
            if not self.over:
                yield
            with self._changed:
                self._done = self._times if self.over else times
                self._changed.notify_all()
            if self.over:
                return

    def wait(self) -> None:
        """Until it has looked as often as it was asked to."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= self._times, _PATIENCE)

    def end(self) -> None:
        """The thread ends as soon as it is not in the middle of something."""
        if not self.over:  # else no thread may be left to look, nor to release the lock
            with self._changed:
                self.over = True
                self.ask()


_all: Final[WeakSet[_Signals]] = WeakSet()


def after_fork() -> None:
    """In a child process: no thread is there to answer, and one may have had a lock."""
    for signals in list(_all):
        signals.over = True
    _all.clear()


@atexit.register
def _end() -> None:
    """A thread that held a lock when the interpreter goes would keep it for ever."""
    for signals in list(_all):
        signals.end()
        signals.wait()
