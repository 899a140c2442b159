"""Views of wrapped arrays: a write through any of them is seen through all, as in NumPy."""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from types import FunctionType
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from interrupts import Interrupts
from lib.strategies import RELEASES, settings_of_caches
from recompute._arrays import array, attributes, operate, sharing, writes
from recompute.testing import ManualClock, check_invariants
from recompute.testing.arrays import serving

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_numpy import adapter  # noqa: E402  # after importorskip


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with serving(adapter):
        yield


# The property: programs of views of views, and writes through any of them

SOURCES: Final[dict[str, Callable[[], Any]]] = {
    "vector": lambda: np.arange(6.0),
    "matrix": lambda: np.arange(12.0).reshape(3, 4),
    "square": lambda: np.arange(9).reshape(3, 3),
    "cube": lambda: np.arange(12, dtype="float32").reshape(2, 2, 3),
    "Fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "every other": lambda: np.arange(24.0).reshape(4, 6)[::2, ::2],
    "reversed": lambda: np.arange(12.0).reshape(3, 4)[::-1, ::-1],
    "column": lambda: np.arange(12.0).reshape(4, 3)[:, 1],
    "complex": lambda: np.arange(6.0).reshape(2, 3) * (1 + 2j),
    "bytes": lambda: np.arange(16, dtype="uint8").reshape(4, 4),
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (2, 3)),
    "records": lambda: np.array([(1, 2.0), (3, 4.0), (5, 6.0)], [("a", "i8"), ("b", "f8")]),
    "matrix type": lambda: np.asmatrix(np.arange(6.0).reshape(2, 3)),
    "nothing": lambda: np.empty((0, 3)),
}

VIEWS: Final[tuple[str, ...]] = (
    *("a[0]", "a[-1]", "a[1:]", "a[::2]", "a[::-1]", "a[..., 0]", "a[:, 1:]", "a[None]", "a[()]", "a[...]"),
    *("a[1:, ::-1]", "a['a']", "a[[0, 1]]", "a[a.real > 2]", "a[0][..., 1:]", "a[:len(b)]", "a.T[1:].T", "a.T"),
    *("a.mT", "a.real", "a.imag", "a.view()", "a.view('uint8')", "a.view('float32')", "a.reshape(-1)"),
    *("a.reshape(2, -1)", "a.reshape(-1, order='F')", "a.ravel()", "a.ravel('F')", "a.ravel('K')"),
    *("a.transpose()", "a.swapaxes(0, -1)", "a.squeeze()", "a.diagonal()", "a.copy()"),
    *("a.astype(a.dtype, copy=False)", "a.conj()", "np.reshape(a, -1)", "np.ravel(a)", "np.transpose(a)"),
    *("np.swapaxes(a, 0, -1)", "np.moveaxis(a, 0, -1)", "np.squeeze(a)", "np.expand_dims(a, 0)"),
    *("np.broadcast_to(a, (2, *a.shape))", "np.diagonal(a)", "np.diag(a)", "np.flip(a)", "np.flipud(a)"),
    *("np.rot90(a)", "np.split(a, 2)[1]", "np.array_split(a, 2)[0]", "np.real(a)", "np.imag(a)"),
    *("np.atleast_2d(a)", "np.atleast_1d(a, b)[0]", "np.broadcast_arrays(a, a)[1]", "np.rollaxis(a, -1)"),
    *("np.einsum('ii->i', a) if a.size else a", "np.einsum('ij->ji', a)", "np.unstack(a)[0]"),
    *("np.matrix_transpose(a)", "np.hsplit(a, 2)[0]", "np.lib.stride_tricks.sliding_window_view(a, 2, 0)"),
    *("np.nonzero(a)[0]", "a.flat[1:]", "list(a)[0]", "a + 1", "np.nan_to_num(a, copy=False)"),
    *("np.asarray(a)[:1]", "a.T.reshape(-1)", "np.concatenate([a, a])", "a.sum(0)"),
)

