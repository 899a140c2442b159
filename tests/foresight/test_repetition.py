"""Finding out that a program repeats, however long it has run."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._foresight.repetition import BEGINS, LOST, NOTHING, Repetition
from recompute.extend import Settings
from recompute.testing import ManualClock, check_invariants

LONG, SHORTEST = 16, 16  # operations: looked up in a row, and of a round at least

Seen = tuple[int, int, int]
"""A token, bytes that are missing, bytes in memory."""


def told(stream: Iterable[Seen], most: int = 1 << 10, *, useful: bool = False) -> list[int]:
    """What is found at each operation. `useful`: a plan of the rounds is followed."""
    repetition = Repetition(None, None, most)
    repetition.useful = useful
    return [repetition.see(*seen) for seen in stream]


tokens = st.integers(0, 5)


@st.composite
def bodies(draw: st.DrawFn) -> list[Seen]:
    """Of a round that is no shorter loop: it begins after a `get`, with least in memory, and it gives back all."""
    length = draw(st.integers(SHORTEST, 70))
    names = draw(st.lists(tokens, min_size=length, max_size=length))
    names[::12] = range(6, 6 + len(names[::12]))  # no 16 operations in a row come twice
    loads = [0, *draw(st.lists(st.integers(1, 9), min_size=length - 1, max_size=length - 1))]
    missing = draw(st.sampled_from((0, 5)))
    return [
        (2 * name + (not at), missing * (load > 4), load)
        for at, (name, load) in enumerate(zip(names, loads, strict=True))
    ]


@given(bodies(), st.lists(tokens.map(lambda name: (2 * name, 3, 3)), max_size=40), st.sampled_from((256, 1 << 17)))
def test_a_round_is_found_within_three(body: list[Seen], before: list[Seen], most: int) -> None:
    """Whatever came before: the third round begins one at the latest, or the fourth, and so does every later one."""
    found = told(before + 12 * body, most)
    begins = [at - len(before) for at, what in enumerate(found) if what]
    assert begins[0] <= 3 * len(body)
    assert begins == [*range(begins[0], 12 * len(body), len(body))]
    assert begins[0] % len(body) == 0
    assert set(found) == {NOTHING, BEGINS}


@given(bodies(), st.integers(1, 3), st.data())
def test_a_round_begins_behind_one_that_differs(body: list[Seen], count: int, data: st.DataObject) -> None:
    """Between rounds comes another one, of new operations and no longer: the next one begins all the same."""
    others = [(50 + name, 0, 9) for name in data.draw(st.lists(tokens, min_size=1, max_size=len(body)))]
    found = told(5 * body + count * (others + 2 * body), useful=True)
    at = 5 * len(body)
    for _ in range(count):
        at += len(others)
        if 2 * len(others) >= len(body) or at == 5 * len(body) + len(others):
            assert found[at] == BEGINS
        at += 2 * len(body)
    assert LOST not in found[4 * len(body) :]


@given(st.lists(tokens, min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 1000))
def test_a_loop_that_builds_up_is_no_round(body: list[int], growth: int, base: int) -> None:
    """Nor one that uses up: not after twice as many operations as are remembered, and whatever else is there."""
    stream = [(2 * name, 0, base * growth + growth * at) for at, name in enumerate(400 * body)]
    assert not any(told(stream, 512))
    assert not any(told([(name, load, 0) for name, _, load in reversed(stream)], 512))


@given(st.lists(tokens, min_size=1, max_size=5), st.integers(20, 60), st.integers(0, 1000))
def test_gets_are_part_of_what_repeats(body: list[int], times: int, base: int) -> None:
    """A loop that is always the same, with something got now and then: no round is shorter than the time between."""
    loop = [(2 * name, 0, base) for name in times * body]
    loop[0] = (loop[0][0] + 1, 0, base)
    begins = [at for at, what in enumerate(told(8 * loop)) if what == BEGINS]
    late = [at for at in begins if at > 4 * len(loop)]
    assert {after - before for before, after in itertools.pairwise(late)} == {len(loop)}


@given(st.lists(st.tuples(tokens, st.integers(0, 3), st.integers(0, 9)), max_size=200))
def test_anything_may_come(stream: list[Seen]) -> None:
    """A round begins only where the operations before it came in the same order a period earlier, and none is short."""
    found = told(stream)
    begins = [at for at, what in enumerate(found) if what == BEGINS]
    if begins:
        names = [token for token, _, _ in stream[: begins[0] + 1]]
        assert any(names[-LONG:] == names[-LONG - period : -period] for period in range(1, len(names) - LONG + 1))
    assert all(after - before >= SHORTEST for before, after in itertools.pairwise(begins))


def unit(value: Any) -> bytearray:
    return bytearray(1000)


@pytest.mark.slow
def test_a_plain_loop_goes_on_after_what_is_remembered() -> None:
    """With default settings, once memory was short, more operations run than foresight remembers."""
    with rc.Cache(50_000) as cache:
        source = rc.pure(bytearray(10))
        kept = [rc.ap(unit, source) for _ in range(100)]
        del kept
        for _ in range(100):
            rc.ap(unit, source)
        kept = [rc.ap(unit, source) for _ in range(10)]  # more is in use than when the loop began
        for _ in range(200_000):
            rc.ap(unit, source)
        assert [value.get() for value in kept] == [bytearray(1000)] * 10
    assert cache._engine.before is not None
    check_invariants(cache, [source, *kept])


def objects_after(rounds: int, cache: rc.Cache, clock: ManualClock) -> Counter[type]:
    """What there is after so many rounds of an equal program."""

    def step(x: int) -> int:
        clock.advance(1.0)
        return x + 1

    with cache:
        for _ in range(rounds):
            with cache.iteration():
                values = [rc.pure(1)]
                for _ in range(12):
                    values.append(rc.ap(step, values[-1], nbytes=100))
                while values:
                    values.pop().get()
    gc.collect()
    return Counter(map(type, gc.get_objects()))


def test_costs_of_rounds_are_not_kept_for_ever() -> None:
    """After hundreds of rounds that follow one plan there is no more than after a few."""
    clock = ManualClock()
    cache = rc.Cache(700, clock=clock, settings=Settings(effort=0.0005, waits=True))
    before = objects_after(10, cache, clock)
    assert cache.stats().foresight.startswith("following")
    after = objects_after(300, cache, clock)
    assert after[list] <= before[list] + 20


def test_a_marked_round_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded of it goes, and it is said why."""
    monkeypatch.setattr("recompute._foresight.rounds._MOST", 100)
    cache = rc.Cache(1000, settings=Settings(waits=True))
    with cache, cache.iteration():
        value = rc.pure(0)
        for _ in range(200):
            value = rc.ap(lambda x: x + 1, value, nbytes=10)
        assert cache.stats().foresight == "lost: a round of more than 100 steps is not planned"
        assert cache._engine.journal.listeners == []
        assert value.get() == 200


