"""When values are used for the last time: against a check of every later run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recompute.planners import last_uses

VALUES = st.lists(st.integers(0, 5), max_size=3)
RUNS = st.lists(st.tuples(VALUES, VALUES), max_size=8)


def is_needed(value: int, later: list[tuple[list[int], list[int]]], lasting: set[int]) -> bool:
    """Whether somebody reads it before it is made again."""
    for makes, reads in later:
        if value in reads:
            return True
        if value in makes:
            return False
    return value in lasting


@given(runs=RUNS, lasting=st.sets(st.integers(0, 5)))
def test_a_value_is_let_go_of_where_nothing_later_needs_it(
    runs: list[tuple[list[int], list[int]]], lasting: set[int]
) -> None:
    """After each run, of what it makes and reads, in this order and once each."""
    expected = [
        [value for value in dict.fromkeys(makes + reads) if not is_needed(value, runs[place + 1 :], lasting)]
        for place, (makes, reads) in enumerate(runs)
    ]
    assert expected == last_uses(runs, lasting)
