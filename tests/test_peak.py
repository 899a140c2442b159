"""The peak is never above the budget and the overshoot, whatever becomes counted, and wherever."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.extend import Settings
from recompute.testing import check_invariants

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")


def within(cache: rc.Cache, budget: int) -> bool:
    """Whether what the cache says of itself holds, in all and on each device."""
    stats = cache.stats()
    assert all(pool.peak <= budget + pool.overshoot for pool in stats.pools)
    return stats.peak <= budget * max(1, len(stats.pools)) + stats.overshoot


class World:
    """A cache, values of some hundred bytes, and what a program may have got of them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.cache = rc.Cache(budget)
        with self.cache:
            self.values = [rc.pure(np.zeros(10))]
        self.got: list[Any] = []
        self.lengths: dict[int, int] = {}

    def grown(self, number: int) -> Any:
        """A result that is longer each time it is made: its size was learnt, and is another one."""
        length = self.lengths[number] = self.lengths.get(number, 5) + number
        return np.zeros(length)


def source(world: World, number: int) -> None:
    world.values.append(rc.pure(np.zeros(number)))


def make(world: World, number: int) -> None:
    world.values.append(rc.ap(np.add, world.values[number % len(world.values)], 1.0))


def view(world: World, number: int) -> None:
    world.values.append(rc.ap(np.ndarray.ravel, world.values[number % len(world.values)]))


def halves(world: World, number: int) -> None:
    """Two views of one new array, which neither of them owns."""
    world.values += rc.ap(lambda x: (lambda y: (y[:1], y))(x + 1), world.values[number % len(world.values)], nout=2)


def grow(world: World, number: int) -> None:
    world.values.append(rc.ap(world.grown, number))


def at_run_time(world: World, number: int) -> None:
    """A view of a value that the function asks for itself."""
    value = world.values[number % len(world.values)]
    world.values.append(rc.ap(lambda: value.get().ravel()))


def hold(world: World, number: int) -> None:
    """A view of what may be evicted afterwards."""
    world.got.append(world.values[number % len(world.values)].get()[:1])


def let_go(world: World, number: int) -> None:
    world.got.clear()


def drop(world: World, number: int) -> None:
    if len(world.values) > 1:
        del world.values[number % len(world.values)]


STEPS: Final[dict[str, Callable[[World, int], Any]]] = {
    "source": source, "make": make, "view": view, "halves": halves, "grow": grow, "at run time": at_run_time,
    "hold": hold, "let go": let_go, "drop": drop,
    "get": lambda world, number: world.values[number % len(world.values)].get(),
    "evict": lambda world, number: world.values[number % len(world.values)].evict(),
    "pin": lambda world, number: world.values[number % len(world.values)].pin(),
    "unpin": lambda world, number: world.values[number % len(world.values)].unpin(),
    "detach": lambda world, number: world.values[number % len(world.values)].detach(),
    "release": lambda world, number: world.cache.release_memory(number * 8 or None),
}  # fmt: skip
PROGRAMS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 20)), max_size=40)


def run(world: World, program: list[tuple[str, int]]) -> None:
    with world.cache:
        for name, number in program:
            with suppress(rc.BudgetError):
                STEPS[name](world, number)
            assert within(world.cache, world.budget)
            check_invariants(world.cache, world.values)


class Far:
    """Bytes of some device."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.device = device


class FarAdapter(rc.adapters.Adapter):
    """Where they are, and how many."""

    name = "far"

    def nbytes(self, value: Far) -> int:
        return value.nbytes

    def device(self, value: Far) -> str:
        return value.device


rc.adapters.register(Far, FarAdapter())


def scaled(x: Any, numbers: Any, *, step: int = 0) -> Any:
    return x * 2.0


@pytest.mark.parametrize(
    ("positional", "named"),
    [(lambda n: 0.1 * n, None), (lambda n: (0.1 * n, [n]), None), (lambda n: 0, lambda n: n)],
    ids=["number", "nested", "keyword"],
)
def test_numbers_that_change_from_call_to_call(
    positional: Callable[[int], Any], named: Callable[[int], int] | None
) -> None:
    """A step's number or its learning rate is nothing new: room for the result is made before the call."""
    with rc.Cache(budget=2400) as cache:
        x, y = rc.pure(np.ones(100)), []
        for number in range(1, 10):
            y.append(rc.ap(scaled, x, positional(number), **({} if named is None else {"step": named(number)})))
        assert cache.stats().evictions
        assert cache.stats().overshoot == 0
        assert cache.stats().peak <= 2400


