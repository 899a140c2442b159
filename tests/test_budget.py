"""Budgets: what is a size, what cannot fit, and that a refusal leaves everything as it was."""

from __future__ import annotations

import gc
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from lib.vectors import vector
from recompute._budget import format_bytes, parse_budget
from recompute.policies import PolicyName
from recompute.testing import EventLog, check_invariants


def unit(*arguments: Any) -> int:
    return 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (1_000_000, 10**6),
        ("1000", 1000),
        ("1_000", 1000),
        ("512MB", 512 * 10**6),
        ("512 mb", 512 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("2k", 2000),
        ("2Ki", 2048),
        ("1e3 kB", 10**6),
        (" 7 B ", 7),
        ("3TB", 3 * 10**12),
        ("1PiB", 2**50),
    ],
)
def test_sizes(given: Any, expected: int) -> None:
    """Numbers and text, decimal and binary units."""
    assert parse_budget(given) == expected
    assert rc.Cache(given).budget == expected


@pytest.mark.parametrize(
    "wrong", [0, -1, 1e6, -2.5, nan, inf, -inf, "12 parsecs", "", "MB", "-3MB", "1,5 GB", "nan", "0"]
)
def test_what_is_no_size(wrong: Any) -> None:
    """Zero, negative, not a number, infinite or unknown units: a clear error, here and when set later."""
    with pytest.raises(ValueError, match="budget"):
        rc.Cache(wrong)
    cache = rc.Cache(100)
    with pytest.raises(ValueError, match="budget"):
        cache.budget = wrong
    assert cache.budget == 100


@pytest.mark.parametrize("wrong", [True, False, [], object(), b"5MB", 3j])
def test_what_is_no_budget_at_all(wrong: Any) -> None:
    """A bool or any other object is a TypeError."""
    with pytest.raises(TypeError, match="budget"):
        rc.Cache(wrong)


@given(st.integers(1, 10**15))
def test_sizes_for_people(size: int) -> None:
    """format_bytes gives a text that parse_budget reads as the same size, to three digits."""
    assert parse_budget(format_bytes(size)) == pytest.approx(size, rel=0.006)


def test_a_source_larger_than_the_budget() -> None:
    """It is refused, by name, with what it needs; the cache is as it was."""
    cache = rc.Cache(50)
    with cache:
        y = rc.ap(unit, nbytes=30)
        with pytest.raises(rc.BudgetError, match="a source of 80 B is larger than the whole budget of 50 B on cpu"):
            rc.pure(vector(*range(10)))
        assert y.resident
        assert cache.stats().used == 30
        check_invariants(cache, [y])


def test_the_message_names_operation_need_and_shortfall() -> None:
    """Which operation, made where, what it needs, what must stay and how much is missing."""
    cache = rc.Cache(100)
    with cache:
        x = rc.pure(vector(1, 2))
        kept = rc.ap(unit, nbytes=40).pin()
        arg = rc.ap(unit, nbytes=20)
        with pytest.raises(rc.BudgetError) as caught:
            rc.ap(unit, x, arg, nbytes=50)
    text = str(caught.value)
    for part in ("unit", "test_budget.py:", "50 B", "16 B in sources", "40 B pinned", "20 B locked", "26 bytes"):
        assert part in text, (part, text)
    assert isinstance(caught.value, MemoryError)
    assert kept.resident
    assert arg.resident
    check_invariants(cache, [x, kept, arg])


def test_pins_that_fill_the_budget() -> None:
    """What is pinned stays; what does not fit beside it is refused, and fits after unpin."""
    cache = rc.Cache(3)
    with cache:
        kept = [rc.ap(unit, nbytes=1).pin() for _ in range(3)]
        with pytest.raises(rc.BudgetError, match="pinned"):
            rc.ap(unit, nbytes=1)
        assert all(value.resident and value.pinned for value in kept)
        check_invariants(cache, kept)
        kept[0].unpin()
        new = rc.ap(unit, nbytes=1)
        assert not kept[0].resident
        new.pin()
        with pytest.raises(rc.BudgetError):
            kept[0].pin()
        assert not kept[0].pinned
        check_invariants(cache, [*kept, new])


