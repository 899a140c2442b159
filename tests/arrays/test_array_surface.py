"""What a wrapped array does, one sentence a behaviour."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest

import recompute as rc
from recompute.testing import check_invariants
from recompute.testing.arrays import serving

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_numpy import adapter  # noqa: E402  # after importorskip

Point = namedtuple("Point", "x y")


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with serving(adapter):
        yield


@pytest.fixture
def cache() -> Iterator[rc.Cache]:
    """A cache of its own, the current one during the test; its books are right afterwards."""
    with rc.Cache(verify=True) as cache:
        yield cache
    cache.stats()


def grid() -> Any:
    return np.arange(6.0).reshape(2, 3)


def same(expected: Any, actual: Any) -> None:
    """A wrapped array holds what a plain one is, to the last bit."""
    assert isinstance(actual, rc.RecomputableArray)
    plain = actual.get()
    assert type(expected) is type(plain)
    assert (expected.dtype, expected.shape) == (plain.dtype, plain.shape)
    assert adapter.fingerprint(expected) == adapter.fingerprint(plain)


def evicted(x: rc.RecomputableArray) -> rc.RecomputableArray:
    assert x.evict()
    return x


def names(function: Any) -> tuple[str, ...]:
    """What a function calls by name."""
    return getattr(function, "__code__", grid.__code__).co_names  # type: ignore[no-any-return]  # of a function nobody has typed


def rematerializations(cache: rc.Cache) -> int:
    return cache.stats().rematerializations


# Wrapping


def test_what_is_wrapped_after_its_eviction_is_brought_back_once_to_tell_its_shape(cache: rc.Cache) -> None:
    """The outline of an evicted array is kept as soon as `rc.array` has wrapped it, and not before."""
    plain = rc.ap(np.ones, (3, 4))
    assert plain.evict()
    x = rc.array(plain)
    assert (x.shape, x.dtype, rematerializations(cache)) == ((3, 4), np.float64, 1)
    assert plain.evict()
    assert (x.shape, x.dtype, rematerializations(cache)) == ((3, 4), np.float64, 1)


def test_an_array_that_is_wrapped_is_neither_copied_nor_frozen(cache: rc.Cache) -> None:
    """The wrapper holds the caller's memory; the caller may write to it as before."""
    plain = grid()
    x = rc.array(plain)
    assert np.shares_memory(plain, np.asarray(x))
    assert plain.flags.writeable
    assert cache.stats().used == plain.nbytes
    assert not x.evict(), "a source"


def test_a_part_of_an_array_can_be_wrapped(cache: rc.Cache) -> None:
    """A slice, a transpose and a read-only array are sources too, and stay views of what they were."""
    plain = grid()
    for part in (plain[:, 1:], plain.T, plain[::-1], np.broadcast_to(plain, (2, 2, 3))):
        same(part, rc.array(part))
        assert np.shares_memory(plain, rc.array(part).get())


def test_wrapping_again_makes_another_reference(cache: rc.Cache) -> None:
    """`rc.array` of a wrapped array is the same value; what one of them becomes, the other does not."""
    x = rc.array(grid())
    y = rc.array(x)
    assert x is not y
    assert x.number == y.number
    y += 1
    same(grid(), x)
    same(grid() + 1, y)


@pytest.mark.parametrize("operator_", [operator.iadd, operator.imul, operator.ipow, operator.ifloordiv])
@pytest.mark.parametrize("by", [3, np.ones((2, 1))])
def test_a_scalar_stays_the_same_under_its_other_name(cache: rc.Cache, operator_: Any, by: Any) -> None:
    """`y = x; x += by` leaves y alone, as with plain scalars, which never change."""
    x = rc.array(grid()).max()
    y = x
    x = operator_(x, by)
    same(operator_(grid().max(), by), x)
    same(grid().max(), y)


def test_a_recomputable_of_an_array_can_be_wrapped(cache: rc.Cache) -> None:
    """A value from `pure` or `ap` becomes an array; one of something else does not."""
    same(grid(), rc.array(rc.pure(grid())))
    made = rc.array(rc.ap(np.ones, 3))
    same(np.ones(3), evicted(made))
    with pytest.raises(TypeError, match="takes an array"):
        rc.array(rc.pure([1, 2]))


def test_arrays_in_containers_are_wrapped(cache: rc.Cache) -> None:
    """Arrays in tuples, lists and dicts are wrapped; everything else, and the kind of container, stays."""
    tree = {"w": [grid(), (1, grid())], "name": "net", "scale": np.float64(2)}
    wrapped = rc.array(tree)
    same(grid(), wrapped["w"][0])
    same(grid(), wrapped["w"][1][1])
    assert (wrapped["w"][1][0], wrapped["name"], wrapped["scale"]) == (1, "net", 2.0)
    assert type(wrapped["scale"]) is np.float64
    assert isinstance(tree["w"][0], np.ndarray)  # type: ignore[index]  # as it was
    point = rc.array(Point(grid(), 2))
    assert type(point) is Point
    same(grid(), point.x)
    assert type(rc.array(OrderedDict(a=grid()))) is OrderedDict
    table = rc.array(defaultdict(list, a=grid()))
    same(grid(), table["a"])
    assert table["nothing yet"] == []
    x = rc.array(grid())
    assert rc.array([x, 1])[0] is x
    for nothing in (None, "a", 1, {1}, [], (), [1.0, [2.0]], {"a": np.float64(1)}):
        with pytest.raises(TypeError, match="wraps an array that a library has made"):
            rc.array(nothing)


