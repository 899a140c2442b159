"""A repeated run sees what the first one saw, or an error names what has changed."""

from __future__ import annotations

import pickle
import random
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import IntEnum
from fractions import Fraction
from functools import cached_property, partial, reduce, wraps
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import ManualClock, check_invariants

FACTOR = 1
COUNT = 0


def again(value: rc.Recomputable[Any]) -> Any:
    """What a repeated run gives."""
    value.evict()
    assert not value.resident
    return value.get()


# What a function is bound to


def test_functions_of_a_loop_keep_their_variable() -> None:
    """Each function sees the loop's variable as it was in its turn."""
    with rc.Cache():
        x = rc.pure(1)
        made = []
        for power in range(50):
            made.append(rc.ap(lambda value: value * power, x))  # noqa: B023  # on purpose
        assert sum(again(value) for value in made) == 1225


def test_a_small_budget_changes_no_result_of_a_loop() -> None:
    """So it is if the budget makes them run again."""
    with rc.Cache(600) as cache:
        x = rc.pure(1)
        made = [rc.pure(0)]
        for power in range(50):
            made.append(rc.ap(lambda value: bytes([power]) * (50 + value), x))  # noqa: B023  # on purpose
        assert [value.get()[0] for value in made[1:]] == list(range(50))
        assert cache.stats().rematerializations


def test_a_variable_that_is_bound_between_two_operations() -> None:
    """Each sees what it saw first, also if the variable was not bound before."""

    def function(number: int) -> int:
        return number and power

    with rc.Cache():
        made = [rc.ap(function, 0)]
        for power in range(5, 8):  # noqa: B007  # on purpose
            made.append(rc.ap(function, 1))
        for value, expected in zip(made, [0, 5, 6, 7], strict=True):
            assert again(value) == expected


def test_functions_of_one_code_keep_their_names() -> None:
    """A function is not taken for another one that was there before it."""

    def named(name: str) -> Callable[[], str]:
        def function() -> str:
            return sign

        function.__qualname__ = name
        return function

    sign = "one object"
    with rc.Cache():
        values = [rc.ap(named(f"function_{number}")) for number in range(20)]
        assert [value._node.operation.name for value in values] == [f"function_{number}" for number in range(20)]


def test_globals_are_seen_as_they_were() -> None:
    """What a function finds among its module's globals counts like a closure; so it is in a script's own loop."""
    global FACTOR
    with rc.Cache():
        x = rc.pure(3)
        made = []
        for FACTOR in range(5):
            made.append(rc.ap(lambda value: value * FACTOR, x))  # noqa: B023  # on purpose
        assert [again(value) for value in made] == [0, 3, 6, 9, 12]
        assert [rc.ap(lambda value: value * FACTOR, x).get()] == [12]


def test_functions_inside_of_functions_are_looked_into() -> None:
    """Decorated functions, partial ones, functions that call functions of the same closure, and those they define."""

    def decorated(function: Callable[[int], int]) -> Callable[[int], int]:
        @wraps(function)
        def inner(value: int) -> int:
            return function(value)

        return inner

    with rc.Cache():
        x = rc.pure(2)
        made = []
        for power in range(4):

            def times(value: int) -> int:
                return value * power  # noqa: B023  # on purpose

            made.append(rc.ap(decorated(times), x))
            made.append(rc.ap(partial(lambda value, more: value * power + more, more=0), x))  # noqa: B023  # on purpose
            made.append(rc.ap(lambda value: times(value), x))
            made.append(rc.ap(lambda value: sum(value * power for _ in range(1)), x))  # noqa: B023
            made.append(rc.ap(lambda function, value: function(value), times, x))
        assert [again(value) for value in made] == [2 * power for power in range(4) for _ in range(5)]


def test_a_function_that_calls_itself_goes_on() -> None:
    """What closes over itself, or over what is bound later, works as before."""

    def factorial(number: int) -> int:
        return 1 if number < 2 else number * factorial(number - 1)

    def late(number: int) -> int:
        return helper(number)

    def helper(number: int) -> int:
        return number + 1

    with rc.Cache():
        assert again(rc.ap(factorial, 5)) == 120
        assert again(rc.ap(late, 5)) == 6


