"""On chains whose operations differ in cost, but not their values in size: the optimum."""

from __future__ import annotations

import pytest
from exhaustive import least_cost
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute._plans.chains import chained, optimum, recognised
from recompute._plans.exact import exact
from recompute._plans.liveness import cost_of, schedule
from recompute._plans.problem import problem_of
from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.planners import PlanError, plan, verify


@st.composite
def chains(draw: st.DrawFn, states: int) -> Program:
    """Forward operations, a loss, and backward ones that take what these made, some of it not, some of it twice."""
    program = Program("chain")
    value = program.add_source(draw(st.integers(0, 2)))
    size, other = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cost = st.integers(0, 5).map(float)
    weights = [program.add_source(1) for _ in range(draw(st.integers(0, 1)))]
    made = [value]
    for _ in range(draw(st.integers(1, states))):
        made += program.add_call("f", (made[-1], *weights), (program.add_storage(size),), draw(cost))
    (gradient,) = program.add_call("loss", (made[-1],), (program.add_storage(other),), draw(cost))
    taken = [value for value in reversed(made) for _ in range(draw(st.sampled_from((1, 1, 1, 0, 2))))]
    for value in taken[: 2 * states] or made[-1:]:
        (gradient,) = program.add_call("b", (gradient, value, *weights), (program.add_storage(other),), draw(cost))
    program.outputs = [gradient]
    return program


def budget_of(program: Program, share: float) -> int:
    return int(share * sum(program.sizes))


@settings(max_examples=settings().max_examples * 3 // 2)
@given(program=chains(4), share=st.floats(0.2, 1.0))
def test_with_one_size_it_is_the_exhaustive_optimum(program: Program, share: float) -> None:
    """Whatever the costs; and where it finds nothing, there is nothing."""
    budget = budget_of(program, share)
    problem = problem_of(program, budget)
    if isinstance(recognised(problem), str):
        return
    best = least_cost(program, budget)
    if best is None:
        with pytest.raises(PlanError, match="infeasible"):
            chained(problem)
        return
    sequence, bound, _ = chained(problem)
    assert schedule(problem, sequence)[1] <= budget
    assert cost_of(problem, sequence) == pytest.approx(best)
    assert bound * problem.model_cost == pytest.approx(best if problem.model_cost else 0.0)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(n=st.integers(3, 40), budget=st.integers(3, 42))
def test_on_uniform_chains_it_is_revolve(n: int, budget: int) -> None:
    """The table and the closed form have the same optimum."""
    problem = problem_of(chain(n), min(budget, n + 1))
    sequence, bound, _ = chained(problem)
    assert schedule(problem, sequence)[1] <= min(budget, n + 1)
    assert cost_of(problem, sequence) == optimum(n, min(budget, n + 1)) == pytest.approx(bound * 2 * n)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(program=chains(9), share=st.floats(0.2, 0.6))
def test_narrow_windows_lose_nothing(program: Program, share: float) -> None:
    """The best split moves one way only as memory and segments grow: search over states finds nothing cheaper."""
    problem = problem_of(program, budget_of(program, share))
    if isinstance(recognised(problem), str):
        return
    try:
        best = exact(problem, 20_000)
    except PlanError:
        with pytest.raises(PlanError, match="infeasible"):
            chained(problem)
        return
    sequence, _, _ = chained(problem)
    assert best is None or cost_of(problem, sequence) == pytest.approx(cost_of(problem, best))


def test_own_knows_them() -> None:
    """Costs that differ do not keep it from proving the optimum, on a chain of a thousand operations too."""
    program = chain(500)
    for number, call in enumerate(program.calls):
        call.cost = 1.0 + number * 7 % 5
    found = plan(program, 9)
    assert found.is_optimal
    assert verify(program, found) == (9, pytest.approx(found.overhead))


def test_what_is_too_long_is_left_to_the_search() -> None:
    """So are chains whose values differ in size, and what is no chain."""
    program = chain(300)
    program.calls[3].cost = 2.0
    with pytest.raises(PlanError, match="too long"):
        chained(problem_of(program, 200), most=1e5)
    program.calls[500].arguments = program.calls[500].arguments[:1] + program.calls[590].arguments[1:]
    with pytest.raises(PlanError, match="another order"):
        chained(problem_of(program, 200))
    program = chain(5)
    program.outputs.append(2)
    with pytest.raises(PlanError, match="training chains: operation 1 does not"):
        chained(problem_of(program, 4))
    program = chain(5)
    program.sizes[2] = 3
    with pytest.raises(PlanError, match="differ in size"):
        chained(problem_of(program, 6))
