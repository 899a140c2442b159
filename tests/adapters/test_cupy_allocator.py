"""The allocator that asks the cache for room, on real CuPy arrays over a small pool of host memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.events import Evicted
from recompute.testing import ManualClock, check_invariants
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
cupy = pytest.importorskip("cupy", reason="the extra 'cupy' is not installed")

from host_memory import UNIT, HostAdapter, HostPool, add, full, seen  # noqa: E402  # after importorskip

import recompute_cupy  # noqa: E402
from recompute_cupy import DeviceMemoryError, install, uninstall  # noqa: E402

ONE = UNIT // 8  # numbers in a unit


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    """The cache sees arrays through the adapter, and CuPy's own allocator is back at the end."""
    before = cupy.cuda.get_allocator()
    with registered(HostAdapter(), cupy.ndarray):
        yield
    uninstall()
    assert cupy.cuda.get_allocator() == before


def units(count: int, number: float = 0) -> Any:
    """An array of so many units of memory."""
    return full(count * ONE, number)


def with_temporaries(array: Any, count: int = 2) -> Any:
    """Twice the array, by way of so many arrays of its size."""
    temporaries = [add(array, array) for _ in range(count)]
    return add(temporaries[0], full(array.size, 0))


def least_recent(cost: float, neighbours: float, size: int, staleness: float) -> float:
    """The score by which the value goes first that was not used for longest."""
    return 1 / (staleness + 1e-9)


# Room is made


def test_values_make_room_for_allocations() -> None:
    """Far more values than the limit holds can be made, and all come back; the pool never takes more than the limit."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=4 * UNIT, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(50)]
        assert cache.stats().evictions >= 46
        for number, value in enumerate(values):
            assert seen(value.get())[0] == number
            assert pool.total_bytes() <= 4 * UNIT
        check_invariants(cache, values)


def test_the_end_of_the_device_is_a_limit_too() -> None:
    """Without a limit, values make room when the device has no more."""
    pool, cache = HostPool(4 * UNIT), rc.Cache()
    with install(cache, None, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(20)]
        assert [seen(value.get())[0] for value in values] == list(range(20))


def test_temporaries_inside_an_operation_make_room() -> None:
    """What a function allocates and drops is covered, and so is what the caller allocates himself."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=6 * UNIT, pool=pool), cache:
        chain = [rc.ap(units, 1, 1.0)]
        for _ in range(10):
            chain.append(rc.ap(with_temporaries, chain[-1]))
        assert [seen(value.get())[0] for value in chain] == [2.0**power for power in range(11)]
        mine = units(5)
        assert cache.stats().used <= UNIT
        del mine
        assert seen(chain[5].get())[0] == 32


def test_an_operation_that_gets_values_allocates_and_evicts_in_the_middle() -> None:
    """Evictions inside an allocation inside a recomputation inside an operation change no result."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=8 * UNIT, pool=pool), cache:
        chain = [rc.ap(units, 1, 1.0)]
        for _ in range(12):
            chain.append(rc.ap(with_temporaries, chain[-1]))

        def both(one: Any) -> Any:
            return with_temporaries(add(one, chain[3].get()))

        total = rc.ap(both, chain[9])
        for _ in range(3):
            assert seen(total.get())[0] == 2 * (512 + 8)
            cache.release_memory(device="cuda:0")
        assert cache.stats().rematerializations > 12
        check_invariants(cache, [*chain, total])


def test_free_blocks_are_given_back_before_values_are_evicted() -> None:
    """Room that blocks of another size take is used before any value goes."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=8 * UNIT, pool=pool), cache:
        kept = rc.ap(units, 2, 7.0)
        dropped = [units(2) for _ in range(3)]
        dropped.clear()
        assert pool.total_bytes() == 8 * UNIT
        large = rc.ap(units, 6, 5.0)
        assert (pool.given_back, cache.stats().evictions) == (1, 0)
        assert [seen(kept.get())[0], seen(large.get())[0]] == [7, 5]