WRITES: Final[tuple[str, ...]] = (
    *("a[0] = {n}", "a[...] = {n}", "a[1:] = a[:-1]", "a[::-1] = a", "a[0] = a[-1]", "a[a.real > 3] = {n}"),
    *("a[[0, -1]] = {n}", "a[[0, 0]] += {n}", "a[...] = b", "a[b.real > 2] = {n}", "a[0, 1:] = {n}"),
    *("a['b'] = {n}", "a[1:] += a[:-1]", "a[0] += {n}", "a[0][1:] *= {n}", "a.T[0] -= {n}"),
    *("a[..., ::2] += b[..., :1]", "a[:1][:, 1:] = {n}", "a += {n}", "a *= 2", "a -= b", "a += a"),
    *("a += a[::-1]", "a **= 2", "a //= 2", "a &= 3", "a.fill({n})", "a.sort()", "a.sort(0)", "a.partition(1)"),
    *("a.put([0, -1], {n})", "a.flat = {n}", "a.flat[1:3] = {n}", "a.real = {n}", "a.imag = {n}"),
    *("a.real += {n}", "a.byteswap(True)", "a.shape = (-1,)", "a.shape = (2, -1)", "np.add(a, {n}, out=a)"),
    *("np.multiply(a, b, out=a)", "np.add(b, {n}, out=a)", "np.sqrt(b, a)", "np.cumsum(a, 0, out=a)"),
    *("np.negative(a, out=a[...])", "np.add(a[0], {n}, out=a[0])", "np.modf(a, out=(a[:1], a[1:2]))"),
    *("np.divmod(a[0], 2, out=(a[0], a[1]))", "np.add(a, {n}, out=a, where=a > 2)", "np.clip(a, 1, 5, out=a)"),
    *("np.copyto(a, {n})", "np.copyto(a, b)", "np.sum(b, 0, out=a)"),
    *("np.copyto(a[1:], {n}, where=[True, False, True])", "np.put(a, [1], {n})", "np.place(a, a > 2, [{n}])"),
    *("np.putmask(a, a > 2, {n})", "np.fill_diagonal(a, {n})"),
    *("np.put_along_axis(a, np.argmax(a, 0)[None], {n}, 0)", "np.add.at(a, [0, 0], {n})"),
    *("np.subtract.at(a, (0, slice(1, None)), {n})", "np.nan_to_num(a, copy=False)", "for row in a: row += {n}"),
    *("a[0], a[1] = {n}, 3", "np.random.default_rng({n}).shuffle(a)", "np.random.RandomState({n}).shuffle(a)"),
    *("a.setflags(write=True)", "a[0].sort()", "np.random.default_rng({n}).shuffle(a.reshape(-1))"),
    *("np.matmul(a, a, out=a)", "np.stack([b, b], out=a)"),
)

ODD: Final = frozenset({"a.setflags(write=True)", "np.asarray(a)[:1]"})
"""What NumPy allows, and a cached array refuses or gives as a plain one."""


