"""The rounds of one cache, one after the other: recorded, planned, followed, and judged.

A round of which nothing is known is recorded, and planned in the background; the next ones follow the plan. If the
program changes, the plan is still followed as long as it is worth it, and another one is made of what the round is now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from recompute import extend
from recompute._foresight.follower import Follower
from recompute._foresight.knowledge import Knowledge
from recompute._foresight.recording import Recording
from recompute._foresight.worth import Worth
from recompute.extend import Node

if TYPE_CHECKING:
    from recompute._cache import Cache

_DEARER: Final = 0.1
"""Of the cost of a round: how much more than its script a round may repeat that has changed."""


class Rounds:
    """One thread at a time tells of them."""

    def __init__(self, cache: Cache, effort: float, *, waits: bool) -> None:
        self.state = ""
        """What is done, in words."""
        self.inside = False
        """Whether a round has begun and not ended."""
        self._cache = cache
        self._known = Knowledge(effort, waits=waits)
        self._worth = Worth(cache)
        self._recording: Recording | None = None
        self._follower: Follower | None = None
        self._followed = False  # in this round, from its beginning on
        self._short = True  # something was evicted in the last round
        self._unsubscribe: Callable[[], None] = _nothing

    def begin(self) -> None:
        """A round begins."""
        cache, known, worth = self._cache, self._known, self._worth
        self.inside = True
        worth.begin()
        why = known.look()
        if why:
            self._forget(why)
        script = known.script
        self._followed = script is not None
        if script is not None:
            self._follower = Follower(script, self._bring, extend.resident(cache))
            extend.advise(cache, self._follower)
            self._say("following", f"a plan with an overhead of {script.overhead:.3f}")
        if self._short and known.wanted and (worth.try_again or script is not None) and cache.budget is not None:
            self._recording = Recording(extend.resident(cache))
            self._unsubscribe = cache.subscribe(self._recording)
            if script is None:
                self._say("recording")

    def end(self, *, failed: bool) -> None:
        """It is over. `failed`: it was cut short, and nothing is learnt from it."""
        self.inside = False
        recording, follower, worth = self._recording, self._follower, self._worth
        if recording is not None:
            extend.settle(self._cache)
            self._recording = None
            self._unsubscribe()
            self._unsubscribe = _nothing  # it knows the recording
        if follower is not None:
            self._leave()
        if failed:
            return
        spent = worth.spent()
        self._short = spent.evictions > 0
        if not self._followed:
            worth.without_plan(spent)
        else:
            why = worth.with_plan(spent)
            if follower is not None and why:
                self._forget(why)
            if follower is None or why:
                return
            self._known.changed = bool(follower.unknown)
            self._known.compare(follower.costs())
        if recording is not None and spent.evictions:
            self._plan(recording)

    @property
    def listens(self) -> bool:
        """Whether this round is recorded, or a plan is followed."""
        return self._recording is not None or self._follower is not None

    def begins(self, operation: Node) -> None:
        """An operation is about to run for the first time."""
        if self._recording is not None:
            self._recording.begins(operation)
        follower = self._follower
        if follower is not None:
            follower.begins(operation)
            if follower.unknown and not follower.lost:
                self._guard(follower)
            if follower.lost:
                self._leave()
                self._forget(follower.lost)

    def wants(self, value: Node) -> None:
        """An evicted value is about to be got."""
        if self._follower is not None:
            self._follower.wants(value)

    def forget(self, why: str) -> None:
        """What comes next is another program."""
        self._forget(why)
        self._worth.forget()

    def stop(self) -> None:
        """No round follows; when it returns, no thread plans one."""
        self._known.finish()

    def _guard(self, follower: Follower) -> None:
        """Give a script up if the round is another one and the script makes it much dearer, or may do so."""
        script, repeated = follower.script, self._worth.repeated
        if script.tight:
            follower.lost = "the round is another one, and there is hardly more memory than it needs"
        elif repeated > follower.planned + _DEARER * script.model_cost:
            follower.lost = f"{repeated:.3g} seconds were repeated, not {follower.planned:.3g}"

    def _plan(self, recording: Recording) -> None:
        pool = extend.fullest(self._cache)
        if pool is not None:
            if self._known.script is None:
                self._say("planning")
            recorded = recording.finish(pool.device, extend.referred(self._cache))
            self._known.plan(recorded, int(pool.limit) - pool.held)

    def _forget(self, why: str) -> None:
        """The cache decides by itself; after a pause the program is learnt anew."""
        self._known.forget()
        self._worth.rest()
        self._say("lost", why)

    def _bring(self, value: Node) -> float:
        """Have a value in memory; the seconds that operations took for that."""
        before = extend.spent(self._cache)[1]
        extend.bring(self._cache, value)
        return extend.spent(self._cache)[1] - before

    def _leave(self) -> None:
        self._follower = None
        extend.advise(self._cache, None)

    def _say(self, state: str, why: str = "") -> None:
        self.state = f"{state}: {why}" if why else state
        extend.foresee(self._cache, state, why)


def _nothing() -> None:
    """Nobody listens."""
