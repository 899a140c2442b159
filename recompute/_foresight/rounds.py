"""Foresight of one cache: its rounds, one after the other, are recorded, planned, followed, and judged by their cost.

A round of which nothing is known is recorded, and planned in the background; the next ones follow the plan. If the
program changes, the plan is still followed as long as it is worth it, and another one is made of what the round is now.
A round that goes wrong is left to the cache; a plan that goes wrong twice in a row, or without reason, is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from recompute import extend
from recompute._foresight.follower import Follower
from recompute._foresight.planning import Knowledge
from recompute._foresight.recording import Recording
from recompute._foresight.repetition import BEGINS, LOST, NOTHING, Repetition
from recompute._locks import RLock, do_if_free, gate_if_free
from recompute.events import Event
from recompute.extend import Counts, Operation, Value

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
        self.follower: Follower | None = None
        """Set while a plan is followed."""
        self._followed = False  # in this round, from its beginning on
        self._lost = False  # the last round that began with the plan was another one
        self._short = True  # something was evicted in the last round
        self._is_cut = False
        self._over = False

    def begin(self) -> None:
        """A round begins."""
        if self._over:
            return
        cache, known, worth = self._cache, self._known, self._worth
        self._leave_off()  # what an interrupt has left of the last one
        self.inside, self._is_cut = True, False
        worth.begin()
        why = known.look(worth.repeated)
        if why:
            self.forget(why)
        script = known.script if worth.try_again else None
        if script is not None and not worth.gains(script.overhead):
            if known.final:
                self.forget(f"a plan with an overhead of {script.overhead:.3f} would be no gain")
            script = None
        self._followed = script is not None
        if script is not None:
            self.follower = Follower(script, self._bring, cache.extend.resident(), cache.extend.is_wanted)
            cache.extend.advise(self.follower)
            self._say("following", f"a plan with an overhead of {script.overhead:.3f}")
        if self._short and known.wanted and worth.try_again and cache.budget is not None:
            self._recording = Recording(cache.extend.resident())
            cache.extend.listen(self._hear)
            if script is None:
                self._say("recording")

    def end(self, *, failed: bool) -> None:
        """It is over. `failed`: it was cut short, and nothing is learnt from it."""
        self.inside = False
        follower, worth = self.follower, self._worth
        try:
            if self._recording is not None:
                self._cache.extend.settle()
        finally:
            recording = self._recording
            self._leave_off()
        if recording is not None and not self._cache.extend.settle():
            recording = None  # another thread is in the middle of adding to it
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
        return self._recording is not None or self.follower is not None

    def begins(self, operation: Operation) -> None:
        """An operation is about to run for the first time."""
        if self._recording is not None:
            self._recording.begins(operation)
        follower = self.follower
        if follower is not None:
            follower.begins(operation)
            self._check(follower)

    def wants(self, value: Value) -> None:
        """An evicted value is about to be got."""
        follower = self.follower
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
        if self.follower is not None:
            self.follower.lost = "the round was cut short"

    def give_up(self, why: str) -> None:
        """No round is recorded or planned any more."""
        self._over, self.inside = True, False
        if self.follower is not None:
            self.follower.lost = why
        self.follower = None
        self._stop_recording()
        self._known.forget()
        self._tell("ended", why)

    def _hear(self, event: Event) -> None:
        """Something happened in a round that is recorded."""
        recording = self._recording
        if recording is not None:
            try:
                recording(event)
            except BaseException:
                self.cut_short()
                raise
            if recording.length > _MOST:
                self._stop_recording()
                if self.follower is None:
                    self.forget(f"a round of more than {_MOST:,} steps is not planned")

    def _leave_off(self) -> None:
        """Neither record nor follow."""
        self._stop_recording()
        if self.follower is not None:
            self._leave()

    def _stop_recording(self) -> None:
        self._recording = None
        self._cache.extend.stop_listening(self._hear)

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
        self._cache.extend.advise(None)
        self.follower = None

    def _say(self, state: str, why: str = "") -> None:
        if not self._over:
            self._tell(state, why)

    def _tell(self, state: str, why: str) -> None:
        said = f"{state}: {why}" if why else state
        if said != self.state:
            self.state = said
            self._cache.extend.foresee(state, why)


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


class Worth:
    """Of the plans of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._before = self._now()
        self._without: Counts | None = None  # of the last round without a plan
        self._pause = 0  # rounds until another try
        self._next_pause = _PAUSE

    def begin(self) -> None:
        """A round begins."""
        self._before = self._now()
        self._pause -= 1

    @property
    def repeated(self) -> float:
        """Seconds that the program had repeated before this round."""
        return self._before.repeated_seconds

    @property
    def try_again(self) -> bool:
        """Whether this round may be recorded, to be planned."""
        return self._pause <= 0

    def spent(self) -> Counts:
        """In this round so far."""
        return Counts._make([now - before for now, before in zip(self._now(), self._before, strict=True)])

    def without_plan(self, spent: Counts) -> None:
        """A round is over in which the cache decided by itself."""
        self._without = spent

    def gains(self, overhead: float) -> bool:
        """Whether there is something to gain, and a plan no worse than the cache by itself in its last round."""
        return self._without is None or _WORSE < _overhead(self._without) >= overhead

    def goes_wrong(self, planned: float, model_cost: float, *, differs: bool) -> str:
        """Whether a plan is better left in the middle of a round: why, else empty.

        `planned`: seconds that were to be repeated by now, of a round of `model_cost`. `differs`: it is another round.
        """
        repeated = self._cache.extend.counts().repeated_seconds - self._before.repeated_seconds
        most = planned if differs else _NOISE * planned
        if repeated <= most + _DEARER * model_cost:
            return ""
        return f"{repeated:.3g} seconds were repeated, not {planned:.3g}"

    def with_plan(self, spent: Counts) -> str:
        """A round is over in which a plan was followed; empty if it was worth it, else why not."""
        without, overhead = self._without, _overhead(spent)
        if (
            without is None
            or overhead <= _WORSE * _overhead(without)
            or spent.rematerializations <= without.rematerializations
        ):
            self._next_pause = _PAUSE
            return ""
        loss = (overhead - _overhead(without)) / _SHARE
        self._pause = max(self._pause, ceil(min(loss, _LONGEST)))
        return f"an overhead of {overhead:.3f}, {_overhead(without):.3f} without a plan"

    def rest(self) -> None:
        """A plan was of no use."""
        self._pause = max(self._pause, self._next_pause)
        self._next_pause = min(_LONGEST, 2 * self._next_pause)

    def _now(self) -> Counts:
        self._cache.extend.settle()
        return self._cache.extend.counts()


