"""Faults: whatever an operation does, everything else is as it was."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import recompute as rc
from lib.vectors import vector
from recompute.testing import Identity, check_invariants


class Failing:
    """Raises on chosen runs."""

    def __init__(self, error: BaseException, *runs: int) -> None:
        self.error = error
        self.runs = runs
        self.count = 0

    def __call__(self, *payloads: Any, **more: Any) -> Any:
        self.count += 1
        if self.count in self.runs:
            raise self.error
        return vector(len(payloads), *range(2))


class Scene:
    """A chain x -> a -> b and a bystander; the state of a cache to be compared before and after."""

    def __init__(self, function: Callable[..., Any], budget: int | None = None) -> None:
        self.cache = rc.Cache(budget)
        with self.cache:
            self.x = rc.pure(vector(1, 2))
            self.a = rc.ap(vector, 3, 4)
            self.b = rc.ap(function, self.a, self.x)
            self.bystander = rc.ap(vector, 5)
            self.pinned = rc.ap(vector, 6).pin()

    @property
    def handles(self) -> list[rc.Recomputable[Any]]:
        return [self.x, self.a, self.b, self.bystander, self.pinned]

    def state(self) -> Any:
        check_invariants(self.cache, self.handles)
        stats = self.cache.stats()
        return stats.used, [handle.resident for handle in self.handles], stats.operations


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3), MemoryError(), GeneratorExit()]
)
def test_an_operation_that_raises_again_and_then_does_not(error: BaseException) -> None:
    """The error passes through unchanged, the cache is as it was, and the next get works."""
    scene = Scene(Failing(error, 2, 3))
    scene.b.evict()
    before = scene.state()
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            scene.b.get()
        assert caught.value is error
        assert scene.state() == before
    assert scene.b.get() == vector(2, 0, 1)
    scene.state()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_first_run_that_raises(error: BaseException) -> None:
    """Nothing comes of it, and nothing is left of it."""
    scene = Scene(Failing(error))
    before = scene.state()
    with pytest.raises(type(error)), scene.cache:
        rc.ap(Failing(error, 1), scene.a, [scene.x], key=scene.bystander)
    assert scene.state() == before


def test_a_fault_in_the_middle_of_a_chain() -> None:
    """What was brought back before the fault stays right, what was not stays evicted, locks are gone."""
    middle = Failing(RuntimeError("middle"), 2)
    cache = rc.Cache()
    with cache:
        values = [rc.ap(vector, 1)]
        for step in range(10):
            values.append(rc.ap(middle if step == 5 else Failing(ValueError()), values[-1]))
        for value in values:
            assert value.evict()
        with pytest.raises(RuntimeError, match="middle"):
            values[-1].get()
        check_invariants(cache, values)
        assert [value.resident for value in values] == [True] * 6 + [False] * 5
        assert values[-1].get() == vector(1, 0, 1)
        check_invariants(cache, values)


def test_the_note_says_where_the_operation_was_created() -> None:
    """File and line of the call of ap, and the function's name, are a note on the error."""
    scene = Scene(Failing(ValueError("no")))

    def troubled(payload: Any) -> Any:
        raise KeyError("trouble")

    with pytest.raises(KeyError) as caught, scene.cache:
        rc.ap(troubled, scene.a)
    notes = "".join(caught.value.__notes__)
    assert "troubled" in notes
    line = troubled.__code__.co_firstlineno + 4
    assert f"test_faults.py:{line}" in notes


def test_an_error_that_takes_no_notes_passes_through() -> None:
    """The error matters more than the note."""

    class Proud(Exception):
        def add_note(self, note: str) -> None:
            raise TypeError("I take no notes")

    scene = Scene(Failing(ValueError()))
    with pytest.raises(Proud), scene.cache:
        rc.ap(Failing(Proud(), 1), scene.a)
    scene.state()


@pytest.mark.parametrize("second", [1, 3, 30])
def test_another_size_the_second_time(second: int) -> None:
    """The bytes counted are those of the latest run; if they do not fit, everything is as it was."""
    sizes = iter([3, second, 3])

    def moody() -> Any:
        return vector(7, slack=next(sizes))

    cache = rc.Cache(40)
    with cache:
        x = rc.ap(vector, 1)
        y = rc.ap(moody)
        y.evict()
        if second < 30:
            assert y.get() == vector(7)
            assert cache.stats().used == 16 + second
        else:
            x.pin()
            with pytest.raises(rc.BudgetError, match="moody"):
                y.get()
            assert cache.stats().used == 8
            check_invariants(cache, [x, y])
            assert y.get() == vector(7)
        check_invariants(cache, [x, y])


