"""Replays that know the future take no more work than they are given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from small_programs import programs

from recompute._plans.future import replayed
from recompute._plans.problem import problem_of
from recompute._traces.program import Program

WORK_OF_ONE = 500
"""Steps that one operation of such a program takes, at most."""


@given(program=programs(operations=25), share=st.floats(0.0, 1.0), most=st.floats(0.0, 3000.0))
def test_a_replay_ends_after_the_work_it_may_do(program: Program, share: float, most: float) -> None:
    """It is given up then, and is otherwise the one without a limit."""
    problem = problem_of(program, 0)
    problem.room = problem.least - problem.constant + int(share * problem.least)
    wanted, free = replayed(problem)
    order, work = replayed(problem, most=most)
    if free <= most:
        assert order == wanted
    elif order is None:
        assert work <= free
    else:  # it was over when that was noticed
        assert order == wanted
        assert free <= most + WORK_OF_ONE
