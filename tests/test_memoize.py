"""`memoize`: the same arguments give the same Recomputable, in bounded memory, whatever threads and errors do."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._memoize import _Table
from recompute.testing import check_invariants

arguments = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 2.5]) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=1), inner),
    max_leaves=4,
)


@rc.memoize
def module_level(value: Any) -> Any:
    return [value]


class Model(OrderedDict[Any, int]):
    """What `lru_cache` of the same size would remember: an ordered dict of calls, by equality."""

    def call(self, key: Any, most: int) -> bool:
        hit = key in self
        self[key] = 1
        self.move_to_end(key)
        if len(self) > most:
            self.popitem(last=False)
        return hit


@given(st.lists(st.integers(0, 6)), st.integers(1, 4))
def test_the_least_recently_used_call_is_forgotten(calls: list[int], most: int) -> None:
    """Hits, misses and the number of entries are those of `functools.lru_cache`, call by call."""
    expected = functools.lru_cache(most)(lambda value: [value])
    with rc.Cache() as cache:
        function = rc.memoize(lambda value: [value], max_entries=most)
        for value in calls:
            assert function(value).get() == expected(value)
            assert tuple(function.cache_info()) == tuple(expected.cache_info())
        check_invariants(cache)


@given(st.lists(st.tuples(arguments, st.booleans()), max_size=12))
def test_equal_arguments_give_the_same_recomputable(calls: list[tuple[Any, bool]]) -> None:
    """Whatever is evicted: calls with equal arguments give one Recomputable, others give another."""
    seen: list[tuple[Any, Any]] = []
    with rc.Cache():
        function = rc.memoize(lambda value: [value], typed=True)
        for value, evict in calls:
            made = function(value)
            assert made.get() == [value]
            same = [other for known, other in seen if repr(known) == repr(value)]
            assert all(made is other for other in same)
            assert all(made is not other for known, other in seen if known != value)
            seen.append((value, made))
            if evict:
                made.evict()


def test_typed() -> None:
    """`1`, `1.0` and `True` are one call, or three if types count: as with `lru_cache`."""
    with rc.Cache():
        for typed, entries in ((False, 1), (True, 3)):
            function = rc.memoize(str, typed=typed)
            for value in (1, 1.0, True):
                function(value)
            assert function.cache_info().currsize == entries
            assert function.cache_parameters() == {"maxsize": 16_384, "typed": typed}


def test_arrays_count_by_content() -> None:
    """Equal arrays are one call, a changed one is another, and no identity is used again."""
    with rc.Cache():
        function = rc.memoize(np.sum)
        values = np.arange(1000.0)
        first = function(values)
        assert function(values.copy()) is first
        assert function(values.astype(np.float32)) is not first
        values[500] = 0
        assert function(values).get() == np.arange(1000.0).sum() - 500
        for number in range(50):
            assert function(np.full(10, float(number))).get() == 10 * number


def test_arrays_that_differ_only_in_what_is_said_beside_their_numbers_are_different_calls() -> None:
    """The metadata of a dtype, also inside of a record, and how a masked array is filled or written to, count."""

    @rc.memoize
    def same(array: Any) -> Any:
        return array

    def plain(unit: str) -> Any:
        return np.zeros(3, np.dtype("f8", metadata={"unit": unit}))

    def record(unit: str) -> Any:
        return np.zeros(3, np.dtype([("a", np.dtype("f8", metadata={"unit": unit}), 2)]))

    def masked(fill: float, *, hard: bool = False) -> Any:
        return np.ma.array([1.0, 2.0], mask=[True, False], fill_value=fill, hard_mask=hard)

    with rc.Cache():
        assert same(plain("m")) is same(plain("m"))
        assert [same(plain(unit)).get().dtype.metadata["unit"] for unit in ("m", "km")] == ["m", "km"]
        assert [same(record(unit)).get().dtype["a"].base.metadata["unit"] for unit in ("m", "km")] == ["m", "km"]
        assert same(masked(7)) is same(masked(7))
        assert [same(masked(fill)).get().filled()[0] for fill in (7, 8)] == [7, 8]
        assert [same(masked(7, hard=hard)).get().hardmask for hard in (True, False)] == [True, False]


def test_a_result_that_is_changed_in_place_is_not_what_later_calls_return() -> None:
    """A wrapped array refers to something else then, whether it was changed itself or through a view."""
    doubled: Any = rc.memoize(lambda x: x * 2)
    with rc.Cache():
        source = rc.array(np.ones(3))
        first = doubled(source)
        assert doubled(source) is first
        first += 1
        second = doubled(source)
        assert (first.get().tolist(), second.get().tolist()) == ([3, 3, 3], [2, 2, 2])
        assert doubled(source) is second
        second[:1][...] = 7
        assert (second.get().tolist(), doubled(source).get().tolist()) == ([7, 2, 2], [2, 2, 2])


def test_recomputables_count_by_value() -> None:
    """A Recomputable among the arguments is told from others by what it refers to."""
    with rc.Cache() as cache:
        function = rc.memoize(np.add)
        x, y = rc.pure(np.ones(3)), rc.pure(np.ones(3))
        first = function(x, y)
        assert function(x, y) is first
        assert function(y, x) is not first
        first.evict()
        assert (first.get() == 2).all()
        del x, y, first
        function.cache_clear()
        gc.collect()
        assert cache.stats().used == 0


def test_results_are_the_business_of_the_budget() -> None:
    """A hundred results of 10 kB are remembered in 50 kB."""
    with rc.Cache("50kB") as cache:
        function = rc.memoize(lambda number: bytes(10_000 + number))
        values = [function(number) for number in range(100)]
        assert [len(function(number).get()) for number in range(100)] == [10_000 + number for number in range(100)]
        assert all(function(number) is value for number, value in enumerate(values))
        assert function.cache_info().misses == 100
        assert cache.stats().peak <= 50_000 + cache.stats().overshoot


def test_entries_belong_to_the_cache_of_the_call() -> None:
    """A function decorated before there is a cache remembers for each cache by itself, and entries go with it."""
    with rc.Cache() as one:
        first = module_level(1)
        assert module_level(1) is first
        assert module_level.cache_info() == (1, 1, 16_384, 1)
    with rc.Cache():
        assert module_level(1) is not first
        assert module_level.cache_info().currsize == 1
    gone = weakref.ref(one)
    del one, first
    gc.collect()
    assert gone() is None


def test_a_fixed_cache() -> None:
    """`cache=` is where calls go, wherever they are made; arguments of another cache are refused."""
    fixed = rc.Cache()
    function = rc.memoize(np.negative, cache=fixed)
    with rc.Cache() as other:
        assert function(1).cache is fixed
        assert function.cache_info().currsize == 1
        assert other.stats().operations == 0
        with pytest.raises(ValueError, match="belong to two caches"):
            function(rc.pure(1))


def test_a_key() -> None:
    """`key=` says what tells calls apart; what cannot be hashed is refused."""
    with rc.Cache():
        function = rc.memoize(lambda path, log: [path], key=lambda path, log: path)
        assert function("a", object()) is function("a", object())
        wrong = rc.memoize(str, key=lambda value: [value])  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match=r"the key of a call of str cannot be hashed: \[1\]"):
            wrong(1)


def test_names_of_arguments() -> None:
    """An argument by name is another call than one by position, and the names count."""
    with rc.Cache():
        function = rc.memoize(lambda *args, **kwargs: (args, kwargs))
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((), {}),
            ((1,), {}),
            ((), {"a": 1}),
            ((), {"b": 1}),
            (("a", 1), {}),
        ]
        for args, kwargs in calls * 2:
            assert function(*args, **kwargs).get() == (args, kwargs)
        assert function.cache_info().misses == len(calls)


def test_what_cannot_be_told_apart_is_refused() -> None:
    """An argument without hash and digest gets one error that names the cure."""

    class Opaque:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.lock = threading.Lock()

    with rc.Cache(), pytest.raises(TypeError, match="Opaque among them can neither be hashed nor digested; pass key="):
        rc.memoize(str)(Opaque())


def test_long_keys_are_not_kept() -> None:
    """Of a long text among the arguments the table keeps a digest; the result is told from that of another text."""
    with rc.Cache():
        function = rc.memoize(len)
        assert function("a" * 10_000).get() == 10_000
        assert function("b" * 10_000) is not function("a" * 10_000)
        assert function("a" * 10_000) is function("a" * 9_999 + "a")


def test_threads_compute_once() -> None:
    """Threads that call at the same time get one Recomputable of one run."""
    runs: list[int] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> int:
        runs.append(number)
        return number

    with rc.Cache() as cache:
        function = rc.memoize(work)

        def call(_: int) -> list[Any]:
            with cache:
                barrier.wait()
                return [function(number) for number in range(50)]

        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(call, range(4)))
    assert sorted(runs) == list(range(50))
    assert all(one is other for row in made for one, other in zip(row, made[0], strict=True))


def test_exceptions_are_not_remembered() -> None:
    """A call that raises is made again."""
    fails = [True]

    def work() -> int:
        if fails:
            raise OSError("no")
        return 1

    with rc.Cache():
        function = rc.memoize(work)
        with pytest.raises(OSError, match="no"):
            function()
        assert function.cache_info().currsize == 0
        fails.clear()
        assert function().get() == 1


def test_recursion() -> None:
    """A memoized function may call itself: each number is computed once."""
    with rc.Cache() as cache:

        @rc.memoize
        def fibonacci(number: int) -> int:
            return number if number < 2 else fibonacci(number - 1).get() + fibonacci(number - 2).get()

        assert fibonacci(20).get() == 6765
        assert fibonacci.cache_info().misses == 21
        check_invariants(cache)


def test_recursion_without_an_end() -> None:
    """RecursionError, as without the cache, wherever Python notices it; afterwards nothing is left."""
    numbers = {"more": [1, 2, 3]}
    with rc.Cache() as cache:

        @rc.memoize
        def endless(number: int) -> int:
            return endless(number).get() + len(numbers)

        with pytest.raises(RecursionError):
            endless(1)
        assert endless.cache_info().currsize == cache.stats().used == 0
        check_invariants(cache)


def test_methods() -> None:
    """Calls of a method are told apart by the instance; class methods and static methods work."""

    class Scale:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @rc.memoize
        def times(self, number: int) -> int:
            return self.factor * number

        @classmethod
        @rc.memoize
        def name(cls) -> str:
            return cls.__name__

        @staticmethod
        @rc.memoize
        def twice(number: int) -> int:
            return 2 * number

    with rc.Cache():
        two, three = Scale(2), Scale(3)
        assert (two.times(5).get(), three.times(5).get()) == (10, 15)
        assert two.times(5) is two.times(5)
        assert Scale.times(two, 5) is two.times(5)
        assert Scale.name() is two.name()
        assert Scale.twice(4).get() == two.twice(4).get() == 8
        assert Scale.times.cache_info().currsize == 2


def test_what_is_refused() -> None:
    """Functions whose result can be read once, and options that make no sense."""

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield 1

    for function, what in ((coroutine, "a coroutine function"), (generator, "a generator function")):
        with pytest.raises(TypeError, match=f"is {what}.*memoize a plain function"):
            rc.memoize(function)
    with pytest.raises(TypeError, match="memoize takes a function, not 10"):
        rc.memoize(10)  # type: ignore[call-overload]
    wrong: Any
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_entries must be a whole number"):
            rc.memoize(str, max_entries=wrong)


def test_it_stands_for_the_function() -> None:
    """Name, doc, `__wrapped__`, repr and pickle are those of a decorated function."""
    assert module_level.__name__ == "module_level"
    assert module_level.__wrapped__(3) == [3]
    assert repr(module_level) == "<memoized module_level>"
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_a_key_that_calls_the_function_when_it_is_compared_waits_for_nothing() -> None:
    """What compares keys may use what is remembered, and forget it."""

    class Key:
        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            function(0)
            if self.number == 2:
                function.cache_clear()
            return isinstance(other, Key) and self.number == other.number

    @rc.memoize
    def function(key: Any) -> int:
        return 7

    def work() -> None:
        with rc.Cache() as cache:
            for number in (1, 1, 2, 2, 3):
                assert function(Key(number)).get() == 7
            check_invariants(cache)
        done.set()

    done = threading.Event()
    threading.Thread(target=work, daemon=True).start()
    assert done.wait(30)


def test_an_argument_that_contains_itself_is_an_error_that_names_the_cure() -> None:
    """As for `ap`, but with what `memoize` has for it."""
    circle: list[Any] = []
    circle.append(circle)
    with rc.Cache(), pytest.raises(ValueError, match="contains itself; pass key="):
        module_level(circle)


@pytest.mark.parametrize("options", [{"cache": 3}, {"cache": rc.Cache}, {"key": 3}])
def test_wrong_options_are_errors_at_once(options: dict[str, Any]) -> None:
    """Not at the first call."""
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be a"):
        rc.memoize(len, **options)


def test_an_interrupted_call_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays: it is no call that others wait for."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with rc.Cache():
        monkeypatch.setattr(_Table, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            module_level("interrupted")
        monkeypatch.undo()
        before = module_level.cache_info().currsize
        assert module_level("interrupted") is module_level("interrupted")
        assert (before, module_level.cache_info().currsize) == (0, 1)


class Tensor:
    """Hashable by identity, as tensors of PyTorch are, though its content may change."""

    def __init__(self, content: bytes, device: str = "cpu", requires_grad: bool = False) -> None:
        self.content = content
        self.device = device
        self.requires_grad = requires_grad


class TensorAdapter(rc.adapters.Adapter):
    name = "tensors of this test"

    def nbytes(self, value: Any) -> int:
        return len(value.content)

    def device(self, value: Any) -> str:
        return str(value.device)

    def fingerprint(self, value: Any) -> bytes:
        return bytes(value.content)


rc.adapters.register(Tensor, TensorAdapter())


def test_what_an_adapter_digests_counts_by_content() -> None:
    """Also if it can be hashed, by identity: a copy is the same call, what was changed in place is another one."""
    with rc.Cache():
        tensor = Tensor(b"ab")
        first = module_level(tensor)
        assert module_level(copy.deepcopy(tensor)) is first
        assert module_level([[tensor]]) is module_level([[copy.copy(tensor)]])
        tensor.content = b"ac"
        assert module_level(tensor) is not first
        assert module_level(Tensor(b"ab", "gpu")) is not first


def test_what_requires_gradients_counts_by_identity_too() -> None:
    """Gradients of a result go to the very argument that it was computed from."""
    with rc.Cache():
        weights, others = Tensor(b"ab", requires_grad=True), Tensor(b"ab", requires_grad=True)
        first = module_level(weights)
        assert module_level(weights) is first
        assert module_level(others) is not first
        weights.content = b"ac"
        assert module_level(weights) is not first
