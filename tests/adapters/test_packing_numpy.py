"""Arrays of NumPy as bytes and back: bits, dtype, shape and strides, whatever the array looks like."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_adapter
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
nps = pytest.importorskip("hypothesis.extra.numpy", reason="the extra 'numpy' is not installed")

from numpy.lib.stride_tricks import as_strided, sliding_window_view  # noqa: E402  # after importorskip
from packed import fetched, fetched_source, packed, unpacked  # noqa: E402  # it lies beside other tests

from recompute_numpy import adapter  # noqa: E402

ALIGNED = np.dtype([("small", "i1"), ("large", "f8"), ("text", "U3")], align=True)  # with padding
DTYPES = st.one_of(
    nps.scalar_dtypes(),
    nps.byte_string_dtypes(max_len=4),
    nps.unicode_string_dtypes(max_len=4),
    nps.array_dtypes(),
    st.sampled_from([ALIGNED, np.dtype(np.longdouble), np.dtype(">f8"), np.dtype("V3"), np.dtype("M8[7ns]")]),
)
SHAPES = nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with registered(adapter, np.ndarray, np.generic):
        yield


@st.composite
def recipes(draw: st.DrawFn) -> Callable[[], Any]:
    """Makes the same array each time, which alone keeps its memory: in any order, a view with gaps, of random bits."""
    dtype, shape = draw(DTYPES), draw(SHAPES)
    seed = draw(st.integers(0, 2**32 - 1))
    order = draw(st.permutations(range(len(shape))))
    owns = draw(st.booleans())
    steps = st.sampled_from([None, 1, 2, 3, -1, -2])
    index = [slice(draw(st.integers(0, 2)) or None, None, draw(steps)) for _ in shape]
    repeated = draw(st.integers(0, 3))

    def make() -> Any:
        array = np.empty([shape[axis] for axis in order], dtype)
        if array.nbytes:
            array.reshape(-1).view(np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, array.nbytes)
        array = array.transpose(np.argsort(order))
        if owns:
            return array.copy(order="K")
        array = array[(..., *index)]
        return np.broadcast_to(array, (repeated, *array.shape)) if repeated else array

    return make


def elements(array: Any) -> list[bytes]:
    """The bits of each element, with padding."""
    return [array[(*index, ...)].tobytes() for index in np.ndindex(array.shape)]


def looks(array: Any) -> tuple[Any, ...]:
    return type(array), array.shape, array.strides, array.dtype, array.dtype.isalignedstruct, elements(array)


@given(recipes())
def test_an_array_comes_back_to_the_last_bit_with_its_strides(make: Callable[[], Any]) -> None:
    """Any dtype, order and view; its bytes are not more than what is counted, and what owned its memory does again."""
    array = make()
    counted = adapter.nbytes(array)
    assert sum(map(len, packed(array)[1])) <= counted
    back = unpacked(array)
    assert looks(back) == looks(array)
    assert adapter.nbytes(back) <= counted
    assert back.base is None or array.base is not None
    assert not np.shares_memory(back, array)


@given(recipes())
def test_an_array_comes_back_from_a_disk(make: Callable[[], Any]) -> None:
    """The same for results and sources of a cache, which come back read-only."""

    def check(found: Any) -> None:
        assert looks(found) == looks(make())
        assert not found.flags.writeable

    if adapter.nbytes(make()):
        fetched(make, check)
        fetched_source(lambda: make().copy(order="K"), check=lambda found: check_copy(found, make()))


def check_copy(found: Any, array: Any) -> None:
    assert looks(found) == looks(array.copy(order="K"))


@given(recipes(), recipes())
def test_arrays_inside_of_something_come_back_the_same(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """In lists, dicts and arrays of objects arrays have the strides that they had, and one array is one again."""
    first, second = one(), other()
    held = np.empty(2, object)
    held[:] = [first.copy(), "text"]
    back = unpacked([first, {"second": second}, first, held, 1.5])
    assert looks(back[0]) == looks(first)
    assert looks(back[1]["second"]) == looks(second)
    assert back[2] is back[0]
    assert looks(back[3][0]) == looks(first.copy())
    assert back[4] == 1.5


@given(recipes())
def test_the_memory_itself_is_written_and_read(make: Callable[[], Any]) -> None:
    """Packing copies nothing, and unpacking reads into the memory that the array has."""
    array = make()
    head, buffers = adapter.pack(array)
    (buffer,) = buffers
    assert not array.size or np.shares_memory(array, buffer)
    given = bytes(memoryview(buffer).cast("B"))
    filled: list[Any] = []

    def load(memory: Any) -> None:
        memoryview(memory).cast("B")[:] = given
        filled.append(memory)

    back = adapter.unpack(head, load)
    assert not array.size or np.shares_memory(back, filled[0])


def test_a_broadcast_array_stays_small() -> None:
    """What has one element in memory for a million is packed and comes back so."""

    def make() -> Any:
        return np.broadcast_to(np.arange(3.0), (1_000_000, 3))

    assert [len(part) for part in packed(make())[1]] == [24]
    back = unpacked(make())
    assert (back.shape, back.strides, adapter.nbytes(back)) == ((1_000_000, 3), (0, 8), 24)
    assert adapter.nbytes(unpacked(sliding_window_view(np.arange(1_000.0), 100))) == 8_000
    assert adapter.nbytes(unpacked(as_strided(np.arange(100.0), (50, 50), (8, 8)))) <= 800


WHOLE = np.arange(1_000.0).reshape(10, 100)


@pytest.mark.parametrize("part", [lambda: WHOLE[:, 3], lambda: WHOLE[::2], lambda: WHOLE.T[5:]], ids=["3", "::2", "T"])
def test_gaps_in_memory_of_others_are_not_packed(part: Callable[[], Any]) -> None:
    """A part with gaps of what others hold would come back larger: it is refused; without gaps it is not."""
    with pytest.raises(BufferError, match="others hold"):
        packed(part())
    assert looks(unpacked(part().copy(order="K"))) == looks(part().copy(order="K"))
    assert looks(unpacked(WHOLE[3:5])) == looks(WHOLE[3:5])


def test_what_cannot_be_packed_is_computed_again(tmp_path: Any) -> None:
    """A tier that is told to take all gets nothing of a part with gaps, and the cache says so once."""
    with rc.Cache(tiers=[rc.Disk(folder=tmp_path, always=True)]) as cache:
        part = rc.ap(lambda: WHOLE[:, 3])
        with pytest.warns(RuntimeWarning, match="others hold"):
            assert part.evict()
        assert part.get().tolist() == WHOLE[:, 3].tolist()
        assert (cache.stats().rematerializations, cache.stats().tiers[0].moves) == (1, 0)


OTHERS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: np.float64(1.5),
    "time": lambda: np.datetime64("2020-01-01", "ns"),
    "record": lambda: np.array([(1, 2.5)], "i4,f8")[0],
    "objects": lambda: np.array([[1, "a"], [None, (2,)]], dtype=object),
    "strings": lambda: np.array(["some", "text" * 100], np.dtypes.StringDType()),
    "matrix": lambda: np.matrix(np.arange(12.0).reshape(3, 4), copy=True).T,
    "records": lambda: np.rec.array([(1, 2.5), (3, 4.5)], dtype="i4,f8"),
    "masked": lambda: np.ma.array(np.arange(6.0).reshape(2, 3), mask=np.eye(2, 3, dtype=bool), fill_value=7),
    "nothing": lambda: np.empty(3, "V0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_array_comes_back_by_pickle(name: str) -> None:
    """Scalars, records, objects, strings and subclasses."""
    value = OTHERS[name]()
    back = unpacked(value)
    assert type(back) is type(value)
    assert adapter.fingerprint(back) == adapter.fingerprint(value)
    if isinstance(value, np.ndarray):
        assert back.strides == value.strides
    if name == "masked":
        assert (back.fill_value, back.mask.tolist()) == (7, value.mask.tolist())


class Noted(np.ndarray):  # type: ignore[misc, name-defined]  # it may not be installed
    """An array with an attribute, as NumPy's manual shows."""

    def __array_finalize__(self, array: Any) -> None:
        self.note = getattr(array, "note", None)