def test_shrinking_evicts_at_once() -> None:
    """A smaller budget is kept from that moment on."""
    cache = rc.Cache()
    with cache:
        kept = [rc.ap(unit, nbytes=10) for _ in range(10)]
        cache.budget = 35
        assert cache.stats().used == 30
        assert sum(value.resident for value in kept) == 3
        cache.budget = None
        assert [value.get() for value in kept] == [1] * 10
        assert cache.stats().used == 100
        assert cache.budget is None


def test_a_budget_below_what_must_stay_is_refused() -> None:
    """Sources and pins cannot be evicted: BudgetError, and budget and values are as before."""
    cache = rc.Cache(100)
    with cache:
        x = rc.pure(vector(1, 2, 3))
        y = rc.ap(unit, nbytes=30)
        with pytest.raises(rc.BudgetError, match="the new budget is too small"):
            cache.budget = 23
        assert cache.budget == 100
        assert y.resident
        cache.budget = 24
        assert not y.resident
        check_invariants(cache, [x, y])


def test_shrinking_inside_an_operation() -> None:
    """The arguments of the operation that runs stay, the rest goes."""
    cache = rc.Cache(100)

    def shrink(payload: int) -> int:
        cache.budget = 15
        return payload

    with cache:
        x = rc.ap(unit, nbytes=10)
        other = rc.ap(unit, nbytes=50)
        y = rc.ap(shrink, x, nbytes=5)
        assert x.resident
        assert not other.resident
        assert y.get() == 1
        check_invariants(cache, [x, other, y])


def test_one_budget_a_device() -> None:
    """Each device has a pool of its own; one that is not named is unlimited."""
    cache = rc.Cache({"cpu": 40, "gpu:0": "24 B"})
    with cache:
        near = [rc.ap(vector, 1, 2, device="cpu") for _ in range(4)]
        other = [rc.ap(vector, 1, 2, device="gpu:1") for _ in range(4)]
        far = [rc.ap(vector, 1, 2, device="gpu:0") for _ in range(4)]
        assert [sum(value.resident for value in some) for some in (near, far, other)] == [2, 1, 4]
        assert cache.budget == {"cpu": 40, "gpu:0": 24}
        used = {pool.device: (pool.budget, pool.used) for pool in cache.stats().pools}
        assert used == {"cpu": (40, 32), "gpu:1": (None, 64), "gpu:0": (24, 16)}
        check_invariants(cache, [*near, *far, *other])
    with pytest.raises(TypeError, match="by device"):
        rc.Cache({0: 100})  # type: ignore[dict-item]  # on purpose


def test_a_budget_that_follows_the_machine() -> None:
    """available() takes a share of what is used and what is free, and the cache keeps to it as that changes."""
    free = [100]
    budget = rc.available(0.5, probe=lambda: free[0], seconds=0.0)
    cache = rc.Cache(budget)
    with cache:
        kept = [rc.ap(unit, nbytes=10) for _ in range(4)]
        assert all(value.resident for value in kept)
        free[0] = 5
        kept.append(rc.ap(unit, nbytes=1))
        assert cache.stats().used <= 0.5 * (40 + 5) + 1
        assert cache.budget is budget
        assert repr(budget) == "available(fraction=0.5)"
        check_invariants(cache, kept)


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5])
def test_a_share_is_between_nothing_and_all(wrong: float) -> None:
    """available() takes a fraction above 0 and at most 1."""
    with pytest.raises(ValueError, match="fraction"):
        rc.available(wrong, probe=lambda: 1)


def test_release_memory() -> None:
    """The hook of a host that runs short: frees at least what it asks for, if there is as much, and says how much."""
    cache = rc.Cache()
    with cache:
        kept = [rc.ap(unit, nbytes=10) for _ in range(5)]
        assert cache.release_memory(15) == 20
        assert cache.release_memory("10 B") == 10
        assert cache.release_memory() == 20
        assert cache.release_memory(1) == 0
        assert not any(value.resident for value in kept)
        with pytest.raises(ValueError, match="nbytes"):
            cache.release_memory(-1)


def test_release_memory_of_every_device() -> None:
    """Without a device, as much is freed on each that has values."""
    with rc.Cache() as cache:
        values = [rc.ap(lambda device=device: vector(1, 2, device=device)) for device in ("cpu", "acc:0", "acc:0")]
        assert cache.release_memory(8) == 2 * 16
        assert [value.resident for value in values].count(True) == 1
        assert cache.release_memory() == 16
        assert not any(value.resident for value in values)
        assert [value.get().buffer.device for value in values] == ["cpu", "acc:0", "acc:0"]
    check_invariants(cache, values)


