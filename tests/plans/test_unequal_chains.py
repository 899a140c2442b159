"""On chains whose operations or values differ: the optimum among schedules that keep their checkpoints."""

from __future__ import annotations

import pytest
from exhaustive import least_cost
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute._plans.chains import _Table, chained, optimum, recognised
from recompute._plans.liveness import cost_of, schedule
from recompute._plans.problem import problem_of
from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.planners import PlanError, plan, verify


@st.composite
def chains(draw: st.DrawFn, states: int, uniform: bool) -> Program:
    """Forward operations, a loss, and backward ones that take what these made, some of it not, some of it twice."""
    program = Program("chain")
    value = program.add_source(draw(st.integers(0, 2)))
    size = st.just(draw(st.integers(1, 3))) if uniform else st.integers(0, 4)
    other = st.just(draw(st.integers(1, 3))) if uniform else st.integers(0, 4)
    cost = st.integers(0, 5).map(float)
    weights = [program.add_source(1) for _ in range(draw(st.integers(0, 1)))]
    made = [value]
    for _ in range(draw(st.integers(1, states))):
        made += program.add_call("f", (made[-1], *weights), (program.add_storage(draw(size)),), draw(cost))
    (gradient,) = program.add_call("loss", (made[-1],), (program.add_storage(draw(other)),), draw(cost))
    outputs: list[int] = []
    taken = [value for value in reversed(made) for _ in range(draw(st.sampled_from((1, 1, 1, 0, 2))))]
    for value in taken[: 2 * states] or made[-1:]:
        storages = [program.add_storage(draw(other))]
        if not uniform and draw(st.booleans()):
            storages.append(program.add_storage(draw(st.integers(0, 2))))
        gradient, *more = program.add_call("b", (gradient, value, *weights), storages, draw(cost))
        outputs += more
    program.outputs = [*outputs, gradient]
    return program


def budget_of(program: Program, share: float) -> int:
    return int(share * sum(program.sizes))


@settings(max_examples=settings().max_examples * 3 // 2)
@given(program=chains(4, uniform=True), share=st.floats(0.2, 1.0))
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
    assert bound is not None
    assert bound * problem.model_cost == pytest.approx(best if problem.model_cost else 0.0)


@given(program=chains(4, uniform=False), share=st.floats(0.2, 1.0))
def test_with_different_sizes_it_fits_and_claims_nothing(program: Program, share: float) -> None:
    """It costs no less than the optimum over all schedules, and seldom more."""
    budget = budget_of(program, share)
    problem = problem_of(program, budget)
    try:
        sequence, bound, _ = chained(problem)
    except PlanError:
        return
    best = least_cost(program, budget)
    assert best is not None
    assert schedule(problem, sequence)[1] <= budget
    assert cost_of(problem, sequence) >= best - 1e-9
    assert bound is None or cost_of(problem, sequence) == pytest.approx(best)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(n=st.integers(3, 40), budget=st.integers(3, 42))
def test_on_uniform_chains_it_is_revolve(n: int, budget: int) -> None:
    """The table and the closed form have the same optimum."""
    problem = problem_of(chain(n), min(budget, n + 1))
    sequence, bound, _ = chained(problem)
    assert schedule(problem, sequence)[1] <= min(budget, n + 1)
    assert cost_of(problem, sequence) == optimum(n, min(budget, n + 1)) == pytest.approx((bound or 0.0) * 2 * n)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=chains(30, uniform=True), share=st.floats(0.05, 0.6), cost=st.floats(0.0, 9.0))
def test_narrow_windows_lose_nothing(program: Program, share: float, cost: float) -> None:
    """With one size the best split moves one way only: looking at all of them finds nothing cheaper."""
    problem = problem_of(program, budget_of(program, share))
    found = recognised(problem)
    if isinstance(found, str) or problem.room < 0:
        return
    narrow = _Table(problem, found, 1, problem.room).least
    found.is_uniform = False
    assert _Table(problem, found, 1, problem.room).least == pytest.approx(narrow)


def recorded(n: int, scale: int) -> Program:
    """As a recorder would see it: odd sizes, a weight for each layer, a gradient for each weight that stays."""
    program = Program("layers")
    weights = [program.add_source(1000 + place) for place in range(n)]
    made = [program.add_source(10)]
    for place, weight in enumerate(weights):
        storage = program.add_storage(scale * (3 + place * 7 % 11) + place)
        made += program.add_call("layer", (made[-1], weight), (storage,), 1.0 + place % 3)
    (gradient,) = program.add_call("loss", (made[-1],), (program.add_storage(4),), 0.1)
    for place in range(n - 1, -1, -1):
        storages = (program.add_storage(program.sizes[made[place]]), program.add_storage(1000 + place))
        gradient, gone = program.add_call("back", (gradient, made[place], weights[place]), storages, 2.0)
        program.outputs.append(gone)
    return program


def test_sizes_are_rounded_so_that_it_fits() -> None:
    """Chains of odd sizes are planned within the budget in bytes, and not dearer than by search alone."""
    program = recorded(24, 1001)
    budget = sum(program.sizes) * 2 // 5
    sequence, bound, _ = chained(problem_of(program, budget), most=3e5)
    problem = problem_of(program, budget)
    assert bound is None
    assert schedule(problem, sequence)[1] <= budget
    found = plan(program, budget, effort=0.1)
    assert verify(program, found) == (found.peak, pytest.approx(found.overhead))
    assert found.overhead <= cost_of(problem, sequence) / problem.model_cost + 1e-9


def test_own_knows_them() -> None:
    """Costs that differ do not keep it from proving the optimum, on a chain of a thousand operations too."""
    program = chain(500)
    for number, call in enumerate(program.calls):
        call.cost = 1.0 + number * 7 % 5
    found = plan(program, 9)
    assert found.is_optimal
    assert verify(program, found) == (9, pytest.approx(found.overhead))


def test_what_is_too_long_is_left_to_the_search() -> None:
    """So is what is no chain."""
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
