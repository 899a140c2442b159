"""Policies and searches: their formulas, how they are chosen, and the order in which they evict."""

from __future__ import annotations

from math import inf, isclose
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._policy.formulas import (
    POLICIES,
    Dtr,
    DtrEq,
    DtrLocal,
    Lru,
    Msps,
    Needed,
    Nothing,
    Policy,
    Random,
    Scored,
    Size,
    policy_of,
)
from recompute._policy.search import SEARCHES, Batch, Exact, IgnoreSmall, Sample, Search, search_of
from recompute.testing import EventLog, ManualClock

seconds = st.floats(1e-3, 1e3)
sizes = st.integers(1, 10**9)

FORMULAS: dict[str, Any] = {
    "dtr": lambda c, n, m, s: (c + n) / (m * s),
    "dtr-eq": lambda c, n, m, s: (c + n) / (m * s),
    "dtr-local": lambda c, n, m, s: c / (m * s),
    "lru": lambda c, n, m, s: 1 / s,
    "size": lambda c, n, m, s: 1 / m,
    "msps": lambda c, n, m, s: (c + n) / m,
}


@pytest.mark.parametrize("name", FORMULAS)
@given(cost=seconds, neighbours=seconds, size=sizes, staleness=seconds)
def test_a_score_is_its_published_formula(
    name: str, cost: float, neighbours: float, size: int, staleness: float
) -> None:
    """Each policy's score is the formula of its paper; a policy that looks at no neighbours is asked with none."""
    policy = policy_of(name)
    around = 0.0 if policy.neighbourhood == "none" else neighbours
    expected = FORMULAS[name](cost, around, size, staleness)
    assert isclose(policy.score(cost, around, size, staleness), expected, rel_tol=1e-12)


def test_which_neighbourhood_each_policy_asks_for() -> None:
    """What is needed for the default, e* for dtr, union-find for dtr-eq, ancestors for msps, else nothing."""
    expected = {"needed": "needed", "dtr": "exact", "dtr-eq": "components", "msps": "ancestors"}
    assert {name: policy.neighbourhood for name, policy in POLICIES.items()} == {
        name: expected.get(name, "none") for name in POLICIES
    }


def test_a_policy_by_name_class_object_and_function() -> None:
    """All four ways name the same policy; what is none of them is refused, and a wrong name lists the right ones."""

    def own(cost: float, neighbours: float, size: int, staleness: float) -> float:
        return cost

    assert policy_of("dtr-eq") == policy_of(DtrEq) == policy_of(DtrEq()) == DtrEq()
    assert rc.Cache().policy == Needed() == policy_of("default")
    assert policy_of(own) == Scored(own)
    assert policy_of(own).neighbourhood == "components"
    assert Scored(own, of="exact").neighbourhood == "exact"
    with pytest.raises(ValueError, match="choose from needed, dtr, dtr-eq"):
        rc.Cache(policy="drt")
    with pytest.raises(TypeError, match="a policy is a name"):
        rc.Cache(policy=7)  # type: ignore[arg-type]  # on purpose


def test_policies_are_frozen_values() -> None:
    """They compare, hash and print, and cannot be changed."""
    policies: list[Policy] = [Dtr(), Dtr(), DtrLocal()]
    assert policies[0] == policies[1] != policies[2]
    assert Random(seed=3) == Random(3) != Random(4)
    assert len({Lru(), Lru(), Size(), Msps(), Nothing(), Random(1), Random(1)}) == 5
    assert repr(Random(3)) == "Random(seed=3)"
    assert Sample(seed=2) == Sample(2) != Sample()
    assert repr(Batch()) == "Batch(factor=2.0)"
    for frozen in (Random(), Sample()):
        with pytest.raises(AttributeError):
            frozen.seed = 5  # type: ignore[misc]  # on purpose


def test_a_search_by_name_class_and_object() -> None:
    """Names may have spaces, hyphens or underscores."""
    assert search_of("exact") == search_of(Exact) == search_of(Exact()) == Exact()
    assert search_of("ignore small") == search_of("ignore-small") == search_of("ignore_small") == IgnoreSmall(0.01)
    assert set(SEARCHES) == {"exact", "sample", "ignore small", "batch"}
    with pytest.raises(ValueError, match="choose from exact, sample"):
        rc.Cache(search="scan")
    with pytest.raises(TypeError, match="a search is a name"):
        rc.Cache(search=1.0)  # type: ignore[arg-type]  # on purpose


# (cost, size) of five values, made in this order
VALUES = [(8.0, 1), (1.5, 1), (5.0, 4), (2.5, 1), (11.0, 9)]


def victims(policy: Any, search: Any = "exact") -> list[int]:
    """The order in which independent values go, by position, as ever more room is asked for."""
    clock = ManualClock()
    cache = rc.Cache(policy=policy, search=search, clock=clock)

    def work(cost: float) -> None:
        clock.advance(cost)

    with cache, EventLog(cache) as log:
        made = [rc.ap(work, cost, nbytes=size) for cost, size in VALUES]
        rc.ap(work, 100.0, nbytes=0)
        numbers = [each.number for each in made]
        while cache.release_memory(1):
            pass
    return [numbers.index(event.storage) for event in log.evicted]


