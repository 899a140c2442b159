"""Advice, hints on what the program does next that may be wrong, and the wall around it and around listeners.

An error behind the wall is said once and ends that advice for the cache; it never comes to the operation that met it.
What is the program's own passes through: KeyboardInterrupt and the like, and whatever the handler of a signal raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from recompute._engine.finalizer import Finalizer
from recompute._interrupts import is_interrupt
from recompute.text import outside, warn

if TYPE_CHECKING:
    from recompute._engine.engine import Engine
    from recompute._engine.graph import Storage
    from recompute._engine.pool import Pool


class Advice(Protocol):
    """Asked under the lock."""

    def victims(self, pool: Pool, size: int) -> list[Storage]:
        """Storages to evict, so that `size` more bytes fit: resident and unlocked ones; empty if it does not know."""

    def keeps(self, storage: Storage) -> bool:
        """Whether a storage without outside references should stay all the same."""


class Wall:
    """`with wall:` around each call of what it stands around. `end` is called with the error, if there is one."""

    def __init__(self, end: Callable[[Exception], object]) -> None:
        self._end = end

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        return self.stops(error)

    def stops(self, error: BaseException | None) -> bool:
        """Whether the error goes no further; then it has ended what the wall stands around."""
        if not isinstance(error, Exception) or _passes(error):
            return False
        self._end(error)
        return True


class _Guarded:
    """Advice behind the wall. Asked under the lock."""

    def __init__(self, advice: Advice, wall: Wall) -> None:
        self._advice = advice
        self._wall = wall

    def victims(self, pool: Pool, size: int) -> list[Storage]:
        """Those of the advice that can be evicted: others would be asked for again and again."""
        with self._wall:
            found = self._advice.victims(pool, size)
            return [storage for storage in found if storage.resident and not storage.locks and storage.pool is pool]
        return []

    def keeps(self, storage: Storage) -> bool:
        with self._wall:
            return bool(self._advice.keeps(storage))
        return False


def advise(engine: Engine, advice: Advice | None) -> None:
    """Ask this advice; values kept only on older advice are evicted. Without the lock."""
    references = engine.references
    with engine.changes.alone(), engine.changes.begun(python=True):
        engine.memory.advise(None if advice is None else _Guarded(advice, engine.wall))
        engine.watch()
        for storage in references.on_advice():
            references.evict_unreferenced(storage)
    engine.settling.settle()


def end_advice(engine: Engine, error: Exception) -> bool:
    """Stop asking for advice; False: there was none. Also under the lock: the rest is done without it."""
    memory = engine.memory
    if all(hook is None for hook in (engine.before, engine.wanted, engine.pressed, memory.advice)):
        return False
    engine.before = engine.wanted = engine.pressed = memory.advice = None
    engine.journal.events.append(partial(_conclude, engine, error))
    if not engine.changes.is_mine():
        engine.settling.settle()
    return True


def _conclude(engine: Engine, error: Exception) -> None:
    """Evict values kept only on advice, and say why. Without the lock."""
    why = f"{shown(error)}{_place(error)}"
    try:
        advise(engine, None)
        if engine.unadvised is not None:
            with Wall(_is_known):
                engine.unadvised(why)
    except BaseException:  # an interrupt
        engine.journal.events.appendleft(partial(_conclude, engine, error))
        raise
    say(f"advice on what the program does next has ended for this cache, which goes on without: {why}")


def say(message: str) -> None:
    """An error was met, and what it means."""
    warn(message, RuntimeWarning, stacklevel=outside())


def shown(thing: object) -> str:
    """Its `repr`, which is the user's code."""
    try:
        return repr(thing)
    except Exception as error:
        if _passes(error):
            raise
        return f"<{type(thing).__name__}>"


def _passes(error: Exception) -> bool:
    """Whether it is the program's own wherever it is met: the handler of a signal raised it, just now or before."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _DELAYED:
            return True
        trace = trace.tb_next
    return is_interrupt(error)


_DELAYED: Final = Finalizer.raise_interrupts.__code__
"""Raises what came while nothing could be raised."""


def _place(error: Exception) -> str:
    """Where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _is_known(_: Exception) -> None:
    """One error is enough."""
