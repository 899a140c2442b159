"""A cache that mostly computes what it had computed before says so, once."""

from __future__ import annotations

import warnings
from math import inf
from typing import Any

import pytest

import recompute as rc
from lib.vectors import vector
from recompute.testing import ManualClock

CLOCK = ManualClock()


def step(payload: Any, *more: Any) -> Any:
    CLOCK.advance(0.1)
    return vector(payload.numbers[0] + 1)


def chain(length: int, budget: int | None) -> tuple[rc.Cache, list[rc.Recomputable[Any]]]:
    cache = rc.Cache(budget, clock=CLOCK)
    with cache:
        values = [rc.pure(vector(0))]
        for _ in range(length):
            values.append(rc.ap(step, values[-1]))
    return cache, values


def test_a_program_that_thrashes_is_told_so_once() -> None:
    """The warning names the share, the function, what takes the room and what to do, and points to the program."""
    cache, values = chain(200, 80)
    values[3].pin()
    with pytest.warns(rc.ThrashWarning) as caught:
        found = [value.get().numbers[0] for value in [*reversed(values), *values] * 3]
    assert found == [*range(200, -1, -1), *range(201)] * 3
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith("200 operations were repeated ")
    assert "Repeated most: step (" in message
    assert "8 B pinned" in message
    assert "8 B in sources" in message
    assert "budget of 80 B" in message
    assert "unpin()" in message
    assert warning.filename == __file__
    assert cache.stats().rematerializations > 500


def test_as_an_error_it_is_raised_once_and_loses_nothing() -> None:
    """A program that makes warnings errors can go on after it."""
    cache, values = chain(200, 80)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rc.ThrashWarning)
        raised = 0
        for value in [*reversed(values)] * 4:
            try:
                value.get()
            except rc.ThrashWarning:
                raised += 1
        assert raised == 1
        assert [value.get().numbers[0] for value in values] == list(range(201))
    rc.testing.check_invariants(cache, values)


def test_a_long_chain_that_is_read_backwards_hears_nothing() -> None:
    """What the best choices take in a tenth of the memory is the price, and no accident."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache, values = chain(1000, 800)
        for number in range(1000, -1, -1):
            assert values.pop().get().numbers[0] == number
    stats = cache.stats()
    assert stats.rematerializations > 800
    assert stats.remat_time > 0.5 * stats.model_time


def test_a_small_program_that_is_much_slower_is_told_so() -> None:
    """Where the functions take nothing, what is lost is the time of the machine."""

    def read(cache: rc.Cache) -> None:
        values = [rc.pure(vector(0))]
        for _ in range(100):
            values.append(rc.ap(step, values[-1]))
        for number in range(100_000):
            values[1 + 37 * number % 100].get()
            if cache._engine.thrashing.next == inf:
                break

    with rc.Cache(80, clock=lambda: 0.0) as cache, pytest.warns(rc.ThrashWarning, match="operations were repeated"):
        read(cache)


def test_what_takes_little_is_no_remedy() -> None:
    """A pinned value of one part in a hundred is not what is short."""
    _, values = chain(400, 1600)
    values[3].pin()
    with pytest.warns(rc.ThrashWarning) as caught:
        found = [values[37 * number % 400].get().numbers[0] for number in range(4000)]
    assert found == [37 * number % 400 for number in range(4000)]
    assert "pinned" not in str(caught[0].message)


@pytest.mark.parametrize("budget", [None, 10_000])
def test_who_has_the_memory_hears_nothing(budget: int | None) -> None:
    """Nothing is said where little is repeated, nor of what a program without a budget evicts itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, values = chain(1500, budget)
        if budget is None:
            for value in values:
                value.evict()
            values[-1].get()


def test_what_is_computed_beside_counts() -> None:
    """A program that is slowed down a little, for long, hears nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache, values = chain(30, 160)
        with cache:
            for number in range(4000):
                values[-1] = rc.ap(step, values[-1])
                if number % 3 == 0:
                    values[20].evict()
                    values[20].get()
    assert cache.stats().rematerializations > 1000
