"""Wrapped arrays when something goes wrong, or several threads use them: the books stay right, results too."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Barrier, Thread
from types import FunctionType
from typing import Any

import pytest

import recompute as rc
from interrupts import Interrupts, Storm, Tracing, delivered, modules_in
from recompute._arrays import array, attributes, dispatch, namespace, operate, sharing, writes
from recompute.testing import check_invariants
from recompute.testing.arrays import serving

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_numpy import adapter  # noqa: E402  # after importorskip

STRIDE = 4  # of the crossings at which an interrupt strikes; each test parameter takes other ones
MODULES = (array, attributes, dispatch, namespace, operate, sharing, writes)
CLASSES = (
    *(rc.RecomputableArray, attributes.Coercions, attributes.Attributes, array.Method, array.Flat, operate.Call),
    *(dispatch._Filling, operate.Operands, namespace.Namespace, sharing.Memory, sharing.Path, sharing.Step),
    *(writes.Changed, writes.Version),
)


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with serving(adapter):
        yield


def grid() -> Any:
    return np.arange(12.0).reshape(3, 4)


def fill_diagonal(x: Any, y: Any) -> None:
    np.fill_diagonal(x, 5)


def put_in_place(x: Any, y: Any) -> None:
    x += y


def assign(x: Any, y: Any) -> None:
    x[0] = y[1]


def assign_flat(x: Any, y: Any) -> None:
    x.flat[3:6] = 7


STEPS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x + y,
    put_in_place,
    lambda x, y: np.sqrt(x, out=y),
    assign,
    lambda x, y: np.linalg.svd(x @ y.T),
    lambda x, y: np.add(x, 1, out=x, where=y > 2),
    lambda x, y: x.sort(),
    lambda x, y: np.concatenate([x, y, [[1, 2, 3, 4]]]),
    fill_diagonal,
    lambda x, y: float(np.sum(x)),
    assign_flat,
    lambda x, y: np.add.at(x, [0, 0], 1),
    lambda x, y: np.divmod(x, 3, out=(x, y)),
    lambda x, y: [row * 2 for row in x],
    lambda x, y: str(y),
)
"""Each changes `x` and `y`, or makes something of them, and does the same to plain and to wrapped arrays."""


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    """Every function of the array layer lets interrupts in."""

    def where(function: FunctionType, name: str) -> bool:
        ours = function.__module__.startswith("recompute._arrays")
        return ours and name not in ("__init__", "__del__", "__getattr__")

    wanted = Interrupts()
    wanted.let_in(monkeypatch, (*MODULES, *CLASSES), where)
    yield wanted
    wanted.arm(0)


def versions() -> list[tuple[list[Any], list[Any]]]:
    """The content of `x` and `y` before each step, and after the last, on plain arrays."""
    x, y = grid(), grid() + 1
    found = [(x.tolist(), y.tolist())]
    for step in STEPS:
        step(x, y)
        found.append((x.tolist(), y.tolist()))
    return found


def run(cache: rc.Cache) -> tuple[int, Any, Any]:
    """All steps; the number of those that were completed, and what there is then."""
    completed = 0
    with cache:
        x, y = rc.array(grid()), rc.array(grid()) * 1 + 1
        try:
            for step in STEPS:
                step(x, y)
                completed += 1
                cache.release_memory()
        except KeyboardInterrupt:
            pass
    return completed, x, y


@pytest.mark.parametrize("start", range(STRIDE))
@pytest.mark.parametrize("budget", [None, 1_500])
def test_an_interrupt_at_any_time(interrupts: Interrupts, budget: int | None, start: int) -> None:
    """An array that was being changed has its old or its new content, all else is as it was, and nothing leaks."""
    expected = versions()
    cache = rc.Cache(budget)
    interrupts.arm(0)
    run(cache)
    crossings = interrupts.crossings
    assert crossings > 200
    for crossing in range(17 + start * 7, crossings, 7 * STRIDE):  # those before belong to making x and y
        interrupts.arm(crossing)
        completed, x, y = run(cache)
        interrupts.arm(0)
        possible = expected[completed : completed + 2]
        assert x.tolist() in [outcome[0] for outcome in possible]
        assert y.tolist() in [outcome[1] for outcome in possible]
        check_invariants(cache, [x, y])
        del x, y
        gc.collect()
        check_invariants(cache)
        assert cache.stats().used == 0, f"crossing {crossing}"
    completed, x, y = run(cache)
    assert (x.tolist(), y.tolist()) == expected[-1]


def alone(x: Any) -> list[Any]:
    x = x * 1
    x[:2]  # a view, which goes
    return [x, x * 2]


def view_alone(x: Any) -> list[Any]:
    view = (x * 1)[::-1]
    return [view, view * 2]


def with_views(x: Any) -> list[Any]:
    x = x * 1
    return [x, x[::-1], x[2:]]


def add(arrays: list[Any]) -> None:
    arrays[0] += 1


def detach(arrays: list[Any]) -> None:
    arrays[1] = arrays[1].detach() if isinstance(arrays[1], rc.RecomputableArray) else arrays[1].copy()


@pytest.mark.parametrize("later", [[], [7], [7, 14]], ids=["one", "two", "three"])
@pytest.mark.parametrize(
    ("make", "change", "step"), [(alone, add, 1), (view_alone, add, 1), (with_views, add, 3), (with_views, detach, 1)]
)
def test_writes_after_interrupts(
    make: Callable[[Any], list[Any]], change: Callable[[list[Any]], None], step: int, later: list[int]
) -> None:
    """Wherever in a change they strike, later writes go to present versions, and are seen by what shares memory."""
    tracing = Tracing(modules_in("recompute._arrays", "recompute._recomputable"))
    place = 1
    while place == 1 or tracing.struck:
        with rc.Cache() as cache:
            arrays, plain = make(rc.array(np.arange(6.0))), make(np.arange(6.0))
            tracing.arm(place, *(place + more for more in later))
            with suppress(KeyboardInterrupt), tracing.on():
                change(arrays)
            delivered(cache)
            if arrays[1]._node.operation is None or not same(arrays, plain):
                change(plain)
            for array, expected in zip(arrays, plain, strict=True):
                for written in (array, expected):
                    view = written[:2]
                    view += 5
                    written *= 2
                assert same(arrays, plain), tracing.where
            del view
            check_invariants(cache, arrays)
        place += step


def same(arrays: list[Any], plain: list[Any]) -> bool:
    return all(np.array_equal(array.get(), expected) for array, expected in zip(arrays, plain, strict=True))


@rc.memoize
def halved(array: Any) -> Any:
    return array / 2


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # struck between `open` and its `with`
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
@pytest.mark.parametrize("tiers", [[], [rc.Host(2_000, always=True), rc.Disk()]], ids=["memory", "tiers"])
@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_a_storm_of_signals_while_arrays_change(release: Any, tiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is struck, an array has what it had or what it was about to have, and all is counted right."""
    lost: list[Any] = []  # what Python could not raise, since it struck at the beginning of a destructor
    monkeypatch.setattr(sys, "unraisablehook", lambda args: lost.append((args.exc_type, str(args.exc_value))))
    storm, draw = Storm(modules_in("recompute"), KeyboardInterrupt, 0.0002), random.Random(0)

    def change(array: Any, kind: int) -> None:
        if kind == 0:
            array += 1
        elif kind == 1:
            array[:3][...] = 0

    def use(array: Any, kind: int) -> None:
        if kind == 2:
            array.evict()
        elif kind == 3:
            rc.array(array).get()
        elif kind == 4:
            halved(array)

    for _ in range(30):
        with rc.Cache(8_000, release=release, tiers=tiers) as cache:
            gc.collect()  # caches of before, whose folders are removed: not in the storm
            plain = [np.ones(100)]
            arrays: list[Any] = [rc.array(np.ones(100))]
            for _ in range(30):
                one, other, kind = draw.randrange(len(arrays)), draw.randrange(len(arrays)), draw.randrange(8)
                made: list[Any] = []
                with suppress(KeyboardInterrupt), storm.on():
                    change(arrays[one], kind)
                    use(arrays[one], kind)
                    if kind == 5:
                        made.append(rc.ap(np.add, arrays[one], arrays[other]))
                    elif kind > 5:
                        made.append(arrays[one] * 0.5 + arrays[other] * 0.5)
                delivered(cache)
                if not np.array_equal(arrays[one].get(), plain[one]):
                    change(plain[one], kind)
                    assert np.array_equal(arrays[one].get(), plain[one])
                assert np.array_equal(halved(arrays[one]).get(), plain[one] / 2)
                halved.cache_clear()
                if made:
                    plain.append(plain[one] + plain[other] if kind == 5 else plain[one] * 0.5 + plain[other] * 0.5)
                    arrays.append(made.pop())
                if len(arrays) > 6:
                    del arrays[1], plain[1]
                check_invariants(cache, arrays)
            assert same(arrays, plain)
            arrays.clear()
            gc.collect()  # tracebacks
            while cache.release_memory():
                pass
            check_invariants(cache)
            stats = cache.stats()
            assert (stats.used, [tier.used for tier in stats.tiers]) == (0, [0] * len(tiers))
    assert storm.strikes
    assert [error for error in lost if error[0] is not KeyboardInterrupt] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError, SystemExit])