# What is known without the content


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(lambda x: x.shape, id="shape"),
        pytest.param(lambda x: x.dtype, id="dtype"),
        pytest.param(lambda x: x.ndim, id="ndim"),
        pytest.param(lambda x: x.size, id="size"),
        pytest.param(lambda x: x.nbytes, id="nbytes"),
        pytest.param(lambda x: x.itemsize, id="itemsize"),
        pytest.param(lambda x: x.strides, id="strides"),
        pytest.param(len, id="len"),
        pytest.param(np.shape, id="np.shape"),
        pytest.param(np.ndim, id="np.ndim"),
        pytest.param(np.size, id="np.size"),
        pytest.param(np.iscomplexobj, id="np.iscomplexobj"),
        pytest.param(np.isrealobj, id="np.isrealobj"),
        pytest.param(lambda x: np.result_type(x, np.float32), id="np.result_type"),
        pytest.param(lambda x: hasattr(x, "sum") and not hasattr(x, "nothing"), id="hasattr"),
        pytest.param(lambda x: callable(x.sum), id="a method"),
        pytest.param(lambda x: np.iterable(x), id="np.iterable"),
    ],
)
def test_metadata_recomputes_nothing(cache: rc.Cache, known: Callable[[Any], Any]) -> None:
    """Of an evicted array, what does not depend on its content is answered at once, as NumPy would."""
    y = rc.array(grid()) * 2j
    expected = known(y.get())
    evicted(y)
    before = cache.stats()
    assert expected == known(y)
    after = cache.stats()
    assert not y.resident
    assert (before.rematerializations, before.coercions) == (after.rematerializations, after.coercions)


def test_printing_what_it_is_recomputes_nothing(cache: rc.Cache) -> None:
    """`repr` names dtype, shape, origin and state; `dir` lists what NumPy's arrays have."""
    y = rc.array(grid()) + 1
    assert repr(y) == "<RecomputableArray float64 (2, 3), add: resident, 48 B>"
    assert repr(evicted(y)) == "<RecomputableArray float64 (2, 3), add: evicted, 48 B>"
    assert repr(rc.array(grid())) == "<RecomputableArray float64 (2, 3), source: resident, 48 B>"
    assert repr(y.sum).startswith("<method sum of <RecomputableArray")
    assert {"argsort", "T", "get", "detach"} <= set(dir(y))
    assert (y.sum.__name__, y.sum.__doc__) == ("sum", np.ndarray.sum.__doc__)
    assert not y.resident
    assert rematerializations(cache) == 0


def test_copies_and_other_references_recompute_nothing(cache: rc.Cache) -> None:
    """Copying a wrapper makes another reference, evicted or not."""
    y = evicted(rc.array(grid()) + 1)
    for other in (copy.copy(y), copy.deepcopy(y), copy.deepcopy([y])[0], rc.array(y)):
        assert not other.resident
        assert other.number == y.number
    assert rematerializations(cache) == 0


# Views


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[1:], id="slice"),
        pytest.param(lambda x: x[..., 0], id="ellipsis"),
        pytest.param(lambda x: x[None], id="new axis"),
        pytest.param(lambda x: x[::-1, ::-1], id="reversed"),
        pytest.param(lambda x: x.T, id="T"),
        pytest.param(lambda x: x.mT, id="mT"),
        pytest.param(lambda x: x.reshape(3, 2), id="reshape"),
        pytest.param(lambda x: x.ravel(), id="ravel"),
        pytest.param(lambda x: x.real, id="real"),
        pytest.param(lambda x: x.view(np.uint8), id="view"),
        pytest.param(lambda x: x.swapaxes(0, 1), id="swapaxes"),
        pytest.param(lambda x: np.transpose(x), id="np.transpose"),
        pytest.param(lambda x: np.broadcast_to(x, (4, 2, 3)), id="np.broadcast_to"),
        pytest.param(lambda x: np.split(x, 2)[1], id="np.split"),
        pytest.param(lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, axis=1), id="windows"),
        pytest.param(lambda x: np.diagonal(x), id="np.diagonal"),
        pytest.param(lambda x: list(x)[1], id="iteration"),
    ],
)
def test_views_are_aliases(cache: rc.Cache, view: Callable[[Any], Any]) -> None:
    """A view takes no memory, is evicted with what it is a view of, and comes back as a view of it."""
    y = rc.array(grid()) + 1
    used = cache.stats().used
    seen = view(y)
    assert cache.stats().used == used
    assert seen.number == y.number
    same(view(grid() + 1), seen)
    evicted(seen)
    assert not y.resident
    same(view(grid() + 1), seen)
    same(grid() + 1, y)
    assert np.shares_memory(seen.get(), y.get())
    assert cache.stats().used == used


def test_what_is_no_view_has_memory_of_its_own(cache: rc.Cache) -> None:
    """Indexing with arrays, `copy` and `flatten` copy."""
    y = rc.array(grid()) + 1
    for made in (y[[0, 1]], y[y > 2], y.copy(), y.flatten(), y.flat[:]):
        assert made.number != y.number


# Copy-on-write

