"""Random numbers: a repeated run draws what the first drew, and later draws of the program are what they would be."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._engine import randomness, reach
from recompute.testing import Identity, check_invariants

RNG = np.random.default_rng(0)
LEGACY = np.random.RandomState(0)
PLAIN = random.Random(0)


class Holder:
    """An object with a generator in an attribute."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng
        self.calls = 0

    def draw(self, *_: Any) -> Any:
        self.calls += 1
        return self.rng.random()

    def through(self, *_: Any) -> Any:
        return self.draw()

    def global_state(self, *_: Any) -> Any:
        return self.helped()

    def helped(self) -> Any:
        return np.random.random_sample()


class Slotted:
    __slots__ = ("__rng",)

    def __init__(self, rng: Any) -> None:
        self.__rng = rng

    def draw(self, *_: Any) -> Any:
        return self.__rng.random()


class OfClass:
    rng = np.random.default_rng(0)

    def draw(self, *_: Any) -> Any:
        return self.rng.random()


OBJECT = Holder(np.random.default_rng(0))


def helper() -> Any:
    return RNG.random()


def by_name(*_: Any) -> Any:
    return helper() + random.random()


def local_import(*_: Any) -> Any:
    import numpy
    from numpy.random import rand

    return numpy.random.rand() + rand()


def defaulted(*_: Any, rng: Any = RNG) -> Any:
    return rng.random()


def through_an_object(*_: Any) -> Any:
    return OBJECT.draw()


def closing_over(rng: Any) -> Callable[..., Any]:
    return lambda *_: rng.random()


def drawn_from(rng: Any, *_: Any) -> Any:
    return (rng[0] if isinstance(rng, list) else rng).random()


def drawn_by(holder: Any, *_: Any) -> Any:
    return holder.draw()


GENERATORS: dict[str, Callable[[int], Any]] = {
    "Generator": np.random.default_rng,
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "RandomState": np.random.RandomState,
    "Random": random.Random,
}


def _random(generator: Any) -> Callable[..., Any]:
    return lambda *_: generator.random()


WAYS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "bound method": lambda rng: (rng.random,),
    "partial": lambda rng: (partial(rng.random),),
    "partial of an argument": lambda rng: (partial(drawn_from, rng),),
    "closure": lambda rng: (closing_over(rng),),
    "closure of a closure": lambda rng: (partial(closing_over(rng)),),
    "attribute": lambda rng: (Holder(rng).draw,),
    "attribute, by another method": lambda rng: (Holder(rng).through,),
    "attribute of an attribute": lambda rng: (Holder(Holder(rng).rng).draw,),
    "slot": lambda rng: (Slotted(rng).draw,),
    "object in a closure": lambda rng: ((lambda holder: lambda *_: holder.draw())(Holder(rng)),),
    "namespace in a list": lambda rng: ((lambda parts: lambda *_: parts[0].rng.random())([SimpleNamespace(rng=rng)]),),
    "argument": lambda rng: (drawn_from, rng),
    "argument in a list": lambda rng: (drawn_from, [rng]),
    "argument with an attribute": lambda rng: (drawn_by, Holder(rng)),
    "method as an argument": lambda rng: (lambda draw: draw(), rng.random),
    "method called twice as an argument": lambda rng: (lambda draw: [draw(), draw()], rng.random),
}
FIXED: dict[str, Callable[..., Any]] = {
    "np.random": np.random.random_sample,
    "a lambda over np.random": lambda *_: np.random.random_sample(),
    "random": random.random,
    "a lambda over random": lambda *_: random.gauss(0, 1),
    "a global": lambda *_: RNG.random() + LEGACY.rand() + PLAIN.random(),
    "names of names": by_name,
    "a local import": local_import,
    "a default": defaulted,
    "a method of a global": through_an_object,
    "an attribute of the class": OfClass().draw,
    "a method's names": Holder(None).global_state,
}


def seed_all() -> None:
    random.seed(1)
    np.random.seed(1)
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state
    OBJECT.rng.bit_generator.state = np.random.default_rng(2).bit_generator.state
    OfClass.rng.bit_generator.state = np.random.default_rng(3).bit_generator.state
    LEGACY.seed(1)
    PLAIN.seed(1)


Call = tuple[Any, ...]


