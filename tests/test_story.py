"""Why was this recomputed? `Cache.story` says what became of a value."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._cli import main
from recompute.events import Event, Evicted
from recompute.policies import ReleaseMode, SearchName
from recompute.testing import ManualClock


def test_the_story_of_a_value_says_why_it_went_and_came_back() -> None:
    """Each transition has its cause, the oldest first."""
    with rc.Cache(200, clock=ManualClock(), log=100) as cache:
        a = rc.ap(bytes, 60, nbytes=100)
        b = rc.ap(bytes.upper, a, nbytes=100)
        a.evict()
        a.get()
        told = [(step.state, step.why) for step in cache.story(a)]
        assert told == [("resident", "made"), ("dropped", "request"), ("resident", "made again for get")]
        filling, line = rc.ap(bytes, 61, nbytes=100), sys._getframe().f_lineno
        assert "pressure" in {cache.story(a)[-1].why, cache.story(b)[-1].why}
        assert str(cache.story(filling)[0]).endswith(f"resident: made by bytes, 100 B, {__file__}:{line}")
        whole = [(step.number, str(step)) for step in cache.story()]
        for value in (a, b, filling):
            steps = cache.story(value)
            assert [told for number, told in whole if number == value.number] == [str(step) for step in steps]


def test_only_the_newest_transitions_are_kept() -> None:
    """However long the program runs, the log stays as long as it was asked to be."""
    with rc.Cache(log=3) as cache:
        value = rc.ap(bytes, 10)
        for _ in range(10):
            value.evict()
            value.get()
        assert [step.state for step in cache.story(value)] == ["resident", "dropped", "resident"]


def test_a_cache_without_stories_says_how_to_have_them() -> None:
    """The error names the cure; a length that is none is refused."""
    with rc.Cache() as cache, pytest.raises(ValueError, match=r"Cache\(..., log=10_000\)"):
        cache.story(rc.pure(1))
    for wrong in (-1, True, 1.5, "many"):
        with pytest.raises(ValueError, match="how many transitions"):
            rc.Cache(log=wrong)  # type: ignore[arg-type]


def program(steps: list[tuple[str, int, int]], policy: str, log: int) -> tuple[list[Event], rc.Cache, list[Any]]:
    """Run a generated program, with or without a log."""
    clock = ManualClock()

    def work(number: int, size: int, *arguments: Any) -> bytes:
        clock.advance(1.0 + number % 3)
        return b""

    cache = rc.Cache(300, policy=policy, clock=clock, log=log)  # type: ignore[arg-type]
    events: list[Event] = []
    cache.subscribe(events.append)
    values: list[Any] = []
    with cache:
        for kind, number, seed in steps:
            if kind == "call":
                taken = values[-1 - seed % 3 :: -2][:2] if seed % 5 else []
                values.append(rc.ap(work, len(values), number, *taken, nbytes=number))
            elif values:
                value = values[number % len(values)]
                value.get() if kind == "get" else value.evict()
    return events, cache, values


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(1, 60), st.integers(0, 1 << 16)),
        st.tuples(st.sampled_from(["get", "get", "evict"]), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from(["needed", "dtr", "dtr-eq", "dtr-local", "msps", "lru", "size"]))
def test_a_log_changes_no_decision(steps: list[tuple[str, int, int]], policy: str) -> None:
    """The same events with and without; each storage ends in the state in which its story ends; times add up."""
    plain, _, _ = program(steps, policy, 0)
    told, cache, values = program(steps, policy, 100_000)
    assert plain == told
    stories = {value.number: value.story() for value in values}
    for value in values:
        story = stories[value.number]
        assert story[0].why == "made"
        assert (story[-1].state == "resident") == value.resident
        assert story.now == story[-1].state
        assert all(one.state != other.state for one, other in pairwise(story))
    assert sum(step.seconds for story in stories.values() for step in story) == pytest.approx(cache.stats().remat_time)
    evictions = [step for story in stories.values() for step in story if step.state in ("dropped", "leaving")]
    assert Counter(step.why for step in evictions) == Counter(
        event.why for event in told if isinstance(event, Evicted) and event.storage in stories
    )
    assert sum(one.seconds for one in cache.why()) == pytest.approx(cache.stats().remat_time)


@given(STEPS, st.sampled_from(["needed", "dtr", "dtr-eq", "msps", "lru"]))
def test_the_score_is_the_least_of_all(steps: list[tuple[str, int, int]], policy: str) -> None:
    """What a victim under pressure was chosen by gives the score of the published formula; who wanted room is named."""
    _, _, values = program(steps, policy, 100_000)
    for value in values:
        for step in value.story():
            if step.why != "pressure":
                assert step.choice is None
                continue
            choice = step.choice
            assert choice is not None
            assert choice.size == step.nbytes
            assert 0 <= choice.staleness <= step.time
            assert step.wanted == "program.work"
            assert step.wanted_bytes > 0
            if choice.neighbours is None:
                assert choice.score is None
            elif choice.staleness and policy in ("dtr", "dtr-eq"):
                expected = (choice.cost + choice.neighbours) / (choice.size * choice.staleness)
                assert choice.score == pytest.approx(expected)
            assert step.words.startswith("to make room for program.work, ")


def test_why_says_what_would_help() -> None:
    """A line for each function, with its cause; what the hint keeps is not computed again, and that saves time."""
    clock = ManualClock()

    def step(x: Any, number: int) -> bytes:
        clock.advance(1.0)
        return b""

    def run(budget: int, pinned: tuple[int, ...] = ()) -> tuple[rc.Cache, list[Any]]:
        cache = rc.Cache(budget, clock=clock, log=10_000)
        with cache:
            values = [rc.pure(b"")]
            for number in range(12):
                values.append(rc.ap(step, values[-1], number, nbytes=1000))
                if values[-1].number in pinned:
                    values[-1].pin()
            for value in values[::-1]:
                value.get()
        return cache, values

    cache, values = run(5000)
    (reason,) = cache.why()
    assert reason.seconds == cache.stats().remat_time
    assert reason.times == cache.stats().rematerializations
    assert reason.share == 1.0
    assert reason.place.startswith(f"{__file__}:")
    assert (reason.evicted_for, reason.asked_by) == ("to make room for test_why_says_what_would_help.step, 1 kB", "get")
    assert 0.4 <= reason.keep_share <= 1
    count = len(reason.keep)
    assert reason.keep_bytes == 1000 * count
    assert sum(step.seconds for step in cache.why()) == 13
    line = str(cache.why())
    assert line.startswith("test_why_says_what_would_help.step (")
    assert f"; keep {count} kB more ({count} values), and up to {reason.keep_share:.0%} of this goes" in line
    assert "<table>" in cache.why()._repr_html_()
    larger, kept = run(5000 + reason.keep_bytes, reason.keep)
    assert all(len(value.story()) == 1 for value in kept if value.number in reason.keep)
    saved = reason.seconds - larger.stats().remat_time
    assert 0 < saved <= reason.keep_share * reason.seconds
    assert str(rc.Cache(log=5).why()) == "nothing was recomputed, as far as the log goes back"
    assert len(values) == 13


def test_a_story_of_a_number_is_told_when_the_value_has_gone() -> None:
    """By the number that events know it by."""
    with rc.Cache(log=10) as cache:
        value = rc.ap(bytes, 10)
        number = value.number
        del value
        assert [step.state for step in cache.story(number)] == ["resident", "forgotten"]
        assert cache.story(12345) == []


def test_the_command_tells_the_story_of_a_recorded_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By number or by line, from a replay that does what the run did; --json has the figures."""
    path = tmp_path / "run.jsonl"
    clock = ManualClock()

    def step(x: Any, number: int) -> bytes:
        clock.advance(0.5)
        return b""

    with rc.Cache(5000, clock=clock, log=10_000, trace=path) as cache:
        values = [rc.pure(b"")]
        for number in range(12):
            values.append(rc.ap(step, values[-1], number, nbytes=1000))
        for value in values[::-1]:
            value.get()
        wanted = values[3]
        expected, now = [str(one) for one in wanted.story()], wanted.story().now
        why = str(cache.why())
    assert main(["story", str(path), str(wanted.number)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(line for line in lines if "made by" in line).rpartition(", ")[2]
    assert lines == [f"value {wanted.number}, made by {step_name()}, {place}", *expected, f"now  {now}"]
    assert main(["story", str(path), place.rpartition("/")[2], "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["function"] for line in out.splitlines()] == [step_name()] * 10
    assert "made 12 values; these are the first 10" in err
    assert json.loads(out.splitlines()[0])["steps"][1]["choice"]["policy"] == "needed"
    assert main(["story", str(path)]) == 0
    assert capsys.readouterr().out.strip() == why
    assert main(["story", str(path), "--json", "--budget", "100%"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["story", str(path), "nobody.py:3"]) == 1
    assert "has no value 'nobody.py:3'; give its number" in capsys.readouterr().err


@pytest.mark.parametrize("search", get_args(SearchName))
@pytest.mark.parametrize("release", get_args(ReleaseMode))
def test_the_command_makes_the_decisions_of_the_run(
    search: SearchName, release: ReleaseMode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It replays with the policy, the search and the mode of release of the cache that was recorded."""
    path, clock = tmp_path / "run.jsonl", ManualClock()

    def step(x: Any, y: Any, number: int) -> bytes:
        clock.advance(0.5 + number % 7)
        return b""

    with rc.Cache(22_000, clock=clock, log=100_000, trace=path, search=search, release=release) as cache:
        values = [rc.pure(b"")]
        for number in range(60):
            values.append(
                rc.ap(step, values[-1], values[max(0, len(values) - 5)], number, nbytes=500 + number % 9 * 90)
            )
            if number % 3 == 0:
                del values[number * 7 % (len(values) - 1)]
        for value in values[::-1]:
            value.get()
        why = str(cache.why())
    assert main(["story", str(path)]) == 0
    assert capsys.readouterr().out.strip() == why


def test_the_command_knows_no_policy_of_a_programs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name alone is recorded: one line says where the story can be told."""
    path = tmp_path / "run.jsonl"
    with rc.Cache(5000, policy=lambda cost, neighbours, size, staleness: cost / size, trace=path):
        rc.ap(bytes, 10)
    assert main(["story", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.jsonl was recorded with a policy of its own" in line
    assert "`cache.why()`" in line


def step_name() -> str:
    return "test_the_command_tells_the_story_of_a_recorded_value.step"
