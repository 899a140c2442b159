"""Policies and searches: their formulas, how they are chosen, and the order in which they evict."""

from __future__ import annotations

from math import inf, isclose, nan
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._engine.graph import Operation, Storage, Value
from recompute._engine.needed import NEIGHBOURHOODS
from recompute._engine.neighbours import NoNeighbours
from recompute._engine.pool import Pool
from recompute._engine.states import RESIDENT
from recompute._policy.formulas import (
    POLICIES,
    Dtr,
    DtrEq,
    DtrLocal,
    Lru,
    Msps,
    Needed,
    NeighbourhoodName,
    Nothing,
    Policy,
    PolicyName,
    Random,
    Scored,
    Size,
    policy_of,
)
from recompute._policy.search import (
    SEARCHES,
    Batch,
    Candidates,
    Exact,
    IgnoreSmall,
    Sample,
    Search,
    SearchName,
    candidates,
    rank,
    search_of,
)
from recompute.testing import EventLog, ManualClock

pytestmark = pytest.mark.usefixtures("no_python_while_the_collector_is_off")

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
    """Each policy's score is the formula of its paper; one without a neighbourhood gets a cost of zero for it."""
    policy = policy_of(name)
    around = 0.0 if policy.neighbourhood == "none" else neighbours
    expected = FORMULAS[name](cost, around, size, staleness)
    assert isclose(policy.score(cost, around, size, staleness), expected, rel_tol=1e-12)


def test_which_neighbourhood_each_policy_has() -> None:
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
        rc.Cache(policy="drt")  # type: ignore[arg-type]  # on purpose
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
    names: list[Any] = ["ignore small", "ignore-small", "ignore_small"]
    assert [search_of(name) for name in names] == [IgnoreSmall(0.01)] * 3
    with pytest.raises(ValueError, match="choose from exact, sample"):
        rc.Cache(search="scan")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="a search is a name"):
        rc.Cache(search=1.0)  # type: ignore[arg-type]  # on purpose


# (cost, size) of five values, made in this order
VALUES = [(8.0, 1), (1.5, 1), (5.0, 4), (2.5, 1), (11.0, 9)]


def victims(policy: Any, search: Any = "exact") -> list[int]:
    """The order in which independent values go, by position, when all memory is freed bit by bit."""
    clock = ManualClock()
    cache = rc.Cache(policy=policy, search=search, clock=clock)

    def work(cost: float) -> None:
        clock.advance(cost)

    with cache, EventLog(cache) as log:
        made = [rc.ap(work, cost, nbytes=size) for cost, size in VALUES]
        rc.ap(work, 100.0, nbytes=0)
        numbers = [value.number for value in made]
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
    assert victims("lru") == by(lambda c, m, s: -s)


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
        assert all(value.resident for value in kept)


def test_batch_takes_everything_under_twice_the_minimum() -> None:
    """One search, several victims: those whose score is at most twice the least."""
    clock = ManualClock()
    cache = rc.Cache(6, policy=lambda c, n, m, s: c, search="batch", clock=clock)
    with cache, EventLog(cache) as log:
        made = [rc.ap(clock.advance, cost, nbytes=1) for cost in (5.0, 2.0, 3.9, 4.1, 7.0, 2.5)]
        rc.ap(clock.advance, 1.0, nbytes=1)
        assert log.victims() == [made[position].number for position in (1, 5, 2)]


@pytest.mark.parametrize("score", [-1.0, 0.0, inf, -inf])
def test_batch_with_a_minimum_that_has_no_double(score: float) -> None:
    """Scores that are negative, zero or infinite find a victim, too."""
    cache = rc.Cache(4, policy=lambda c, n, m, s: score, search="batch")
    with cache:
        kept = [rc.ap(str, digit, nbytes=1) for digit in range(5)]
        assert cache.stats().evictions
        assert [value.get() for value in kept] == list("01234")


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
    assert [event.storage for event in log.evicted] == [value.number for value in (*large, small)]


def test_a_sample_looks_at_the_square_root() -> None:
    """Of 100 candidates it scores 10."""
    cache = rc.Cache(search="sample")
    with cache:
        kept = [rc.ap(str, digit, nbytes=1) for digit in range(100)]
        before = cache.stats().scored
        cache.release_memory(1)
        assert cache.stats().scored - before == 10
        assert sum(not value.resident for value in kept) == 1


class Newest(Policy):
    """The least stale first."""

    name = "newest"

    def line(self, cost: float, neighbours: float, size: int) -> None:
        return None

    def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
        return staleness


def test_a_policy_of_ones_own() -> None:
    """Who subclasses Policy gets the order of his scores, even if they are lines."""

    class Largest(Size):
        name = "largest"

    assert isinstance(policy_of(Newest), Newest)
    assert victims(Newest()) == by(lambda c, m, s: s)
    assert victims(Largest())[:2] == [4, 2]


def test_searches_are_those_of_the_library() -> None:
    """A subclass of Search from elsewhere is refused, because it would run under the lock."""

    class Mine(Search):
        name = "mine"

    for search in (Mine, Mine(), Search):
        with pytest.raises(TypeError, match="one of Exact, Sample, IgnoreSmall, Batch"):
            search_of(search)


def test_which_policies_are_foreign() -> None:
    """Those whose score is code from outside the library: functions, and classes that are not its own."""

    class Relative(Needed):
        """Under pressure, too."""

    assert not [name for name in POLICIES if policy_of(name).foreign]
    assert Scored(lambda c, n, m, s: c).foreign
    assert Newest().foreign
    assert Relative().foreign
    assert Relative().under(0.5).foreign