def numbers() -> Iterator[int]:
    yield 1


async def coroutine() -> int:
    return 1


@pytest.mark.parametrize("surface", [rc, Identity])
@pytest.mark.parametrize(
    "make",
    [numbers, lambda: iter([1]), lambda: map(str, [1]), lambda: zip([1], [2], strict=True), lambda: io.StringIO("a")],
)
def test_what_can_be_read_only_once_is_refused(surface: Any, make: Callable[[], Any]) -> None:
    """As a result, as one of several, as a source and as an argument, also inside a list."""
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: surface.ap(make),
        lambda: surface.ap(lambda: (1, make()), nout=2),
        lambda: surface.pure(make()),
        lambda: surface.ap(str, make()),
        lambda: surface.ap(str, [1, {"k": make()}]),
        lambda: surface.ap(str, key=make()),
    )
    for attempt in attempts:
        with pytest.raises(TypeError, match="read only once"):
            attempt()


def test_a_coroutine_is_refused() -> None:
    """It runs once, too."""
    made = []

    def start() -> Any:
        made.append(coroutine())
        return made[-1]

    with rc.Cache() as cache:
        with pytest.raises(TypeError, match="not async"):
            rc.ap(start)
        check_invariants(cache)
    made[0].close()


@pytest.mark.parametrize("surface", [rc, Identity])
@pytest.mark.parametrize(("nout", "result"), [(2, (1, 2, 3)), (3, (1,)), (2, 7), (2, None)])
def test_a_wrong_number_of_outputs(surface: Any, nout: int, result: Any) -> None:
    """The first run tells; nothing is left of it."""
    with rc.Cache() as cache:
        with pytest.raises(ValueError, match="outputs"):
            surface.ap(lambda: result, nout=nout)
        check_invariants(cache)
        assert cache.stats().used == 0


def test_a_wrong_number_of_outputs_the_second_time() -> None:
    """A rerun that gives fewer outputs is an error, and the values stay evicted."""
    results = iter([(1, 2), (1,), (1, 2)])
    with rc.Cache() as cache:
        a, b = rc.ap(lambda: next(results), nout=2)
        a.evict()
        with pytest.raises(ValueError, match="1 values"):
            a.get()
        check_invariants(cache, [a, b])
        assert a.get() == 1
        check_invariants(cache, [a, b])


@pytest.mark.parametrize("surface", [rc, Identity])
@pytest.mark.parametrize("nout", [0, -1, True, 1.0, "2"])
def test_a_senseless_nout(surface: Any, nout: Any) -> None:
    """nout is a whole number, at least one."""
    with pytest.raises(ValueError, match="nout"):
        surface.ap(lambda: (1,), nout=nout)


@pytest.mark.parametrize("surface", [rc, Identity])
@pytest.mark.parametrize("nbytes", [-1, [1, 2], 1.5, "8"])
def test_a_senseless_nbytes(surface: Any, nbytes: Any) -> None:
    """nbytes is not negative, and as many as there are outputs."""
    with pytest.raises((ValueError, TypeError), match="nbytes"):
        surface.ap(lambda: 1, nbytes=nbytes)


@pytest.mark.parametrize("surface", [rc, Identity])
def test_what_is_no_function(surface: Any) -> None:
    """ap and lift want something to call."""
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: surface.ap(7),
        lambda: surface.lift("f"),
        lambda: surface.ap(None, 1),
    )
    for attempt in attempts:
        with pytest.raises(TypeError, match="function"):
            attempt()
    with pytest.raises(TypeError):
        surface.ap(surface.pure(7))