def test_a_full_pool_lets_values_make_way_for_each_other() -> None:
    """When all memory is in blocks of values, a new one takes the block of another: nothing goes back to the device."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=10 * UNIT, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(40)]
        assert cache.stats().evictions == 30
        assert pool.given_back == 0
        assert [seen(value.get())[0] for value in values[:5]] == [0, 1, 2, 3, 4]
        check_invariants(cache, values)


def test_no_more_is_evicted_than_what_is_short() -> None:
    """A large request for which a little is missing costs a small value."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=10 * UNIT, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(5)]
        large = rc.ap(units, 6)
        assert cache.stats().evictions == 1
        assert sum(value.resident for value in values) == 4
        del large


def test_a_request_that_no_hole_fits_evicts_until_one_does() -> None:
    """With memory in pieces, values go until there are enough pieces side by side."""
    pool, clock = HostPool(12 * UNIT), ManualClock()
    with install(rc.Cache(clock=clock, policy=least_recent), None, pool=pool) as allocator, allocator.cache as cache:

        def tick(number: float) -> Any:
            clock.advance(1)
            return units(1, number)

        values = [rc.ap(tick, number) for number in range(12)]
        touched = [rc.ap(lambda array: seen(array)[0], value) for value in values[1::2]]  # so these go last
        assert pool.total_bytes() == 12 * UNIT
        large = rc.ap(units, 3, 3.0)
        gone = {number for number, value in enumerate(values) if not value.resident}
        assert len(gone) > 3
        assert any({start, start + 1, start + 2} <= gone for start in range(10))
        assert seen(large.get())[-1] == 3
        assert [seen(value.get())[0] for value in values] == list(range(12))
        assert [value.get() for value in touched] == list(range(1, 12, 2))
        check_invariants(cache, [*values, *touched, large])


# When nothing can be evicted


def test_memory_in_pieces_that_nothing_can_join_is_told() -> None:
    """The error says what is pinned and that the rest is in pieces; nothing is lost."""
    pool, cache = HostPool(8 * UNIT), rc.Cache()
    with install(cache, limit=8 * UNIT, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(8)]
        for value in values[::2]:
            value.pin()
        with pytest.raises(DeviceMemoryError) as caught:
            rc.ap(units, 2)
        message = str(caught.value)
        assert "1,024 bytes were asked for on cuda:0" in message
        assert "2,048 bytes pinned" in message
        assert "2,048 bytes free in pieces that are too small" in message
        assert isinstance(caught.value, rc.BudgetError)
        assert isinstance(caught.value, cupy.cuda.memory.OutOfMemoryError)
        assert caught.value.__notes__[0].startswith("in units, an operation created at")
        del caught
        for value in values:
            value.unpin()
        assert seen(rc.ap(units, 2, 5.0).get())[0] == 5
        assert [seen(value.get())[0] for value in values] == list(range(8))
        check_invariants(cache, values)


def test_a_request_beyond_the_limit_fails_at_once() -> None:
    """What the limit can never hold evicts nothing."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=4 * UNIT, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(4)]
        with pytest.raises(DeviceMemoryError, match="more than the limit of 2,048 bytes"):
            units(5)
        assert cache.stats().evictions == 0
        assert all(value.resident for value in values)


def test_the_error_says_who_holds_the_memory() -> None:
    """Sources, what callers hold, arguments of operations and arrays unknown to the cache are told apart."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=10 * UNIT, pool=pool), cache:
        source = rc.pure(units(1))
        held = rc.ap(units, 2).get()
        argument = rc.ap(units, 3)
        mine = units(1)

        def needs_much(array: Any) -> Any:
            return units(4)

        with pytest.raises(DeviceMemoryError) as caught:
            rc.ap(needs_much, argument)
        for part in (
            "512 bytes in sources",
            "1,536 bytes locked by operations in flight or reserved for them",
            "1,024 bytes evicted but held by the caller",
            "512 bytes in temporaries and other arrays that the cache does not know",
            "1,536 bytes free;",
            "the limit is 5,120 bytes",
        ):
            assert part in str(caught.value)
        assert "pinned" not in str(caught.value)
        del caught, held, mine
        assert seen(rc.ap(needs_much, argument).get()).size == 4 * ONE
        del source


