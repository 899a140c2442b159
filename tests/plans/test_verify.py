"""The judge accepts what works, and names the step of what does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from exhaustive import least_cost
from hypothesis import given
from hypothesis import strategies as st
from small_programs import programs, whole

from recompute._plans.schedule import Action
from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.planners import PlanError, ProgramPlan, plan, verify


@pytest.fixture
def good() -> tuple[Program, ProgramPlan]:
    """A plan that uses its whole budget."""
    program = chain(8)
    return program, plan(program, 4, "revolve")


def test_a_smaller_budget_is_exceeded(good: tuple[Program, ProgramPlan]) -> None:
    program, found = good
    assert verify(program, found) == (4, found.overhead)
    with pytest.raises(PlanError, match=r"step \d+, compute \d+: the budget of 3 bytes is exceeded by 1"):
        verify(program, replace(found, budget=3))


def test_any_dropped_computation_is_noticed(good: tuple[Program, ProgramPlan]) -> None:
    program, found = good
    for place, (kind, _) in enumerate(found.steps):
        if kind == "compute":
            with pytest.raises(PlanError):
                verify(program, replace(found, steps=found.steps[:place] + found.steps[place + 1 :]))


def test_swapped_computations_are_noticed(good: tuple[Program, ProgramPlan]) -> None:
    program, found = good
    computes = [place for place, (kind, _) in enumerate(found.steps) if kind == "compute"]
    for one, two in pairwise(computes):
        steps = list(found.steps)
        steps[one], steps[two] = steps[two], steps[one]
        with pytest.raises(PlanError):
            verify(program, replace(found, steps=tuple(steps)))


def test_wrong_frees_are_named() -> None:
    program = Program("p")
    source = program.add_source(2)
    (made,) = program.add_call("f", (source,), (program.add_storage(1),), 1.0)
    program.outputs = [made]
    base = plan(program, 3)
    assert verify(program, base) == (3, 1.0)
    with pytest.raises(
        PlanError, match="step 0, free 0: the storage of a source cannot be freed before the program drops it"
    ):
        verify(program, replace(base, steps=(("free", 0), *base.steps)))
    with pytest.raises(PlanError, match="step 0, free 1: the storage is not in memory"):
        verify(program, replace(base, steps=(("free", 1), *base.steps)))
    with pytest.raises(PlanError, match="at the end the output 1 is not present"):
        verify(program, replace(base, steps=(*base.steps, ("free", 1))))
    with pytest.raises(PlanError, match="at the end operation 0 has never run"):
        verify(program, replace(base, steps=()))
    with pytest.raises(PlanError, match="no such operation"):
        verify(program, replace(base, steps=(("compute", 7),)))


def test_a_second_copy_needs_room() -> None:
    """An operation that runs again while one of its results is in memory needs room for all of them."""
    program = Program("p")
    source = program.add_source(0)
    program.add_call("f", (source,), (program.add_storage(2), program.add_storage(1)), 1.0)
    steps: tuple[Action, ...] = (("compute", 0), ("free", 2), ("compute", 0))
    found = ProgramPlan("p", "own", 5, steps, 5, 2.0)
    assert verify(program, found) == (5, 2.0)
    with pytest.raises(PlanError, match="step 2, compute 0: the budget of 4 bytes is exceeded by 1"):
        verify(program, replace(found, budget=4))


def test_a_view_goes_with_its_storage() -> None:
    """Making the storage again does not bring the view back."""
    program = Program("p")
    source = program.add_source(0)
    storage = program.add_storage(1)
    (base,) = program.add_call("f", (source,), (storage,), 1.0)
    (view,) = program.add_call("view", (base,), (storage,), 0.0)
    program.outputs = [view]
    steps: tuple[Action, ...] = (("compute", 0), ("compute", 1), ("free", 1), ("compute", 0))
    found = ProgramPlan("p", "own", 1, steps, 1, 2.0)
    with pytest.raises(PlanError, match="the output 2 is not present"):
        verify(program, found)
    assert verify(program, replace(found, steps=(*steps, ("compute", 1)))) == (1, 2.0)


def test_what_the_program_got_is_there_in_time() -> None:
    program = Program("p")
    source = program.add_source(0)
    (first,) = program.add_call("f", (source,), (program.add_storage(2),), 1.0)
    program.add_call("g", (source,), (program.add_storage(2),), 1.0)
    program.steps.append(("get", first))
    program.add_call("h", (source,), (program.add_storage(2),), 1.0)
    found = plan(program, 2)
    assert verify(program, found) == (2, pytest.approx(4 / 3))
    lazy: tuple[Action, ...] = (("compute", 0), ("free", 1), ("compute", 1), ("free", 2), ("compute", 2))
    with pytest.raises(PlanError, match="step 4, compute 2: before this step the value 1 should have been there"):
        verify(program, replace(found, steps=lazy))


@given(program=programs(operations=5), share=st.floats(0.2, 1.0), data=st.data())
def test_what_the_judge_passes_costs_at_least_the_optimum(program: Program, share: float, data: st.DataObject) -> None:
    """Even when steps are dropped or swapped at random."""
    budget = 2 + int(share * whole(program))
    try:
        found = plan(program, budget, rounds=5)
    except PlanError:
        return
    steps = list(found.steps)
    one, two = (data.draw(st.integers(0, len(steps) - 1)) for _ in range(2))
    if data.draw(st.booleans()):
        steps[one], steps[two] = steps[two], steps[one]
    else:
        del steps[one]
    try:
        peak, overhead = verify(program, replace(found, steps=tuple(steps)))
    except PlanError:
        return
    program.steps = [step for step in program.steps if step[0] != "get"]
    best = least_cost(program, budget)
    assert peak <= budget
    assert best is not None
    assert overhead * program.model_time >= best - 1e-9


def test_what_is_detached_can_be_freed_once_it_is_let_go_of() -> None:
    """Both may come right after the operation that made it."""
    program = Program("p")
    (made,) = program.add_call("f", (), (program.add_storage(2),), 1.0)
    program.steps += [("detach", made), ("drop", made)]
    (last,) = program.add_call("g", (), (program.add_storage(3),), 1.0)
    program.outputs = [last]
    found = plan(program, 3)
    assert found.steps[:2] == (("compute", 0), ("free", 0))
    assert verify(program, found) == (3, 1.0)


def test_what_the_program_has_got_may_be_made_again_to_be_detached() -> None:
    """The last run of the operation is the one that stays; without it, what should be detached is not there."""
    program = Program("p")
    (made,) = program.add_call("f", (), (program.add_storage(2),), 1.0)
    program.steps += [("get", made), ("detach", made)]
    steps: tuple[Action, ...] = (("compute", 0), ("free", 0), ("compute", 0))
    found = ProgramPlan("p", "own", 2, steps, 2, 2.0)
    assert verify(program, found) == (2, 2.0)
    for wrong in (steps[:2], (*steps, steps[1])):
        with pytest.raises(PlanError, match="should have been there to be got"):
            verify(program, replace(found, steps=wrong))
