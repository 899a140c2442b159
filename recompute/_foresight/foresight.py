"""Foresight of one cache: where the rounds of its program begin, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, get_ident
from typing import TYPE_CHECKING

from recompute import extend
from recompute._foresight.repetition import BEGINS, LOST, NOTHING, Repetition
from recompute._foresight.rounds import Rounds
from recompute.extend import Operation, Value

if TYPE_CHECKING:
    from recompute._cache import Cache


class Foresight:
    """Follows the rounds of one cache. One thread at a time runs them; what others run meanwhile is let pass."""

    def __init__(self, cache: Cache, effort: float, *, waits: bool = False) -> None:
        self._cache = cache
        self._rounds = Rounds(cache, effort, waits=waits)
        self._repetition: Repetition | None = None
        self._marked = False
        self._thread: int | None = None  # that runs the rounds; None: any, one at a time
        self._busy = Lock()

    @property
    def state(self) -> str:
        """What it does, in words."""
        return self._rounds.state

    # Rounds that are marked

    def begin(self) -> None:
        """A round begins."""
        self._mark(get_ident())

    def next(self) -> None:
        """One round is over, and the next begins."""
        if self._rounds.inside:
            self._rounds.end(failed=False)
        self._mark(None)  # a backward pass may have a thread of its own

    def end(self, *, failed: bool = False) -> None:
        """It is over. `failed`: an exception has cut it short, and nothing is learnt from it."""
        if self._rounds.inside:
            self._rounds.end(failed=failed)
            self._tell(None, None)

    def stop(self) -> None:
        """The last round is over. When it returns, no thread plans another one."""
        self.end(failed=True)
        self._rounds.stop()

    def give_up(self, why: str) -> None:
        """It has failed, and is not asked any more."""
        self._marked, self._repetition = True, None
        self._rounds.give_up(why)

    def _mark(self, thread: int | None) -> None:
        self._marked, self._repetition, self._thread = True, None, thread
        self._rounds.begin()
        if self._rounds.listens:
            self._tell(self.begins, self.wants)
        else:
            self._tell(None, None)

    # Rounds that are found

    def watch(self) -> None:
        """Memory is short, and rounds are not marked: begin to look for repetition."""
        if not self._marked and self._repetition is None:
            self._thread = get_ident()
            self._repetition = Repetition(self._cache._engine, self.begins)
            self._tell(self._repetition.before, self.wants)

    def _tell(self, before: Callable[[Operation], None] | None, wanted: Callable[[Value], None] | None) -> None:
        self._cache.extend.before, self._cache.extend.wanted = before, wanted

    def _turn(self, repetition: Repetition, what: int) -> None:
        """A round begins, or the program does not repeat any more."""
        rounds = self._rounds
        if rounds.inside:
            rounds.end(failed=what == LOST or not repetition.whole)
        if what == BEGINS:
            rounds.begin()
        else:
            rounds.forget("the program does not repeat any more")
        repetition.inside, repetition.useful = rounds.inside, rounds.follows

    # What the engine tells

    def begins(self, operation: Operation, what: int = NOTHING) -> None:
        """An operation is about to run for the first time; `what` it means where rounds are found."""
        if self._is_mine() and self._busy.acquire(blocking=False):
            try:
                if what != NOTHING and self._repetition is not None:
                    self._turn(self._repetition, what)
                self._rounds.begins(operation)
            except BaseException:
                self._cut_short()
                raise
            finally:
                self._busy.release()

    def wants(self, value: Value) -> None:
        """An evicted value is about to be got."""
        if self._is_mine() and self._busy.acquire(blocking=False):
            try:
                self._rounds.wants(value)
            except BaseException:
                self._cut_short()
                raise
            finally:
                self._busy.release()

    def _cut_short(self) -> None:
        """What is known of this round may not be what it did."""
        self._rounds.cut_short()

    def _is_mine(self) -> bool:
        """Whether this call belongs to the rounds: of their thread, and not from inside of an operation."""
        return (self._thread is None or get_ident() == self._thread) and extend.running() is None
