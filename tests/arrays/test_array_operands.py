"""Plain arrays that meet wrapped ones are kept once, as long as they are alive and unchanged."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_invariants

SIDE = 60
VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T,
    "upside down": lambda w: w[::-1],
    "mirrored": lambda w: w[:, ::-1],
    "read-only": lambda w: np.broadcast_to(w, w.shape),
}
changes = st.sampled_from(["nothing", "one element", "all", "NaN", "shape", "rebound", "views"])


def change(what: str, w: Any) -> Any:
    """The array, changed in place, or another one."""
    if what == "one element":
        w[17, 23] += 1
    elif what == "all":
        w *= 0.5
    elif what == "NaN":
        w[3, 3] = np.nan
    elif what == "shape":
        return w.reshape(SIDE, SIDE)
    elif what == "rebound":
        return w.copy() + 1
    elif what == "views":
        w[:, 5][:] = 2
    return w


@given(st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), changes, st.booleans()), max_size=8))
def test_a_change_in_between_is_seen(steps: list[tuple[str, str, bool]]) -> None:
    """Whatever happens to an operand between operations, results and repeated results are those of plain NumPy."""

    def program(x: Any, evicts: bool) -> list[Any]:
        w = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)
        made = []
        for view, what, drops in steps:
            x = x @ VIEWS[view](w) / SIDE
            made.append(x)
            w = change(what, w)
            if drops and evicts:
                made[0].evict()
        if evicts:
            for one in made:
                one.evict()
        return [np.array(one) for one in made]

    start = np.ones((3, SIDE))
    expected = program(start, False)
    with rc.Cache() as cache:
        x = rc.array(start)
        found = program(x, True)
        check_invariants(cache, x)
    assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("read_only", [False, True])
def test_memory_is_that_of_one_copy(view: str, read_only: bool) -> None:
    """A plain operand of many operations takes the memory of one source."""
    w = np.eye(200)
    w.flags.writeable = not read_only
    with rc.Cache() as cache:
        x = rc.array(np.ones((2, 200)))
        for _ in range(20):
            x = x @ VIEWS[view](w)
        results = 21 * 2 * 200 * 8
        assert w.nbytes <= cache.stats().used <= w.nbytes + results
        check_invariants(cache, x)


def test_it_fits_into_a_budget() -> None:
    """A chain with a plain operand fits into the operand, one argument and one result."""
    w = np.eye(500)
    with rc.Cache("2.1MB") as cache:
        x = rc.array(np.ones((2, 500)))
        for _ in range(60):
            x = x @ w
        assert (np.asarray(x) == 1).all()
        assert cache.stats().peak <= 2_100_000


def test_a_source_goes_with_what_needs_it() -> None:
    """What is kept of an operand is freed when no operation needs it, although the array lives on."""
    w = np.eye(100)
    with rc.Cache() as cache:
        x = rc.array(np.ones((2, 100)))
        y = x @ w
        assert cache.stats().used > w.nbytes
        del y
        gc.collect()
        assert cache.stats().used == x.nbytes
        assert ((x @ w) == 1).all()
        check_invariants(cache, x)


def test_views_whose_dtypes_differ_only_in_metadata_are_different_operands() -> None:
    """One memory seen through dtypes with other metadata gives results with that metadata, as in plain NumPy."""
    w = np.linspace(0, 1, 300)
    with rc.Cache():
        x = rc.array(np.ones(300))
        made = [np.minimum(w.view(np.dtype("f8", metadata={"unit": unit})), x) for unit in ("m", "km")]
        assert [y.dtype.metadata["unit"] for y in made] == ["m", "km"]


def test_memory_that_is_used_again() -> None:
    """An array at the address of one that has gone is another array."""
    with rc.Cache() as cache:
        x = rc.array(np.ones((2, 100)))
        made = []
        for number in range(30):
            w = np.full((100, 100), float(number)) + np.eye(100)
            made.append(x @ w)
            del w
        for number, value in enumerate(made):
            value.evict()
            assert (np.asarray(value) == 100 * number + 1).all()
        del made, value
        gc.collect()
        assert cache.stats().used == x.nbytes
        assert not cache.__dict__["_plain"]
