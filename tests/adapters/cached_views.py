"""Views in a cache, for the tests of every adapter whose arrays have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_invariants

NUMBERS = np.arange(1_000.0)
VIEWS = [
    pytest.param(lambda a: a.reshape(20, 50), id="reshape"),
    pytest.param(lambda a: a.reshape(20, 50).T, id="transpose"),
    pytest.param(lambda a: a[3:7], id="slice"),
    pytest.param(lambda a: a[3:700][2:50][::3], id="slice of slices"),
    pytest.param(lambda a: a.view(np.uint8), id="other dtype"),
    pytest.param(lambda a: np.broadcast_to(a, (7, 1_000)), id="broadcast"),
]


def check_aliases(
    make: Callable[[], Any],
    reshape: Callable[..., Any],
    seen: Callable[[Any], Any],
    size: int,
    allocated: Callable[[], int] | None = None,
) -> None:
    """A view of an argument takes no memory of its own and is evicted with it.

    `make`: NUMBERS, in so many bytes. `allocated`: bytes, if somebody else than the cache knows.
    """
    with rc.Cache() as cache:
        allocated = allocated or (lambda: cache.stats().used)
        value = rc.ap(make)
        view = rc.ap(reshape, value, (10, 100)).map(np.transpose)
        assert cache.stats().used == allocated() == size
        assert value.evict()
        assert not view.resident
        assert cache.stats().used == allocated() == 0
        assert np.array_equal(seen(view.get()), NUMBERS.reshape(10, 100).T)


def check_part_of_a_global(part: Callable[[], Any], seen: Callable[[Any], Any], size: int) -> None:
    """Nothing stays counted when it is evicted, over and over. `part`: the first ten of NUMBERS, in so many bytes."""
    with rc.Cache() as cache:
        value = rc.ap(part)
        for _ in range(3):
            assert value.evict()
            assert cache.stats().used == 0
            assert seen(value.get())[9] == 9.0
        assert cache.stats().used == size


def programs(functions: dict[str, Callable[[Any], Any]]) -> st.SearchStrategy[list[tuple[int, str]]]:
    """Up to twelve functions, each of any of the values before."""
    return st.lists(st.tuples(st.integers(0, 30), st.sampled_from([*functions])), max_size=12)


def check_program(
    program: list[tuple[int, str]],
    functions: dict[str, Callable[[Any], Any]],
    start: Any,
    budget: int,
    seen: Callable[[Any], Any],
) -> None:
    """All values come back as they are without a cache, the books balance, and nothing stays counted."""
    expected = [start]
    with rc.Cache(budget) as cache:
        values = [rc.pure(start)]
        for which, name in program:
            which %= len(values)
            expected.append(functions[name](expected[which]))
            values.append(rc.ap(functions[name], values[which]))
        for value, plain in zip(reversed(values), reversed(expected), strict=True):
            assert np.array_equal(seen(value.get()), seen(plain))
        check_invariants(cache, values)
        del value
        values.clear()
        assert cache.stats().used == 0