CHANGES: dict[str, Callable[[Any], Any]] = {
    "+=": lambda x: operator.iadd(x, 1),
    "-=": lambda x: operator.isub(x, x),
    "*=": lambda x: operator.imul(x, [1, 2, 3]),
    "/=": lambda x: operator.itruediv(x, 3),
    "//=": lambda x: operator.ifloordiv(x, 2),
    "%=": lambda x: operator.imod(x, 2),
    "**=": lambda x: operator.ipow(x, 2),
    "@=": lambda x: operator.imatmul(x, np.ones((3, 3))),
    "x[0] =": lambda x: operator.setitem(x, 0, 9),
    "x[...] =": lambda x: operator.setitem(x, ..., 9),
    "x[mask] =": lambda x: operator.setitem(x, x > 2, -x[x > 2]),
    "x[[0, 0]] =": lambda x: operator.setitem(x, ([0, 0], [1, 1]), [7, 8]),
    "x.flat =": lambda x: setattr(x, "flat", 3),
    "x.flat[2] =": lambda x: operator.setitem(x.flat, 2, 7),
    "x.real =": lambda x: setattr(x, "real", 5),
    "sort": lambda x: x.sort(axis=0),
    "partition": lambda x: x.partition(1),
    "fill": lambda x: x.fill(7),
    "put": lambda x: x.put([0, 5], [8, 9]),
    "byteswap": lambda x: x.byteswap(inplace=True),
    "setfield": lambda x: x.setfield(1, np.int32, 4),
    "np.copyto": lambda x: np.copyto(x, [1, 2, 3], where=[True, False, True]),
    "np.copyto by name": lambda x: np.copyto(src=[1, 2, 3], dst=x),
    "np.put": lambda x: np.put(x, [0], 4),
    "np.place": lambda x: np.place(x, x > 2, [44, 55]),
    "np.putmask": lambda x: np.putmask(x, x > 2, x**2),
    "np.fill_diagonal": lambda x: np.fill_diagonal(x, 8),
    "np.put_along_axis": lambda x: np.put_along_axis(x, np.argmax(x, axis=0, keepdims=True), 99, 0),
    "np.nan_to_num": lambda x: np.nan_to_num(x, copy=False),
    "np.nan_to_num, by position": lambda x: np.nan_to_num(x, False, 1.0),
    "np.add.at": lambda x: np.add.at(x, (0, [1, 1]), 1),
    "np.negative.at": lambda x: np.negative.at(x, 0),
    "out=": lambda x: np.multiply(x, 2, out=x),
    "out=, where=": lambda x: np.multiply(x, 2, out=x, where=x > 2),
    "out by position": lambda x: np.multiply(x, 2, x),
    "out of a method": lambda x: x.clip(1, 2, out=x),
    "out of a method by position": lambda x: x.round(0, x),
    "out of cumsum": lambda x: np.cumsum(x, axis=1, out=x),
    "out of accumulate": lambda x: np.add.accumulate(x, 1, None, x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_make_a_new_version(cache: rc.Cache, change: Callable[[Any], Any]) -> None:
    """The wrapper and its views change; copies, values made before, and the caller's own array do not."""
    plain = grid()
    x = rc.array(plain)
    other, row, double = rc.array(x), x[0], x * 2
    expected = grid()
    expected_row = expected[0]
    change(expected)
    change(x)
    for array in (x, row, double):
        array.evict()
    same(expected, x)
    same(grid(), other)
    same(expected_row, row)
    same(grid() * 2, double)
    assert adapter.fingerprint(grid()) == adapter.fingerprint(plain)
    check_invariants(cache, [x, other, row, double])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_that_fails_changes_nothing(cache: rc.Cache, change: Callable[[Any], Any]) -> None:
    """If there is no room for a new version, the old one stays."""
    x = rc.array(grid())
    cache.budget = 50
    with pytest.raises(rc.BudgetError):
        change(x)
    same(grid(), x)
    cache.budget = None
    change(x)


def test_writing_through_a_view_changes_the_array(cache: rc.Cache) -> None:
    """As in NumPy, whether somebody refers to the view or not; what was computed before stays."""
    x = rc.array(grid())
    row, double = x[0], x * 2
    row[:] = 9
    same(np.array([[9.0, 9, 9], [3, 4, 5]]), x)
    x[1][1:] = 7
    same(np.array([[9.0, 9, 9], [3, 7, 7]]), x)
    same(np.full(3, 9.0), row)
    same(grid() * 2, double)


def test_out_returns_what_it_was_given(cache: rc.Cache) -> None:
    """`out=` gives the wrapper itself back; a tuple of them a tuple; None among them a new array."""
    x, whole = rc.array(grid() + 0.5), rc.array(grid())
    assert np.sqrt(x, out=whole) is whole
    assert np.sqrt(x, out=(whole,)) is whole
    assert np.sum(x, axis=0, out=whole[0]) is not whole
    fraction, rest = np.modf(x, out=(whole, None))
    assert fraction is whole
    same(np.modf(grid() + 0.5)[1], rest)
    same(np.modf(grid() + 0.5)[0], whole)


def test_plain_arrays_are_filled(cache: rc.Cache) -> None:
    """A plain array as `out=`, or on the left of an in-place operator, is changed as ever."""
    x, plain = rc.array(grid()), np.zeros((2, 3))
    assert np.add(x, 1, out=plain) is plain
    assert plain.tolist() == (grid() + 1).tolist()
    plain += x
    assert type(plain) is np.ndarray
    assert plain.tolist() == (2 * grid() + 1).tolist()
    plain[:] = x
    plain[0] = x[1]
    np.copyto(plain, x, where=[[True], [False]])
    np.add.at(plain, 0, x[1])
    assert plain.tolist() == [[3.0, 5.0, 7.0], [3.0, 4.0, 5.0]]
    fraction = np.zeros((2, 3))
    np.modf(x, out=(plain, fraction))
    assert fraction.tolist() == grid().tolist()


def test_a_plain_array_that_meets_a_wrapped_one_may_change_later(cache: rc.Cache) -> None:
    """It is copied when it becomes an argument: what the caller does to it afterwards is not seen."""
    x, plain, index = rc.array(grid()), grid(), np.array([1, 0])
    sums = [x + plain, plain + x, np.add(plain, x), np.concatenate([x, plain])[2:] + x, x[index][index] + x]
    plain[:] = -1
    index[:] = 0
    for total in sums:
        same(grid() * 2, evicted(total))


def test_a_list_that_was_an_argument_may_change_later(cache: rc.Cache) -> None:
    """Lists and dicts of arguments are copied."""
    x, row = rc.array(grid()), [1.0, 2.0, 3.0]
    sums = x + row
    row[0] = 99
    same(np.add(grid(), [1, 2, 3]), evicted(sums))


def test_shape_and_dtype_can_be_set(cache: rc.Cache) -> None:
    """As in NumPy without a copy, or with its error; other references keep theirs."""
    x = rc.array(grid())
    other = rc.array(x)
    x.shape = 3, -1
    assert (x.shape, other.shape) == ((3, 2), (2, 3))
    assert x.number == other.number
    x.shape = 6
    x.dtype = np.int64
    same(grid().reshape(6).view(np.int64), x)
    with pytest.raises(AttributeError, match="Incompatible shape"):
        other.T.shape = 6
    with pytest.raises(ValueError, match="cannot reshape"):
        x.shape = 7
    assert x.shape == (6,)


def test_real_and_imaginary_parts_can_be_set(cache: rc.Cache) -> None:
    """As in NumPy, in a new version."""
    x = rc.array(np.array([1 + 2j, 3 + 4j]))
    parts = x.real, x.imag
    x.real = [5, 6]
    x.imag = x.real
    same(np.array([5 + 5j, 6 + 6j]), x)
    same(np.array([5.0, 6.0]), parts[0])
    same(np.array([5.0, 6.0]), parts[1])
    with pytest.raises(TypeError, match="imaginary"):
        rc.array(grid()).imag = 1


def test_resize_and_delete(cache: rc.Cache) -> None:
    """`resize` makes a new version; `del x[0]` is NumPy's error."""
    x = rc.array(grid())
    x.resize((2, 2), refcheck=False)
    same(np.array([[0.0, 1.0], [2.0, 3.0]]), x)
    with pytest.raises(ValueError, match="cannot delete"):
        del x[0]


def test_overwrite_input_overwrites_nothing(cache: rc.Cache) -> None:
    """What NumPy may use as scratch space stays as it is."""
    x = rc.array(grid()[::-1])
    same(np.median(grid(), axis=0), np.median(x, axis=0, overwrite_input=True))
    same(np.percentile(grid(), 30), np.percentile(x, 30, overwrite_input=True))
    same(grid()[::-1], x)


LAYOUTS_OF_OUT = {
    "side by side": lambda memory: memory[4:10].reshape(2, 3),
    "every other": lambda memory: memory[4:16:2].reshape(2, 3),
    "reversed": lambda memory: memory[9:3:-1].reshape(2, 3),
    "transposed": lambda memory: memory[4:10].reshape(3, 2).T,
}


@pytest.mark.parametrize("mode", ["raise", "clip", "wrap"])
@pytest.mark.parametrize("layout", LAYOUTS_OF_OUT)
def test_choose_writes_to_out_and_nothing_beside_it(layout: str, mode: str, cache: rc.Cache) -> None:
    """NumPy itself takes the elements of `out` to lie side by side, and writes beyond its end."""
    look = LAYOUTS_OF_OUT[layout]
    indices = np.array([[0, 1, 0], [1, 1, 0]])
    expected = np.zeros(20)
    look(expected)[...] = np.choose(indices, [grid(), -grid()], mode=mode)
    choices = [rc.array(grid()), rc.array(-grid())]
    for call in (
        lambda out: np.choose(indices, choices, out=out, mode=mode),
        lambda out: rc.array(indices).choose(choices, out, mode),
        lambda out: rc.namespace(np).choose(indices, choices, out=out, mode=mode),
    ):
        memory = rc.array(np.zeros(20))
        out = look(memory)
        assert call(out) is out
        same(expected, evicted(memory))
        same(look(expected), out)
        alone = np.zeros(20)
        call(look(alone))
        assert expected.tobytes() == alone.tobytes()
    with pytest.raises(TypeError, match="invalid shape"):
        np.choose(indices, choices, out=rc.array(np.zeros(3)), mode=mode)


# Coercion


@pytest.mark.parametrize(
    "coercion",
    [
        pytest.param(lambda x: x.get(), id="get"),
        pytest.param(np.asarray, id="asarray"),
        pytest.param(np.array, id="array"),
        pytest.param(lambda x: np.asarray(x, dtype=np.float32), id="asarray, dtype"),
        pytest.param(lambda x: float(x[0, 1]), id="float"),
        pytest.param(lambda x: int(x[0, 1]), id="int"),
        pytest.param(lambda x: bool(x[0, 1]), id="bool"),
        pytest.param(lambda x: complex(x[0, 1]), id="complex"),
        pytest.param(lambda x: range(9)[x.astype(int)[0, 1]], id="index"),
        pytest.param(str, id="str"),
        pytest.param(lambda x: f"{x[0, 1]:.3f}", id="format"),
        pytest.param(bytes, id="bytes"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.tobytes(), id="tobytes"),
        pytest.param(lambda x: x.item(1), id="item"),
        pytest.param(lambda x: 3.0 in x, id="in"),
        pytest.param(np.from_dlpack, id="dlpack"),
        pytest.param(pickle.dumps, id="pickle"),
        pytest.param(lambda x: np.allclose(x, x), id="allclose"),
        pytest.param(lambda x: np.array2string(x), id="array2string"),
        pytest.param(lambda x: np.random.default_rng(0).normal(x), id="random"),
    ],
)
def test_coercions_are_counted(cache: rc.Cache, coercion: Callable[[Any], Any]) -> None:
    """Each way out of the cache counts once in the stats, recomputes if need be, and gives what NumPy gives."""
    y = rc.array(grid()) + 1
    plain = grid() + 1
    expected = plain if "get" in names(coercion) else None if coercion is pickle.dumps else coercion(plain)
    evicted(y)
    before = cache.stats()
    actual = coercion(y) if coercion is not pickle.dumps else pickle.dumps(y) and None
    after = cache.stats()
    assert after.coercions == before.coercions + 1
    assert after.rematerializations == before.rematerializations + 1
    if not isinstance(actual, np.ndarray):
        assert type(expected) is type(actual)
        assert expected == actual
    else:
        assert adapter.fingerprint(expected) == adapter.fingerprint(actual)


def test_other_results_count_as_coercions(cache: rc.Cache) -> None:
    """A function that returns numbers or text, not arrays, gave a value away."""
    x = rc.array(grid())
    before = cache.stats().coercions
    assert np.array_equal(x, grid()) is True
    assert np.array_str(x) == str(grid())
    assert x.argmax().item() == 5
    assert cache.stats().coercions == before + 3
    assert [type(number) for number in (x.sum(), x.argmax(), x[0, 0], x.all())] == [rc.RecomputableArray] * 4
    assert cache.stats().coercions == before + 3


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda x: x.get(), id="get"),
        pytest.param(np.asarray, id="asarray"),
        pytest.param(np.asanyarray, id="asanyarray"),
        pytest.param(np.from_dlpack, id="from_dlpack"),
        pytest.param(lambda x: np.asarray(x.flat[:]), id="flat"),
        pytest.param(lambda x: x.T.get(), id="a view"),
        pytest.param(lambda x: x[0:1].get()[0], id="a view of a view"),
        pytest.param(lambda x: next(iter(np.nditer(x))), id="nditer"),
        pytest.param(lambda x: np.frombuffer(x.data), id="buffer"),
        pytest.param(lambda x: np.broadcast_arrays(x, 1)[0].get(), id="broadcast"),
    ],
)
@pytest.mark.parametrize("source", [True, False])
def test_what_is_given_away_cannot_be_changed_by_accident(
    cache: rc.Cache, given: Callable[[Any], Any], source: bool
) -> None:
    """A source and a result are given read-only; trying to write says so, and changes nothing."""
    x = rc.array(grid()) if source else rc.array(grid()) * 1
    plain = given(x)
    with pytest.raises(ValueError, match="read-only"):
        plain[...] = 7
    with pytest.raises(ValueError, match="read-only"):
        plain += 1
    same(grid(), x)


