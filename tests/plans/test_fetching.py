"""Plans with a tier: results are fetched where that is cheaper, and the judge knows what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exhaustive import least_cost
from hypothesis import given
from hypothesis import strategies as st
from small_programs import programs, whole

from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.planners import PlanError, ProgramPlan, plan, verify


def tier(price: float) -> str:
    """One whose transfers take so many units a byte."""
    return f"{1e9 / price if price else 1e18}B/s"


def in_nanoseconds(program: Program) -> Program:
    """A byte at a price of one takes a unit."""
    return replace(program, unit=1e-9)


@given(programs(operations=5), st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.5, 1.0, 10.0]))
def test_never_below_the_least_and_never_above_that_without_a_tier(program: Program, more: int, price: float) -> None:
    """The plan is verified; it costs no less than the cheapest way there is, and no more than without fetches."""
    program = in_nanoseconds(program)
    budget = min(whole(program), more + sum(program.sizes) // 3)
    try:
        without = plan(program, budget, effort=0.01)
    except PlanError:
        return
    found = plan(program, budget, effort=0.01, tier=tier(price))
    assert verify(program, found) == (found.peak, found.overhead)
    assert found.overhead <= without.overhead + 1e-9
    if program.model_time and not any(kind in ("get", "detach") for kind, _ in program.steps):
        least = least_cost(program, budget, lambda size: price * size)
        assert least is not None
        assert found.overhead * program.model_time >= least - 1e-6


def test_a_deep_chain_is_fetched() -> None:
    """Where a transfer takes a hundredth of an operation, hardly anything runs twice."""
    program = chain(12)
    without, found = plan(program, 5), plan(program, 5, tier="100B/s")
    assert without.overhead > 1.3
    assert found.fetches > 0
    assert found.overhead < 1.1
    assert found.note == f"{found.fetches} fetches from a tier of 100B/s"
    assert f"{found.fetches} fetches" in repr(found)


def test_nothing_is_fetched_that_is_quickly_made() -> None:
    """Where a transfer takes as long as a thousand operations, the plan is one without a tier."""
    without, found = plan(chain(12), 5), plan(chain(12), 5, tier="1B/s,1000s")
    assert found.fetches == 0
    assert found.overhead == without.overhead


def test_a_plan_with_fetches_is_loaded_as_it_was_saved() -> None:
    """As any other."""
    found = plan(chain(12), 5, tier="100B/s")
    loaded = ProgramPlan.from_lines(list(found.to_lines()))
    assert loaded == found
    assert verify(chain(12), loaded) == (found.peak, found.overhead)


def test_what_cannot_be_fetched_is_noticed() -> None:
    """An operation that has not run; a plan without a tier; too little room."""
    found = plan(chain(12), 5, tier="100B/s")
    with pytest.raises(PlanError, match="step 0, fetch 3: an operation that has not run"):
        verify(chain(12), replace(found, steps=(("fetch", 3), *found.steps)))
    with pytest.raises(PlanError, match="the plan has no tier"):
        verify(chain(12), replace(found, tier=""))
    with pytest.raises(PlanError, match="exceeded"):
        verify(chain(12), replace(found, budget=found.peak - 1))


@pytest.mark.parametrize("words", ["12GB/s,overlap", "12GB/s,50GB", "12GB/s,always"])
def test_tiers_that_no_plan_can_hold_to(words: str) -> None:
    """Are refused, with what to say."""
    with pytest.raises(ValueError, match="use 12GB/s"):
        plan(chain(12), 5, tier=words)


def test_only_the_own_method_fetches() -> None:
    """The others are published ones."""
    with pytest.raises(ValueError, match="no option 'tier'"):
        plan(chain(12), 5, "revolve", tier="100B/s")