def test_release_memory_of_a_device_without_values() -> None:
    """There is nothing to free, and no pool is made for it; what is no name is an error."""
    wrong: Any
    with rc.Cache() as cache:
        value = rc.ap(unit)
        assert cache.release_memory(8, "cuda:7") == cache.release_memory(device="cuda:7") == 0
        wrong = 0
        with pytest.raises(TypeError, match="device is the name of one"):
            cache.release_memory(8, wrong)
    assert [pool.device for pool in cache.stats().pools] == ["cpu"]
    check_invariants(cache, [value])


def test_numbers_that_a_budget_function_may_return() -> None:
    """Those of array libraries, as elsewhere; less than nothing is nothing, and what no machine has is no limit."""
    np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
    for number in (np.int64(100), np.float64(100.5), 10**400, float("inf")):
        with rc.Cache(lambda used, number=number: number) as cache:
            assert [rc.ap(unit, nbytes=60).get() for _ in range(3)] == [1, 1, 1]
            assert cache.stats().overshoot == 0
    with rc.Cache(lambda used: -5), pytest.raises(rc.BudgetError, match="larger than the whole budget of 0 B"):
        rc.ap(unit, nbytes=60)
    for wrong in (None, True, "5 MB", float("nan"), np.zeros(2)):
        with rc.Cache(lambda used, wrong=wrong: wrong), pytest.raises(TypeError, match="no number of bytes"):
            rc.ap(unit, nbytes=60)


@pytest.mark.parametrize("wrong", [lambda: 1, lambda one, other: 1, int.__add__])
def test_what_a_budget_function_takes(wrong: Any) -> None:
    """One number; another function is refused where it is given, and the budget stays."""
    with pytest.raises(TypeError, match="must take one number, the bytes in use"):
        rc.Cache(wrong)
    cache = rc.Cache(100)
    with pytest.raises(TypeError, match="must take one number"):
        cache.budget = {"cpu": wrong}
    assert cache.budget == 100


def test_what_a_policy_and_a_clock_take() -> None:
    """Four numbers, and nothing; another function is refused where it is given."""
    wrong: Any
    for wrong in (lambda: 1, lambda cost, size: 1, lambda *, cost: 1):
        with pytest.raises(TypeError, match="must take four numbers"):
            rc.Cache(policy=wrong)
    for wrong in (lambda now: 1.0, lambda *, now: 1.0):
        with pytest.raises(TypeError, match="must take no arguments"):
            rc.Cache(clock=wrong)
    rc.Cache(policy=lambda cost, *others, more=0: cost, clock=lambda now=1.0: now)


@pytest.mark.parametrize("nbytes", [-1, 2**63, 10**30, 1.5, (1, 2), [2**63]])
def test_what_is_no_size_of_a_result(nbytes: Any) -> None:
    """One ValueError before anything runs, and the cache is as it was."""
    with rc.Cache() as cache:
        with pytest.raises(ValueError, match="nbytes must be bytes"):
            rc.ap(unit, nbytes=nbytes)
        assert (cache.stats().operations, cache.stats().used) == (0, 0)


def test_the_known_size_never_exceeds_the_budget() -> None:
    """Sizes that were declared or seen before make room first: the peak stays within the budget."""
    cache = rc.Cache(25)
    with cache, EventLog(cache) as log:
        kept = [rc.ap(unit, nbytes=10) for _ in range(20)]
        assert [value.get() for value in kept] == [1] * 20
    assert cache.stats().peak <= 25
    assert cache.stats().overshoot == 0
    assert max(event.used for event in log) <= 25


def test_an_unknown_size_exceeds_it_by_that_output_at_most() -> None:
    """The first run of a function may overshoot by its output, and the statistics say by how much."""
    cache = rc.Cache(40)
    with cache:
        kept = [rc.ap(vector, 1, 2, 3)]
        kept.append(rc.ap(vector, 4, 5))
        assert cache.stats().overshoot == 0
        kept.append(rc.ap(vector, 1, 2, 3, 4))
        assert cache.stats().overshoot == 32
        kept.append(rc.ap(vector, 1, 2, 3, 4))
        assert cache.stats().overshoot == 32
        assert cache.stats().used <= 40