def test_copies_that_are_given_away_can_be_changed(cache: rc.Cache) -> None:
    """`np.array`, another dtype and an explicit copy are the caller's own."""
    x = rc.array(grid())
    for plain in (np.array(x), np.asarray(x, dtype=np.float32), np.from_dlpack(x, copy=True), x.get().copy()):
        plain[:] = 7
    same(grid(), x)


def test_a_copy_that_is_refused(cache: rc.Cache) -> None:
    """`copy=False` gives the array itself, or NumPy's error if the dtype is another one."""
    x = rc.array(grid())
    assert np.shares_memory(np.asarray(x, copy=False), x.get())
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x, dtype=np.float32, copy=False)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x[0, 0], copy=False)


def test_a_writeable_array_is_asked_for_in_vain(cache: rc.Cache) -> None:
    """`setflags` is refused, and the message says what to do."""
    with pytest.raises(TypeError, match=r"change a copy: np\.array\(x\)"):
        rc.array(grid()).setflags(write=True)
    assert rc.array(grid()).flags.writeable is False


def test_truth_and_numbers_of_larger_arrays(cache: rc.Cache) -> None:
    """They are NumPy's errors."""
    x = rc.array(grid())
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x)
    for convert in (int, float, complex):
        with pytest.raises(TypeError, match="0-dimensional"):
            convert(x)
    with pytest.raises(TypeError, match="integer"):
        operator.index(x[0, 0])
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_an_array_is_an_index_and_a_number(cache: rc.Cache) -> None:
    """Wherever Python wants a number, an array of one is one."""
    one = rc.array(np.array(1))
    assert ["a", "b"][one] == "b"
    assert list(range(one)) == [0]
    assert "abc"[one:] == "bc"
    assert np.zeros(3)[one] == 0
    assert np.arange(one + 1).tolist() == [0, 1]
    assert max(3, one) == 3
    assert (5 if one else 6) == 5


