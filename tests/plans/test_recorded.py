"""Plans of recorded training iterations of real models, against what is known to be possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from recompute._simulator.published_replay import baseline
from recompute._traces.program import Program
from recompute._traces.read import read
from recompute.planners import METHODS, PlanError, plan, verify

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


def program_of(name: str) -> Program:
    path = TRACES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the recorded traces are not in ../shared/traces")
    return read(path)


@pytest.mark.parametrize(
    ("name", "budget", "known"),
    [("unet", 0.5, 1.101), ("unet", 0.3, 1.349), ("resnet32", 0.5, 1.093), ("resnet32", 0.1, 1.764)],
)
def test_own_is_better_than_what_was_known(name: str, budget: float, known: float) -> None:
    """`known`: the best of fifty policies that know the future, after local search."""
    program = program_of(name)
    found = plan(program, of_peak=budget, rounds=500, time_limit=60.0)
    assert verify(program, found) == (found.peak, pytest.approx(found.overhead))
    assert found.overhead <= known


@pytest.mark.parametrize(("name", "budget"), [("transformer", 0.15), ("treelstm", 0.1)])
def test_own_takes_large_programs(name: str, budget: float) -> None:
    """With hardly any search it is better than any published policy."""
    program = program_of(name)
    found = plan(program, of_peak=budget, rounds=1)
    assert verify(program, found)[1] <= 1.5


@pytest.mark.parametrize("method", [method for method in METHODS if method.startswith("chen")])
def test_segments_fit(method: str) -> None:
    """At a third of the memory for one more forward pass, which is about a third of all compute."""
    program = program_of("resnet32")
    found = plan(program, of_peak=0.34, method=method)
    assert verify(program, found)[1] <= 1.35


def test_revolve_refuses_them() -> None:
    """They are no chains."""
    with pytest.raises(PlanError, match="for uniform training chains"):
        plan(program_of("unet"), of_peak=0.5, method="revolve")


def test_a_share_is_one_of_the_baseline() -> None:
    """As in the simulator."""
    program = program_of("unet")
    assert plan(program, of_peak=0.9, method="chen-greedy").budget == int(0.9 * sum(baseline(program).values()))