def test_an_exception_in_a_function(error: type[BaseException]) -> None:
    """It passes through, with a note that says where, and leaves operands and books as they were."""
    with rc.Cache() as cache:
        x = rc.array(grid()) + 1
        before = cache.stats().used

        def fails(row: Any) -> Any:
            raise error("on purpose")

        for attempt in (
            lambda: np.apply_along_axis(fails, 0, x),
            lambda: np.frompyfunc(fails, 1, 1)(x),
            lambda: np.piecewise(x, [x > 3], [fails]),
            lambda: np.frompyfunc(fails, 1, 1)(x, out=x, casting="unsafe"),
            lambda: x.map(fails),
        ):
            with pytest.raises(error, match="on purpose") as caught:
                attempt()
            assert any("created at" in note for note in caught.value.__notes__)
            del caught
        assert x.tolist() == (grid() + 1).tolist()
        gc.collect()
        assert cache.stats().used == before


def test_a_floating_point_error() -> None:
    """NumPy's error state holds while an operation runs; what raises changes nothing."""
    with rc.Cache(verify=True) as cache:
        x = rc.array(np.zeros(3))
        with np.errstate(all="raise"):
            for attempt in (lambda: 1 / x, lambda: np.divide(1, x, out=x), lambda: x.__itruediv__(0)):
                with pytest.raises(FloatingPointError):
                    attempt()
        assert x.tolist() == [0, 0, 0]
        check_invariants(cache, [x])


