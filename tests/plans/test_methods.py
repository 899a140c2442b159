"""Every method's plan passes the judge; none beats the exhaustive optimum, and the good ones reach it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from exhaustive import least_cost
from hypothesis import given, settings
from hypothesis import strategies as st
from small_programs import programs, whole

from recompute._plans.exact import exact
from recompute._plans.liveness import cost_of
from recompute._plans.problem import problem_of
from recompute._traces.chain import chain
from recompute._traces.program import Call, Program
from recompute.planners import METHODS, PlanError, ProgramPlan, plan, verify

QUICK: dict[str, Any] = {"rounds": 60}


def options_of(method: str) -> dict[str, Any]:
    return QUICK if method == "own" else {"time_limit": 10.0} if method == "checkmate" else {}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs(), share=st.floats(0.1, 1.0))
def test_a_plan_passes_the_judge_or_there_is_none(method: str, program: Program, share: float) -> None:
    """What `plan` returns is within the budget, and does what it says."""
    budget = 2 + int(share * whole(program))
    try:
        found = plan(program, budget, method, **options_of(method))
    except PlanError:
        return
    assert verify(program, found) == (found.peak, pytest.approx(found.overhead))
    assert found.peak <= found.budget == budget
    assert found.bound is None or found.overhead >= found.bound * (1 - 1e-6)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "revolve"])
def test_a_backward_pass_from_the_first_operation_on(method: str) -> None:
    """Nothing is left of a forward pass to be cut into segments, and there is a plan."""
    program = Program("backward")
    (made,) = program.add_call("backward", [program.add_source(1)], [program.add_storage(1)], 1.0)
    program.marks.append((0, "BACKWARD"))
    program.outputs.append(made)
    assert verify(program, plan(program, 2, method, **options_of(method))) == (2, 1.0)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs(operations=6), share=st.floats(0.0, 0.7))
def test_own_is_within_a_percent_of_the_optimum_of_small_programs(program: Program, share: float) -> None:
    """And it finds a plan wherever there is one."""
    budget = 2 + int(share * sum(program.sizes))
    best = least_cost(without_gets(program), budget)
    if best is None:
        with pytest.raises(PlanError):
            plan(without_gets(program), budget, **QUICK)
        return
    found = plan(without_gets(program), budget, **QUICK)
    assert best * (1 - 1e-9) <= found.overhead * program.model_time <= best * 1.01 + 1e-9


@settings(max_examples=settings().max_examples * 2 // 5)
@given(program=programs(operations=6), share=st.floats(0.0, 0.7))
def test_checkmate_against_exhaustive_search(program: Program, share: float) -> None:
    """Its plans cost at least the optimum, and its own bound is reached when the solver is done."""
    budget = 2 + int(share * sum(program.sizes))
    program = without_gets(program)
    best = least_cost(program, budget)
    try:
        found = plan(program, budget, "checkmate", time_limit=10.0)
    except PlanError:
        return
    assert best is not None
    assert found.bound is not None
    assert best <= found.overhead * program.model_time + 1e-6
    assert found.overhead == pytest.approx(found.bound, rel=1e-4)


@settings(max_examples=settings().max_examples // 4)
@given(program=programs(operations=12, uniform=True), share=st.floats(0.2, 0.8))
def test_own_is_within_a_percent_of_checkmate(program: Program, share: float) -> None:
    """On small graphs, where Checkmate's optimum is proved."""
    budget = 2 + int(share * sum(program.sizes))
    try:
        best = plan(program, budget, "checkmate", time_limit=20.0)
    except PlanError:
        return
    assert plan(program, budget, rounds=150).overhead <= best.overhead * 1.01 + 1e-9