def test_names_that_a_function_binds_itself_are_shared() -> None:
    """Counters, nonlocal and global ones, count every run."""
    calls = 0

    def counted(value: int) -> int:
        nonlocal calls
        global COUNT
        calls += 1
        COUNT += 1
        return value + COUNT * 0

    with rc.Cache():
        before = COUNT
        value = rc.ap(counted, rc.pure(1))
        assert again(value) == again(value) == 1
    assert calls == 3
    assert before + 3 == COUNT


class Scale:
    """Multiplies by what it is told."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def of(self, value: int) -> int:
        return value * self.factor

    def __call__(self, value: int) -> int:
        return value * self.factor


class SlottedScale:
    __slots__ = ("__weakref__", "factor")

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def of(self, value: int) -> int:
        return value * self.factor


@pytest.mark.parametrize("cls", [Scale, SlottedScale])
def test_instances_are_passed_as_they_were(cls: Any) -> None:
    """An argument is the object itself, or another instance if its attributes were set to something else."""
    seen = []

    def factor(value: int, scale: Any) -> int:
        seen.append(scale)
        return value * scale.factor  # type: ignore[no-any-return]

    with rc.Cache():
        scale = cls(2)
        made = rc.ap(factor, rc.pure(3), scale)
        assert again(made) == 6
        assert seen == [scale, scale]
        scale.factor = 5
        assert again(made) == 6
        assert scale.factor == 5
        assert seen[2] is not scale


def test_objects_that_are_called_are_shared() -> None:
    """A callable object, or one with a method that is an operation, may count its runs."""

    class Counting:
        runs = 0

        def __call__(self, value: int) -> int:
            self.runs += 1
            return value

        def method(self, value: int) -> int:
            return self(value)

    with rc.Cache():
        counting = Counting()
        again(rc.ap(counting, rc.pure(3)))
        again(rc.ap(counting.method, rc.pure(3)))
    assert counting.runs == 4


def test_methods_of_containers() -> None:
    """A method of a dict, a list or an array reads what was in it."""
    with rc.Cache():
        known, numbers, elements = {"a": 1}, [1, 2], np.ones(3)
        value, index, total = rc.ap(known.get, "a"), rc.ap(numbers.index, 2), rc.ap(elements.sum)
        known["a"] = 2
        numbers.insert(0, 7)
        assert again(value) == 1
        elements[:] = 7
        assert again(index) == 1
        assert again(total) == 3


# Plain arguments

COPIED = {
    "list": lambda: [1, 2],
    "dict": lambda: {1: 2},
    "set": lambda: {1, 2},
    "deque": lambda: deque([1, 2]),
    "bytearray": lambda: bytearray(b"ab"),
    "array": lambda: array("d", [1, 2]),
    "defaultdict": lambda: defaultdict(int, {1: 2}),
    "OrderedDict": lambda: OrderedDict({1: 2}),
    "ndarray": lambda: np.arange(3.0),
    "strided": lambda: np.arange(12.0).reshape(3, 4).T[1:],
}


@pytest.mark.parametrize("how", ["argument", "keyword", "nested"])
@pytest.mark.parametrize("what", COPIED)
def test_small_arguments_may_change_later(what: str, how: str) -> None:
    """Later runs get the argument as it was at the first, whatever the caller or the function does to it."""

    def shown(value: Any) -> str:
        value = value[0] if how == "nested" else value
        found = repr(value)
        change(value)
        return found

    def change(value: Any) -> None:
        if isinstance(value, np.ndarray):
            value[:] = 7
        elif isinstance(value, dict):
            value[1] = 7
        elif isinstance(value, set):
            value.add(7)
        else:
            value.append(7)

    argument = COPIED[what]()
    before = repr(argument)
    with rc.Cache():
        if how == "keyword":
            made = rc.ap(shown, value=argument)
        else:
            made = rc.ap(shown, argument if how == "argument" else (argument,))
        change(argument)
        assert again(made) == again(made) == before


def test_what_refuses_to_be_copied_is_passed_on() -> None:
    """A class whose instances cannot be copied, or looked into, works as an argument."""

    class Single(list[int]):
        def __copy__(self) -> Any:
            raise TypeError("there is only one")

    class Closed:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]  # on purpose
            raise ValueError("closed")

    with rc.Cache():
        assert again(rc.ap(lambda value, number: len(value) + number, Single([1]), 1)) == 2
        assert again(rc.ap(lambda value, number: number, Closed(), 1)) == 1


def test_generators_of_random_numbers_draw_the_same() -> None:
    """A generator is an argument like any other: later runs draw what the first one drew."""
    with rc.Cache():
        for generator in (random.Random(1), np.random.default_rng(1), np.random.RandomState(1)):
            made = rc.ap(lambda generator: [generator.random() for _ in range(2)], generator)
            first = made.get()
            assert again(made) == again(made) == first


LARGE = {
    "ndarray": lambda: np.ones(100_000),
    "matrix": lambda: np.ones((300, 400)),
    "strided": lambda: np.ones((300, 400)).T[::2],
    "bytearray": lambda: bytearray(100_000),
    "array": lambda: array("d", [1.0]) * 100_000,
    "memoryview": lambda: memoryview(bytearray(100_000)),
}


@pytest.mark.parametrize("what", LARGE)
def test_large_arguments_that_change_are_noticed(what: str) -> None:
    """The error names the argument and the operation; when the argument is as it was, the value is back."""

    def first(number: int, large: Any) -> float:
        return float(np.asarray(large).ravel()[0])

    large = LARGE[what]()
    with rc.Cache() as cache:
        made = rc.ap(first, 1, large)
        assert again(made) == made.get()
        before = made.get()
        kept = np.array(large)
        np.asarray(large)[:] = 9
        made.evict()
        for _ in range(2):
            with pytest.raises(
                rc.ImpureError, match=rf"argument 2 of .*first \(created at .*\) is a {type(large).__name__}"
            ):
                made.get()
            check_invariants(cache, [made])
        np.asarray(large)[:] = kept
        assert made.get() == before


def test_verify_looks_at_all_of_an_argument() -> None:
    """One element that changes between two samples is seen with `verify=True`."""
    large = np.ones(100_001)
    with rc.Cache(verify=True):
        made = rc.ap(np.sum, large)
        large[1] = 2
        made.evict()
        with pytest.raises(rc.ImpureError, match="argument 1 of sum"):
            made.get()


def test_what_cannot_change_is_passed_on() -> None:
    """Immutable arguments are the same object in every run."""
    seen: list[Any] = []
    constants = ("text", 1.5, (1, "a"), frozenset([1]), np.dtype("f8"), np.float64(3), range(3), b"bytes", int, len)

    with rc.Cache():
        made = rc.ap(lambda *constants: seen.append(constants), *constants)
        again(made)
    assert all(one is other for one, other in zip(*seen, strict=True))


def test_arguments_beside_wrapped_arrays_may_change_later() -> None:
    """What meets a wrapped array is remembered as well: arrays, buffers, lists, functions."""
    with rc.Cache() as cache:
        x = rc.array(np.arange(3.0))
        numbers, buffer, plain, elements = array("d", [1, 2, 3]), bytearray(b"abc"), np.ones(3), [1.0, 2.0, 3.0]
        view = memoryview(bytearray(range(3)))
        made = [np.add(x, other) for other in (numbers, plain, elements, np.frombuffer(buffer, "u1"), view)]
        for power in range(3):
            made.append(np.apply_along_axis(lambda row: row * power, 0, x))  # noqa: B023  # on purpose
        expected = [value.get().copy() for value in made]
        numbers[0] = plain[0] = elements[0] = 70
        buffer[0] = 70
        for value in made:
            value.evict()
        for number, (value, before) in enumerate(zip(made, expected, strict=True)):
            assert np.array_equal(value.get(), before), number
        check_invariants(cache, [x, *made])
        view[0] = 70
        made[4].evict()
        with pytest.raises(rc.ImpureError, match="an argument is a memoryview that was changed"):
            made[4].get()


# Sources


def test_functions_cannot_write_to_sources() -> None:
    """A source is read-only inside operations, and stays writable for the caller."""

    def increment(numbers: Any) -> Any:
        numbers += 1
        return numbers

    numbers = np.ones(3)
    with rc.Cache():
        x = rc.pure(numbers)
        with pytest.raises(ValueError, match="read-only"):
            rc.ap(increment, x)
    assert numbers.tolist() == [1, 1, 1]
    assert numbers.flags.writeable


@pytest.mark.parametrize("source", [np.ones(3), np.ones(100_000), [1, 2], {1: 2}, bytearray(b"ab")], ids=str)
def test_a_source_that_changes_is_noticed(source: Any) -> None:
    """An operation that runs again on a source that was changed in place says so, and names it."""
    with rc.Cache() as cache:
        x = rc.pure(source)
        made = rc.ap(lambda number, value: len(value) + number, 1, x)
        assert again(made) == len(source) + 1
        if isinstance(source, list):
            source.append(3)
        else:
            source[1 if isinstance(source, dict) else 0] = 7
        made.evict()
        with pytest.raises(rc.ImpureError, match=r"a source, argument 1 of .*lambda.* changed in place"):
            made.get()
        check_invariants(cache, [x, made])


class Station:
    """Plain, but for what it keeps for itself."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self._asked = 0

    @cached_property
    def length(self) -> int:
        return len(str(self.place))

    def ask(self) -> int:
        self._asked += 1
        return self.length