class Pickled(Noted):
    """One that says how it is pickled."""

    def __reduce__(self) -> Any:
        return noted, (Pickled, self.note)


def noted(cls: Any, note: str) -> Any:
    array = np.arange(6.0).view(cls)
    array.note = note
    return array


@pytest.mark.parametrize(
    "value",
    [
        np.matrix(np.arange(16.0).reshape(4, 4), copy=True)[::2, ::2],
        np.array([1, "a", None, 2], dtype=object)[::2],
        np.ma.array([1.0, 2.0]),
        noted(Noted, "mine"),
        np.ma.array([1.0, 2.0], mask=[False, True], hard_mask=True),
        np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])[::2],
    ],
    ids=["gaps", "objects with gaps", "no mask", "attributes", "hard mask", "masked with gaps"],
)
def test_what_pickle_would_change_is_not_packed(value: Any) -> None:
    """Gaps in a subclass, or between objects, would be lost, and so would attributes; a mask would be made."""
    with pytest.raises(BufferError, match="pickled"):
        packed(value)


@pytest.mark.parametrize("cls", [Noted, Pickled], ids=lambda cls: cls.__name__)
def test_attributes_of_a_subclass_outlive_a_tier(cls: Any, tmp_path: Any) -> None:
    """What a tier gives back has them, and what it could not give back with them is made again."""
    with rc.Cache(tiers=[rc.Disk(folder=tmp_path, always=True)]) as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it says that it is computed again
        values = [rc.ap(noted, cls, "mine"), rc.pure(noted(cls, "mine"))]
        cache.release_memory()
        assert [value.get().note for value in values] == ["mine", "mine"]
        assert cache.stats().tiers[0].moves == (2 if cls is Pickled else 0)


def test_the_kit_passes() -> None:
    """The adapter keeps its promises for plain arrays, views of them, scalars and subclasses."""
    plain: list[Callable[[], Any]] = [
        lambda: np.arange(100.0),
        lambda: np.arange(100.0).reshape(10, 10).T[::2, ::-1],
        lambda: np.zeros((3, 0), ALIGNED),
        lambda: np.array(1.5),
        lambda: np.ones(3, np.longdouble),
    ]
    check_adapter(adapter, plain, view=lambda array: array.view())
    check_adapter(adapter, [OTHERS[name] for name in OTHERS if name not in ("strings", "nothing")])
