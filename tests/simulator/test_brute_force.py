"""The simulator in its published form does what the published algorithm does, decision by decision."""

from __future__ import annotations

import pytest
from brute_force import Model
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import programs

from recompute._engine.events import Evicted
from recompute._simulator.published_replay import PublishedReplay, baseline
from recompute._traces.program import Program

POLICIES = ("dtr-eq", "dtr", "dtr-local", "lru", "msps", "size")


def decisions(program: Program, budget: int, policy: str) -> tuple[str, list[tuple[int, str]], PublishedReplay]:
    """The status, the storages evicted and why, and the replay, by the library."""
    replay = PublishedReplay(program, {"cpu": budget}, policy=policy)
    evictions: list[tuple[int, str]] = []
    storages: dict[int, int] = {}  # number of a storage in the machine -> in the program

    def listen(event: object) -> None:
        if isinstance(event, Evicted):
            evictions.append((event.storage, event.why))

    replay.subscribe(listen)
    status = replay.run()
    for value, made in replay.values.items():
        storages[made.storage.number] = program.storages[value]
    return status, [(storages[storage], why) for storage, why in evictions if storage in storages], replay


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=settings().max_examples * 3 // 2)
@given(programs(), st.floats(0.2, 1.0))
def test_every_decision_is_that_of_the_definitions(policy: str, program: Program, share: float) -> None:
    """The same storages are evicted, in the same order, for the same reasons; clock, peak and status agree."""
    budget = max(1, int(share * sum(baseline(program).values())))
    model = Model(program, budget, policy)
    expected = model.run()
    status, evictions, replay = decisions(program, budget, policy)
    assert expected == status
    if status == "ok":
        assert model.evictions == evictions
        assert model.clock == replay.machine.clock
        assert model.peak == replay.counts().peak
        assert model.rematerializations == replay.counts().rematerializations
    else:  # the library gives up before it evicts what would not help
        assert model.evictions[: len(evictions)] == evictions


@given(programs())
def test_without_a_budget_nothing_is_under_pressure(program: Program) -> None:
    """The baseline's peak is that of the definitions, and a run within it costs nothing."""
    peak = sum(baseline(program).values())
    model = Model(program, float("inf"), "lru")
    assert model.run() == "ok"
    assert model.peak == peak
    status, _, replay = decisions(program, max(1, peak), "dtr-eq")
    assert (status, replay.counts().remat_time) == ("ok", 0.0)