def run(surface: Any, calls: list[Call], evictions: list[tuple[int, int]]) -> list[Any]:
    """What a program sees that draws, evicts and looks again: values, values again, and later draws."""
    values: list[Any] = []
    seen: list[Any] = []
    for number, call in enumerate(calls):
        values.append(surface.ap(*call))
        for when, which in evictions:
            if when == number and which < len(values):
                values[which].evict()
                seen.append(values[which].get())
    seen += [value.get() for value in values]
    for value in values:
        value.evict()
    seen += [value.get() for value in reversed(values)]
    seed_free = [np.random.random_sample(), random.random(), RNG.random(), LEGACY.rand(), PLAIN.random()]
    return seen + seed_free


programs = st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.sampled_from(sorted(GENERATORS))), max_size=4)
fixed = st.lists(st.sampled_from(sorted(FIXED)), max_size=4)
whens = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=6)


def calls_of(ways: list[tuple[str, str]], names: list[str], times: int) -> list[Call]:
    """Each way `times` times, with one generator for all of them that are alike."""
    seed_all()
    made = {kind: GENERATORS[kind](7) for kind in sorted({kind for _, kind in ways})}
    calls = [WAYS[way](made[kind]) for way, kind in ways]
    return (calls + [(FIXED[name],) for name in names]) * times


@given(programs, fixed, whens)
def test_a_repeated_run_draws_what_the_first_drew(
    ways: list[tuple[str, str]], names: list[str], evictions: list[tuple[int, int]]
) -> None:
    """However a generator is held, and whenever values are evicted, a program sees what it sees without a cache."""
    expected = run(Identity, calls_of(ways, names, 2), evictions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rc.Cache() as cache:
            assert run(rc, calls_of(ways, names, 2), evictions) == expected
            check_invariants(cache)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GENERATORS)
def test_each_way_of_holding_each_generator(way: str, kind: str) -> None:
    """The same for each way with each kind of generator by itself."""
    expected = run(Identity, calls_of([(way, kind)], [], 3), [(1, 0)])
    with rc.Cache():
        assert run(rc, calls_of([(way, kind)], [], 3), [(1, 0)]) == expected


@pytest.mark.parametrize("name", FIXED)
def test_each_global_state(name: str) -> None:
    """The same for each way that leads to a generator of a module."""
    expected = run(Identity, calls_of([], [name], 3), [(1, 0)])
    with rc.Cache():
        assert run(rc, calls_of([], [name], 3), [(1, 0)]) == expected


def test_a_generator_that_is_rebound_later() -> None:
    """A repeated run draws from the generator that the name was bound to then."""
    values = []
    with rc.Cache():
        for seed in range(3):
            rng = np.random.default_rng(seed)
            values.append(rc.ap(lambda: rng.random()))  # noqa: B023
        first = [value.get() for value in values]
        for value in values:
            value.evict()
        assert [value.get() for value in values] == first == [np.random.default_rng(n).random() for n in range(3)]


def test_functions_of_other_libraries() -> None:
    """SciPy's distributions and pandas' samples draw from NumPy's global state, by names several functions deep."""
    stats = pytest.importorskip("scipy.stats")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(100)})
    np.random.seed(1)
    with rc.Cache():
        for call in (
            (stats.norm.rvs, 0, 1, 5),
            (stats.expon(scale=2).rvs, 5),
            (frame.sample, 5),
            (pandas.DataFrame.sample, frame, 5),
        ):
            value = rc.ap(*call)
            first = np.array(value.get())
            after: Any = np.random.get_state()
            value.evict()
            assert np.array_equal(value.get(), first)
            now: Any = np.random.get_state()
            assert np.array_equal(now[1], after[1])


def test_nested_operations() -> None:
    """An operation that draws, makes operations that draw, and asks for evicted ones, draws the same again."""
    rng = np.random.default_rng(1)
    with rc.Cache():
        below = rc.ap(lambda: rng.random())

        def outer() -> list[float]:
            first = rng.random()
            inner = rc.ap(lambda: rng.random()).get()
            below.evict()
            return [first, inner, below.get(), rng.random()]

        value = rc.ap(outer)
        first = value.get()
        later = rng.bit_generator.state
        expected = np.random.default_rng(1).random(4)
        assert first == [expected[1], expected[2], expected[0], expected[3]]
        value.evict()
        assert value.get() == first
        assert rng.bit_generator.state == later