# Python's protocols


def test_iteration(cache: rc.Cache) -> None:
    """Over rows, that are arrays; backwards; unpacking; and not without dimensions."""
    x = rc.array(grid())
    for expected, row in zip(grid(), x, strict=True):
        same(expected, row)
    for expected, row in zip(reversed(grid()), reversed(x), strict=True):
        same(expected, row)
    first, _ = x
    same(grid()[0], first)
    same(np.float64(0), next(iter(first)))
    same(np.float64(5), max(x[1]))
    same(np.array([3.0, 5.0, 7.0]), sum(x))
    assert [number.item() for number in x.flat] == [0, 1, 2, 3, 4, 5]
    for fails in (iter, len, list):
        with pytest.raises(TypeError):
            fails(x[0, 0])


def test_membership(cache: rc.Cache) -> None:
    """`in` compares elements, as NumPy does; in a list of arrays Python asks for identity first."""
    x = rc.array(grid())
    assert 3 in x
    assert 9 not in x
    assert x[0] in x
    assert x in [x]
    with pytest.raises(TypeError):
        assert 1 in x[0, 0]


def test_division_with_remainder(cache: rc.Cache) -> None:
    """`divmod` from both sides gives two arrays."""
    x = rc.array(grid())
    for expected, actual in (
        (divmod(grid(), 2), divmod(x, 2)),
        (divmod(7, grid() + 1), divmod(7, x + 1)),
        (divmod(grid(), grid() + 1), divmod(x, x + 1)),
        (divmod(grid(), grid() + 1), divmod(grid(), x + 1)),
    ):
        assert type(actual) is tuple
        for one, other in zip(expected, actual, strict=True):
            same(one, evicted(other))


def test_powers(cache: rc.Cache) -> None:
    """With two arguments from both sides; with three arguments an error, as in NumPy."""
    x = rc.array(grid())
    same(grid() ** 2, pow(x, 2))
    same(2 ** grid(), pow(2, x))
    for plain in (grid(), x):
        with pytest.raises(TypeError):
            pow(plain, 2, 5)


