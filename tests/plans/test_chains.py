"""On uniform training chains the optimum is known, and reached."""

from __future__ import annotations

import pytest
from exhaustive import least_cost
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute._plans.chains import forward_runs, optimum
from recompute._simulator.published_replay import baseline
from recompute._simulator.simulate import simulate
from recompute._traces.chain import chain
from recompute.planners import PlanError, plan, verify

TABLE = [(256, 32, 736), (256, 24, 744), (1024, 64, 3008), (1024, 30, 3630), (1024, 12, 4776), (2048, 91, 6053)]


@pytest.mark.parametrize(("n", "budget", "cost"), TABLE)
def test_the_table(n: int, budget: int, cost: int) -> None:
    """Revolve's plan has the published optimum, and uses the whole budget."""
    program = chain(n)
    found = plan(program, budget, "revolve")
    assert optimum(n, budget) == cost
    assert verify(program, found) == (budget, pytest.approx(cost / (2 * n)))
    assert found.is_optimal


@pytest.mark.parametrize("n", range(2, 30))
def test_all_budgets_of_short_chains(n: int) -> None:
    """The formula, at every budget."""
    program = chain(n)
    for budget in range(3, n + 2):
        peak, overhead = verify(program, plan(program, budget, "revolve"))
        assert peak <= budget
        assert overhead * 2 * n == pytest.approx(optimum(n, budget))


@pytest.mark.parametrize("n", range(1, 7))
def test_the_formula_is_the_exhaustive_optimum(n: int) -> None:
    """And where there is no plan, there is none by revolve."""
    program = chain(n)
    for budget in range(2, n + 2):
        best = least_cost(program, budget)
        if best is None:
            with pytest.raises(PlanError, match="infeasible"):
                plan(program, budget, "revolve")
        else:
            assert plan(program, budget, "revolve").overhead * 2 * n == pytest.approx(best)


@given(length=st.integers(1, 60), slots=st.integers(1, 60))
@settings(max_examples=settings().max_examples // 2)
def test_the_closed_form_is_the_recursion(length: int, slots: int) -> None:
    """t(l, s) = min over m of m + t(m, s) + t(l - m, s - 1)."""
    if length == 1:
        assert forward_runs(length, slots) == 0
    elif slots == 1:
        assert forward_runs(length, slots) == length * (length - 1) // 2
    else:
        steps = range(1, length)
        best = min(m + forward_runs(m, slots) + forward_runs(length - m, slots - 1) for m in steps)
        assert forward_runs(length, slots) == best


@pytest.mark.parametrize(("n", "budget"), [(40, 5), (200, 12)])
def test_own_knows_chains(n: int, budget: int) -> None:
    """It returns the proved optimum, whatever the search would find."""
    found = plan(chain(n), budget, rounds=1)
    assert found.is_optimal
    assert found.overhead * 2 * n == pytest.approx(optimum(n, budget))


def test_dtr_comes_as_near_as_published() -> None:
    """The chain is the one of the published table: dtr-eq needs 1.008 times the optimum at n = 256, B = 32."""
    program = chain(256)
    assert sum(baseline(program).values()) == 256
    run = simulate(program, 32, policy="dtr-eq")
    assert run.overhead is not None
    assert run.overhead * 512 / optimum(256, 32) == pytest.approx(1.008, abs=0.0005)


def test_what_is_no_uniform_chain_is_refused() -> None:
    """With the reason, and the cure."""
    program = chain(5)
    program.sizes[2] = 3
    with pytest.raises(PlanError, match=r"differ in size.*use method 'own'"):
        plan(program, 6, "revolve")
    program = chain(5)
    program.steps.insert(3, ("get", 1))
    with pytest.raises(PlanError, match="values are got on the way"):
        plan(program, 4, "revolve")
    program = chain(5)
    program.calls[7].arguments = program.calls[7].arguments[:1]
    with pytest.raises(PlanError, match="operation 7 has other arguments"):
        plan(program, 4, "revolve")
    with pytest.raises(ValueError, match="at least one forward"):
        chain(0)