class Pool:
    """Arrays by position, plain ones or wrapped ones, and what a line of code does to them."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def run(self, code: str, one: int, other: int) -> str:
        """The outcome: a name, of an error if there was one. A line that is an expression adds its result."""
        scope = {"np": np, "a": self.arrays[one % len(self.arrays)], "b": self.arrays[other % len(self.arrays)]}
        try:
            if code in VIEWS:
                self.arrays.append(eval(code, scope))
            else:
                exec(code, scope)
        except rc.BudgetError:
            return "short"
        except Exception as error:
            return type(error).__name__
        return "done"


def content(x: Any) -> Any:
    plain = x.get() if isinstance(x, rc.RecomputableArray) else x
    return type(plain).__name__, plain.dtype, plain.shape, adapter.fingerprint(plain)


COMPOUND: Final = re.compile(r"\].* .= |real .= |^for |random|, a\[1\] =")
"""Lines of several changes."""

Steps = list[tuple[str, int, int, int]]


def compare(sources: list[str], steps: Steps, cache: rc.Cache) -> None:
    """Run a program on plain arrays and within a cache: contents are equal after every step, or an error says why."""
    plain, wrapped = Pool(), Pool()
    with cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sources:
            plain.arrays.append(SOURCES[name]())
            try:
                wrapped.arrays.append(rc.array(SOURCES[name]()))
            except rc.BudgetError:
                return
        for code, one, other, number in steps:
            template, code = code, code.replace("{n}", str(number))
            if code == "evict":
                wrapped.arrays[one % len(wrapped.arrays)].evict()
                continue
            if code == "forget":
                if len(plain.arrays) > 1:
                    del plain.arrays[one % len(plain.arrays)], wrapped.arrays[one % len(wrapped.arrays)]
                continue
            if code == "cut":
                cache.release_memory()
                continue
            target = plain.arrays[one % len(plain.arrays)]
            if template in WRITES and (frozen(target) or ("shuffle" in code and not swaps(target))):
                continue
            record = isinstance(target, np.void) or isinstance(plain.arrays[other % len(plain.arrays)], np.void)
            before = [content(array) for array in plain.arrays]
            found = wrapped.run(code, one, other)
            if found == "short":
                if COMPOUND.search(code):
                    return  # some of it may be done
                assert_same(plain, wrapped, before)
                continue
            expected = plain.run(code, one, other)
            if found != expected and "done" in (found, expected):
                where = f"{code} of {one % len(plain.arrays)}, {other % len(plain.arrays)}"
                if code in ODD or (found != "done" and (record or refusal(code, found, target))):
                    return
                raise AssertionError(f"{where}: {found}, but in NumPy {expected}")
            if found == "done" and code in VIEWS and not isinstance(wrapped.arrays[-1], rc.RecomputableArray):
                plain.arrays.pop(), wrapped.arrays.pop()
            assert_same(plain, wrapped)
        cache.budget = None
        assert_same(plain, wrapped)
        check_invariants(cache, wrapped.arrays)


def frozen(plain: Any) -> bool:
    """Whether NumPy lets nobody write to the memory of an array or scalar; a wrapped one can be written to."""
    while isinstance(plain, np.ndarray) and plain.base is not None:
        plain = plain.base
    return not (isinstance(plain, np.ndarray) and plain.flags.writeable)


def swaps(plain: Any) -> bool:
    """Whether there is something to shuffle; else NumPy may not notice that an array is read-only."""
    return bool(plain.size and plain.shape and plain.shape[0] > 1)


def refusal(code: str, error: str, target: Any) -> bool:
    """Whether a wrapped array may refuse, where NumPy does not."""
    unseen = error == "ValueError" and not target.flags.writeable  # NumPy did not look: nothing was to be written
    if error == "ValueError" and isinstance(target, np.matrix):
        return True  # those of three dimensions cannot be copied
    return unseen or ("shuffle" in code and error == "TypeError") or error == "RuntimeError"


def assert_same(plain: Pool, wrapped: Pool, expected: list[Any] | None = None) -> None:
    for position, (one, other) in enumerate(zip(plain.arrays, wrapped.arrays, strict=True)):
        try:
            found = content(other)
        except rc.BudgetError:
            continue
        assert (content(one) if expected is None else expected[position]) == found, (
            f"array {position}: {one}, {other.get()}"
        )


ACTIONS: Final = st.one_of(st.sampled_from(VIEWS), st.sampled_from(WRITES), st.sampled_from(["evict", "forget", "cut"]))
STEPS: Final = st.lists(
    st.tuples(ACTIONS, st.integers(0, 9), st.integers(0, 9), st.integers(0, 99)), min_size=2, max_size=12
)
NAMES: Final = st.lists(st.sampled_from(list(SOURCES)), min_size=1, max_size=2)


@settings(max_examples=settings().max_examples * 4)
@given(NAMES, STEPS, st.integers(60, 800), settings_of_caches())
def test_writes_reach_the_array_and_its_other_views(names: list[str], steps: Steps, budget: int, options: Any) -> None:
    """Whatever is written through whichever view, all arrays hold what they hold in NumPy, or an error says why."""
    compare(names, steps, rc.Cache(budget, clock=ManualClock(), **options))


@settings(max_examples=settings().max_examples * 2)
@given(NAMES, STEPS, settings_of_caches())
def test_without_a_budget(names: list[str], steps: Steps, options: Any) -> None:
    """The same where nothing has to be evicted."""
    compare(names, steps, rc.Cache(clock=ManualClock(), **options))


# Examples


@pytest.fixture
def cache() -> Iterator[rc.Cache]:
    """A cache of its own, the current one during the test."""
    with rc.Cache() as cache:
        yield cache


def grid() -> Any:
    return np.arange(6.0).reshape(2, 3)


def test_computed_before_a_write(cache: rc.Cache) -> None:
    """What was computed from an array keeps the content of that time, evicted or not."""
    x = rc.array(grid()) * 1
    row = x[0]
    double, total = row * 2, x.sum()
    row += 100
    for value in (x, row, double, total):
        value.evict()
    assert (double.tolist(), float(total)) == ([0, 2, 4], 15)
    assert x.tolist() == [[100, 101, 102], [3, 4, 5]]


def test_a_view_outlives_the_array(cache: rc.Cache) -> None:
    """Views of an array that is gone share its memory; one that alone is left has memory of its own when it changes."""
    x = rc.array(grid()) * 1
    row, column = x[0], x[:, 0]
    del x
    row += 10
    assert column.tolist() == [10, 3]
    number = row.number
    assert column.number == number
    del column
    row += 10
    assert row.tolist() == [20, 21, 22]
    assert cache.stats().used == 48 + row.nbytes, "the source, as the recipe's beginning, and three numbers"


def test_other_references_are_copies(cache: rc.Cache) -> None:
    """`rc.array` of a wrapped array, and copies, see nothing of what becomes of it, nor do their views."""
    x = rc.array(grid())
    y = rc.array(x)
    row, other = x[0], y[0]
    row += 1
    assert other.tolist() == y[0].tolist() == [0, 1, 2]
    other += 5
    assert (x[0].tolist(), y[0].tolist()) == ([1, 2, 3], [5, 6, 7])
    assert not np.may_share_memory(x, y)
    assert np.may_share_memory(x, row)
    assert np.shares_memory(other, y)


def test_augmented_assignment_to_a_part_copies_once(cache: rc.Cache) -> None:
    """`x[key] += y` reads a view, changes it, and assigns it to its own place, which is no change."""
    x = rc.array(grid())
    before = cache.stats().operations
    x[0] += 1
    assert cache.stats().operations == before + 3, "getitem, iadd, getitem of the new version"
    x[:, 1:] *= 2
    x[0][1:] -= 1
    assert x.tolist() == [[1, 3, 5], [3, 8, 10]]


def test_detach_of_a_view_cuts_it_off(cache: rc.Cache) -> None:
    """A view that was detached is a source of its own: no write reaches it, and none through it the array."""
    x = rc.array(grid()) * 1
    row = x[0].detach()
    x += 1
    assert row.tolist() == [0, 1, 2]
    row += 7
    assert x.tolist() == (grid() + 1).tolist()


def test_results_of_one_function_that_overlap(cache: rc.Cache) -> None:
    """Arrays that share memory in a way that nobody knows are not written to; those that lie side by side are."""
    rows, columns = np.nonzero(rc.array(grid()) > 2)
    rows += 5
    assert (rows.tolist(), columns.tolist()) == ([6, 6, 6], [0, 1, 2])
    one, two = rc.array(grid()) * 1, rc.array(grid())
    both = np.broadcast_arrays(one, rc.array(one))
    assert both[0].shape == (2, 3)
    with pytest.raises(RuntimeError, match=r"x = x.copy\(\)"):
        one += 1
    two += 1


def test_resizing_what_is_shared_is_refused(cache: rc.Cache) -> None:
    """As in NumPy, `resize` needs an array whose memory nobody else sees."""
    x = rc.array(grid())
    row = x[0]
    with pytest.raises(ValueError, match="resize"):
        x.resize(2)
    del row
    if sys.version_info < (3, 14):  # later NumPy refuses every resize that it is to check
        x.resize(3)
        x.resize(2, refcheck=True)
    x.resize(2, refcheck=False)
    assert x.tolist() == [0, 1]


def test_a_shape_is_set_on_shared_memory(cache: rc.Cache) -> None:
    """To set a shape changes how an array looks, not who shares its memory."""
    x = rc.array(grid())
    row = x[0]
    x.shape = (3, 2)
    x[0] = 9
    assert row.tolist() == [9, 9, 2]
    row[2] = 8
    assert x.tolist() == [[9, 9], [8, 3], [4, 5]]


def test_shuffling_rows_in_place_is_refused(cache: rc.Cache) -> None:
    """NumPy's `shuffle` takes rows for copies, which they are not; numbers are shuffled, and permutations drawn."""
    generator, same = np.random.default_rng(0), np.random.default_rng(0)
    x = rc.array(grid().T)
    with pytest.warns(UserWarning, match="shuffle"), pytest.raises(TypeError, match="permutation"):
        np.random.default_rng(1).shuffle(x)
    assert x.tolist() == grid().T.tolist()
    for shape in ((6,), (3, 2)):
        array = grid().reshape(shape)
        assert generator.permutation(rc.array(array)).tolist() == same.permutation(array).tolist()
    x[...] = generator.permutation(x)
    assert sorted(x.tolist()) == grid().T.tolist()


