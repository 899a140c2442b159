"""Many of anything around one value: the work grows with their number, and not with its square."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import recompute as rc

SMALL, LARGE = 60, 480

Make = Callable[[int], list[Any]]


def steps(run: Callable[[], object]) -> int:
    """How many instructions of the interpreter a call takes."""
    count = 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def outputs(n: int) -> list[Any]:
    return list(rc.ap(lambda: tuple(bytes(8) for _ in range(n)), nout=n))


def shared_outputs(n: int) -> list[Any]:
    numpy = pytest.importorskip("numpy", reason="views are those of arrays")
    return list(rc.ap(lambda: tuple(numpy.zeros((n, 4))), nout=n))


def views_of_a_source(n: int) -> list[Any]:
    numpy = pytest.importorskip("numpy", reason="views are those of arrays")
    x = rc.array(numpy.zeros((n, 4)))
    return [x[row] for row in range(n)]


def views_of_a_result(n: int) -> list[Any]:
    numpy = pytest.importorskip("numpy", reason="views are those of arrays")
    x = rc.array(numpy.zeros((n, 4))) + 1
    return [x[row] for row in range(n)]


def users(n: int) -> list[Any]:
    x = rc.ap(bytes, 8)
    return [rc.ap(bytearray, x) for _ in range(n)]


def handles(n: int) -> list[Any]:
    x = rc.ap(bytes, 8)
    return [rc.Recomputable(x.cache, x._node) for _ in range(n)]


def arguments(n: int) -> list[Any]:
    xs = [rc.ap(bytes, 8) for _ in range(n)]
    return [*xs, rc.ap(b"".join, xs)]


def chain(n: int) -> list[Any]:
    xs = [rc.ap(bytes, 8)]
    for _ in range(n):
        xs.append(rc.ap(bytes, xs[-1]))
    return xs


MANY = [outputs, shared_outputs, views_of_a_source, views_of_a_result, users, handles, arguments, chain]


@pytest.mark.parametrize("order", ["first", "last", "any"])
@pytest.mark.parametrize("make", MANY, ids=lambda make: make.__name__)
@pytest.mark.parametrize("release", ["eager", "banish", "ignore"])
def test_the_work_grows_with_the_number(make: Make, order: str, release: Any) -> None:
    """Eight times as many take at most ten times the work, to make them and to drop them one by one in any order."""

    def program(n: int) -> tuple[int, int]:
        with rc.Cache(release=release) as cache:
            kept: list[Any] = []
            making = steps(lambda: kept.extend(make(n)))
            if order == "first":
                kept.reverse()
            elif order == "any":
                random.Random(0).shuffle(kept)

            def drop() -> None:
                while kept:
                    kept.pop()
                cache.flush()

            return making, steps(drop)

    program(SMALL)  # what is learnt once is learnt now
    small, large = program(SMALL), program(LARGE)
    assert large[0] <= 10 * small[0]
    assert large[1] <= 10 * small[1]


@pytest.mark.parametrize("make", MANY, ids=lambda make: make.__name__)
def test_the_work_to_bring_all_back_grows_with_the_number(make: Make) -> None:
    """Eight times as many take at most twelve times the work to be evicted and got, one by one."""

    def program(n: int) -> int:
        with rc.Cache("1GB"):
            kept = make(n)

            def bring_back() -> None:
                for value in kept:
                    rc.Recomputable.evict(value)
                for value in kept:
                    rc.Recomputable.get(value)

            return steps(bring_back)

    program(SMALL)
    assert program(LARGE) <= 12 * program(SMALL)


def test_an_eviction_looks_at_a_sample_of_many_users() -> None:
    """To find a victim takes hardly more work where ten thousand operations take one value than where a thousand do."""

    def program(n: int) -> int:
        with rc.Cache(200_000) as cache:
            trunk = rc.ap(bytes, 1000)
            kept = [rc.ap(bytes, trunk, nbytes=1000) for _ in range(n)]

            def more() -> None:
                for _ in range(20):
                    kept.append(rc.ap(bytes, trunk, nbytes=1000))

            more()
            assert cache.stats().evictions > n // 2
            return steps(more)

    assert program(10_000) <= 2 * program(1_000)


def test_a_loop_takes_no_work_for_values_that_stay() -> None:
    """One operation after the other, each a repetition of the last, takes as much beside many values as beside few."""

    def program(n: int) -> int:
        with rc.Cache(100 * n) as cache:
            first = rc.ap(bytes, 1)
            kept = [first]

            def more(times: int = 5) -> None:
                for _ in range(times):
                    kept.append(rc.ap(bytes, first, nbytes=100))

            more(n + 200)
            assert cache.stats().evictions >= 200
            return min(steps(more) for _ in range(5))  # now and then all scores are computed anew

    assert program(8_000) <= 1.5 * program(500)