def test_a_failing_assignment_changes_nothing() -> None:
    """Unlike in NumPy not even a part: what raises has no effect."""
    with rc.Cache():
        x = rc.array(grid())
        with pytest.raises(IndexError):
            np.add.at(x, [0, 99], 1)
        with pytest.raises(ValueError, match="could not broadcast"):
            x[0] = [1, 2, 3]
        with pytest.raises(ValueError, match="could not convert"):
            x[:] = "text"
        assert x.tolist() == grid().tolist()


def test_threads_share_one_computation() -> None:
    """Several threads that need the same evicted array compute it once."""
    with rc.Cache() as cache:
        x = rc.array(grid())
        y = np.linalg.inv(x @ x.T + np.eye(3))
        expected = y.tolist()
        z = y * 2
        for array in (y, z):
            array.evict()
        barrier, found = Barrier(4), []

        def work() -> None:
            barrier.wait()
            found.append((y.tolist(), z.tolist()))

        together(*[work] * 4)
        assert found == [(expected, (np.array(expected) * 2).tolist())] * 4
        assert cache.stats().rematerializations <= 5  # matmul, add, inv, multiply


def test_threads_with_arrays_of_their_own() -> None:
    """Threads within one cache and one budget, each with its own arrays, get what each would get alone."""
    cache = rc.Cache(4_000)
    expected = versions()[-1]
    found: list[Any] = []

    def work() -> None:
        with cache:
            for _ in range(3):
                x, y = rc.array(grid()), rc.array(grid() + 1)
                for step in STEPS:
                    step(x, y)
                found.append((x.tolist(), y.tolist()))

    together(*[work] * 4)
    assert found == [expected] * 12
    gc.collect()
    assert cache.stats().used == 0
    check_invariants(cache)


def test_threads_that_change_one_array() -> None:
    """Each change is a version of some version before it, or an error says that threads must take turns."""
    with rc.Cache() as cache:
        x = rc.array(np.zeros(100))

        refused = []

        def work() -> None:
            for _ in range(50):
                try:
                    x.__iadd__(1)
                    np.add(x, 0, out=x)
                except RuntimeError as error:
                    refused.append(str(error))

        together(*[work] * 4)
        content = x.tolist()
        assert len(set(content)) == 1
        assert 0 < content[0] <= 200
        assert all("take turns, with a lock" in message for message in refused)
        check_invariants(cache, [x])
        cache.release_memory()  # versions that were recomputed for a thread that was late
        assert cache.stats().used <= 2 * 800


def test_a_thread_reads_while_another_changes() -> None:
    """A reader sees a whole version."""
    with rc.Cache() as cache:
        x = rc.array(np.zeros(100))
        seen: list[Any] = []

        def write() -> None:
            for value in range(100):
                x[:] = value
                cache.release_memory()

        def read() -> None:
            for _ in range(100):
                seen.append(x.get())

        together(write, read, read)
        assert all(len(set(array.tolist())) == 1 for array in seen)
        assert x.tolist() == [99.0] * 100


def together(*work: Callable[[], None]) -> None:
    """Run functions in threads of their own; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