def test_a_mapped_file(cache: rc.Cache, tmp_path: Any) -> None:
    """An array in a file is an array; changes make versions in memory and leave the file alone."""
    grid().tofile(tmp_path / "numbers")
    for mode in ("r", "r+", "c"):
        x = rc.array(np.memmap(tmp_path / "numbers", "float64", mode, shape=(2, 3)))
        x[0] += 1
        assert type(x.get()) is np.ndarray
        assert x.tolist() == [[1, 2, 3], [3, 4, 5]]
        assert type((x * 2).get()) is np.ndarray
    assert np.fromfile(tmp_path / "numbers").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_result_without_dimensions_can_be_assigned_to(cache: rc.Cache) -> None:
    """Where NumPy gives an immutable scalar, a wrapped one is an array, as the array API standard has it."""
    total = rc.array(grid()).sum()
    total[()] = 1
    assert (float(total), total.shape) == (1, ())
    total[...] += 1
    assert float(total) == 2
    total += 0.5
    assert float(total) == 2.5


def test_signatures_of_the_standard(cache: rc.Cache) -> None:
    """`__dlpack__` and `to_device` take what the array API standard says, by name and by position."""
    x = rc.array(grid()) * 1
    assert str(signature(type(x).__dlpack__)).count("None") >= 4
    assert list(signature(type(x).__dlpack__).parameters) == ["self", "stream", "max_version", "dl_device", "copy"]
    device, stream = list(signature(type(x).to_device).parameters.values())[1:]
    assert (device.kind, stream.kind) == (device.POSITIONAL_ONLY, stream.KEYWORD_ONLY)
    assert x.to_device("cpu", stream=None) is x
    with pytest.raises(ValueError, match="device"):
        x.to_device("gpu")
    assert np.from_dlpack(x).tolist() == x.tolist()


