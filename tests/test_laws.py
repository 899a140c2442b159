"""The laws of an applicative functor, and that evictions do not break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import Identity, ManualClock

values = st.one_of(st.integers(-9, 9), st.none(), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=3))
functions: st.SearchStrategy[Callable[[Any], Any]] = st.sampled_from(
    (repr, str, type, lambda x: x, lambda x: (x, x), lambda x: [x], lambda x: None)
)
disturbances = st.integers(0, 2**12 - 1)


class Disturbed:
    """The surface, with evictions of everything evictable before and after each application, as the bits say."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.made: list[rc.Recomputable[Any]] = []

    def _shake(self) -> None:
        for made in self.made:
            self.bits = (self.bits >> 1) | ((self.bits & 1) << 11)
            if self.bits & 1:
                made.evict()

    def pure(self, value: Any) -> Any:
        self._shake()
        return rc.pure(value)

    def ap(self, function: Any, *args: Any) -> Any:
        self._shake()
        self.made.append(rc.ap(function, *args))
        self._shake()
        return self.made[-1]

    def get(self, value: Any) -> Any:
        self._shake()
        return value.get()


@pytest.fixture(autouse=True)
def _cache() -> Iterator[None]:
    with rc.Cache(clock=ManualClock()):
        yield


def equal(left: Any, right: Any) -> None:
    assert left.get() == right.get()


@given(values, disturbances)
def test_identity_law(value: Any, bits: int) -> None:
    """pure(id) <*> v is v."""
    on = Disturbed(bits)
    assert on.get(on.ap(on.pure(lambda x: x), on.pure(value))) == value


@given(functions, functions, values, disturbances)
def test_composition_law(f: Any, g: Any, value: Any, bits: int) -> None:
    """pure(compose) <*> u <*> v <*> w is u <*> (v <*> w)."""
    on = Disturbed(bits)

    def compose(f: Any) -> Any:
        return lambda g: lambda x: f(g(x))

    u, v, w = on.pure(f), on.pure(g), on.pure(value)
    left = on.ap(on.ap(on.ap(on.pure(compose), u), v), w)
    right = on.ap(u, on.ap(v, w))
    assert on.get(left) == on.get(right)


@given(functions, values, disturbances)
def test_homomorphism_law(f: Any, value: Any, bits: int) -> None:
    """pure(f) <*> pure(x) is pure(f(x))."""
    on = Disturbed(bits)
    assert on.get(on.ap(on.pure(f), on.pure(value))) == rc.pure(f(value)).get()


@given(functions, values, disturbances)
def test_interchange_law(f: Any, value: Any, bits: int) -> None:
    """u <*> pure(y) is pure(apply to y) <*> u."""
    on = Disturbed(bits)
    u = on.pure(f)
    assert on.get(on.ap(u, on.pure(value))) == on.get(on.ap(on.pure(lambda g: g(value)), u))


@given(functions, functions, values)
def test_functor_laws(f: Any, g: Any, value: Any) -> None:
    """map(id) is the identity, and map(f after g) is map(g), then map(f); evicted in between or not."""
    x = rc.pure(value)
    equal(x.map(lambda x: x), x)
    inner = x.map(g)
    inner.evict()
    equal(inner.map(f), x.map(lambda x: f(g(x))))


@given(functions, values)
def test_map_ap_apply_and_lift_agree(f: Any, value: Any) -> None:
    """Four ways to write one application."""
    x = rc.pure(value)
    for other in (rc.ap(f, x), rc.pure(f).apply(x), rc.lift(lambda x: f(x))(x), rc.ap(rc.pure(f), x)):
        equal(x.map(f), other)


@given(functions, st.lists(values, max_size=4), disturbances)
def test_traverse_is_sequence_after_map(f: Any, some: list[Any], bits: int) -> None:
    """traverse(f) is sequence of the mapped list, and sequence of pure values is pure of the list."""
    on = Disturbed(bits)
    assert rc.traverse(lambda x: on.ap(f, x), some).get() == [f(value) for value in some]
    assert rc.sequence([on.ap(f, value) for value in some]).get() == [f(value) for value in some]
    assert rc.sequence([rc.pure(value) for value in some]).get() == some


@given(functions, st.lists(values, max_size=4))
def test_sequence_is_natural(f: Any, some: list[Any]) -> None:
    """Mapping before sequence is mapping inside after it."""
    inside = rc.sequence([rc.pure(value) for value in some]).map(lambda row: [f(cell) for cell in row])
    before = rc.sequence([rc.pure(value).map(f) for value in some])
    inside.evict()
    before.evict()
    equal(inside, before)


@pytest.mark.parametrize("surface", [rc, Identity])
def test_sequence_keeps_the_container(surface: Any) -> None:
    """A tuple gives a tuple, a dict a dict, any other iterable a list."""
    one, two = surface.pure(1), surface.pure(2)
    assert surface.sequence((one, two)).get() == (1, 2)
    assert surface.sequence({"a": one, "b": [two]}).get() == {"a": 1, "b": [2]}
    assert surface.sequence(iter([one, two])).get() == [1, 2]
