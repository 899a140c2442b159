"""Whether plans are worth it: what rounds cost with them and without, and how long not to try again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from recompute._cache import Cache

_WORSE: Final = 1.005
"""Times the overhead of the last round without a plan: more than that, with more repeated runs, is a loss."""

_SHARE: Final = 0.01
"""Of the cost of a round: what may be lost per round, over time."""

_PAUSE: Final = 2
"""Rounds, at least, without another try after a plan that was of no use; twice as many each time."""

_LONGEST: Final = 64
"""Of these pauses, in rounds."""

_DEARER: Final = 0.1
"""Of the cost of a round: how much more than planned may be repeated in it before its plan is left."""

_NOISE: Final = 2.0
"""Times what was planned: besides, in a round that is as planned, since seconds are measured."""


@dataclass(frozen=True)
class Spent:
    """What a cache has done: since it is there, or in a round."""

    seconds: float
    """Of all runs."""
    repeated: float
    """Seconds of the runs that repeat others."""
    runs: int
    """These runs."""
    evictions: int

    @property
    def overhead(self) -> float:
        """All compute divided by that of the first runs."""
        once = self.seconds - self.repeated
        return self.seconds / once if once > 0 else 1.0


class Worth:
    """Of the plans of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._before = self._now()
        self._without: Spent | None = None  # the last round without a plan
        self._pause = 0  # rounds until another try
        self._next_pause = _PAUSE

    def begin(self) -> None:
        """A round begins."""
        self._before = self._now()
        self._pause -= 1

    @property
    def try_again(self) -> bool:
        """Whether this round may be recorded, to be planned."""
        return self._pause <= 0

    @property
    def repeated(self) -> float:
        """Seconds of repeated runs in this round so far."""
        return self._cache.extend.counts().repeated_seconds - self._before.repeated

    def spent(self) -> Spent:
        """In this round so far."""
        now, before = self._now(), self._before
        return Spent(
            now.seconds - before.seconds,
            now.repeated - before.repeated,
            now.runs - before.runs,
            now.evictions - before.evictions,
        )

    def without_plan(self, spent: Spent) -> None:
        """A round is over in which the cache decided by itself."""
        self._without = spent

    def gains(self, overhead: float) -> bool:
        """Whether there is something to gain, and a plan no worse than the cache by itself in its last round."""
        return self._without is None or _WORSE < self._without.overhead >= overhead

    def goes_wrong(self, planned: float, model_cost: float, *, differs: bool) -> str:
        """Whether a plan is better left in the middle of a round: why, else empty.

        `planned`: seconds that were to be repeated by now, of a round of `model_cost`. `differs`: it is another round.
        """
        repeated = self.repeated
        most = planned if differs else _NOISE * planned
        if repeated <= most + _DEARER * model_cost:
            return ""
        return f"{repeated:.3g} seconds were repeated, not {planned:.3g}"

    def with_plan(self, spent: Spent) -> str:
        """A round is over in which a plan was followed; empty if it was worth it, else why not."""
        without = self._without
        if without is None or spent.overhead <= _WORSE * without.overhead or spent.runs <= without.runs:
            self._next_pause = _PAUSE
            return ""
        loss = (spent.overhead - without.overhead) / _SHARE
        self._pause = max(self._pause, ceil(min(loss, _LONGEST)))
        return f"an overhead of {spent.overhead:.3f}, {without.overhead:.3f} without a plan"

    def rest(self) -> None:
        """A plan was of no use."""
        self._pause = max(self._pause, self._next_pause)
        self._next_pause = min(_LONGEST, 2 * self._next_pause)

    def _now(self) -> Spent:
        self._cache.extend.settle()
        done = self._cache.extend.counts()
        return Spent(done.seconds, done.repeated_seconds, done.rematerializations, done.evictions)