def test_a_number_that_decides_the_size() -> None:
    """What calls with other numbers needed is a guess: a call whose result is smaller than that is never refused."""
    with rc.Cache(budget=2000) as cache:
        large = rc.ap(np.zeros, 200)
        del large
        source = rc.pure(np.zeros(125))
        assert rc.ap(np.zeros, 100).get().size == 100
        assert source.get().size == 125
        check_invariants(cache, [source])


@given(PROGRAMS, st.integers(80, 800))
def test_programs(program: list[tuple[str, int]], budget: int) -> None:
    """Values made, shared, held, pinned, detached and grown: what was counted without room is in the overshoot."""
    run(World(budget), program)


def test_a_result_that_is_larger_than_the_last_one() -> None:
    """Room for what is beyond the size that was learnt is made once, and what it exceeds the budget by is noted."""
    lengths = iter([5, 60])

    def grown(number: int) -> Any:
        return np.zeros(next(lengths))

    with rc.Cache(800) as cache:
        first = rc.ap(grown, 1)
        others = [rc.ap(np.add, first, number) for number in range(9)]
        others.append(rc.ap(np.ones, 40))
        assert cache.stats().used == 720
        rc.ap(grown, 1)
        stats = cache.stats()
        assert (stats.peak, stats.overshoot) == (1200, 400)  # 720 bytes and 480 before any of them could be evicted


@given(PROGRAMS, st.integers(80, 800), st.lists(st.integers(80, 800), min_size=1, max_size=4))
def test_other_budgets(program: list[tuple[str, int]], first: int, others: list[int]) -> None:
    """With a budget that changes, the largest one counts; and what is used is never above the one that is set."""
    world = World(first)
    world.budget = max([first, *others])
    for number, budget in enumerate(others):
        run(world, program[number :: len(others)])
        try:
            world.cache.budget = budget
        except rc.BudgetError:
            continue
        stats = world.cache.stats()
        assert stats.used <= budget
        assert stats.peak <= world.budget + stats.overshoot


def test_lowered_while_bytes_are_in_use() -> None:
    """Less budget is no overshoot, whatever is held meanwhile."""
    with rc.Cache(8000) as cache:
        values = [rc.ap(np.full, 100, 1.0 * number) for number in range(10)]
        got = [value.get() for value in values[:3]]
        assert all(value.evict() for value in values[:3])
        cache.budget = 3000
        assert cache.stats().held > 0
        assert (cache.stats().peak, cache.stats().overshoot) == (8000, 0)
        with pytest.raises(rc.BudgetError, match="too small"):
            cache.budget = 1000
        assert cache.stats().overshoot == 0
        del got


def test_a_budget_that_is_a_function() -> None:
    """It may fall below what is used; that is no overshoot either, and what is made afterwards fits again."""
    limit = 8000
    with rc.Cache(lambda used: limit) as cache:
        values = [rc.ap(np.ones, 100) for _ in range(9)]
        limit = 2000
        assert cache.stats().used > limit
        values.append(rc.ap(np.ones, 100))
        assert cache.stats().used <= limit
        assert cache.stats().overshoot == 0


