"""Constants of a published trace: under a budget they stay; the run that is 100 % lets go of them as of all else."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from brute_force import Model
from hypothesis import given
from hypothesis import strategies as st
from random_traces import programs

from recompute.simulator import baseline, simulate
from recompute.traces import Call, Program


def computed(program: Program) -> Program:
    """The same with a call that takes nothing for each source."""
    made = {value: len(program.calls) + at for at, value in enumerate(sources(program))}
    return replace(
        program,
        calls=program.calls + [Call("source", (), (value,), 0.0) for value in made],
        makers=[made.get(value, maker) for value, maker in enumerate(program.makers)],
        steps=[("call", made[number]) if kind == "source" else (kind, number) for kind, number in program.steps],
    )


def sources(program: Program) -> list[int]:
    return [number for kind, number in program.steps if kind == "source"]


@given(programs(drop_sources=True))
def test_the_whole_counts_constants_as_if_they_were_computed(program: Program) -> None:
    """100 % of a budget is what a run without one takes, with nothing in memory that has no reference left."""
    model = Model(computed(program), inf, "lru")
    model.run()
    assert sum(baseline(program).values()) == model.peak


@pytest.mark.parametrize("policy", ["dtr-eq", "msps"])
@given(programs(drop_sources=True), st.floats(0.2, 1.0))
def test_under_a_budget_constants_stay(policy: str, program: Program, share: float) -> None:
    """A constant takes its bytes to the end of the trace, whoever refers to it."""
    peak = baseline(program)
    budget = max(1, int(share * sum(peak.values())))
    model = Model(program, budget, policy)
    run = simulate(program, {"cpu": budget}, policy=policy, peak=peak)
    assert run.status == model.run()
    if run.status == "ok":
        assert run.peak_bytes == model.peak
        assert run.peak_bytes >= sum(program.sizes[program.storages[value]] for value in sources(program))