def test_a_value_that_needs_itself() -> None:
    """A function that gets, on a later run, what is made from its own result: an error, not a hang."""
    box: list[Any] = []

    def strange() -> Any:
        return box[0].get() if box else vector(1)

    with rc.Cache() as cache:
        y = rc.ap(strange)
        z = rc.ap(lambda payload: vector(*payload.numbers, 2), y)
        z.evict()
        y.evict()
        box.append(z)
        with pytest.raises(RuntimeError, match="needs its own result"):
            z.get()
        check_invariants(cache, [y, z])
        box.clear()
        assert z.get() == vector(1, 2)
        check_invariants(cache, [y, z])
        box.append(y)
        y.evict()
        with pytest.raises(RuntimeError, match="needs its own result"):
            y.get()
        box.clear()
        assert y.get() == vector(1)


def test_a_fault_behind_a_get_inside_an_operation() -> None:
    """It passes through the operation that asked, which may live with it; nothing stays locked."""
    failing = Failing(ValueError("below"), 2, 3)
    with rc.Cache() as cache:
        below = rc.ap(failing)
        above = rc.ap(lambda: vector(len(below.get())))

        def careful() -> Any:
            try:
                return below.get()
            except ValueError:
                return vector(0)

        below.evict()
        above.evict()
        with pytest.raises(ValueError, match="below"):
            above.get()
        check_invariants(cache, [below, above])
        assert rc.ap(careful).get() == vector(0)
        check_invariants(cache, [below, above])
        assert above.get() == vector(3)
        check_invariants(cache, [below, above])


def test_an_adapter_that_raises() -> None:
    """A size that cannot be measured is a fault like any other."""

    class Sulky:
        pass

    def measure(value: Any) -> int:
        raise RuntimeError("no size")

    rc.register_size(Sulky, measure)
    with rc.Cache() as cache:
        for attempt in (lambda: rc.ap(Sulky), lambda: rc.pure(Sulky())):
            with pytest.raises(RuntimeError, match="no size"):
                attempt()
            check_invariants(cache)
        assert cache.stats().used == 0


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (-5, ValueError, "is -5; .*register_size, must say from 0 to"),
        (10**30, ValueError, "is 10000"),
        (2**62, ValueError, "from 0 to"),
        (None, TypeError, "is None; .* must say how many bytes"),
        (math.nan, TypeError, "is nan"),
        ("12 MB", TypeError, "how many bytes"),
    ],
)
def test_a_size_that_is_none(size: Any, error: type[Exception], match: str) -> None:
    """Of a result or of a source: an error that says whose it is; nothing is counted."""

    class Wrong:
        pass

    rc.register_size(Wrong, lambda value: size)
    with rc.Cache() as cache:
        for attempt in (lambda: rc.ap(Wrong), lambda: rc.pure(Wrong())):
            with pytest.raises(error, match=match) as caught:
                attempt()
            assert "the size of a" in str(caught.value)
            assert "Wrong" in str(caught.value)
            check_invariants(cache)
        assert cache.stats().used == 0


def test_verify_finds_an_impure_function() -> None:
    """A second run that differs raises ImpureError by name; the value stays evicted."""
    results = iter([1, 2, 1])

    def moody() -> int:
        return next(results)

    with rc.Cache(verify=True) as cache:
        y = rc.ap(moody)
        y.evict()
        with pytest.raises(rc.ImpureError, match="moody"):
            y.get()
        check_invariants(cache, [y])
        assert y.get() == 1


def test_verify_finds_a_value_that_was_changed_in_place() -> None:
    """Whoever changed it, the next look tells; evicted and recomputed it is right again."""
    with rc.Cache(verify=True) as cache:
        y = rc.ap(bytearray, b"abc")
        y.get()[0] = 0
        with pytest.raises(rc.ImpureError, match="changed in place"):
            y.get()
        with pytest.raises(rc.ImpureError, match="changed in place"):
            rc.ap(bytes, y)
        check_invariants(cache, [y])
        y.evict()
        assert y.get() == b"abc"


def test_verify_with_handles_inside_payloads() -> None:
    """A payload that refers to values of the cache is digested without a deadlock."""
    from functools import partial

    with rc.Cache(verify=True):
        x = rc.pure(3)
        assert rc.pure(partial(pow, x)).get().func is pow
        assert rc.pure([x]).get() == [x]


def test_verify_with_shared_parts() -> None:
    """A list that holds one list twice, forty deep, is digested in no time."""
    deep: list[Any] = [1]
    for _ in range(40):
        deep = [deep, deep]
    with rc.Cache(verify=True):
        assert rc.pure(deep).get() is deep
