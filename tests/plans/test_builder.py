"""A program that is built by the names of values: against one written by numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute.planners import PlanError, ProgramBuilder, last_uses, least, peak, plan, verify
from recompute.traces import Program

CALLS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(0, 4), max_size=2), st.integers(0, 3)),
    max_size=6,
)
"""What each reads (from the newest value on), the bytes of what it makes, and its room."""


@given(sources=st.lists(st.integers(0, 4), min_size=1, max_size=3), calls=CALLS)
def test_names_stand_for_numbers(sources: list[int], calls: list[Any]) -> None:
    """The same program as by numbers; the room of a call is a result that has no name."""
    expected, numbers = Program("p"), list[int]()
    built: ProgramBuilder[str] = ProgramBuilder(Program("p"))
    names: list[str] = []
    for nbytes in sources:
        numbers.append(expected.add_source(nbytes))
        names.append(f"v{len(names)}")
        built.source(names[-1], nbytes)
    for reads, sizes, room in calls:
        places = [-1 - read % len(numbers) for read in reads]
        storages = [expected.add_storage(nbytes) for nbytes in (sizes + [room] * bool(room))]
        results = expected.add_call("f", [numbers[place] for place in places], storages, 2.0)
        makes = {f"v{len(names) + at}": nbytes for at, nbytes in enumerate(sizes)}
        assert tuple(results[len(sizes) :]) == built.call("f", [names[place] for place in places], makes, 2.0, room)
        numbers += results[: len(sizes)]
        names += makes
        assert list(makes.values()) == [built.nbytes(name) for name in makes]
    for name, number in zip(names, numbers, strict=True):
        built.step("detach", [name])
        expected.steps.append(("detach", number))
    assert expected == built.program
    assert dict(zip(names, numbers, strict=True)) == built.values


def test_room_counts_while_the_call_runs() -> None:
    """An operation needs what it reads, what it makes, and its room."""
    built: ProgramBuilder[str] = ProgramBuilder(Program("p"))
    built.source("x", 3)
    built.call("f", ["x"], {"y": 5}, 1.0, room=7)
    built.call("g", ["y"], {"z": 1}, 1.0)
    assert (least(built.program), peak(built.program)) == (15, 15)


def test_what_nothing_has_made_cannot_be_read() -> None:
    """Its name is in the error."""
    built: ProgramBuilder[str] = ProgramBuilder(Program("p"))
    with pytest.raises(KeyError, match="x"):
        built.call("f", ["x"], {"y": 5}, 1.0)


def test_a_copy_takes_more_and_leaves_the_first_as_it_is() -> None:
    """Sources, calls and names of a copy are its own."""
    built: ProgramBuilder[str] = ProgramBuilder(Program("p"))
    built.source("x", 3)
    other, same = built.copy(), built.copy()
    other.call("f", ["x"], {"y": 5}, 1.0)
    other.program.outputs.append(1)
    assert same == built
    assert (other.nbytes("y"), len(other.program.calls), "y" in built.values) == (5, 1, False)


@given(calls=CALLS, data=st.data(), share=st.floats(0, 1))
def test_a_graph_is_planned_as_its_values_live(calls: list[Any], data: st.DataObject, share: float) -> None:
    """The peak is that of the values that are read later; what is detached is never made again."""
    built: ProgramBuilder[str] = ProgramBuilder(Program("p"))
    built.source("x")
    runs: list[tuple[list[str], list[str]]] = []
    names, sizes, rooms = ["x"], {"x": 0}, []
    for reads, bytes_made, room in calls:
        made = [f"v{len(names) + at}" for at in range(len(bytes_made))]
        runs.append((made, [names[-1 - read % len(names)] for read in reads]))
        names += made
        sizes.update(zip(made, bytes_made, strict=True))
        rooms.append(room)
    outputs = data.draw(st.sets(st.sampled_from(names[1:]))) if names[1:] else set()
    once = data.draw(st.sets(st.integers(0, len(runs))))
    for number, gone in enumerate(last_uses(runs, ["x", *outputs])):
        made, reads = runs[number]
        built.call("f", reads, {name: sizes[name] for name in made}, 1.0, rooms[number])
        built.step("detach", made if number in once else ())
        built.step("drop", gone)
    built.program.outputs = [built.values[name] for name in sorted(outputs)]
    most = 0
    for number, (made, _) in enumerate(runs):
        before = {name for makes, _ in runs[:number] for name in makes}
        needed = {name for _, reads in runs[number:] for name in reads}
        live = before & (needed | outputs) | set(made)
        most = max(most, sum(sizes[name] for name in live) + rooms[number])
    most = max(most, sum(sizes[name] for name in outputs))
    assert most == peak(built.program)
    budget = max(1, least(built.program) + int(share * (most - least(built.program))))
    try:
        found = plan(built.program, budget, effort=0.001)
    except PlanError:
        return  # there is none
    verify(built.program, found)
    assert all(found.order.count(number) == 1 for number in once if number < len(runs) and runs[number][0])