def test_the_error_can_be_sent_to_another_process() -> None:
    """It is the same after pickling."""
    copy = pickle.loads(pickle.dumps(DeviceMemoryError("too much")))
    assert (type(copy), str(copy)) == (DeviceMemoryError, "too much")


def test_arrays_in_cycles_are_collected_before_giving_up() -> None:
    """Memory that only the garbage collector can free counts as room."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=4 * UNIT, pool=pool):
        cycle: list[Any] = [units(3)]
        cycle.append(cycle)
        del cycle
        assert seen(units(4)).size == 4 * ONE


def test_a_listener_that_allocates_does_not_evict_in_turn() -> None:
    """Allocations of those who hear of an eviction get what the pool has, or its own error."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    heard: list[bool] = []

    def listen(event: Any) -> None:
        if not isinstance(event, Evicted):
            return
        try:
            heard.append(units(3) is not None)
        except cupy.cuda.memory.OutOfMemoryError as error:
            heard.append(isinstance(error, DeviceMemoryError))

    with install(cache, limit=4 * UNIT, pool=pool), cache:
        values = [rc.ap(units, 1, number) for number in range(4)]
        cache.subscribe(listen)
        values.append(rc.ap(units, 1, 4.0))
        assert heard == [False]
        assert cache.stats().evictions == 1


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20), st.booleans()), max_size=15),
    capacity=st.integers(4, 20),
    limited=st.booleans(),
)
def test_every_request_is_met_or_refused_without_loss(
    sizes: list[tuple[int, int, bool]], capacity: int, limited: bool
) -> None:
    """Whatever is allocated in whatever order, results are right, the books balance, and in the end all is free."""
    pool, cache = HostPool(capacity * UNIT), rc.Cache()

    def widen(array: Any, size: int) -> Any:
        return add(full(1, float(seen(array)[0])), full(size * ONE, 1.0))

    with install(cache, None, limit=capacity * UNIT if limited else None, pool=pool), cache:
        values, expected = [rc.ap(units, 1, 0.0)], [0.0]
        for size, which, pinned in sizes:
            which %= len(values)
            try:
                value = rc.ap(widen, values[which], size)
            except DeviceMemoryError:
                continue
            if pinned and size == 1 and not any(other.pinned for other in values):
                value.pin()
            values.append(value)
            expected.append(expected[which] + 1)
        for value, number in zip(values, expected, strict=True):
            with suppress(DeviceMemoryError):
                assert seen(value.get())[0] == number
        check_invariants(cache, values)
        for value in values:
            value.unpin()
        del value
        values.clear()
        assert cache.stats().used == 0
        pool.free_all_blocks()
        assert (pool.used_bytes(), pool.total_bytes()) == (0, 0)