def by(key: Any) -> list[int]:
    """Positions by a score of (cost, size, staleness), the least first."""
    clock, scores = 0.0, []
    total = sum(cost for cost, _ in VALUES) + 100.0
    for position, (cost, size) in enumerate(VALUES):
        clock += cost
        scores.append((key(cost, size, total - clock), position))
    return [position for _, position in sorted(scores)]


@pytest.mark.parametrize("search", ["exact", "ignore small"])
@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ("needed", lambda c, m, s: c / (m * s)),
        ("dtr", lambda c, m, s: c / (m * s)),
        ("dtr-eq", lambda c, m, s: c / (m * s)),
        ("dtr-local", lambda c, m, s: c / (m * s)),
        ("msps", lambda c, m, s: c / m),
        (lambda c, n, m, s: c, lambda c, m, s: c),
        (lambda c, n, m, s: -c, lambda c, m, s: -c),
    ],
)
def test_independent_values_go_in_the_order_of_their_scores(policy: Any, search: str, key: Any) -> None:
    """Without neighbours the whole order of evictions follows from cost, size and staleness."""
    assert victims(policy, search) == by(key)


def test_the_least_recently_used_goes_first() -> None:
    """lru looks at nothing but the last access."""
    assert [each for each in victims("lru")] == by(lambda c, m, s: -s)  # noqa: C416  # reads as the sentence


def test_the_largest_goes_first() -> None:
    """size takes the largest first, and of equal ones a fixed one."""
    assert victims("size")[:2] == [4, 2]
    assert victims("size") == victims("size")


def test_random_is_fair_and_repeatable() -> None:
    """One seed, one order; other seeds, other orders."""
    assert victims(Random(1)) == victims(Random(1))
    assert len({tuple(victims(Random(seed))) for seed in range(20)}) > 10


@pytest.mark.parametrize("search", SEARCHES)
def test_none_evicts_nothing(search: str) -> None:
    """Under the policy none a full budget is an error, whatever the search."""
    assert victims("none", search) == []
    with rc.Cache(3, policy="none", search=search):
        kept = [rc.ap(str, 1, nbytes=1) for _ in range(3)]
        with pytest.raises(rc.BudgetError):
            rc.ap(str, 1, nbytes=1)
        assert all(each.resident for each in kept)


def test_batch_takes_everything_under_twice_the_minimum() -> None:
    """One search, several victims: those whose score is at most twice the least."""
    clock = ManualClock()
    cache = rc.Cache(6, policy=lambda c, n, m, s: c, search="batch", clock=clock)
    with cache, EventLog(cache) as log:
        made = [rc.ap(clock.advance, cost, nbytes=1) for cost in (5.0, 2.0, 3.9, 4.1, 7.0, 2.5)]
        rc.ap(clock.advance, 1.0, nbytes=1)
        assert log.victims() == [made[each].number for each in (1, 5, 2)]


@pytest.mark.parametrize("score", [-1.0, 0.0, inf, -inf])
def test_batch_with_a_minimum_that_has_no_double(score: float) -> None:
    """Scores that are negative, zero or infinite find a victim, too."""
    cache = rc.Cache(4, policy=lambda c, n, m, s: score, search="batch")
    with cache:
        kept = [rc.ap(str, each, nbytes=1) for each in range(5)]
        assert cache.stats().evictions
        assert [each.get() for each in kept] == list("01234")


def test_small_values_are_ignored_until_nothing_else_is_left() -> None:
    """Below one per cent of the mean size a value is no victim while there are others."""
    clock = ManualClock()
    cache = rc.Cache(policy="lru", search="ignore small", clock=clock)
    with cache, EventLog(cache) as log:
        small = rc.ap(clock.advance, 1.0, nbytes=1)
        large = [rc.ap(clock.advance, 1.0, nbytes=1000) for _ in range(3)]
        rc.ap(clock.advance, 1.0, nbytes=0)
        while cache.release_memory(1):
            pass
    assert [event.storage for event in log.evicted] == [each.number for each in (*large, small)]


def test_a_sample_looks_at_the_square_root() -> None:
    """Of 100 candidates it scores 10."""
    cache = rc.Cache(search="sample")
    with cache:
        kept = [rc.ap(str, each, nbytes=1) for each in range(100)]
        before = cache.stats().scored
        cache.release_memory(1)
        assert cache.stats().scored - before == 10
        assert sum(not each.resident for each in kept) == 1


def test_own_policies_and_searches() -> None:
    """Who subclasses Policy or Search is taken as he is."""

    class Newest(Policy):
        name = "newest"

        def line(self, cost: float, neighbours: float, size: int) -> None:
            return None

        def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
            return staleness

    assert isinstance(policy_of(Newest), Newest)
    assert victims(Newest()) == by(lambda c, m, s: s)
    assert issubclass(type(search_of(Exact)), Search)
