"""What the simulator says of a recorded training is what a block does within that budget.

A trace knows of an in-place operator that its output is on the memory of its argument, not that the argument has gone
from there: where dropout writes its masks in place, the two agree within a tenth.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

import recompute as rc

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from example_scripts import example  # noqa: E402  # it lies beside other tests

import recompute_torch as rt  # noqa: E402  # after importorskip
from recompute.simulator import Run, simulate  # noqa: E402  # after importorskip
from recompute.traces import read  # noqa: E402  # after importorskip

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = example("_torch_training").TASKS


def trained(name: str, budget: int | None, trace: Path | None = None) -> rc.Stats:
    """Two steps of a training of which every operator takes one second."""
    torch.manual_seed(0)
    task = TASKS[name]()
    with rt.budget(budget, foresight=False, trace=trace, clock=count().__next__) as block:
        for _ in range(2):
            task.step()
        return block.stats()


def replayed(trace: Path, budget: int) -> Run:
    """What the simulator says of a recorded training."""
    return simulate(read(trace), budget, limit=100)


@pytest.mark.parametrize("name", ["resnet", "lstm"])
def test_a_recording_within_a_budget_is_replayed_as_it_was(name: str, tmp_path: Path) -> None:
    """The simulator repeats as many operators, and as much compute, as the block that was recorded."""
    budget = int(0.6 * trained(name, None).peak)
    live = trained(name, budget, tmp_path / "trace")
    run = replayed(tmp_path / "trace", budget)
    assert live.rematerializations > 0
    assert run.rematerializations == live.rematerializations
    assert run.overhead == pytest.approx(live.overhead)


@pytest.mark.parametrize("name", ["transformer", "resnet", "lstm"])
def test_a_recording_without_a_limit_foretells_a_budget(name: str, tmp_path: Path) -> None:
    """Repeated operators and their share of the compute are those of a block in that budget, within a tenth."""
    budget = int(0.6 * trained(name, None, tmp_path / "trace").peak)
    live = trained(name, budget)
    run = replayed(tmp_path / "trace", budget)
    assert live.rematerializations > 0
    assert run.rematerializations == pytest.approx(live.rematerializations, rel=0.1)
    assert run.overhead is not None
    assert run.overhead - 1 == pytest.approx(live.overhead - 1, rel=0.1)
