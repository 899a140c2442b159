"""Foresight of one cache: which round of the program it is in, what is known of it, and how that came out.

A round of which nothing is known is recorded, and planned in the background; the next ones follow the plan. If the
program changes, the plan is still followed as long as it is worth it, and another one is made of what the round is now.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Final

from recompute import extend
from recompute._foresight.follower import Follower
from recompute._foresight.planning import Planning
from recompute._foresight.recording import Recording
from recompute._foresight.repetition import Repetition
from recompute._foresight.script import Script
from recompute.extend import Node

if TYPE_CHECKING:
    from recompute._cache import Cache

_WORSE: Final = 1.005
"""Times the overhead of the last round without a plan: a plan that makes a round dearer is not followed again."""

_DEARER: Final = 0.05
"""Of the cost of a round: how much more than its script a round may repeat that has changed."""

_MEASURED: Final = 3
"""Rounds whose costs are averaged before they are compared with those of the recorded round."""

_OTHER: Final = 0.05
"""Of the cost of the round: what the costs of its operations may differ by, together."""

_PATIENCE: Final = 64
"""Rounds, at most, without another try after a plan that was of no use."""


class Foresight:
    """Sees to the rounds of one cache. One thread at a time runs them; what others run meanwhile is let pass."""

    def __init__(self, cache: Cache, effort: float, *, waits: bool = False) -> None:
        self.state = ""
        """What it does, in words."""
        self._cache = cache
        self._effort = effort
        self._waits = waits
        self._thread: int | None = 0  # that runs the rounds; None: any, one at a time
        self._busy = Lock()
        self._marked = False
        self._inside = False
        self._repetition: Repetition | None = None
        self._recording: Recording | None = None
        self._follower: Follower | None = None
        self._planning: Planning | None = None
        self._script: Script | None = None
        self._short = True  # something was evicted in the last round
        self._planned: Planning | None = None  # what the script is from
        self._costs: list[list[float | None]] = []  # of the calls, in rounds that were as the script has them
        self._changed = False  # the last round was not as the script has it
        self._before = 0.0, 0.0, 0, 0  # when this round began: seconds of runs, of repeated ones; these; evictions
        self._online = inf, 0  # overhead of the last round without a script, and its repeated runs
        self._pause = 0  # rounds until something is recorded again
        self._next_pause = 1
        self._stop: Callable[[], None] = _nothing

    # Rounds that are marked

    def begin(self) -> None:
        """A round begins."""
        self._marked, self._repetition = True, None
        self._thread = get_ident()
        self._begin()

    def end(self, *, failed: bool = False) -> None:
        """It is over. `failed`: an exception has cut it short, and nothing is learnt from it."""
        if self._inside:
            self._end(failed)
            extend.tell(self._cache, None)

    def next(self) -> None:
        """One round is over, and the next begins."""
        if self._inside:
            self._end(failed=False)
        self.begin()
        self._thread = None  # a backward pass may have a thread of its own

    # Rounds that are found

    def watch(self) -> None:
        """Memory is short, and nobody has said where rounds begin: look for repetition from now on."""
        if not self._marked and self._repetition is None:
            self._thread = get_ident()
            self._repetition = Repetition()
            extend.tell(self._cache, self.begins)

    def begins(self, operation: Node) -> None:
        """An operation of this round, or of the next one, is about to run for the first time."""
        if self._is_mine() and self._busy.acquire(blocking=False):
            try:
                self._begins(operation)
            finally:
                self._busy.release()

    def _is_mine(self) -> bool:
        """Whether this call belongs to the rounds: of their thread, and not from inside of an operation."""
        return (self._thread is None or get_ident() == self._thread) and extend.running() is None

    def wants(self, value: Node) -> None:
        """An evicted value of this round is about to be got."""
        follower = self._follower
        if follower is not None and self._is_mine() and self._busy.acquire(blocking=False):
            try:
                follower.wants(value)
            finally:
                self._busy.release()

    def _begins(self, operation: Node) -> None:
        if self._repetition is not None:
            self._look_for_rounds(self._repetition, operation)
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

    def _guard(self, follower: Follower) -> None:
        """Give a script up that makes a round that has changed much dearer than it says."""
        repeated = extend.spent(self._cache)[1] - self._before[1]
        if repeated > follower.planned + _DEARER * follower.script.model_cost:
            follower.lost = f"{repeated:.3g} seconds were repeated, not {follower.planned:.3g}"

    def _look_for_rounds(self, repetition: Repetition, operation: Node) -> None:
        if repetition.see(operation, extend.used(self._cache)):
            if repetition.begins_here():
                if self._inside:
                    self._end(failed=False)
                self._begin()
        elif self._inside:
            self._end(failed=True)
            self._forget("the program does not repeat any more")
            self._pause, self._next_pause = 0, 1  # what repeats next is another program

    # A round

    def _begin(self) -> None:
        cache = self._cache
        self._inside = True
        self._before = self._now()
        self._look_at_plans()
        if self._script is not None:
            self._follower = Follower(self._script, self._bring)
            extend.advise(cache, self._follower)
            self._say("following", f"a plan with an overhead of {self._script.overhead:.3f}")
        self._pause -= 1
        wanted = self._planning is None and self._pause <= 0 if self._script is None else self._changed
        if wanted and self._short and cache.budget is not None:
            self._recording = Recording(extend.resident(cache))
            self._stop = cache.subscribe(self._recording)
            if self._script is None:
                self._say("recording")
        extend.tell(cache, self.begins, self.wants)

    def _end(self, failed: bool) -> None:
        self._inside = False
        recording, follower = self._recording, self._follower
        if recording is not None:
            self._cache.stats()  # sees to references that went
            self._recording = None
            self._stop()
            self._stop = _nothing  # it knows the recording
        if follower is not None:
            self._leave()
        if failed:
            return
        overhead, runs, evictions = self._spent()
        self._short = evictions > 0
        if follower is None:
            self._online = overhead, runs
        elif overhead > _WORSE * self._online[0] and runs > self._online[1]:
            self._forget(f"an overhead of {overhead:.3f}, {self._online[0]:.3f} without a plan")
            return
        else:
            self._changed = bool(follower.unknown)
            self._next_pause = 1
            self._compare(follower)
        if recording is not None and evictions:
            self._plan(recording)

    def _plan(self, recording: Recording) -> None:
        pool = extend.fullest(self._cache)
        if pool is not None:
            recorded = recording.finish(pool.device, extend.referred(self._cache))
            self._start(Planning(recorded, int(pool.limit) - pool.held, self._effort))

    def _start(self, planning: Planning) -> None:
        self._planning = planning
        if self._script is None:
            self._say("planning")
        (planning.run if self._waits else planning.start)()

    def _compare(self, follower: Follower) -> None:
        """Plan again if operations do not cost what they did in the recorded round, which was one measurement each."""
        planned, script = self._planned, self._script
        if self._changed or planned is None or script is None or self._planning is not None:
            return
        self._costs.append(follower.costs())
        if len(self._costs) == _MEASURED:
            before = [call.cost for call in planned.recorded.program.calls]
            now = [_mean(*costs) for costs in zip(before, zip(*self._costs, strict=True), strict=True)]
            if sum([abs(one - other) for one, other in zip(before, now, strict=True)]) > _OTHER * sum(before):
                recorded = planned.recorded.with_costs(now)
                self._start(Planning(recorded, planned.budget, self._effort, script.sequence))

    def _look_at_plans(self) -> None:
        """Take the best script that there is by now."""
        planning = self._planning
        if planning is not None:
            if planning.script is not None and planning.script is not self._script:
                self._script, self._planned, self._changed = planning.script, planning, False
                self._costs = []
            if planning.is_over:
                self._planning = None
                if self._script is None:
                    self._forget(planning.failed or "no plan was made")

    def _forget(self, why: str) -> None:
        """The cache decides by itself; after a pause, which gets longer each time, the program is learnt anew."""
        self._script = self._planning = self._planned = None
        self._pause, self._next_pause = self._next_pause, min(_PATIENCE, 2 * self._next_pause)
        self._say("lost", why)

    def _bring(self, value: Node) -> float:
        """Have a value in memory; the seconds that operations took for that."""
        _, before = extend.spent(self._cache)
        extend.bring(self._cache, value)
        return extend.spent(self._cache)[1] - before

    def _leave(self) -> None:
        self._follower = None
        extend.advise(self._cache, None)

    def _now(self) -> tuple[float, float, int, int]:
        stats = self._cache.stats()
        return *extend.spent(self._cache), stats.rematerializations, stats.evictions

    def _spent(self) -> tuple[float, int, int]:
        """Of this round so far: the overhead, the repeated runs, the evictions."""
        seconds, repeated, runs, evictions = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        overhead = seconds / (seconds - repeated) if seconds > repeated else 1.0
        return overhead, int(runs), int(evictions)

    def _say(self, state: str, why: str = "") -> None:
        self.state = f"{state}: {why}" if why else state
        extend.foresee(self._cache, state, why)


def _mean(before: float, measured: tuple[float | None, ...]) -> float:
    costs = [cost for cost in measured if cost is not None]
    return sum(costs) / len(costs) if costs else before


def _nothing() -> None:
    """Nobody listens."""
