"""Depth: a million evicted values come back, go again, and take little bookkeeping."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest

import recompute as rc
from recompute.testing import Identity

_MILLION = 1_000_000


def successor(number: int) -> int:
    return number + 1


@pytest.mark.slow
def test_a_chain_of_a_million_evicted_values() -> None:
    """One get of the last brings it back through a million operations, and dropping it leaves nothing."""
    cache = rc.Cache()
    gc.freeze()  # the collector need not look at what is not garbage
    try:
        with cache:
            y = rc.pure(0)
            for _ in range(_MILLION):
                y = rc.ap(successor, y)
        assert cache.stats().releases == _MILLION - 1
        assert y.evict()
        assert y.get() == _MILLION
        assert cache.stats().rematerializations == _MILLION
        del y
        assert cache.stats().used == 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("release", ["ignore", "banish"])
def test_a_deep_chain_in_the_other_release_modes(release: Any) -> None:
    """Twenty thousand operations, evicted where the mode allows it, come back and go."""
    cache = rc.Cache(release=release)
    with cache:
        y = rc.pure(0)
        for _ in range(20_000):
            y = rc.ap(successor, y)
        cache.release_memory()
        assert y.get() == 20_000
        del y
        cache.release_memory()
    assert cache.stats().used == 0


@pytest.mark.parametrize("policy", ["dtr-eq", "dtr-local", "lru"])
def test_a_deep_chain_within_a_small_budget(policy: str) -> None:
    """Ten thousand operations in the room of a hundred: the last is right, and the budget was kept."""
    cache = rc.Cache(100, policy=policy)
    with cache:
        values = [rc.ap(successor, 0, nbytes=1)]
        for _ in range(10_000):
            values.append(rc.ap(successor, values[-1], nbytes=1))
        assert values[-1].get() == 10_001
        assert values[5_000].get() == 5_001
        assert cache.stats().peak <= 100


def test_a_wide_operation() -> None:
    """Ten thousand evicted arguments of one operation are brought back for it."""
    cache = rc.Cache()
    with cache:
        parts = [rc.ap(successor, number) for number in range(10_000)]
        total = rc.ap(sum, parts)
        for part in (total, *parts):
            part.evict()
        assert total.get() == sum(range(1, 10_001))


def test_a_deep_diamond_is_computed_once_a_level() -> None:
    """Each level takes the one above twice: two thousand levels are two thousand runs, not two to that power."""
    cache = rc.Cache()
    with cache:
        y = rc.pure(1)
        for _ in range(2000):
            y = rc.ap(lambda a, b: (a + b) % 1009, y, y)
        before = y.get()
        assert cache.stats().releases == 1999  # else the last one dropped would stay for y, evicted
        y.evict()
        assert y.get() == before
        assert cache.stats().rematerializations == 2000


def test_gets_inside_operations_may_nest() -> None:
    """A chain of dynamic dependencies, as deep as Python's own recursion allows without them."""
    cache = rc.Cache()

    def peek(handle: Any) -> Any:
        return lambda: handle.get() + 1

    with cache:
        y = rc.pure(0)
        for _ in range(100):
            y = rc.ap(peek(y))
        y.evict()
        assert y.get() == 100


@pytest.mark.slow
def test_bookkeeping_of_an_operation() -> None:
    """Less than 800 bytes an operation in a chain of 50,000, evicted values and recipes."""
    cache = rc.Cache()
    with cache:
        y = rc.pure(0)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(50_000):
                y = rc.ap(successor, y)
            y.get()
            per_operation = tracemalloc.get_traced_memory()[0] / 50_000
            y.evict()
            assert y.get() == 50_000  # resident, they have slots among the candidates, too
            resident = tracemalloc.get_traced_memory()[0] / 50_000
        finally:
            tracemalloc.stop()
    assert per_operation < 800
    assert resident < 800


def test_the_identity_is_as_deep() -> None:
    """What the cache is compared with has no depth at all."""
    y = Identity.pure(0)
    for _ in range(10_000):
        y = Identity.ap(successor, y)
    assert y.get() == 10_000
