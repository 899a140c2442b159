"""`ahead`: a thread moves values before their room is needed, and ends with its cache."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from threading import Event

import numpy as np
import pytest

import recompute as rc
from recompute.testing import check_invariants

ROWS = 5_000
SIZE = 8 * ROWS


def filled(number: int) -> rc.Recomputable[np.ndarray]:
    return rc.pure(np.full(ROWS, float(number)))


def test_some_memory_is_kept_free(tmp_path: Path) -> None:
    """As much as two of the values for which the program had to wait; it may have taken some of that since then."""
    with rc.Cache(32 * SIZE, tiers=rc.Disk(folder=tmp_path, ahead=True), foresight=False) as cache:
        made = [filled(number) for number in range(32)]
        cache._engine.moving.ahead.waited(cache._engine.memory.pool("cpu"), SIZE)  # type: ignore[union-attr]
        check_invariants(cache, made)  # waits until nothing is left to be moved
        assert cache.stats().used == 30 * SIZE
        made += [filled(number) for number in range(32, 40)]
        check_invariants(cache, made)
        assert cache.stats().tiers[0].moves >= 8
        assert cache.stats().peak <= 32 * SIZE
        assert [value.get()[0] for value in made] == list(range(40))
        check_invariants(cache, made)


def test_what_is_dropped_stays_until_its_room_is_needed(tmp_path: Path) -> None:
    """It takes no time to drop it."""
    with rc.Cache(32 * SIZE, tiers=rc.Disk(folder=tmp_path, ahead=True), foresight=False) as cache:
        source = filled(1)
        kept = [rc.ap(np.negative, source) for _ in range(31)]
        for number in range(4):
            cache._engine.moving.ahead.waited(cache._engine.memory.pool("cpu"), SIZE)  # type: ignore[union-attr]
            check_invariants(cache, [source, *kept])
            assert cache.stats().used == 32 * SIZE, number


def test_the_program_goes_on_while_a_value_is_moved(tmp_path: Path) -> None:
    """An operation runs while bytes are on their way, and takes what is free already."""
    begun, go_on = Event(), Event()

    class Slow:
        """Waits until it may be pickled, but in the main thread."""

        times = 0

        def __reduce__(self) -> tuple[type, tuple[()]]:
            Slow.times += 1
            if Slow.times > 1:
                begun.set()
                assert go_on.wait(60)
            return Slow, ()

    Slow.__qualname__ = "Slow"
    sys.modules[__name__].Slow = Slow  # type: ignore[attr-defined]  # pickle looks for it there
    rc.register_size(Slow, lambda value: SIZE)
    with rc.Cache(32 * SIZE + 1_000, tiers=rc.Disk(folder=tmp_path, ahead=True), foresight=False) as cache:
        made = [rc.pure(Slow()) for _ in range(33)]  # one was moved by this thread, which had to wait
        try:
            assert begun.wait(60)
            assert rc.ap(len, b"1234").get() == 4
        finally:
            go_on.set()
        check_invariants(cache, made)
        assert Slow.times == 3


def test_an_error_in_the_thread_is_raised_by_the_next_use(tmp_path: Path) -> None:
    """It comes from an adapter; nothing is lost."""

    class Odd:
        pass

    class Raising(rc.adapters.Adapter):
        times = 0

        def nbytes(self, value: object) -> int:
            return SIZE

        def evicted(self, value: object) -> None:
            Raising.times += 1
            if Raising.times == 2:
                raise LookupError("no")

        def pack(self, value: object) -> tuple[str, list[bytes]]:
            return "", []

        def unpack(self, head: str, load: object) -> Odd:
            return Odd()

    rc.adapters.register(Odd, Raising())
    cache = rc.Cache(32 * SIZE, tiers=rc.Disk(folder=tmp_path, ahead=True), foresight=False)
    with cache:
        made = [rc.pure(Odd()) for _ in range(33)]
        with pytest.raises(LookupError, match="no"):
            check_invariants(cache, made)
        assert all(isinstance(value.get(), Odd) for value in made)
        check_invariants(cache, made)


def test_the_thread_ends_with_its_cache(tmp_path: Path) -> None:
    """And the files of the cache with it."""
    with rc.Cache(8 * SIZE, tiers=rc.Disk(folder=tmp_path, ahead=True), foresight=False) as cache:
        made = [filled(number) for number in range(20)]
        check_invariants(cache, made)
        signals = cache._engine.moving.ahead._signals  # type: ignore[union-attr]
    assert signals is not None
    del made, cache
    gc.collect()
    assert signals.over
    signals.wait()
    assert list(tmp_path.iterdir()) == []


def test_its_thread_can_be_ended_before_the_cache(tmp_path: Path) -> None:
    """Then nobody waits for it; it begins anew when the program has to wait again."""
    with rc.Cache(32 * SIZE, tiers=rc.Disk(folder=tmp_path, ahead=True), foresight=False) as cache:
        made = [filled(number) for number in range(32)]
        ahead, pool = cache._engine.moving.ahead, cache._engine.memory.pool("cpu")
        assert ahead is not None
        for _ in range(2):
            ahead.waited(pool, SIZE)
            signals = ahead._signals
            assert signals is not None
            check_invariants(cache, made)
            cache.extend.stop_ahead()
            signals.end()  # as at the end of the process
            signals.wait()
            assert signals._done == signals._times
        assert [value.get()[0] for value in made] == list(range(32))
