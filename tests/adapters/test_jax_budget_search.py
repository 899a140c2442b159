"""The search for what the planner may get, against a compiler that is a formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from recompute_jax._emit.regions import LENGTH  # after importorskip
from recompute_jax._remat.budget_search import BudgetSearch  # after importorskip

BUDGET = 1_000_000
LENGTHS = {LENGTH: 4, 4: 1, 1: 0}


def search(factor: float, waste: dict[int, int], least: int, compilations: int) -> tuple[int, int, list[int]]:
    """The most that fitted (0: nothing), the number of compilations, and all that the planner got.

    What is compiled needs `factor` times what was planned, and `waste` by the length of regions.
    """
    aim = BudgetSearch(BUDGET, compilations)
    best, got = 0, []
    looks = 0
    while (planned := aim.given) is not None:
        got.append(planned)
        if planned < least:
            aim.no_plan()
            continue
        looks += 1
        compiled = int(factor * planned) + waste[aim.length]
        if compiled <= BUDGET:
            best = max(best, planned)
            aim.fitted(compiled, 3 - planned / BUDGET)
        else:
            aim.exceeded(compiled, planned, LENGTHS[aim.length])
    return best, looks, got


@given(
    st.floats(0.5, 2.0), st.lists(st.integers(0, 200_000), min_size=3, max_size=3), st.integers(0, 300_000), st.data()
)
def test_what_fits_is_found(factor: float, waste: list[int], least: int, data: st.DataObject) -> None:
    """A compiler that needs a multiple of what was planned and some more is seen through in eight compilations."""
    best, looks, got = search(factor, dict(zip(LENGTHS, waste, strict=True)), least, 8)
    assert looks <= len(got) <= 8
    assert all(each > 0 for each in got)
    if factor * least + max(waste) <= 0.9 * BUDGET:
        assert best
    if best:
        roomy = min((BUDGET - max(waste)) / factor, 1.6 * BUDGET)
        assert best >= 0.5 * min(roomy, BUDGET)


def test_longer_regions_come_back() -> None:
    """Shorter regions that need more are given up, and the planner gets less."""
    aim = BudgetSearch(BUDGET, 5)
    aim.exceeded(1_200_000, 900_000, 4)
    assert (aim.length, aim.anew) == (4, False)
    aim.exceeded(1_300_000, 900_000, 1)
    assert (aim.length, aim.anew) == (LENGTH, True)
    assert aim.given is not None
    assert aim.given < 900_000
    aim.exceeded(1_100_000, aim.given, 4)
    assert aim.length == LENGTH


def test_shorter_regions_stay() -> None:
    """Where they need less, later plans are made of them, too."""
    aim = BudgetSearch(BUDGET, 5)
    aim.exceeded(1_200_000, 900_000, 4)
    aim.exceeded(1_100_000, 900_000, 0)
    assert (aim.length, aim.anew) == (4, True)


@pytest.mark.parametrize("compilations", [1, 2, 5])
def test_no_more_compilations_than_asked(compilations: int) -> None:
    """Nothing fits: so many are tried, and the last is announced."""
    aim = BudgetSearch(BUDGET, compilations)
    for left in range(compilations, 0, -1):
        assert aim.given is not None
        assert aim.is_last == (left == 1)
        aim.exceeded(50 * BUDGET, aim.given, 0)
    assert aim.given is None