def test_the_names_in_signatures_are_those_of_the_tables() -> None:
    """The types of `policy` and `search` list every name, and nothing else."""
    assert set(get_args(PolicyName)) == {*POLICIES, "default"}
    assert set(get_args(SearchName)) == set(SEARCHES)
    assert set(get_args(NeighbourhoodName)) == set(NEIGHBOURHOODS)


# Candidates by themselves: storages without a cache

NOW = 100.0


def storage(number: int, cost: float, size: int, last_access: float = 0.0) -> Storage:
    """A resident storage of one value."""
    found, value, operation = Storage(number), Value(), Operation(str, (), ())
    found.cost, found.size, found.last_access = cost, size, last_access
    value.storage, value.operation = found, operation
    found.values = operation.outputs = (value,)
    found.state, found.resident = RESIDENT, True
    return found


def pool(policy: Policy, search: Search, storages: list[Storage]) -> Candidates:
    """Candidates with unlimited memory."""
    neighbourhood = NEIGHBOURHOODS[policy.neighbourhood](lambda storage: None)
    found = candidates(search, policy, neighbourhood)
    found.pool = Pool("cpu", found, None)
    for one in storages:
        found.add(one)
    return found


facts = st.tuples(st.floats(0.1, 10), st.integers(1, 100), st.floats(0, 99))


@pytest.mark.parametrize("search", [Exact(), IgnoreSmall(), Batch(), Sample(seed=5)], ids=lambda search: search.name)
@pytest.mark.parametrize("own", ["dtr-local", "lru", "size"])
@given(made=st.lists(facts, max_size=20))
def test_ranking_a_snapshot_is_choosing(own: Any, search: Search, made: list[tuple[float, int, float]]) -> None:
    """The best of `rank` for a user's function is what the same policy of the library chooses by a scan."""
    policy = policy_of(own)
    scored = Scored(policy.score, of="none")
    storages = [storage(number, *rest) for number, rest in enumerate(made)]
    expected = pool(scored, search, storages).choose(NOW)
    ours = pool(scored, search, storages)
    ranked = rank(scored, search, ours.snapshot(NOW))
    assert (ranked if search.together else ranked[:1]) == expected
    assert ours.scored >= len(ranked)
    scores = [policy.score(one.cost, 0.0, one.size, NOW - one.last_access) for one in ranked]
    assert scores == sorted(scores)
    if isinstance(search, Exact):
        assert set(ranked) == set(storages)
        chosen = pool(policy, search, storages).choose(NOW)
        assert [policy.score(one.cost, 0.0, one.size, NOW - one.last_access) for one in chosen] == scores[:1]


def test_a_snapshot_runs_no_code_of_the_user() -> None:
    """It has the facts of all that are not locked; the score is first called by `rank`."""
    calls: list[tuple[float, float, int, float]] = []

    def score(*facts: Any) -> float:
        calls.append(facts)
        return -facts[2]

    policy = Scored(score, of="none")
    small, large, locked = storage(1, 5.0, 10), storage(2, 3.0, 20, 40.0), storage(3, 1.0, 30)
    locked.locks = 1
    snapshot = pool(policy, Exact(), [small, large, locked]).snapshot(NOW)
    assert snapshot == [(small, 5.0, 0.0, 10, 100.0, False), (large, 3.0, 0.0, 20, 60.0, False)]
    assert not calls
    assert rank(policy, Exact(), snapshot) == [large, small]
    assert calls == [(5.0, 0.0, 10, 100.0), (3.0, 0.0, 20, 60.0)]


def test_what_nobody_needs_ranks_first() -> None:
    """A function that sees the needed neighbourhood still evicts first what costs nothing to lose."""

    class TheDearIsUnneeded(NoNeighbours):
        def unneeded(self, candidate: Any) -> bool:
            return candidate is dear

    policy = Scored(lambda c, n, m, s: c, of="needed")
    dear, cheap = storage(1, 50.0, 1), storage(2, 1.0, 1)
    ours = pool(policy, Exact(), [dear, cheap])
    ours.around = TheDearIsUnneeded(lambda storage: None)
    assert rank(policy, Exact(), ours.snapshot(NOW)) == [dear, cheap]


def test_a_foreign_policy_is_told_the_pressure() -> None:
    """A subclass of the default policy is ranked under the pressure of the snapshot."""
    seen: list[float] = []

    class Watching(Needed):
        def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
            seen.append(self.pressure)
            return super().score(cost, neighbours, size, staleness)

    ours = pool(Watching(), Exact(), [storage(1, 1.0, 1)])
    ours.around.pressure = 0.25
    rank(Watching(), Exact(), ours.snapshot(NOW))
    assert seen == [0.25]


def test_nothing_ranks_nobody() -> None:
    """Under the policy none there is nobody to choose, not even for a subclass."""

    class Still(Nothing):
        pass

    ours = pool(Still(), Exact(), [storage(1, 1.0, 1)])
    assert ours.choose(NOW) == rank(Still(), Exact(), ours.snapshot(NOW)) == []


class Wrong(Newest):
    def score(self, *facts: Any) -> Any:
        return None


def nan_score(cost: float, neighbours: float, size: int, staleness: float) -> float:
    return nan


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (Scored(nan_score), ValueError, r"nan_score\(1.0, 0.0, 2, 100.0\) returned nan"),
        (Scored(lambda *facts: "1.0"), TypeError, r"<lambda> returned '1.0'"),
        (Scored(lambda *facts: 10**400), ValueError, r"<lambda> returned an integer larger than any float"),
        (Wrong(), TypeError, r"Wrong.score returned None"),
    ],
)
def test_a_score_that_is_no_number(policy: Policy, error: type[Exception], message: str) -> None:
    """It is an error that names the function."""
    ours = pool(policy, Exact(), [storage(1, 1.0, 2)])
    with pytest.raises(error, match=message):
        rank(policy, Exact(), ours.snapshot(NOW))
