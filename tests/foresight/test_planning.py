"""Planning in the background, and finding out that a program repeats."""

from __future__ import annotations

import os
import sys
from math import inf
from types import FrameType

import pytest

import recompute as rc
from recompute._foresight.planning import _LOOK, Knowledge, Planning
from recompute._foresight.recording import Recording, Round
from recompute._foresight.script import Script
from recompute._plans.exact import exact
from recompute._plans.problem import problem_of
from recompute.extend import Settings


def recorded_chain(length: int) -> Round:
    """Forward through a chain and back."""
    cache = rc.Cache(10**9)
    recording = Recording([])
    cache.subscribe(recording)
    cache.extend.before = recording.begins
    with cache:
        values = [rc.pure(1)]
        for _ in range(length):
            values.append(rc.ap(lambda x: x + 1, values[-1], nbytes=100))
        gradient = rc.ap(lambda x: x, values[-1], nbytes=100)
        while len(values) > 1:
            gradient = rc.ap(lambda x, y: x + y, gradient, values.pop(), nbytes=100)
        return recording.finish("cpu", [])


def test_planning_stops_when_nobody_waits() -> None:
    """A plan that would take an hour ends when it is not wanted any more, which is no failure."""
    planning = Planning(recorded_chain(200), 3000, 400.0)
    planning.start()
    assert not planning.is_over
    planning.stop()
    planning.over.wait()
    assert planning.is_over
    assert planning.failed == ""


def test_planning_takes_no_longer_than_the_program_has_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a tenth of a second: a plan saves no more than what is repeated, and to make it slows the program down."""
    known = Knowledge(400.0, waits=False)
    known.look(7.0)
    known.plan(recorded_chain(200), 3000)
    background = known._planning
    assert background is not None
    for repeated in (7.0, 7.5, 9.0):
        assert known.look(repeated) == ""
        assert background.allowed == pytest.approx(0.1 + repeated - 7.0)
    known.finish()

    planning = Planning(recorded_chain(200), 3000, 1.0)
    planning.allowed = 0.0
    looked: list[Script | None] = []

    def sleep(seconds: float) -> None:
        if seconds == _LOOK:
            looked.append(planning.script)
            planning.allowed = inf if len(looked) == 3 else 0.0

    monkeypatch.setattr("recompute._foresight.planning.sleep", sleep)
    planning.start()
    planning.wait()
    assert looked == [None] * 3
    assert planning.script is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a thread has a priority of its own")
def test_planning_takes_the_time_that_others_leave() -> None:
    """The thread that plans has a lower priority than the program."""
    planning = Planning(recorded_chain(200), 3000, 400.0)
    before = set(os.listdir("/proc/self/task"))
    planning.start()
    try:
        while not (new := set(os.listdir("/proc/self/task")) - before):
            pass
        thread = int(new.pop())
        own = os.getpriority(os.PRIO_PROCESS, 0)
        while os.getpriority(os.PRIO_PROCESS, thread) == own < 19:
            assert not planning.is_over
        assert os.getpriority(os.PRIO_PROCESS, thread) == min(19, own + 15)
    finally:
        planning.stop()
        planning.over.wait()


class Stop(Exception):
    """Planning is not wanted any more."""


def test_a_search_through_states_can_be_stopped() -> None:
    """It asks at each state whether it shall go on."""
    problem = problem_of(recorded_chain(6).program, 500)
    asked = 0

    def rest() -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise Stop

    problem.rest = rest
    with pytest.raises(Stop):
        exact(problem, 1000)


def plans() -> int:
    """How many threads make a plan right now."""
    found = 0
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            found += caller.f_code is Planning.run.__code__
            caller = caller.f_back
    return found


def test_nothing_is_planned_after_the_last_round() -> None:
    """What plans has ended when the last round is said to be over."""
    with rc.Cache(2500, settings=Settings(effort=400.0)) as cache:
        for _ in range(2):
            with cache.iteration():
                values = [rc.pure(1)]
                for _ in range(200):
                    values.append(rc.ap(lambda x: x + 1, values[-1], nbytes=100))
                while values:
                    assert values.pop().get() > 0
        while plans() == 0:
            assert cache.stats().foresight == "planning"
        cache.next_iteration(last=True)
        assert plans() == 0


def test_what_planned_before_is_waited_for_too() -> None:
    """A plan that was given up for another one may still be on its way out."""
    known = Knowledge(400.0, waits=False)
    for length in (200, 201, 202):
        known.plan(recorded_chain(length), 3000)
    while plans() == 0:
        pass
    known.finish()
    assert plans() == 0
