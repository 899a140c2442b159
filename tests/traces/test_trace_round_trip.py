"""A run that was recorded under a budget and a policy, and is replayed under the same, makes the same decisions."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import recompute as rc
import recompute.events
from lib.programs import Apply, Budget, Gather, Interpreter, Program, Source
from lib.strategies import POLICIES, RELEASES, programs, settings_of_caches
from recompute._engine.events import Added, Event, Evicted, Performed
from recompute._simulator.published_replay import baseline
from recompute._simulator.simulate import simulate
from recompute.testing import EventLog, ManualClock
from recompute.traces import read

DATA = Path(__file__).parent / "data"
LINES = [name for name in POLICIES if name not in ("random", "none")]

_UNLIKE = ("move", "mixture", "head")  # they use a second device, or raise

TWO_VICTIMS = Program([Apply("add", (), nbytes=8), Apply("count", ()), Apply("add", (), how="applied")])
"""One whose memory is given up after its eviction, then one of a plain number: both for the room of the third."""

GUESSED = Program(
    [
        Source((0, 0)),
        Apply("add", (), how="applied"),
        Apply("scale", (0, 0)),
        Apply("add", (-1,), how="applied"),
        Apply("add", (-1,), how="applied"),
    ]
)
"""One whose last size is a guess for which there is no room: it runs, and its argument goes for what it made."""

Decision = tuple[Any, ...]


def decisions(events: list[Event]) -> list[Decision]:
    """What a cache decided, with storages numbered in order of appearance."""
    numbers: dict[int, int] = {}
    found: list[Decision] = []
    for event in events:
        if isinstance(event, Added):
            numbers.setdefault(event.storage, len(numbers))
        elif isinstance(event, Performed):
            for storage in event.storages:
                numbers.setdefault(storage, len(numbers))
            if event.again:
                remade = tuple(numbers[storage] for storage in event.storages)
                found.append(("again", event.function, event.cost, remade))
        elif isinstance(event, Evicted):
            found.append(("evicted", numbers[event.storage], event.why, event.held))
    return found


def plain(program: Program) -> Program:
    """A program without what a replay does not know: see recompute._traces.recorded."""
    kept = [step for step in program if not isinstance(step, (Budget, Gather))]
    operations = [step for step in kept if not (isinstance(step, Apply) and step.function in _UNLIKE)]
    return Program(replace(step, peeks=(), fault=0) if isinstance(step, Apply) else step for step in operations)


def record(program: Program, budget: int | None, path: Path, **options: Any) -> tuple[list[Decision], bool]:
    """The decisions of a recorded run, and whether something failed."""
    cache = rc.Cache(budget, clock=ManualClock(), trace=path, **options)
    with EventLog(cache) as log:
        interpreter = Interpreter(rc, cache)
        found = [interpreter.do(step) for step in program]
        del interpreter
        with cache:
            pass
        return decisions(log.events), any(observation[0] in ("short", "error") for observation in found)


def replay(path: Path, budget: int, **options: Any) -> list[Decision]:
    events: list[Event] = []
    run = simulate(read(path), {"cpu": budget}, machine="library", listener=events.append, limit=1e9, **options)
    assert run.status == "ok"
    return decisions(events)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("policy", LINES)
@settings(max_examples=max(10, settings().max_examples // 2))
@example(program=TWO_VICTIMS, budget=88)
@example(program=GUESSED, budget=312)
@given(program=programs(devices=("cpu",), fickle=False, faults=False), budget=st.integers(30, 600))
def test_the_same_decisions(policy: str, release: str, program: Program, budget: int) -> None:
    """Evictions with their reasons and rematerializations with their costs, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        made, failed = record(plain(program), budget, path, policy=policy, release=release)
        assume(not failed)
        assert replay(path, budget, policy=policy, release=release) == made


@settings(max_examples=settings().max_examples * 2)
@given(programs(threads=True), settings_of_caches(), st.one_of(st.none(), st.integers(30, 600)))
def test_every_recorded_run_can_be_replayed(program: Program, options: dict[str, Any], budget: int | None) -> None:
    """Whatever happened in it, it can be read, and runs to its end when there is memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl.gz"
        record(program, budget, path, **options)
        recorded = read(path)
        run = simulate(recorded, {}, machine="library", peak=baseline(recorded), limit=1e9)
        assert run.status == "ok"


def test_a_real_program() -> None:
    """The demo's model, as it was recorded: the replay does what the file says."""
    path = DATA / "letters.jsonl.gz"
    with gzip.open(path) as file:
        header, *lines = map(json.loads, file)
    events = [event_of(line) for line in lines if line["event"] != "End"]
    made = decisions(events)
    assert sum(decision[0] == "again" for decision in made) > 10
    assert replay(path, header["budget"], policy=header["policy"], release=header["release"]) == made


def event_of(line: dict[str, Any]) -> Event:
    kind = getattr(recompute.events, line.pop("event"))
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    event: Event = kind(**fields)
    return event


def test_another_budget() -> None:
    """A recorded run tells what less memory would have cost."""
    program = read(DATA / "letters.jsonl.gz")
    runs = [simulate(program, of_peak=share, policy="dtr-eq", machine="library") for share in (1.0, 0.7, 0.4)]
    overheads = [run.overhead for run in runs]
    assert overheads[0] == 1.0
    assert overheads == sorted(overheads)
    assert all(run.peak_bytes <= run.budget_bytes for run in runs)