def test_rounding(cache: rc.Cache) -> None:
    """`round` of an element, and NumPy's `round` of arrays."""
    x = rc.array(grid() / 7)
    assert round((grid() / 7)[1, 0], 2) == round(x[1, 0], 2)
    assert round((grid() / 7)[1, 0]) == round(x[1, 0])
    same(np.round(grid() / 7, 2), x.round(2))
    same(np.round(grid() / 7, 2), np.round(x, 2))


def test_flat(cache: rc.Cache) -> None:
    """`flat` reads, writes, counts, iterates and coerces in C order, whatever the order in memory."""
    x = rc.array(grid().T)
    same(np.float64(3), x.flat[1])
    same(grid().T.flat[1:4], x.flat[1:4])
    same(grid().T.flat[[5, 0]], x.flat[[5, 0]])
    assert len(x.flat) == 6
    assert np.asarray(x.flat).tolist() == grid().T.ravel().tolist()
    x.flat[1] = 30
    x.flat[[4, 5]] = [40, 50]
    assert x.tolist() == [[0, 30], [1, 4], [40, 50]]
    x.flat = [1, 2]
    assert x.tolist() == [[1, 2], [1, 2], [1, 2]]


def test_pickles_and_copies(cache: rc.Cache) -> None:
    """A pickle carries the content, and is a source of the cache that is current when it is read."""
    y = rc.array(grid()) + 1
    data = pickle.dumps({"y": evicted(y)})
    with rc.Cache() as other:
        read = pickle.loads(data)["y"]
        same(grid() + 1, read)
        assert read.cache is other
        assert not read.evict()
    for duplicate in (copy.copy(y), copy.deepcopy(y)):
        duplicate[:] = 0
        same(grid() + 1, y)
    same(grid() + 1, pickle.loads(y.dumps()) + rc.array(np.zeros(3)))


def test_printing(cache: rc.Cache) -> None:
    """Text shows the content as NumPy does."""
    x = rc.array(grid())
    assert str(x) == str(grid())
    assert f"{x}" == str(grid())
    assert f"{x[1, 2]:06.2f}" == "005.00"
    assert np.array_str(x, precision=1) == np.array_str(grid(), precision=1)
    assert np.array_repr(x) == repr(grid())


def test_files(cache: rc.Cache, tmp_path: Any) -> None:
    """Saved once, not again when something is recomputed."""
    x = rc.array(grid()) + 1
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x, again=x)
    np.savetxt(tmp_path / "x.txt", x)
    x.tofile(tmp_path / "x.bin")
    for loaded in (
        np.load(tmp_path / "x.npy"),
        np.load(tmp_path / "x.npz")["again"],
        np.loadtxt(tmp_path / "x.txt"),
        np.fromfile(tmp_path / "x.bin").reshape(2, 3),
    ):
        assert loaded.tolist() == (grid() + 1).tolist()


def test_attributes_of_ones_own(cache: rc.Cache) -> None:
    """Unknown attributes are errors, to read and to set."""
    x = rc.array(grid())
    with pytest.raises(AttributeError, match="'nothing', nor has the ndarray"):
        _ = x.nothing
    with pytest.raises(AttributeError):
        x.nothing = 1
    with pytest.raises(AttributeError):
        x.T = x


def test_types(cache: rc.Cache) -> None:
    """An array is a Recomputable, whatever else it may look like."""
    x = rc.array(grid())
    assert isinstance(x, rc.Recomputable)
    assert not isinstance(x, np.ndarray)
    assert x.cache is cache
    assert isinstance(rc.ap(np.add, x, 1), rc.RecomputableArray)
    assert isinstance(x.map(np.sum), rc.RecomputableArray)
    assert type(x.map(np.ndarray.tolist)) is rc.Recomputable
    assert isinstance(rc.sequence([x, x]), rc.Recomputable)
    assert x.pin().pinned
    assert not x.unpin().pinned
    y = (x + 1).detach()
    assert not y.evict()


# NumPy beyond numbers


def test_random_generators_take_arrays(cache: rc.Cache) -> None:
    """Methods of generators coerce their arguments, and give plain arrays."""
    x = rc.array(grid())
    for draw in (
        lambda rng, a: rng.normal(a, 2),
        lambda rng, a: rng.permutation(a),
        lambda rng, a: rng.permuted(a, axis=1),
        lambda rng, a: rng.choice(a, 3),
        lambda rng, a: rng.choice(3, p=a[1] / a[1].sum()),
        lambda rng, a: rng.poisson(a),
        lambda rng, a: rng.multivariate_normal(a[0], np.eye(3)),
        lambda rng, a: rng.integers(0, a + 1),
    ):
        expected = draw(np.random.default_rng(1), grid())
        actual = draw(np.random.default_rng(1), x)
        assert type(expected) is type(actual)
        assert np.array_equal(expected, actual)


def test_random_results_come_back_the_same_if_they_are_sources(cache: rc.Cache) -> None:
    """What a generator made is wrapped, or made from its seed by an operation."""
    noise = rc.array(np.random.default_rng(1).normal(size=3))
    made = rc.array(rc.ap(lambda seed: np.random.default_rng(seed).normal(size=3), 1))
    same(noise.get(), evicted(made))
    same(noise.get() * 2, evicted(noise * 2))


def test_shuffling(cache: rc.Cache) -> None:
    """`shuffle` warns that it does not know the type, and shuffles all the same; `permutation` does not warn."""
    x, expected = rc.array(np.arange(5.0)), np.arange(5.0)
    rng = np.random.default_rng(3)
    with pytest.warns(UserWarning, match="shuffling a 'RecomputableArray'"):
        rng.shuffle(x)
    assert sorted(x.tolist()) == expected.tolist()
    assert x.tolist() != expected.tolist()
    order = np.random.default_rng(3).permutation(5)
    np.random.default_rng(3).shuffle(expected)
    assert np.arange(5.0)[order].tolist() == expected.tolist()
    same(expected, rc.array(np.arange(5.0))[order])


