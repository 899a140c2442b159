"""The local search keeps its books, and what it finds fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_programs import programs

from recompute._plans.future import replayed
from recompute._plans.improve import Search
from recompute._plans.liveness import cost_of, prune, schedule
from recompute._plans.problem import problem_of
from recompute._plans.timeline import Timeline
from recompute._traces.program import Program


@settings(max_examples=settings().max_examples * 2 // 5)
@given(program=programs(operations=25), share=st.floats(0.1, 0.9), seed=st.integers(0, 9))
def test_after_each_round_memory_is_what_the_order_of_runs_says(program: Program, share: float, seed: int) -> None:
    """Whether the round was kept or undone; and it fits, and `best` is the cheapest so far."""
    problem = problem_of(program, 0)
    most = schedule(problem, problem.order)[1]
    problem.room = problem.least + int(share * (most - problem.least)) - problem.constant
    sequence, _ = replayed(problem)
    if sequence is None:
        return
    search = Search(problem, prune(problem, sequence), seed)
    least = search.best_cost
    for _ in range(20):
        search.round(0.1 * problem.model_cost / len(problem.order))
        fresh = Timeline(problem, search.line.runs)
        assert search.line.memory == fresh.memory
        assert max(fresh.memory) <= problem.room
        assert search.line.cost == pytest.approx(fresh.cost)
        least = min(least, search.line.cost)
    assert cost_of(problem, search.best) == pytest.approx(least)
    assert schedule(problem, search.best)[1] <= problem.room + problem.constant