@settings(max_examples=settings().max_examples * 2 // 5)
@given(program=programs(operations=6), share=st.floats(0.0, 0.7))
def test_search_over_states_against_exhaustive_search(program: Program, share: float) -> None:
    """A* finds the optimum, or that there is none."""
    problem = problem_of(without_gets(program), 2 + int(share * sum(program.sizes)))
    best = least_cost(without_gets(program), 2 + int(share * sum(program.sizes)))
    if best is None:
        with pytest.raises(PlanError, match="no schedule runs the program"):
            exact(problem, 100_000)
        return
    sequence = exact(problem, 100_000)
    assert sequence is not None
    assert cost_of(problem, sequence) == pytest.approx(best)


def without_gets(program: Program) -> Program:
    program.steps = [step for step in program.steps if step[0] not in ("get", "detach")]
    return program


@given(program=programs(), seed=st.integers(0, 3))
@settings(max_examples=settings().max_examples // 5)
def test_the_same_seed_gives_the_same_plan(program: Program, seed: int) -> None:
    """Where the rounds end the search."""

    def once() -> object:
        try:
            return plan(program, 2 + sum(program.sizes) // 2, seed=seed, **QUICK).steps
        except PlanError as error:
            return str(error)

    assert once() == once()


def test_merged_operations_are_proved_for_themselves_only() -> None:
    """Checkmate on a coarser program gives a plan of the whole one, without a bound, and says why."""
    program = chain(12)
    found = plan(program, 6, "checkmate", operations=16)
    assert verify(program, found)[0] <= 6
    assert found.bound is None
    assert "merged to 16 operations" in found.note


def test_a_large_program_is_refused_by_checkmate() -> None:
    """With the cure."""
    with pytest.raises(PlanError, match="merge them with operations="):
        plan(chain(100), 20, "checkmate")


def test_checkmate_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SciPy."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plan\]' in a checkout"):
        plan(chain(4), 3, "checkmate")


@pytest.mark.parametrize("method", [method for method in METHODS if method != "revolve"])
def test_a_budget_that_cannot_do_is_one_clear_line(method: str) -> None:
    """It says what would do."""
    with pytest.raises(PlanError, match=r"infeasible.*give") as caught:
        plan(chain(30), 2, method)
    assert "\n" not in str(caught.value)


def test_an_infeasible_segmentation_names_the_least_that_works() -> None:
    """And that works indeed."""
    program = chain(64)
    for method in ("chen-sqrt", "chen-greedy"):
        with pytest.raises(PlanError, match=r"needs [\d,]+ bytes") as caught:
            plan(program, 5, method)
        least = int(str(caught.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
        assert plan(program, least, method).peak == least
        assert 8 <= least <= 32


def test_wrong_arguments_are_refused() -> None:
    """Methods, options, budgets and devices."""
    program = chain(3)
    with pytest.raises(ValueError, match="unknown method 'magic'; known are own,"):
        plan(program, 5, "magic")
    with pytest.raises(ValueError, match="'revolve' has no option 'seed'; known: none"):
        plan(program, 5, "revolve", seed=1)
    with pytest.raises(ValueError, match="at least one byte"):
        plan(program, -1)
    program.add_source(1, "gpu")
    with pytest.raises(ValueError, match="one device"):
        plan(program, 5)


def test_progress_is_told() -> None:
    """It ends at one, with the overhead of the plan."""
    heard: list[tuple[float, float]] = []
    program = chain(14)
    program.sizes[3] = 2  # no longer uniform
    found = plan(program, 8, rounds=50, progress=lambda share, least: heard.append((share, least)))
    assert heard[-1] == (1.0, pytest.approx(found.overhead))
    assert [share for share, _ in heard] == sorted(share for share, _ in heard)


def test_workers_share_the_search() -> None:
    """Processes with other seeds; the best plan counts."""
    program = chain(14)
    program.sizes[3] = 2
    found = plan(program, 6, rounds=20, workers=2)
    assert verify(program, found)[1] <= plan(program, 6, rounds=20).overhead + 1e-9


def test_a_plan_reads_back_from_lines() -> None:
    """And says in one line what it is."""
    found = plan(chain(6), 4, "revolve")
    assert ProgramPlan.from_lines(found.to_lines()) == found
    assert repr(found).startswith("<plan of chain of 6 by revolve: overhead 1.1667, optimal, peak 4 of 4 bytes")
    with pytest.raises(PlanError, match="line 1 is not"):
        ProgramPlan.from_lines(["[]"])
    with pytest.raises(PlanError, match="line 3 is not"):
        ProgramPlan.from_lines([*list(found.to_lines())[:2], '{"compute": "x"}'])
    with pytest.raises(PlanError, match="does not say"):
        ProgramPlan.from_lines([])


@pytest.mark.parametrize(
    "wrong", [{"budget": "4"}, {"peak": True}, {"overhead": None}, {"bound": "1"}, {"note": 1}, {"more": 1}]
)
def test_a_plan_says_what_it_is(wrong: dict[str, object]) -> None:
    """Each field of the first line has its type, no other is known, and none but the last three may be missing."""
    first, *steps = plan(chain(6), 4, "revolve").to_lines()
    with pytest.raises(PlanError, match="line 1 does not say"):
        ProgramPlan.from_lines([json.dumps(json.loads(first) | wrong), *steps])
    few = {name: value for name, value in json.loads(first).items() if name not in ("bound", "seconds", "note")}
    assert ProgramPlan.from_lines([json.dumps(few), *steps]).bound is None
    del few["peak"]
    with pytest.raises(PlanError, match="line 1 does not say"):
        ProgramPlan.from_lines([json.dumps(few), *steps])


def test_a_source_that_comes_late_is_there_before_anything_runs_again() -> None:
    """As in the program, which makes it at once: runs that cost nothing are not put before it to save memory."""

    def call(argument: int, *results: int, cost: float = 0.0) -> Call:
        return Call("f", (argument,), results, cost)

    program = Program("late", unit=1.0, sizes=[0, 0, 2, 1, 2, 2, 0, 1], devices=["cpu"] * 8)
    program.storages = [0, 1, 0, 2, 3, 1, 4, 2, 5, 6, 4, 7, 5]
    program.makers = [-1, -1, 0, 0, -1, 1, 1, 2, 3, -1, 4, -1, 5]
    program.calls = [call(0, 2, 3), call(1, 5, 6), call(3, 7), call(4, 8, cost=1.0), call(6, 10), call(8, 12)]
    program.steps = [("source", 0), ("source", 1), ("call", 0), ("get", 2), ("source", 4), ("call", 1), ("get", 2)]
    program.steps += [("call", 2), ("get", 2), ("drop", 0), ("detach", 2), ("call", 3), ("source", 9), ("call", 4)]
    program.steps += [("source", 11), ("call", 5)]
    for budget in range(4, 12):
        found = plan(program, budget, "own", **QUICK)
        assert verify(program, found) == (found.peak, pytest.approx(found.overhead))
