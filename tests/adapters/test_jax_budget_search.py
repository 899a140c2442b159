"""The search for the cheapest plan that fits, against compilers that make anything of a plan."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from recompute_jax._remat.ladder import cheapest  # after importorskip

compilers = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def taken(compiled: list[int], budget: int, stride: int) -> tuple[int | None, list[int]]:
    """What is taken for a budget, and what was compiled for that. Predictions fall with the number of the plan."""
    predictions = sorted(range(len(compiled)), reverse=True)
    start = bisect_left([-prediction for prediction in predictions], -(budget * len(compiled) // 100))
    seen: list[int] = []

    def fits(number: int) -> bool:
        seen.append(number)
        return compiled[number] <= budget

    return cheapest(len(compiled), start, fits, stride), seen


@given(compilers, st.integers(1, 100), st.integers(1, 100), st.integers(1, 5))
def test_more_bytes_never_cost_more(compiled: list[int], one: int, two: int, stride: int) -> None:
    """Whatever the compiler makes of each plan, a larger budget gets a plan that is no dearer."""
    small, large = sorted((one, two))
    dearer = taken(compiled, small, stride)[0]
    if dearer is not None:
        cheaper = taken(compiled, large, stride)[0]
        assert cheaper is not None
        assert cheaper <= dearer


@given(compilers, st.integers(1, 100), st.integers(1, 5))
def test_what_is_taken_fits(compiled: list[int], budget: int, stride: int) -> None:
    """It was compiled, it fits, and nothing is compiled twice."""
    number, seen = taken(compiled, budget, stride)
    assert len(seen) == len(set(seen))
    if number is not None:
        assert number in seen
        assert compiled[number] <= budget


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40, unique=True), st.integers(1, 100), st.integers(1, 5))
def test_the_cheapest_is_found(sizes: list[int], budget: int, stride: int) -> None:
    """Where what is dearer needs less, it is the first that fits."""
    compiled = sorted(sizes, reverse=True)
    first = next((number for number, size in enumerate(compiled) if size <= budget), None)
    assert taken(compiled, budget, stride)[0] == first


@pytest.mark.parametrize(("budget", "calls"), [(20, 2), (18, 3)])
def test_few_are_compiled_if_the_start_is_right(budget: int, calls: int) -> None:
    """One that fits and one that does not, and one for each plan too few."""
    seen: list[int] = []

    def fits(number: int) -> bool:
        seen.append(number)
        return 40 - number <= budget

    assert cheapest(40, 20, fits, 1) == 40 - budget
    assert len(seen) == calls