def _overhead(spent: Counts) -> float:
    """All compute divided by that of the first runs."""
    once = spent.seconds - spent.repeated_seconds
    return spent.seconds / once if once > 0 else 1.0


class Foresight:
    """Follows the rounds of one cache. One thread at a time runs them; what others run meanwhile is let pass."""

    def __init__(self, cache: Cache, effort: float, *, waits: bool = False) -> None:
        self._cache = cache
        self._rounds = Rounds(cache, effort, waits=waits)
        self._repetition: Repetition | None = None
        self._marked = False
        self._thread: int | None = None  # that runs the rounds; None: any, one at a time
        self._busy: Any = RLock()
        self._if_free = gate_if_free(self._busy)

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
            try:
                self._rounds.end(failed=failed)
            finally:
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
        repetition.inside, repetition.useful = rounds.inside, rounds.follower is not None

    # What the engine tells

    def begins(self, operation: Operation, what: int = NOTHING) -> None:
        """An operation is about to run for the first time; `what` it means where rounds are found."""
        self._do(self._begins, operation, what)

    def _begins(self, operation: Operation, what: int) -> None:
        if what != NOTHING and self._repetition is not None:
            self._turn(self._repetition, what)
        self._rounds.begins(operation)

    def wants(self, value: Value) -> None:
        """An evicted value is about to be got."""
        self._do(self._rounds.wants, value)

    def _do(self, follow: Callable[..., None], *told: Any) -> None:
        """Unless another thread is at it, or this very one, in whose middle a destructor struck."""
        if self._is_mine() and not self._busy._is_owned():
            try:
                do_if_free(self._if_free, partial(follow, *told))
            except BaseException:
                self._rounds.cut_short()
                raise

    def _is_mine(self) -> bool:
        """Whether this call belongs to the rounds: of their thread, and not from inside of an operation."""
        return (self._thread is None or get_ident() == self._thread) and extend.running() is None
