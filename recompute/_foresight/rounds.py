"""The rounds of one cache, one after the other: recorded, planned, followed, and judged.

A round of which nothing is known is recorded, and planned in the background; the next ones follow the plan. If the
program changes, the plan is still followed as long as it is worth it, and another one is made of what the round is now.
A round that goes wrong is left to the cache; a plan that goes wrong twice in a row, or without reason, is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from recompute._foresight.follower import Follower
from recompute._foresight.knowledge import Knowledge
from recompute._foresight.recording import Recording
from recompute._foresight.worth import Worth
from recompute.events import Event
from recompute.extend import Operation, Value

if TYPE_CHECKING:
    from recompute._cache import Cache

_MOST: Final = 1_000_000
"""Steps of a round that is recorded: operations, values that go, and what is got."""


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
        self._lost = False  # the last round that began with the plan was another one
        self._short = True  # something was evicted in the last round
        self._unsubscribe: Callable[[], None] = _nothing
        self._is_cut = False
        self._over = False

    def begin(self) -> None:
        """A round begins."""
        if self._over:
            return
        cache, known, worth = self._cache, self._known, self._worth
        self.inside, self._is_cut = True, False
        worth.begin()
        why = known.look()
        if why:
            self.forget(why)
        script = known.script if worth.try_again else None
        if script is not None and not worth.gains(script.overhead):
            if known.final:
                self.forget(f"a plan with an overhead of {script.overhead:.3f} would be no gain")
            script = None
        self._followed = script is not None
        if script is not None:
            self._follower = Follower(script, self._bring, cache.extend.resident(), cache.extend.is_wanted)
            cache.extend.advise(self._follower)
            self._say("following", f"a plan with an overhead of {script.overhead:.3f}")
        if self._short and known.wanted and worth.try_again and cache.budget is not None:
            self._recording = Recording(cache.extend.resident())
            self._unsubscribe = cache.extend.listen(self._hear)
            if script is None:
                self._say("recording")

    def end(self, *, failed: bool) -> None:
        """It is over. `failed`: it was cut short, and nothing is learnt from it."""
        self.inside = False
        follower, worth = self._follower, self._worth
        if self._recording is not None:
            self._cache.extend.settle()
        recording = self._recording
        self._stop_recording()
        if recording is not None and not self._cache.extend.settle():
            recording = None  # another thread is in the middle of adding to it
        if follower is not None:
            self._leave()
        if failed or self._is_cut:
            return
        spent = worth.spent()
        self._short = spent.evictions > 0
        if not self._followed:
            worth.without_plan(spent)
        elif follower is not None:
            why = worth.with_plan(spent)
            if why:
                self.forget(why)
                return
            self._lost = False
            self._known.changed = follower.differs
            self._known.compare(follower.costs())
            if not follower.differs:
                return
        elif self._known.script is not None:
            return  # of one round that went wrong nothing is learnt
        if recording is not None and spent.evictions:
            self._plan(recording)

    @property
    def listens(self) -> bool:
        """Whether this round is recorded, or a plan is followed."""
        return self._recording is not None or self._follower is not None

    @property
    def follows(self) -> bool:
        """Whether a plan is followed in this round."""
        return self._follower is not None

    def begins(self, operation: Operation) -> None:
        """An operation is about to run for the first time."""
        if self._recording is not None:
            self._recording.begins(operation)
        follower = self._follower
        if follower is not None:
            follower.begins(operation)
            self._check(follower)

    def wants(self, value: Value) -> None:
        """An evicted value is about to be got."""
        follower = self._follower
        if follower is not None:
            follower.wants(value)
            self._check(follower)

    def _check(self, follower: Follower) -> None:
        """Leave the plan for this round if it goes wrong, and for ever if it did so before, or it is no other round."""
        script, differs = follower.script, follower.differs
        if not follower.lost and differs and script.tight:
            follower.lost = "the round is another one, and there is hardly more memory than it needs"
        if not follower.lost:
            follower.lost = self._worth.goes_wrong(follower.planned, script.model_cost, differs=differs)
        if follower.lost:
            self._leave()
            if self._lost or not differs:
                self.forget(follower.lost)
            else:
                self._lost = self._known.changed = True
                self._say("lost", follower.lost)

    def cut_short(self) -> None:
        """An exception has come between: nothing is learnt from this round, and a plan is followed no more."""
        self._is_cut = True
        if self._follower is not None:
            self._follower.lost = "the round was cut short"

    def give_up(self, why: str) -> None:
        """No round is recorded or planned any more."""
        self._over, self.inside = True, False
        if self._follower is not None:
            self._follower.lost = why
        self._follower = None
        self._stop_recording()
        self._known.forget()
        self._tell("ended", why)

    def _hear(self, event: Event) -> None:
        """Something happened in a round that is recorded."""
        recording = self._recording
        if recording is not None:
            recording(event)
            if recording.length > _MOST:
                self._stop_recording()
                if self._follower is None:
                    self.forget(f"a round of more than {_MOST:,} steps is not planned")

    def _stop_recording(self) -> None:
        self._recording = None
        self._unsubscribe()
        self._unsubscribe = _nothing

    def stop(self) -> None:
        """No round follows; when it returns, no thread plans one."""
        self._known.finish()

    def _plan(self, recording: Recording) -> None:
        pool = self._cache.extend.fullest()
        if pool is not None:
            if self._known.script is None:
                self._say("planning")
            recorded = recording.finish(
                pool.device,
                [value for storage in self._cache.extend.resident() for value in storage.values if value.referred],
            )
            self._known.plan(recorded, int(pool.limit) - pool.held)

    def forget(self, why: str) -> None:
        """The cache decides by itself; after a pause the program is learnt anew."""
        self._known.forget()
        self._worth.rest()
        self._lost = False
        self._say("lost", why)

    def _bring(self, value: Value) -> float:
        """Have a value in memory; the seconds that operations took for that."""
        before = self._cache.extend.counts().repeated_seconds
        self._cache.extend.bring(value)
        return self._cache.extend.counts().repeated_seconds - before

    def _leave(self) -> None:
        self._follower = None
        self._cache.extend.advise(None)

    def _say(self, state: str, why: str = "") -> None:
        if not self._over:
            self._tell(state, why)

    def _tell(self, state: str, why: str) -> None:
        said = f"{state}: {why}" if why else state
        if said != self.state:
            self.state = said
            self._cache.extend.foresee(state, why)


def _nothing() -> None:
    """There is no listener."""