def test_several_devices() -> None:
    """What surprises on each of them adds up, as the peaks do."""
    with rc.Cache({"far:0": 100, "far:1": 200}) as cache:
        values = [rc.ap(Far, 90, "far:0"), rc.ap(Far, 180, "far:1")]
        values += [rc.ap(lambda: Far(50, "far:0")), rc.ap(lambda: Far(50, "far:1"))]
        stats = cache.stats()
        assert [(pool.device, pool.peak, pool.overshoot) for pool in stats.pools] == [
            ("far:0", 140, 40),
            ("far:1", 230, 30),
        ]
        assert (stats.peak, stats.overshoot) == (370, 70)


@given(st.lists(st.lists(st.integers(1, 40), max_size=8), max_size=5))
def test_laps_of_the_peak(laps: list[list[int]]) -> None:
    """The peak of each part of a run is the most in use during it, and that of the run is the greatest of them."""
    with rc.Cache() as cache:
        expected, found, used, kept = [], [], 0, []
        for lap in laps:
            most = used
            for length in lap:
                kept.append(rc.ap(np.zeros, length))
                used += 8 * length
                most = max(most, used)
                if length % 2:
                    used -= 8 * kept.pop(0).get().size
            expected.append(most)
            cache.stats()  # what has gone is seen to
            found.append(cache.extend.lap().get("cpu", 0))
        assert found == expected
        assert cache.stats().peak == max([used, *expected])


def test_small_values_are_left_alone() -> None:
    """What is smaller than that stays, and the budget is kept by what is not; if only it is there, there is no room."""
    cache = rc.Cache(2_000, settings=Settings(smallest=100))
    with cache:
        small = [rc.ap(np.full, 10, number) for number in range(10)]
        large = [rc.ap(np.full, 50, number) for number in range(10)]
        assert all(value.resident for value in small)
        assert sum(value.resident for value in large) == 3
        with pytest.raises(rc.BudgetError):
            rc.ap(np.zeros, 200)
        assert [value.get()[0] for value in small + large] == [*range(10), *range(10)]
        check_invariants(cache, small + large)


def test_an_error_says_what_would_do() -> None:
    """With as many bytes as the error names the same operation finds room."""
    cache = rc.Cache(3_000)
    with cache:
        x = rc.pure(np.zeros(200))
        rc.ap(np.negative, rc.ap(np.ones, 10))
        with pytest.raises(rc.BudgetError) as error:
            rc.ap(np.zeros, 300)
        assert (error.value.device, error.value.operation) == ("cpu", "zeros")
        assert error.value.needed == 1600 + 2400
        cache.budget = error.value.needed
        assert rc.ap(np.zeros, 300).resident
        assert x.resident


def test_arguments_that_can_never_fit_are_not_tried() -> None:
    """An operation whose arguments exceed the budget together fails at once: nothing is computed again for it."""
    with rc.Cache(20_000) as cache:
        parts = [rc.ap(bytes, 1000) for _ in range(30)]
        evicted = [part for part in parts if not part.resident]
        before = cache.stats()
        with pytest.raises(rc.BudgetError, match="more on cpu"):
            rc.ap(b"".join, parts)
        after = cache.stats()
        check_invariants(cache, parts)
        assert evicted
        assert (after.rematerializations, after.evictions) == (before.rematerializations, before.evictions)
        assert all(part.get() == bytes(1000) for part in parts)


@pytest.mark.parametrize("nest", [lambda inner: [inner], lambda inner: {"a": inner, "b": inner}])
def test_values_that_are_nested_deeply(nest: Callable[[Any], Any]) -> None:
    """What decides the sizes of results is found without going into all of a value."""
    value: Any = 1
    for _ in range(10_000):
        value = nest(value)
    with rc.Cache() as cache:
        held = rc.ap(lambda: value, nbytes=8)
        assert rc.ap(len, held).get() == len(value)
        assert rc.ap(lambda value: value, value=held, nbytes=8).get() is value
        check_invariants(cache, [held])
    while value != 1:  # or its destructor would go as deep
        value = value[0] if isinstance(value, list) else value["a"]