def test_structured_arrays(cache: rc.Cache) -> None:
    """Fields are views; they and records can be assigned; sorting by a field works."""
    plain = np.array([(2, 2.5, "ab"), (1, 4.5, "cd")], "i4,f8,U2")
    x = rc.array(plain)
    number = x.number
    same(plain["f1"], x["f1"])
    assert x["f1"].number == number
    same(plain[["f0", "f2"]], x[["f0", "f2"]])
    same(plain[0], x[0])
    same(plain[0]["f1"], x[0]["f1"])
    same(np.sort(plain, order="f0"), np.sort(x, order="f0"))
    expected = plain.copy()
    expected["f0"] = 9
    expected[0] = (5, 5.5, "zz")
    x["f0"] = 9
    x[0] = (5, 5.5, "zz")
    same(expected, x)
    assert x.tolist() == expected.tolist()
    assert plain["f0"].tolist() == [2, 1]
    same(expected.view(np.recarray).f1, x.view(np.recarray).f1)
    with pytest.raises(ValueError, match="no field"):
        _ = x["nothing"]


def test_a_record_alone_is_an_array_if_it_is_asked_for(cache: rc.Cache) -> None:
    """NumPy takes a single record for an array without dimensions: read-only, as other arrays from a cache."""
    plain = np.array([(2, 2.5), (1, 4.5)], "i4,f8")
    x = rc.array(plain)
    assert np.asarray(x[0]).dtype == plain.dtype
    assert np.asarray(x[0]).tolist() == (2, 2.5)
    assert np.array([np.asarray(record) for record in x], x.dtype).tolist() == plain.tolist()
    assert not np.asarray(x[0]).flags.writeable
    copy = np.array(x[0])
    copy["f0"] = 9
    assert x.tolist() == plain.tolist()


@pytest.mark.parametrize("dtype", ["f8", "i2", "c16"])
def test_the_imaginary_part_of_real_numbers_cannot_be_written_to(cache: rc.Cache, dtype: str) -> None:
    """It is no view, so that a write would be lost; that of complex numbers is one."""
    plain = np.arange(4).astype(dtype)
    x = rc.array(plain)
    for part in (x.imag, np.imag(x), x.imag[1:], x.T.imag):
        if dtype == "c16":
            part[...] = 1
        else:
            with pytest.raises(ValueError, match="imaginary part of real numbers"):
                part[...] = 1
            with pytest.raises(ValueError, match="imaginary part of real numbers"):
                part += 1
    assert x.tolist() == (plain + 1j if dtype == "c16" else plain).tolist()
    own = x.imag.copy()
    own += 1
    number = x[0].imag
    number += 1
    assert (number, own[0]) == ((2, 2) if dtype == "c16" else (1, 1))


def test_dates(cache: rc.Cache) -> None:
    """Dates and spans compute, compare and print."""
    plain = np.array(["2020-01-01", "2021-02-03", "NaT"], "M8[D]")
    x = rc.array(plain)
    same(plain - plain[0], x - x[0])
    same(plain + np.timedelta64(1, "D"), x + np.timedelta64(1, "D"))
    same(np.datetime64("2022", "D") - plain, np.datetime64("2022", "D") - x)
    same(plain > np.datetime64("2020-06"), x > np.datetime64("2020-06"))
    same(plain.astype("M8[M]"), x.astype("M8[M]"))
    same(np.isnat(plain), np.isnat(x))
    same(np.diff(plain), np.diff(x))
    same(np.busday_count(plain[0], plain[1]), np.busday_count(x[0], x[1]))
    same(np.busday_offset(plain[:2], 1, roll="forward"), np.busday_offset(x[:2], 1, roll="forward"))
    same(np.is_busday(plain), np.is_busday(x))
    same(np.datetime_as_string(plain), np.datetime_as_string(x))
    assert x.tolist() == plain.tolist()


def test_text(cache: rc.Cache) -> None:
    """Arrays of strings add, compare and convert."""
    plain = np.array(["a", "bc"])
    x = rc.array(plain)
    same(plain + "x", x + "x")
    same(np.strings.upper(plain), np.strings.upper(x))
    same(np.char.add(plain, plain), np.char.add(x, x))
    same(plain == "a", x == "a")
    same(plain.astype("S"), x.astype("S"))


def test_masked_arrays(cache: rc.Cache) -> None:
    """The mask travels, counts as memory, and is part of each version; writing `masked` into one works."""
    plain = np.ma.masked_array(grid(), grid() > 2)
    x = rc.array(plain)
    same(plain + 1, evicted(x + 1))
    same(plain + 1, x + 1)
    same(plain.sum(axis=0), x.sum(axis=0))
    same(plain.filled(0), x.filled(0))
    same(plain.compressed(), x.compressed())
    same(plain.mask, x.mask)
    same(np.ma.getmask(plain), np.ma.getmask(x))
    assert np.ma.sum(plain) == np.ma.sum(x)
    assert np.ma.is_masked(x)
    other = rc.array(x)
    x[0, 0] = np.ma.masked
    assert x.mask.tolist() == [[True, False, False], [True] * 3]
    assert other.mask.tolist() == plain.mask.tolist()
    x += 1
    expected = np.ma.masked_array(grid() + 1, [[True, False, False], [True] * 3])
    assert x.filled(0).tolist() == expected.filled(0).tolist()
    same(grid() + plain, rc.array(grid()) + plain)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_matrices(cache: rc.Cache) -> None:
    """Subclasses stay what they are, also where results are written to."""
    plain = grid().view(np.matrix)
    x = rc.array(plain)
    same(plain * plain.T, x * x.T)
    same(plain[0], x[0])
    same(plain.A, x.A)
    assert type(np.asarray(x)) is np.ndarray
    assert type(np.asanyarray(x)) is np.matrix
    x += 1
    same(plain + 1, x)
    np.add(x, 1, out=x)
    same(plain + 2, x)