class Stored:
    """Leaves behind what cannot go to a tier."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.note = "in memory"

    def __getstate__(self) -> dict[str, Any]:
        return {"number": self.number, "note": None}


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Level(IntEnum):
    LOW = 1
    HIGH = 2


SOURCES: dict[str, Callable[[], Any]] = {
    "floats": lambda: [0.5, 1.5, float("nan"), -0.0],
    "many": lambda: list(map(float, range(1_000))),
    "numbers": lambda: [1, True, 1 << 100, 1j, None, range(3), slice(1, 2)],
    "texts": lambda: ["".join(["a", "b"]) * 1_000, b"abc" * 500],
    "dict": lambda: {0.5: [1.5], "".join(["a", "b"]): {2.5: (3.5, 4.5)}},
    "set": lambda: {"".join(["a", str(number)]) for number in range(50)},
    "large set": lambda: {"".join(["a", str(number)]) for number in range(500)},
    "deque": lambda: deque([[0.5], [1.5]], 5),
    "instances": lambda: [Station([number, 0.5]) for number in range(100)],
    "slots": lambda: [Slotted(1_000 + number) for number in range(100)],
    "own state": lambda: [Stored(number) for number in range(100)],
    "arrays": lambda: [np.arange(5.0), np.float64(0.5), bytearray(b"ab"), array("d", [1.5])],
    "objects": lambda: [Fraction(1, 3), Level.HIGH, len, Station, random.Random(1)],
    "nested": lambda: reduce(lambda inner, number: [inner, number], range(50), [0.5]),
}


@pytest.mark.parametrize("what", SOURCES)
def test_a_source_that_comes_back_from_a_tier_is_as_it_was(what: str) -> None:
    """A container may go to a tier and back, though what is in it are other objects then."""
    with rc.Cache("1MB", tiers=[rc.Disk()]) as cache:
        source = rc.pure(SOURCES[what]())
        result = rc.ap(len, source)
        for _ in range(2):
            assert source.evict()
            assert not source.resident
            assert again(result) == len(SOURCES[what]())
            source.get()  # for the result itself may have come back from the disk, if it took long to make
        check_invariants(cache, [source, result])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.integers() | st.text(), inner)
            | st.builds(Station, inner)
        ),
    ).map(lambda part: [part])
)
def test_what_is_packed_and_unpacked_looks_the_same(source: Any) -> None:
    """Of any containers and plain instances the sample is that of what comes back from a tier."""
    adapter = rc.adapters.Adapter()
    before = adapter.sample(source)
    assert hash(before) == hash(adapter.sample(pickle.loads(pickle.dumps(source))))
    assert before == adapter.sample(pickle.loads(pickle.dumps(source)))
    source.append(0)
    assert before != adapter.sample(source)


def _exchange(part: Any) -> Callable[[list[Any]], None]:
    def change(source: list[Any]) -> None:
        source[0] = part

    return change


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "number": (lambda: [0.5], _exchange(1.5)),
    "type": (lambda: [1], _exchange(True)),
    "zero": (lambda: [0.0], _exchange(-0.0)),
    "text": (lambda: ["abc" * 1_000], _exchange("abd" * 1_000)),
    "key": (lambda: {1: 2}, lambda source: (source.clear(), source.update({2: 2}))),
    "element of a set": (lambda: {1, 2}, lambda source: (source.clear(), source.update({1, 3}))),
    "inside of a list": (lambda: [[1]], lambda source: source[0].append(2)),
    "inside of an array": (lambda: [np.zeros(3)], lambda source: source[0].fill(1)),
    "a scalar": (lambda: [np.float64(1)], _exchange(np.float64(2))),
    "an attribute": (lambda: [Station(1)], lambda source: setattr(source[0], "place", 2)),
    "a slot": (lambda: [Slotted(1)], lambda source: setattr(source[0], "number", 2)),
    "an instance": (lambda: [Station(1)], _exchange(Station(2))),
    "a member": (lambda: [Level.LOW], _exchange(Level.HIGH)),
    "a class": (lambda: [Station], _exchange(Slotted)),
}


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_inside_of_a_source_is_noticed(what: str, moves: bool) -> None:
    """What is in a container may not change either, whether it was in a tier meanwhile or not."""
    make, change = CHANGES[what]
    with rc.Cache("1MB", tiers=[rc.Disk()], clock=ManualClock()):  # the result takes no time, and is made again
        source = rc.pure(make())
        result = rc.ap(len, source)
        if moves:
            assert again(source) is not None
        change(source.get())
        result.evict()
        with pytest.raises(rc.ImpureError, match="a source, argument 1 of len"):
            result.get()


def test_instances_in_a_source_may_remember_what_they_have_computed() -> None:
    """Attributes that are private, or computed once, are no part of the content."""
    with rc.Cache():
        source = rc.pure([Station(number) for number in range(3)])
        result = rc.ap(lambda stations: sum(station.ask() for station in stations), source)
        assert again(result) == again(result) == 3


# Any program

KINDS = st.sampled_from(["closure", "argument", "list", "array", "instance", "default"])


@given(st.lists(st.tuples(KINDS, st.integers(0, 9)), min_size=1, max_size=8), st.booleans())
def test_programs_that_change_what_they_pass(steps: list[tuple[str, int]], verify: bool) -> None:
    """Whatever one variable, list, array or object is used for in a loop, values are those of plain Python."""
    numbers, elements, scale = [0], np.zeros(3), Scale(0)
    with rc.Cache(verify=verify) as cache:
        x = rc.pure(2)
        made: list[rc.Recomputable[Any]] = []
        expected = []
        for kind, number in steps:
            numbers[0], scale.factor = number, number
            elements[:] = number
            if kind == "closure":
                made.append(rc.ap(lambda value: value * number, x))  # noqa: B023  # on purpose
            elif kind == "argument":
                made.append(rc.ap(lambda value, by: value * by, x, number))
            elif kind == "list":
                made.append(rc.ap(lambda value, by: value * by[0], x, numbers))
            elif kind == "array":
                made.append(rc.ap(lambda value, by: int(value * by[0]), x, elements))
            elif kind == "instance":
                made.append(rc.ap(lambda value, scale: value * scale.factor, x, scale))
            else:
                made.append(rc.ap(lambda value, by=number: value * by, x))
            expected.append(2 * number)
        for value in made:
            value.evict()
        assert [value.get() for value in reversed(made)] == expected[::-1]
        check_invariants(cache, [x, *made])