def test_threads_share_the_memory() -> None:
    """Several threads that run operations under one limit all get their results."""
    pool, cache = HostPool(1_000 * UNIT), rc.Cache()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            with cache:
                chain = [rc.ap(units, 1, float(seed))]
                for _ in range(60):
                    chain.append(rc.ap(add, chain[-1], chain[len(chain) // 2]))
                plain = [float(seed)]
                for _ in range(60):
                    plain.append(plain[-1] + plain[len(plain) // 2])
                for value, number in zip(chain, plain, strict=True):
                    if seen(value.get())[0] != number:
                        wrong.append((seed, number))
        except BaseException as error:
            wrong.append(error)

    with install(cache, limit=24 * UNIT, pool=pool):
        threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert cache.stats().evictions > 0
    check_invariants(cache)


# Installing


def test_uninstalling_restores_the_allocator_and_the_limit() -> None:
    """The allocator and the limit of the pool are what they were, after the block, an error in it, or `uninstall`."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    pool.set_limit(77 * UNIT)
    before = cupy.cuda.get_allocator()
    with install(cache, limit=4 * UNIT, pool=pool) as allocator:
        assert (allocator.installed, pool.get_limit()) == (True, 4 * UNIT)
        assert cupy.cuda.get_allocator() == allocator.malloc
        assert "not installed" not in repr(allocator)
    assert (allocator.installed, pool.get_limit()) == (False, 77 * UNIT)
    assert "not installed" in repr(allocator)
    with pytest.raises(KeyError), install(cache, limit=4 * UNIT, pool=pool):
        raise KeyError
    install(cache, limit=4 * UNIT, pool=pool)
    uninstall()
    uninstall()
    allocator.uninstall()
    assert cupy.cuda.get_allocator() == before
    assert pool.get_limit() == 77 * UNIT


def test_only_one_can_be_installed() -> None:
    """Installing a second one is an error that names the first, and changes nothing."""
    pool, cache = HostPool(100 * UNIT), rc.Cache()
    with install(cache, limit=4 * UNIT, pool=pool) as allocator:
        with pytest.raises(RuntimeError, match="is installed already"):
            install(rc.Cache(), limit=9 * UNIT, pool=pool)
        assert allocator.installed
        assert pool.get_limit() == 4 * UNIT


def test_an_allocator_set_since_is_not_overwritten() -> None:
    """Uninstalling below somebody else's allocator is an error; when he has put ours back, it works."""
    pool = HostPool(100 * UNIT)
    allocator = install(rc.Cache(), limit=4 * UNIT, pool=pool)
    cupy.cuda.set_allocator(pool.malloc)
    with pytest.raises(RuntimeError, match="another allocator was set"):
        uninstall()
    assert allocator.installed
    cupy.cuda.set_allocator(allocator.malloc)
    uninstall()


def test_within_using_allocator_nothing_is_installed() -> None:
    """Where CuPy forbids to change the allocator, the error is CuPy's, and the limit stays."""
    pool = HostPool(100 * UNIT)
    with cupy.cuda.using_allocator(pool.malloc), pytest.raises(ValueError, match="using_allocator"):
        install(rc.Cache(), limit=4 * UNIT, pool=pool)
    assert pool.get_limit() == 0
    install(rc.Cache(), limit=4 * UNIT, pool=pool)


def test_what_was_allocated_outlives_the_allocator() -> None:
    """Arrays stay valid after `uninstall`, and one who kept the allocator still gets memory, but no evictions."""
    pool, cache = HostPool(4 * UNIT), rc.Cache()
    with install(cache, limit=4 * UNIT, pool=pool) as allocator, cache:
        value = rc.ap(units, 3, 3.0)
        array = value.get()
    assert seen(array)[0] == 3
    assert allocator.malloc(UNIT).mem.size == UNIT
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        allocator.malloc(2 * UNIT)
    assert type(caught.value) is cupy.cuda.memory.OutOfMemoryError
    assert value.resident


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fraction": 0}, ValueError, "above 0 and at most 1"),
        ({"fraction": 1.5}, ValueError, "above 0 and at most 1"),
        ({"limit": "much"}, ValueError, "'much' is not a size"),
        ({"limit": 0}, ValueError, "at least one byte"),
    ],
)
def test_wrong_limits_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """A limit that is none is an error, and nothing is installed."""
    with pytest.raises(error, match=message):
        install(rc.Cache(), **arguments)


@pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_no_fraction_of_it() -> None:
    """The error says to give a limit."""
    with pytest.raises(RuntimeError, match="give limit="):
        install(rc.Cache())


def test_a_limit_can_be_text() -> None:
    """As budgets can."""
    pool = HostPool(100 * UNIT)
    with install(rc.Cache(), limit="2 KiB", pool=pool):
        assert pool.get_limit() == 2048


def test_an_allocator_whose_limit_cannot_be_set_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the limit cannot be set, CuPy's allocator is back."""
    pool = HostPool(100 * UNIT)

    def refuse(size: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(pool, "set_limit", refuse)
    before = cupy.cuda.get_allocator()
    with pytest.raises(OSError, match="no"):
        install(rc.Cache(), limit=UNIT, pool=pool)
    assert cupy.cuda.get_allocator() == before
    monkeypatch.undo()
    install(rc.Cache(), limit=UNIT, pool=pool)


def test_public_names() -> None:
    """What the package offers is there."""
    assert all(hasattr(recompute_cupy, name) for name in recompute_cupy.__all__)
    assert sorted(recompute_cupy.__all__) == list(recompute_cupy.__all__)
