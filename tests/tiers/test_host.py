"""Host memory as a tier: whatever is written comes back, and buffers serve again for copies of the same size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from interrupts import Tracing, modules_in, strike
from lib.vectors import Vector, VectorAdapter, vector
from recompute.testing import check_invariants
from recompute.testing.conformance import registered

SIZES = st.lists(st.integers(0, 5).map(lambda number: 100 * number), min_size=1, max_size=3)


def spare_bytes(store: Any) -> int:
    """Of all buffers that a store has, and no copy."""
    return sum(len(buffer) for buffers in store._spare.values() for buffer in buffers)


@given(st.lists(st.tuples(SIZES, st.integers(0, 8)), max_size=60))
def test_buffers_serve_again(writes: list[tuple[list[int], int]]) -> None:
    """Copies read back as they were written while others are removed; there never were more bytes than copies had."""
    store: Any = rc.Host().open()
    copies: list[tuple[Any, list[bytes]]] = []
    most = 0
    for number, (sizes, removed) in enumerate(writes):
        content = [bytes([number % 256]) * size for size in sizes]
        copies.append((store.write([memoryview(part) for part in content], sum(sizes)), content))
        used = sum(len(part) for _, parts in copies for part in parts)
        most = max(most, used)
        assert used + spare_bytes(store) <= most
        for where, parts in copies:
            with store.read(where) as load:
                for part in parts:
                    found = bytearray(len(part))
                    load(memoryview(found))
                    assert found == part
        if removed < len(copies):
            store.remove(copies.pop(removed)[0])


def test_a_round_takes_the_buffers_of_the_one_before() -> None:
    """A program that moves as much in each round allocates in the first one alone."""
    with registered(VectorAdapter(), Vector), rc.Cache({"gpu:0": 64}, tiers={"gpu:0": [rc.Host(always=True)]}) as cache:
        store: Any = cache._engine.memory.tiers.of("gpu:0")[0]  # type: ignore[union-attr]  # there are tiers
        allocated = []
        for number in range(5):
            values = [rc.ap(partial(made, number), place) for place in range(20)]
            assert [value.get().numbers for value in values] == [(number, place) for place in range(20)]
            check_invariants(cache, values)
            allocated.append(store.used + spare_bytes(store))
            del values
        assert len(set(allocated)) == 1
        assert cache.stats().tiers[0].moves > 3 * 18


def made(number: int, place: int) -> Vector:
    return vector(number, place, device="gpu:0")


def test_threads_have_buffers_of_their_own() -> None:
    """What one thread writes is not written over by another."""
    store: Any = rc.Host().open()
    wrong: list[Any] = []

    def work(number: int) -> None:
        content = bytes([number]) * 1_000
        for _ in range(300):
            where = store.write([memoryview(content)], 1_000)
            with store.read(where) as load:
                found = bytearray(1_000)
                load(memoryview(found))
            if found != content:
                wrong.append(number)
            store.remove(where)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert spare_bytes(store) <= 4_000


def moved(store: Any) -> None:
    """Copies of several sizes, which come and go."""
    for sizes in ((100, 200, 300, 100), (50, 150, 250, 200), (100, 300)):
        copies = [(store.write([memoryview(bytes([size % 256]) * size)], size), size) for size in sizes]
        for where, size in copies:
            found = bytearray(size)
            with store.read(where) as load:
                load(memoryview(found))
            assert found == bytes([size % 256]) * size
            store.remove(where)


@pytest.mark.parametrize("strike", [strike, moved], ids=["interrupt", "use"])
def test_a_handler_of_a_signal_at_each_place(strike: Callable[..., None]) -> None:
    """One that raises, and one that moves values itself, leave the store as good as new."""
    tracing = Tracing(modules_in("recompute._tiers.host"))
    for at in range(1, 1_000):
        store = rc.Host().open()
        tracing.arm(at, strike=partial(strike, store) if strike is moved else strike)
        with suppress(KeyboardInterrupt), tracing.on():
            moved(store)
        if not tracing.struck:
            break
        tracing.arm(0)
        moved(store)
    assert 100 < at < 999