def test_threads_that_share_a_generator() -> None:
    """Threads that draw through a cache and recompute what was evicted see each number once, and all of them."""
    rng = np.random.default_rng(3)
    count, threads = 40, 4
    with rc.Cache() as cache:

        def work() -> list[tuple[Any, float]]:
            made = []
            with cache:
                for _ in range(count):
                    value = rc.ap(lambda: rng.random())
                    made.append((value, value.get()))
                    value.evict()
                    assert value.get() == made[-1][1]
            return made

        with ThreadPoolExecutor(threads) as pool:
            all_made = [one for part in pool.map(lambda _: work(), range(threads)) for one in part]
        drawn = sorted(number for _, number in all_made)
        assert drawn == sorted(np.random.default_rng(3).random(count * threads))
        for value, _ in all_made:
            value.evict()
        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(lambda one: one[0].get() == one[1], all_made)) == [True] * len(all_made)


def test_another_thread_may_draw_itself_meanwhile() -> None:
    """While a method of a generator is repeated, the generator itself is not touched."""
    rng = np.random.default_rng(1)
    with rc.Cache():
        values = [rc.ap(rng.random, 100) for _ in range(20)]
        first = [np.array(value.get()) for value in values]
        for value in values:
            value.evict()
        drawn: list[float] = []
        thread = threading.Thread(target=lambda: drawn.extend(rng.random() for _ in range(2000)))
        thread.start()
        assert all(np.array_equal(value.get(), before) for value, before in zip(values, first, strict=True))
        thread.join()
    expected = np.random.default_rng(1)
    expected.random(2000)
    assert drawn == list(expected.random(2000))


def test_a_thread_that_waits_inside_lends_its_turn() -> None:
    """Two threads draw from one generator, and one of them waits inside for what the other is computing."""
    rng = np.random.default_rng(1)
    inside = threading.Event()
    with rc.Cache() as cache:
        in_flight = cache._engine.scheduler.in_flight
        waits = [False]
        below = rc.ap(lambda: rng.random())
        expected = below.get()
        below.evict()

        def outer() -> list[float]:
            one = rng.random()
            inside.set()
            while waits[0] and below._node.operation not in in_flight:
                sleep(0)  # until the other thread is about to compute it
            return [one, below.get() if waits[0] else expected, rng.random()]  # not known to be needed

        above = rc.ap(outer)
        first = above.get()
        state = rng.bit_generator.state
        for value in (below, above):
            value.evict()
        waits[0] = True
        inside.clear()
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(above.get)
            inside.wait()
            other = pool.submit(below.get)
            assert one.result(timeout=60) == first
            assert other.result(timeout=60) == expected
        assert rng.bit_generator.state == state
        check_invariants(cache)


def test_states_are_counted_once() -> None:
    """Operations that began in one state share its bytes, which count until none needs them."""
    rng = np.random.Generator(np.random.MT19937(1))
    state = rng.bit_generator.state
    with rc.Cache() as cache:
        values = []
        for _ in range(3):
            rng.bit_generator.state = state
            values.append(rc.ap(lambda: rng.random()))
        used = cache.stats().used
        assert 2_500 < used < 3_000
        values.append(rc.ap(lambda: rng.random()))
        assert 2 * 2_500 < cache.stats().used < 2 * 3_000
        check_invariants(cache)
        values.clear()
        assert cache.stats().used == 0


def test_budgets_hold_with_states() -> None:
    """What states take is part of the budget."""
    rng = np.random.RandomState(1)
    with rc.Cache("40kB") as cache:
        values = [rc.ap(lambda: rng.rand(100)) for _ in range(10)]
        first = np.random.RandomState(1).rand(10, 100)
        for value, expected in zip(values, first, strict=True):
            assert np.array_equal(value.get(), expected)
        stats = cache.stats()
        assert stats.peak <= 40_000 + stats.overshoot
        check_invariants(cache)


def test_an_operation_that_draws_nothing_keeps_no_state() -> None:
    """Nothing is remembered of a generator that an operation could have drawn from, and did not."""
    rng = np.random.default_rng(1)
    with rc.Cache() as cache:
        value = rc.ap(lambda: 0 if rng is None else 1)
        operation = value._node.operation
        assert operation is not None
        assert operation.options is None
        assert cache.stats().used == rc.sizeof(1)


@pytest.fixture
def afresh() -> Iterator[None]:
    randomness._told.clear()
    yield
    randomness._told.clear()


@pytest.mark.usefixtures("afresh")
def test_what_cannot_be_restored_is_said_once() -> None:
    """At the first run, once for a function, with the name of the generator and the cure."""
    system = random.SystemRandom()
    with rc.Cache():

        def draw() -> float:
            return system.random()

        with pytest.warns(rc.RandomWarning, match=r"draw \(created at .*SystemRandom has no state.*pass .* a seed"):
            rc.ap(draw)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rc.ap(draw)