class Live:
    """Bytes that count how many of them there are at once."""

    now = peak = 0

    def __init__(self, size: int) -> None:
        self.size = size
        Live.now += size
        Live.peak = max(Live.peak, Live.now)

    def __del__(self) -> None:
        Live.now -= self.size


rc.register_size(Live, lambda live: live.size)


def large(*_: Any) -> Live:
    return Live(1_000_000)


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_what_is_dropped_is_destroyed_before_its_bytes_are_used_again(release: Any) -> None:
    """A chain of three comes back in the memory of two, whatever is dropped on the way."""
    before = Live.now
    with rc.Cache(2_000_000, release=release) as cache:
        a = rc.ap(large)
        b = rc.ap(large, a)
        x = rc.ap(large, b)
        b.evict()
        x.evict()
        del a
        Live.peak = Live.now
        x.get()
        assert Live.peak - before <= 2_000_000
        assert cache.stats().overshoot == 0
        check_invariants(cache, [b, x])


def test_an_argument_whose_last_reference_goes_as_its_operation_runs_is_destroyed_before_the_next_one() -> None:
    """The bytes of a value that another thread lets go of are not used while it is still there."""
    keep: list[Any] = []

    def second(_: Any) -> Live:
        keep.clear()  # as another thread may
        return Live(1_000_000)

    before = Live.now
    with rc.Cache(2_000_000) as cache:
        a = rc.ap(large)
        b = rc.ap(second, a, nbytes=1_000_000)
        x = rc.ap(large, b, nbytes=1_000_000)
        for value in (a, b, x):
            value.evict()
        keep.append(a)
        del a, value
        Live.peak = Live.now
        x.get()
        assert Live.peak - before <= 2_000_000
        assert cache.stats().overshoot == 0
        check_invariants(cache, [b, x])


def test_threads_that_say_what_they_make_stay_within_the_budget() -> None:
    """Eight threads with declared sizes never exceed the budget together, and no byte is counted twice."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            cache = rc.Cache(1_000_000)
            kept: list[Any] = []

            def work(number: int, cache: rc.Cache = cache, kept: list[Any] = kept) -> None:
                with cache:
                    for more in range(4):
                        size = 100_000 + 100 * (8 * more + number)
                        kept.append(rc.ap(bytearray, size, nbytes=size + 57))

            threads = [Thread(target=work, args=[number], daemon=True) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "deadlock"
            stats = cache.stats()
            assert (stats.overshoot, stats.peak <= 1_000_000) == (0, True)
            check_invariants(cache, kept)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_a_first_result_of_unknown_size_takes_the_place_of_the_arguments(release: Any) -> None:
    """What a function has taken may be evicted for what it made; once its size is known, that is an error."""
    with rc.Cache(2_500, release=release) as cache:
        x = rc.ap(np.zeros, 125)
        y = rc.ap(lambda x: np.concatenate([x, x]), x)
        assert y.resident
        assert not x.resident
        assert cache.stats().used <= 2_500
        assert cache.stats().overshoot > 0
        assert within(cache, 2_500)
        with pytest.raises(rc.BudgetError, match="locked"):  # its size is known now
            rc.ap(lambda x: np.concatenate([x, x]), x, nbytes=2_000)
        check_invariants(cache, [x, y])


def test_a_first_result_that_never_fits_leaves_its_arguments_as_they_were() -> None:
    """The arguments of an operation that failed so are needed by nobody but those who refer to them."""
    with rc.Cache(2_500) as cache:
        x, z = rc.ap(np.zeros, 125), rc.ap(np.ones, 100)
        with pytest.raises(rc.BudgetError, match="larger than the whole budget"):
            rc.ap(lambda x, z: np.zeros(1000), x, z)
        check_invariants(cache, [x, z])
        assert x.get().sum() == 0
        assert z.get().sum() == 100
        del x, z
        assert cache.stats().used == 0
        check_invariants(cache)
