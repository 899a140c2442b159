"""The least number that fits, found by bisection: against a look at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recompute.planners import smallest

SPANS = st.tuples(st.integers(-3, 100), st.integers(1, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(span=SPANS, data=st.data(), within=st.integers(1, 20))
def test_it_is_the_least_where_more_always_fits(span: tuple[int, int], data: st.DataObject, within: int) -> None:
    """Exactly, or to within what is asked; neither end is tried, nor any number twice."""
    low, high = span
    least = data.draw(st.integers(low + 1, high))
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number >= least

    assert least == smallest(fits, low, high)
    assert len(tried) == len(set(tried) - {low, high}) <= (high - low).bit_length()
    assert least <= smallest(fits, low, high, within=within) < least + within


@given(span=SPANS, fitting=st.sets(st.integers(-3, 200)), tries=st.integers(0, 9))
def test_what_it_gives_was_seen_to_fit(span: tuple[int, int], fitting: set[int], tries: int) -> None:
    """Whatever fits, in no more tries than are allowed; the upper end, which does, where nothing else was seen."""
    low, high = span
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number in fitting

    found = smallest(fits, low, high, tries=tries)
    assert found == min({high, *fitting.intersection(tried)})
    assert len(tried) <= tries
