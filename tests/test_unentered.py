"""A cache with a budget that was made and never entered: the first operation that goes elsewhere says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import recompute as rc


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    """A new default cache, and none of the caches of other tests."""
    rc.set_default_cache(None)
    yield
    rc.set_default_cache(None)


def heard(work: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()  # type: ignore[operator]
    return [f"{one.filename}: {one.message}" for one in caught]


def test_a_forgotten_with_is_said_once() -> None:
    """One warning at the first operation in the unlimited default cache, which names both lines."""
    cache = rc.Cache("1MB")
    (said,) = heard(lambda: [rc.ap(bytes, 10), rc.ap(bytes, 10), rc.pure(1)])
    assert said.startswith(f"{__file__}: ")
    assert "the cache of 1 MB made at" in said
    assert f"{__file__}:" in said.partition(" made at ")[2]
    assert "with cache:" in said
    assert cache.stats().operations == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.__enter__() and cache.__exit__(),
        lambda cache: rc.set_default_cache(cache),
        lambda cache: rc.memoize(bytes, cache=cache)(10),
    ],
)
def test_a_cache_that_is_used_is_not_forgotten(use: object) -> None:
    """Entered, the default one, or used in another way: nothing is said."""
    cache = rc.Cache("1MB")
    use(cache)  # type: ignore[operator]
    assert heard(lambda: rc.ap(bytes, 10)) == []
    assert cache.budget == 1_000_000


def test_others_are_not_meant() -> None:
    """Neither an unlimited cache, nor one that has gone, nor where one is entered, or the default one has a budget."""
    unlimited = rc.Cache()
    rc.Cache("1MB")  # it has gone
    assert heard(lambda: rc.ap(bytes, 10)) == []
    cache = rc.Cache("1MB")

    def inside() -> None:
        with unlimited:
            rc.ap(bytes, 10)

    assert heard(inside) == []
    rc.set_default_cache(rc.Cache("2MB"))
    assert heard(lambda: rc.ap(bytes, 10)) == []
    assert cache.stats().operations == 0
