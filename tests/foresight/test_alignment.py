"""Finding the operations of a script again in a round that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._foresight.planning import Planning
from recompute._foresight.recording import Recording
from recompute._foresight.script import Alignment, Script
from recompute.extend import Operation

Graph = list[tuple[int, ...]]
"""For each operation the earlier ones that it takes; each is another function."""

FUNCTIONS = [eval(f"lambda *values: {number}") for number in range(60)]
NEW = [eval(f"lambda *values: -{number}") for number in range(60)]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Operations that take the last one, and some before it."""
    length = draw(st.integers(1, 30))
    return [
        tuple(sorted({number - 1, *draw(st.lists(st.integers(0, number - 1), max_size=2))})) if number else ()
        for number in range(length)
    ]


class Round:
    """Runs operations in a cache, and keeps how the engine tells of them."""

    def __init__(self) -> None:
        self.cache = rc.Cache(10**6)
        with self.cache:
            self.source = rc.pure(0)
        self.values: dict[int, Any] = {}
        self.told: list[Operation] = []

    def run(self, function: Any, taken: Sequence[int]) -> Any:
        """What the function makes of results, and of the source."""
        self.cache.extend.before = self.told.append
        arguments = [self.values[number] for number in taken if number in self.values]
        with self.cache:
            result = rc.ap(function, self.source, *arguments)
        self.cache.extend.before = None
        return result


def script_of(graph: Graph) -> Script:
    """The script of a round that runs a graph."""
    made = Round()
    recording = Recording([])
    made.cache.subscribe(recording)
    for number, taken in enumerate(graph):
        made.cache.extend.before = recording.begins
        arguments = [made.values[earlier] for earlier in taken]
        with made.cache:
            made.values[number] = rc.ap(FUNCTIONS[number], made.source, *arguments)
    planning = Planning(recording.finish("cpu", []), 10**6, 0.0001)
    planning.run()
    assert planning.script is not None
    return planning.script


@given(graphs())
def test_the_same_round(graph: Graph) -> None:
    """Each operation is the one that the script has next."""
    alignment, made = Alignment(script_of(graph)), Round()
    for number, taken in enumerate(graph):
        made.values[number] = made.run(FUNCTIONS[number], taken)
        assert alignment.find(made.told[-1]) == number
    assert alignment.unknown == 0


@given(graphs(), st.data())
def test_new_operations(graph: Graph, data: st.DataObject) -> None:
    """Those that the script does not have are not taken for others, and all others are found."""
    alignment, made = Alignment(script_of(graph)), Round()
    new = data.draw(st.lists(st.integers(0, len(graph) - 1), unique=True), label="new ones before these")
    for number, taken in enumerate(graph):
        if number in new:
            made.run(NEW[number], taken)
            assert alignment.find(made.told[-1]) == -1
        made.values[number] = made.run(FUNCTIONS[number], taken)
        assert alignment.find(made.told[-1]) == number
    assert alignment.unknown == len(new)


@given(graphs(), st.data())
def test_operations_between(graph: Graph, data: st.DataObject) -> None:
    """If one is replaced, the round is found again with the second operation after it, and the new one is known."""
    alignment, made = Alignment(script_of(graph)), Round()
    replaced = data.draw(st.integers(0, len(graph) - 1), label="replaced")
    for number, taken in enumerate(graph):
        function = NEW[number] if number == replaced else FUNCTIONS[number]
        made.values[number] = made.run(function, taken)
        found = alignment.find(made.told[-1])
        assert found == number or (found == -1 and number in (replaced, replaced + 1))
    if any(replaced in taken for taken in graph[replaced + 2 :]):
        assert alignment.nodes[replaced] is made.told[replaced]


@given(graphs(), st.data())
def test_operations_left_out(graph: Graph, data: st.DataObject) -> None:
    """If the last ones are not there, nothing is taken for them."""
    alignment, made = Alignment(script_of(graph)), Round()
    count = data.draw(st.integers(0, len(graph)), label="there")
    for number, taken in enumerate(graph[:count]):
        made.values[number] = made.run(FUNCTIONS[number], taken)
        alignment.find(made.told[-1])
    assert alignment.next == count
    assert alignment.nodes[count:] == [None] * (len(graph) - count)


@given(st.integers(1, 20), st.integers(0, 12), st.integers(3, 20))
def test_a_part_left_out(before: int, left_out: int, after: int) -> None:
    """After a side branch that is not there this time, the round is found again with the second operation."""
    side = range(before, before + left_out)
    graph: Graph = [() if not number else (number - 1,) for number in range(before)]
    graph += [(before - 1 if number == before else number - 1,) for number in side]
    first = before + left_out
    graph += [(before - 1 if number == first else number - 1,) for number in range(first, first + after)]
    alignment, made = Alignment(script_of(graph)), Round()
    for number, taken in enumerate(graph):
        if number not in side:
            made.values[number] = made.run(FUNCTIONS[number], taken)
            found = alignment.find(made.told[-1])
            assert found == number or (found == -1 and number == first)
    assert alignment.next == len(graph)