@pytest.mark.usefixtures("afresh")
def test_spawned_children_are_said() -> None:
    """How many children a generator has cannot be set, which is said at the first run; a method gets a copy."""
    rng = np.random.default_rng(1)
    with rc.Cache():
        with pytest.warns(rc.RandomWarning, match="children were spawned"):
            rc.ap(lambda: [child.random() for child in rng.spawn(2)])
        value = rc.ap(rng.spawn, 1)
        first = value.get()[0].bit_generator.state
        value.evict()
        assert value.get()[0].bit_generator.state == first


@pytest.mark.usefixtures("afresh")
def test_a_generator_that_is_a_result_is_said() -> None:
    """A generator that an operation made comes back as it was made: drawing from it is changing a result in place."""
    with rc.Cache():
        made = rc.ap(np.random.default_rng, 1)
        with pytest.warns(rc.RandomWarning, match="is part of a value that may be evicted"):
            rc.ap(drawn_from, made)


@pytest.mark.usefixtures("afresh")
def test_a_repeated_run_that_draws_otherwise_is_said() -> None:
    """A function whose repeated run draws more than the first did is named."""
    rng, runs = np.random.default_rng(1), []

    def draw() -> float:
        runs.append(1)
        return sum(rng.random() for _ in runs)

    with rc.Cache():
        value = rc.ap(draw)
        value.evict()
        with pytest.warns(rc.RandomWarning, match="was drawn from otherwise in a repeated run"):
            value.get()


def test_an_error_in_a_repeated_run_puts_generators_back() -> None:
    """A fault leaves the generator as it found it."""
    rng = np.random.default_rng(1)
    fails: list[int] = []

    def draw() -> float:
        number = rng.random()
        if fails:
            raise OSError("no")
        return number

    with rc.Cache():
        value = rc.ap(draw)
        state = rng.bit_generator.state
        value.evict()
        fails.append(1)
        with pytest.raises(OSError, match="no"):
            value.get()
        assert rng.bit_generator.state == state
        fails.clear()
        assert value.get() == np.random.default_rng(1).random()


def test_what_a_function_names_is_found_once_for_its_code() -> None:
    """A second operation of the same code is not read again."""
    reach._reaches.clear()
    reads: list[Any] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is reach._follow.__code__:
            reads.append(frame.f_locals["function"])

    with rc.Cache():
        sys.setprofile(look)
        try:
            for number in range(5):
                rc.ap(lambda value: helper() + value, number)
        finally:
            sys.setprofile(None)
    assert len(reads) == 1


def test_objects_that_cannot_be_looked_into() -> None:
    """What hides its attributes, or has code in their place, is passed over, and none of that code runs."""

    class Hiding:
        def __getattribute__(self, name: str) -> Any:
            raise OSError(name)

    class Pretending:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise OSError("no")

    rng = np.random.default_rng(1)
    hidden: list[Any] = [Hiding(), Pretending(), asyncio.new_event_loop(), threading.Lock(), rng]
    with rc.Cache():
        value = rc.ap(lambda: hidden[4].random())
        first = value.get()
        value.evict()
        assert value.get() == first
    hidden[2].close()


def test_a_name_that_was_built_in() -> None:
    """A module gives it another meaning between two operations: then it is looked at, whatever the globals are."""

    class Globals(dict[str, Any]):
        pass

    for program in ({}, Globals()):
        exec("def work(): return float(len('ab'))", program)
        with rc.Cache():
            assert rc.ap(program["work"]).get() == 2.0
            program["rng"] = np.random.default_rng(1)
            exec("def len(text): return rng.random()", program)
            value = rc.ap(program["work"])
            first = value.get()
            value.evict()
            assert value.get() == first


def test_a_function_that_is_defined_again() -> None:
    """As in a notebook: a helper that did not draw is replaced by one that does, under the same name."""
    program: dict[str, Any] = {"rng": np.random.default_rng(1)}
    exec("def helper(): return 3\ndef work(): return helper()", program)
    with rc.Cache():
        rc.ap(program["work"])
        exec("def helper(): return rng.random()", program)
        value = rc.ap(program["work"])
        first = value.get()
        value.evict()
        assert value.get() == first


def test_nothing_is_kept_alive() -> None:
    """What a function names, closes over, or is a method of goes with it."""
    gone = []
    with rc.Cache():
        for _ in range(3):
            holder = Holder(np.random.default_rng(1))
            value = rc.ap((lambda inner: lambda: inner.draw())(holder))
            gone.append(weakref.ref(holder))
            value = rc.ap(holder.through)
            del holder, value
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3