def test_scipy_adds_through_views(cache: rc.Cache) -> None:
    """`oaconvolve` adds blocks in place through views of its own; its results are those for plain arrays."""
    scipy_signal = pytest.importorskip("scipy.signal", reason="SciPy is not installed")
    random = np.random.default_rng(0)
    for shapes in (((1000,), (30,)), ((200, 50), (7, 5)), ((5000,), (100,))):
        one, two = (random.normal(size=shape) for shape in shapes)
        found = scipy_signal.oaconvolve(rc.array(one), rc.array(two))
        assert np.array_equal(np.asarray(found), scipy_signal.oaconvolve(one, two))


def test_scipy_correlates(cache: rc.Cache) -> None:
    """`pearsonr` of wrapped arrays is that of plain ones, where it assigns to results without dimensions too."""
    scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    random = np.random.default_rng(0)
    for one, two in (random.normal(size=(2, 20)), (np.arange(5.0), 2 * np.arange(5.0)), random.normal(size=(2, 2))):
        expected, found = scipy_stats.pearsonr(one, two), scipy_stats.pearsonr(rc.array(one), rc.array(two))
        assert (float(found.statistic), float(found.pvalue)) == (float(expected.statistic), float(expected.pvalue))


def test_an_interrupted_write_is_seen_by_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an interrupt strikes, an array and its views have the old content, or all of them the new one."""
    interrupts = Interrupts()

    def where(function: FunctionType, name: str) -> bool:
        return function.__module__.startswith("recompute._arrays") and name not in ("__init__", "__getattr__", "join")

    holders = (array, attributes, operate, sharing, writes, rc.RecomputableArray, sharing.Path, writes.Version)
    interrupts.let_in(monkeypatch, holders, where)

    def run(crossing: int) -> list[Any]:
        with rc.Cache():
            x = rc.array(grid())
            row, column = x[0], x[:, 1:]
            interrupts.arm(crossing)
            with suppress(KeyboardInterrupt):
                row += 1
            crossings.append(interrupts.crossings)
            interrupts.arm(0)
            seen = [x.tolist(), row.tolist(), column.tolist()]
            column[...] = 7
            assert (x[:, 1:] == 7).all()
            assert row[1:].tolist() == [7, 7]
            return seen

    crossings: list[int] = []
    new = run(0)
    old = [grid().tolist(), [0, 1, 2], grid()[:, 1:].tolist()]
    assert crossings[0] > 20
    for crossing in range(1, crossings[0] + 1):
        assert run(crossing) in (old, new), interrupts.where


def test_views_of_what_was_nearly_evicted() -> None:
    """An array that was chosen to be evicted, and spared in the end, shares its memory with views as ever."""
    with rc.Cache(600, clock=ManualClock()):
        x = rc.array(np.arange(2.0))
        kept = []
        for length in (1, 20, 2, 15, 1, 20, 3, 20):
            kept.append(x.repeat(length))
            for array in kept:
                if array.resident:
                    assert array[1:].number == array.number


@pytest.mark.parametrize("trim", ["f", "b", "fb"])
@pytest.mark.parametrize("content", [[0, 0, 1, 0, 2, 0], [0, 0], [1, 2], [0, np.nan, 0]])
def test_what_trim_zeros_returns_is_the_same_part_after_a_write(content: list[float], trim: str) -> None:
    """Though there are no zeros any more, or others; and a write to it reaches the array."""
    plain = np.array(content, dtype=float)
    part = np.trim_zeros(plain, trim)
    with rc.Cache():
        wrapped = rc.array(np.array(content, dtype=float))
        found = np.trim_zeros(wrapped, trim)
        np.testing.assert_array_equal(found.get(), part)
        for array, view in ((plain, part), (wrapped, found)):
            array[::2] = 5
            view[1:] = 0
        np.testing.assert_array_equal(found.get(), part)
        np.testing.assert_array_equal(wrapped.get(), plain)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.2.0", reason="NumPy trims several axes since 2.2")
def test_trim_zeros_of_several_axes() -> None:
    """Of all of them, or one."""
    plain = np.zeros((4, 5))
    plain[1, 2] = plain[2, 3] = 1
    with rc.Cache():
        wrapped = rc.array(plain)
        for options in ({}, {"trim": "b"}, {"axis": 1}):
            found = rc.namespace(np).trim_zeros(wrapped, **options)
            np.testing.assert_array_equal(found.get(), np.trim_zeros(plain, **options))


@pytest.mark.parametrize("release", RELEASES)
def test_a_view_that_something_else_was_needed_for_sees_writes(release: Any) -> None:
    """The array that goes is not forgotten as long as a view of another one is made from it, too."""
    with rc.Cache(release=release):
        x, z = rc.array(np.ones((2, 3))), rc.array(np.ones(3))
        wide, row = np.broadcast_arrays(x, z)
        x += x  # what x was before has no reference now
        z += z
        assert [array.get().max() for array in (x, z, wide, row)] == [2.0] * 4


@pytest.mark.parametrize("release", RELEASES)
def test_an_array_that_a_container_shares_with_an_argument_is_counted_once(release: Any) -> None:
    """Whichever of the two is evicted, comes back or goes: the bytes are those of two arrays, not of three."""
    nbytes = 800_000

    class Both:
        def __init__(self, array: Any) -> None:
            self.parts = {"view": array[::-1], "more": [array, array + 1]}

    with rc.Cache(release=release) as cache:
        array = rc.ap(np.ones, nbytes // 8)
        both = rc.ap(Both, array)
        together = rc.sequence([array])
        for change in (array.evict, both.evict, together.get, both.get, array.evict):
            change()
            assert cache.stats().used <= 2 * nbytes + 5_000
            check_invariants(cache, [array, both, together])
        assert cache.stats().used > 2 * nbytes
        del array
        assert 2 * nbytes < cache.stats().used <= 2 * nbytes + 5_000
        assert both.get().parts["view"][0] == 1
        check_invariants(cache, [both, together])


@pytest.mark.parametrize("release", RELEASES)
def test_what_comes_back_from_a_tier_is_counted_whole(release: Any, tmp_path: Any) -> None:
    """A container that was in a file shares its arrays with nothing."""
    with rc.Cache("1MB", release=release, tiers=[rc.Disk("10MB", folder=tmp_path, always=True)]) as cache:
        arrays = [rc.ap(np.full, 1250, float(number)) for number in range(20)]
        containers = [rc.sequence([array]).detach() for array in arrays]
        for value in (*arrays, *containers):
            value.evict()
        held = [value.get() for value in containers]
        assert sum(array.nbytes for (array,) in held) <= cache.stats().used


@pytest.mark.parametrize("release", RELEASES)
def test_an_array_in_a_container_stays_counted_when_its_source_goes(release: Any) -> None:
    """Of a source that is forgotten the container keeps the bytes: they count as held, and go with it."""
    nbytes = 800_000
    with rc.Cache(release=release) as cache:
        for detach in (False, True):
            array = rc.ap(np.ones, nbytes // 8).detach() if detach else rc.pure(np.ones(nbytes // 8))
            both = rc.ap(lambda part: {"parts": [part]}, array).detach()
            del array
            gc.collect()
            assert nbytes < cache.stats().used <= nbytes + 5_000
            check_invariants(cache, [both])
            del both
            gc.collect()
            assert cache.stats().used == 0
    held: list[Any] = []

    def fill() -> None:
        while len(held) < 10:
            array = rc.pure(np.ones(nbytes // 8))
            held.append(rc.sequence([array]).detach())
            del array

    with rc.Cache("3MB", release=release):
        with pytest.raises(rc.BudgetError):
            fill()
        assert len(held) * nbytes <= 3_000_000