def test_empty_and_zero_dimensional_arrays(cache: rc.Cache) -> None:
    """Nothing and one number are arrays as others."""
    for plain in (np.zeros((0, 3)), np.zeros((2, 0)), np.array(3.0), np.float64(3)):
        x = rc.array(plain)
        same(plain, x)
        same(plain + 1, x + 1)
        same(plain.sum(), x.sum())
        same(plain.T, x.T)
        x += 1
        same(plain + 1 if plain.shape else type(plain + 0)(4.0) if plain.base is None else plain, x[()])


def test_object_results(cache: rc.Cache) -> None:
    """Functions may make arrays of objects, though these cannot be wrapped."""
    made = np.frompyfunc(lambda x: (x,), 1, 1)(rc.array(grid()))
    assert made.shape == (2, 3)
    assert made[0, 1] == (1.0,)


@pytest.mark.parametrize("state", ["raise", "warn"])
def test_a_repeated_run_warns_of_nothing(cache: rc.Cache, state: Any) -> None:
    """What was ignored or warned of in the first run is not raised or warned of again."""
    with np.errstate(divide="ignore"):
        y = 1 / rc.array(np.zeros(2))
    with np.errstate(divide=state):
        assert evicted(y).tolist() == [np.inf, np.inf]


# Libraries and caches that do not go together


def test_two_caches_do_not_mix(cache: rc.Cache) -> None:
    """The error says what to do."""
    x = rc.array(grid())
    with rc.Cache():
        y = rc.array(grid())
    for mix in (
        lambda: x + y,
        lambda: np.add(x, y),
        lambda: np.concatenate([x, y]),
        lambda: x[y > 2],
        lambda: x.dot(y.T),
        lambda: operator.setitem(x, 0, y[0]),
        lambda: operator.iadd(x, y),
        lambda: np.add(x, 1, out=y),
        lambda: np.where(x > 2, [y, y], 0),
    ):
        with pytest.raises(ValueError, match=r"two caches: .* pass the value: argument\.get\(\)"):
            mix()
    same(grid(), x)
    same(grid(), y)
    same(2 * grid(), x + y.get())


def test_arrays_belong_to_the_cache_that_was_current_when_they_were_wrapped(cache: rc.Cache) -> None:
    """Results belong to the cache of the operands, whichever is current."""
    x = rc.array(grid())
    with rc.Cache() as other:
        assert (x + 1).cache is cache
        assert np.zeros_like(x).cache is cache
        assert rc.array(x).cache is cache
        assert rc.array(grid()).cache is other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param([1, 2], r"not a list; make one first, for example rc\.array\(numpy\.asarray\(x\)\)", id="a list"),
        pytest.param(1.5, "not a float", id="a number"),
        pytest.param(None, "not a NoneType", id="nothing"),
        pytest.param("text", r"not a str.* use rc\.pure", id="text"),
        pytest.param({}, "not a dict", id="a dict"),
        pytest.param(np.array([None, 1]), "Python objects .* numeric dtype, or use rc.pure and rc.ap", id="objects"),
        pytest.param(np.zeros(2, "O,f8"), "Python objects", id="objects in fields"),
    ],
)
def test_what_cannot_be_wrapped(cache: rc.Cache, given: Any, message: str) -> None:
    """TypeError, with what to do instead."""
    with pytest.raises(TypeError, match=message):
        rc.array(given)


def test_objects_cannot_be_operands(cache: rc.Cache) -> None:
    """Plain arrays of objects are refused where they meet wrapped ones, too."""
    with pytest.raises(TypeError, match="Python objects"):
        _ = rc.array(grid()) + np.array([None, 1, 2])


def test_what_can_be_read_only_once_is_refused(cache: rc.Cache) -> None:
    """Generators are used up in the first run."""
    with pytest.raises(TypeError, match="pass a list or a tuple instead"):
        np.concatenate((array for array in [rc.array(grid())]), axis=rc.array(np.array(0)))
    with pytest.raises(TypeError, match="pass a list or a tuple instead"):
        _ = rc.array(grid()) + (number for number in [1, 2, 3])


def test_a_changed_source_is_found(cache: rc.Cache) -> None:
    """A caller who changes the array that he wrapped is told so, if the cache verifies."""
    plain = grid()
    x = rc.array(plain)
    y = x + 1
    plain[0, 0] = 100
    y.evict()
    with pytest.raises(rc.ImpureError, match=r"a source was changed in place .* work on a copy"):
        y.get()


def test_a_changed_result_is_found(cache: rc.Cache) -> None:
    """Who makes an array writeable that he got, and changes it, is told so, if the cache verifies."""
    y = rc.array(grid()) + 1
    plain = y.get()
    plain.setflags(write=True)
    plain[0, 0] = 100
    with pytest.raises(rc.ImpureError, match=r"the result of add .* was changed in place"):
        y.get()


def test_history_that_grows_is_warned_of() -> None:
    """A loop without `detach` is warned of once in a while; with it nothing is kept and nothing said."""
    with rc.Cache() as cache:
        x = rc.array(np.ones(3))
        steps = range(10_100)
        with pytest.warns(RuntimeWarning, match=r"cut their history .* w = step\(w\)\.detach\(\)"):
            x = reduce(lambda x, _: x * 1.0, steps, x)
        y = rc.array(np.ones(3))
        y = reduce(lambda y, _: (y * 1.0).detach(), steps, y)
        assert cache.stats().used <= 4 * 24


def test_nothing_is_left_when_arrays_have_gone(cache: rc.Cache) -> None:
    """Without references, no bytes are counted any more."""
    x = rc.array(grid())
    y = x @ x.T
    w, v = np.linalg.eigh(y)
    x[0] = y[0, 0]
    x += 1
    np.add(x, 1, out=x)
    del x, y, w, v
    assert cache.stats().used == 0