def test_an_output_larger_than_the_budget_is_refused() -> None:
    """Whether its size was known or not; afterwards everything is as it was, and works."""
    cache = rc.Cache(40)
    with cache:
        y = rc.ap(vector, 1, 2)
        for _ in range(2):
            with pytest.raises(rc.BudgetError, match="vector"):
                rc.ap(vector, *range(9))
            check_invariants(cache, [y])
        assert y.get() == vector(1, 2)


def test_two_outputs_that_are_one_object_are_counted_once() -> None:
    """Room is made for the memory, not for the names it has."""

    def both() -> tuple[Any, Any]:
        one = vector(1, 2, 3)
        return one, one

    cache = rc.Cache(24)
    with cache:
        for _ in range(2):
            pair = rc.ap(both, nout=2)
            assert cache.stats().used == 24
            assert cache.stats().overshoot == 0
            check_invariants(cache, pair)


def test_a_budget_that_asks_the_machine() -> None:
    """Without a probe the budget is the wanted share of the memory that psutil sees free, and of what is in use."""
    psutil = pytest.importorskip("psutil", reason="the extra `adaptive` is not installed")
    whole = rc.available(1.0)(0)
    assert 0 < whole <= psutil.virtual_memory().total
    with rc.Cache(rc.available(0.5)) as cache:
        value = rc.ap(unit, nbytes=30)
    assert value.get() == 1
    assert 0 < (cache.stats().pools[0].budget or 0) < psutil.virtual_memory().total


def test_room_for_a_result_is_made_after_the_arguments_came_back() -> None:
    """What brings evicted arguments back may take the room that the result will need later."""
    with rc.Cache() as cache:
        first = rc.ap(vector, 1)
        second = rc.ap(lambda payload: vector(2), first)
        third = rc.ap(lambda payload: vector(3), second)
        for value in (first, second, third):
            value.evict()
        cache.budget = 16
        assert rc.ap(lambda payload: vector(4), third, nbytes=8).get() == vector(4)
        assert cache.stats().peak <= 24
        check_invariants(cache, [first, second, third])


def test_a_lenient_cache_does_not_collect_cycles() -> None:
    """Nothing fails there for want of room, and a collection stops all threads: a worker would do it all the time."""
    collections: list[str] = []

    class Block:
        def __init__(self) -> None:
            self.parts = bytes(1000)

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    with rc.Cache(4 * 1000) as cache:
        cache.extend.be_lenient()
        values = [rc.ap(Block) for _ in range(2)]
        held = [value.get() for value in values]
        for value in values:
            value.evict()
        assert cache.stats().held > 2000
        gc.disable()
        gc.callbacks.append(note)
        try:
            pinned = [rc.ap(Block).pin() for _ in range(5)]
        finally:
            gc.callbacks.remove(note)
            gc.enable()
        assert collections == []
        assert [value.get().parts for value in pinned] == [bytes(1000)] * 5
        assert cache.stats().overshoot > 0
        assert len(held) == 2


@pytest.mark.parametrize("policy", ["needed", "lru"])
def test_a_lenient_cache_evicts_what_it_can_though_it_cannot_fit(policy: PolicyName) -> None:
    """What has to stay exceeds the budget, and all else goes for what is made next."""
    with rc.Cache(10, policy=policy) as cache:
        cache.extend.be_lenient()
        stays = rc.ap(unit, nbytes=12).pin()
        for _ in range(5):
            values = [rc.ap(unit, nbytes=4) for _ in range(3)]
            assert [value.resident for value in values] == [False, False, True]
        assert cache.stats().peak == 12 + 4
        assert stays.get() == 1
        del stays, values
        check_invariants(cache)


def test_what_is_given_back_leaves_room_to_make_the_rest() -> None:
    """Sources exceed the budget, as when a block ends: what is made again meanwhile has all of it beside them."""
    with rc.Cache(10) as cache:
        values = [rc.ap(unit, nbytes=1) for _ in range(3)]
        for _ in range(16):
            values.append(rc.ap(unit, values[-1], values[-3], nbytes=1))
        cache.release_memory()
        cache.extend.be_lenient()
        source = rc.pure(bytes(12))
        assert values[-1].get() == 1
        stats = cache.stats()
        assert stats.rematerializations <= 10 * len(values)
        assert 10 + stats.overshoot == stats.peak <= rc.sizeof(source.get()) + 10
