"""The library decides what DTR in plain Python decides: every eviction and every run, in order, with the clock.

Costs are whole numbers here, which floats add exactly in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from published_figures import program
from random_traces import programs

from recompute._traces.chain import chain
from recompute.events import Event, Evicted, Performed
from recompute.simulator import Run, baseline, simulate
from recompute.traces import Call, Program

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from minimal_dtr import Decision, MinimalDTR, Value, train


def by_the_library(program: Program, budget: int, peak: Mapping[str, int] | None = None) -> tuple[Run, list[Decision]]:
    """A replay in the simulator, and what it decided, in the numbers of the program."""
    events: list[Event] = []
    run = simulate(
        program, {"cpu": budget}, policy="dtr-eq", machine="published", limit=100, peak=peak, listener=events.append
    )
    decisions: list[Decision] = []
    calls: dict[tuple[int, ...], int] = {}  # results, by their numbers in the cache -> call
    storages: dict[int, int] = {}  # number in the cache -> number in the program
    for event in events:
        if isinstance(event, Performed):
            if not event.again:
                calls[event.results] = len(calls)
                results = program.calls[calls[event.results]].results
                storages.update(zip(event.homes, [program.storages[value] for value in results], strict=True))
            again = "rematerialize" if event.again else "perform"
            decisions.append(Decision(event.time, again, calls[event.results]))
        elif isinstance(event, Evicted):
            why = "release" if event.why == "release" else "evict"
            decisions.append(Decision(event.time, why, storages[event.storage]))
    return run, decisions


def in_plain_python(program: Program, budget: float) -> tuple[str, MinimalDTR]:
    """ok or oom, and the machine that ran the program, which numbers operations and storages as the program does."""
    dtr = MinimalDTR(budget)
    values: list[Value] = []
    try:
        for kind, number in program.steps:
            match kind:
                case "source":
                    values.append(dtr.source(program.sizes[program.storages[number]]))
                case "call":
                    call = program.calls[number]
                    sizes = [program.sizes[program.storages[result]] for result in call.results]
                    arguments = [values[argument] for argument in call.arguments]
                    values += dtr.call(call.cost, sizes, arguments, aliases(program, call))
                case "drop" if program.makers[number] >= 0:
                    dtr.release(values[number])
                case "drop":
                    pass  # constants stay
                case _:
                    raise AssertionError(f"a recorded program that does more: {kind}")
        for value in program.outputs:
            dtr.pin(values[value])
    except MemoryError:
        return "oom", dtr
    return "ok", dtr


def aliases(program: Program, call: Call) -> list[int | None]:
    """For each result the first argument or result before it that lies on the same storage."""
    storages = [program.storages[value] for value in (*call.arguments, *call.results)]
    first = [storages.index(storage) for storage in storages]
    return [None if at == first[at] else first[at] for at in range(len(call.arguments), len(storages))]


def check_alike(program: Program, budget: int, peak: Mapping[str, int] | None = None) -> str:
    """The same decisions, peak and overhead; the status. What thrashes is not compared: here nobody would stop it."""
    run, expected = by_the_library(program, budget, peak)
    if run.status == "thrash":
        return run.status
    status, dtr = in_plain_python(program, budget)
    assert run.status == status
    assert expected == dtr.log[: len(expected)]
    rest = dtr.log[len(expected) :]
    if status == "ok":
        assert rest == []
        assert run.peak_bytes == dtr.peak
        assert run.overhead == (dtr.overhead if dtr.model_time else 1.0)
    else:
        assert {decision.what for decision in rest} <= {"evict"}  # the library gives up before what would not help
    return status


@settings(max_examples=settings().max_examples * 4)
@given(programs(), st.floats(0.2, 1.0))
def test_random_programs_are_run_alike(program: Program, share: float) -> None:
    """Random programs with aliases, several results and early releases are run alike, down to where they do not fit."""
    peak = baseline(program)
    assume(check_alike(program, max(1, int(share * sum(peak.values()))), peak) != "thrash")


@pytest.mark.parametrize("budget", [4, 5, 8, 16, 40, 64])
def test_a_chain_is_run_alike(budget: int) -> None:
    """A training of 64 layers is run alike in anything between a few bytes and enough."""
    assert check_alike(chain(64), budget) == "ok"


@pytest.mark.parametrize("n", [1, 2, 3, 64])
def test_the_demonstration_is_that_chain(n: int) -> None:
    """What the script prints is about the chain of the simulator."""
    assert by_the_library(chain(n), 16)[1] == train(n, 16)[0].log


@pytest.mark.parametrize("n", [16, 64, 256])
def test_a_chain_in_little_memory_costs_less_than_half_more(n: int) -> None:
    """In memory for 2 sqrt(n) values the overhead of a training of n layers stays below 1.5."""
    dtr, lines = train(n, 2 * int(n**0.5))
    assert dtr.overhead < 1.5
    assert dtr.peak == dtr.budget
    assert [len(line) for line in lines] == [n] * n


def test_a_deep_chain_does_not_recurse() -> None:
    """The last of ten thousand evicted values is brought back, with all that it is made from, one after the other."""
    dtr = MinimalDTR(2)
    made = [dtr.source(0)]
    for _ in range(10_000):
        made += dtr.call(1, [1], [made[-1]])
        dtr.release(made[-2])
    dtr.release(made[-1])
    assert not any(value.resident for value in made[1:])
    dtr.pin(made[-1])
    assert made[-1].resident
    assert dtr.overhead == 2
    assert dtr.peak == 2


def test_what_does_not_fit_is_an_error() -> None:
    """An operation whose result cannot fit beside its argument raises MemoryError, which says what is short."""
    dtr = MinimalDTR(3)
    (value,) = dtr.call(1, [2], [dtr.source(1)])
    with pytest.raises(MemoryError, match=r"no room for 1: 3\.0 of 3 is locked"):
        dtr.call(1, [1], [value])


@pytest.mark.parametrize(
    ("trace", "share", "status"),
    [("unet", 0.5, "ok"), ("unet", 0.4, "oom"), ("resnet32", 0.3, "ok"), ("transformer", 0.5, "ok")],
)
def test_recorded_trainings_are_run_alike(trace: str, share: float, status: str) -> None:
    """Iterations that the DTR authors recorded are run alike."""
    found, peak = program(trace)
    assert check_alike(found, int(share * sum(peak.values())), peak) == status