def test_a_round_much_longer_than_its_plan_is_not_followed_for_ever() -> None:
    """A loop that goes on with the operation that came last is lost: what it runs is not kept."""
    clock = ManualClock()
    cache = rc.Cache(600, clock=clock, settings=Settings(effort=0.0005, waits=True))

    def step(x: int) -> int:
        clock.advance(1.0)
        return x + 1

    def round_of(extra: int) -> None:
        values = [rc.pure(1)]
        for _ in range(12):
            values.append(rc.ap(step, values[-1], nbytes=100))
        while values:
            values.pop().get()
        source = rc.pure(1)
        for _ in range(extra):
            rc.ap(step, source, nbytes=100)

    with cache:
        for extra in (1, 1, 1):
            with cache.iteration():
                round_of(extra)
        assert cache.stats().foresight.startswith("following")
        with cache.iteration():
            round_of(3000)
            assert cache.stats().foresight.startswith("lost: the round is much longer")


def test_operations_that_fail_are_not_kept() -> None:
    """A round in which many do is recorded as one without them."""
    cache = rc.Cache(10**6)
    with cache, cache.iteration():
        for number in itertools.count():
            with pytest.raises(ZeroDivisionError):
                rc.ap(int.__floordiv__, number, 0)
            if number == 200:
                break
        recording = cache._foresight._rounds._recording  # type: ignore[union-attr]
        assert recording is not None
        assert len(recording._begun) <= 64
