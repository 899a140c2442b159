"""The NumPy adapter: what an array costs, whose memory it is, and whether two results are the same."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
nps = pytest.importorskip("hypothesis.extra.numpy", reason="the extra 'numpy' is not installed")

from cached_views import VIEWS, check_aliases, check_part_of_a_global, check_program, programs  # noqa: E402  # after importorskip
from numpy.lib.stride_tricks import as_strided, sliding_window_view  # noqa: E402

from recompute_numpy import adapter  # noqa: E402

BIG = np.arange(1_000.0)
DTYPES = st.one_of(
    nps.scalar_dtypes(), nps.byte_string_dtypes(max_len=4), nps.unicode_string_dtypes(max_len=4), nps.array_dtypes()
)
ARRAYS = nps.arrays(DTYPES, nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
FLOATS = nps.arrays(np.float64, nps.array_shapes(min_dims=1, max_dims=3, max_side=4), elements=st.floats())


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with registered(adapter, np.ndarray, np.generic):
        yield


def test_arrays_and_scalars_are_served() -> None:
    """Arrays of any subclass and scalars are the adapter's; a dtype, a generator or a ufunc is not."""
    served = [np.ndarray, np.matrix, np.ma.MaskedArray, np.memmap, np.recarray, np.float64, np.bool_, np.str_, np.void]
    plain = [type(np.dtype("f8")), np.random.Generator, np.ufunc, int]
    assert [adapter.serves(cls) for cls in served + plain] == [True] * len(served) + [False] * len(plain)


# Size


@given(ARRAYS)
def test_an_array_that_owns_its_memory_is_charged_for_it(array: Any) -> None:
    """An array without a base takes its nbytes and is its own buffer."""
    array = array.copy()
    assert adapter.nbytes(array) == array.nbytes
    assert adapter.buffer(array) is array
    assert adapter.watch(array) is array


@pytest.mark.parametrize(
    "view",
    [
        *VIEWS,
        pytest.param(lambda a: a[:0], id="nothing"),
        pytest.param(lambda a: sliding_window_view(a, 10), id="windows"),
        pytest.param(lambda a: as_strided(a, (2, 2), (8, 16)), id="strided"),
        pytest.param(lambda a: a.view(np.matrix).T, id="subclass"),
    ],
)
def test_a_view_that_alone_keeps_an_array_is_charged_for_all_of_it(view: Callable[[Any], Any]) -> None:
    """The only reference to an array takes the whole array's bytes; a view of one that lives on, its own at most."""
    alone = view(np.arange(1_000.0))
    shared = view(BIG)
    assert adapter.nbytes(alone) == BIG.nbytes
    assert adapter.nbytes(shared) == min(shared.nbytes, BIG.nbytes)
    assert adapter.buffer(shared) is BIG
    watched = adapter.watch(alone)
    assert adapter.buffer(alone) is watched
    assert adapter.watch(shared) is shared


def test_a_view_is_charged_in_full_once_its_owner_is_nobody_elses() -> None:
    """The charge follows the references to the owner, however the view was made."""
    owner = np.zeros(100)
    view = owner[:10]
    assert adapter.nbytes(view) == 80
    del owner
    assert adapter.nbytes(view) == 800


def test_a_function_that_returns_a_view_of_its_local_is_charged_for_the_local() -> None:
    """What a function made and returned a part of counts in full in the cache."""

    def head() -> Any:
        local = np.zeros(100)
        return local[:10]

    with rc.Cache() as cache:
        value = rc.ap(head)
        assert cache.stats().used == 800
        del value


def test_memory_of_others_counts_as_the_arrays_own() -> None:
    """An array over bytes or over a map is its own buffer; parts share it and are charged for the part."""
    raw = np.frombuffer(bytes(range(80)), np.uint8)
    assert adapter.buffer(raw) is raw
    assert adapter.nbytes(raw) == 80
    assert adapter.buffer(raw[8:]) is raw
    assert adapter.nbytes(raw[8:]) == 72
    mapped = np.frombuffer(mmap.mmap(-1, 4096), np.float64)
    assert adapter.nbytes(mapped) == 4096


def test_a_slice_of_shared_bytes_is_charged_for_the_slice() -> None:
    """Nobody frees bytes that somebody else holds, even if the array between is a temporary."""
    shared = bytes(1_000)
    assert adapter.nbytes(np.frombuffer(shared, np.uint8)[:10]) == 10
    assert adapter.nbytes(np.frombuffer(bytes(bytearray(1_000)), np.uint8)[:10]) == 1_000


def test_a_map_of_a_file_and_its_parts_share_a_buffer(tmp_path: Path) -> None:
    """A memmap is its own buffer, and so for its slices, of either type."""
    mapped = np.memmap(tmp_path / "data", np.float64, "w+", shape=(100,))
    assert adapter.buffer(mapped) is mapped
    assert adapter.buffer(mapped[10:][10:]) is mapped
    assert adapter.buffer(np.asarray(mapped)[5:]) is mapped
    assert [adapter.nbytes(mapped), adapter.nbytes(mapped[:10])] == [800, 80]


@pytest.mark.parametrize("scalar", [np.float64(1.5), np.int8(3), np.bool_(True), np.str_("abc"), np.datetime64("2020")])
def test_scalars_never_share_memory(scalar: Any) -> None:
    """A scalar takes its nbytes, has no buffer, and freezing it does nothing."""
    adapter.freeze(scalar)
    assert adapter.nbytes(scalar) == scalar.nbytes
    assert adapter.buffer(scalar) is None
    assert adapter.watch(scalar) is None


def test_a_record_shares_the_memory_of_its_array() -> None:
    """The one scalar that is a view, a record of a structured array, is treated as a view."""
    records = np.zeros(10, "i4,f8")
    assert adapter.buffer(records[3]) is records
    assert adapter.nbytes(records[3]) == records.itemsize


def test_object_arrays_add_their_elements_once() -> None:
    """The distinct elements of an object array are added to its references, in fields too."""
    element, text = [1, 2, 3], "some text"
    array = np.empty(3, object)
    array[:] = [element, element, text]
    assert adapter.nbytes(array) == array.nbytes + rc.sizeof(element) + rc.sizeof(text)
    record = np.zeros(2, [("number", "f8"), ("object", object)])
    record["object"] = text
    assert adapter.nbytes(record) == record.nbytes + rc.sizeof(text)
    assert adapter.nbytes(record[0]) == record[0].nbytes + rc.sizeof(text)


def test_large_object_arrays_are_estimated() -> None:
    """Beyond a thousand elements a sample stands for all of them."""
    array = np.array([bytes(100) + bytes([number % 256]) for number in range(50_000)], dtype=object)
    exact = array.nbytes + sum(rc.sizeof(element) for element in array)
    assert adapter.nbytes(array) == pytest.approx(exact, rel=0.01)


def test_an_array_that_contains_itself_has_a_size() -> None:
    """A self-containing object array is measured once."""
    array = np.empty(1, object)
    array[0] = array
    assert adapter.nbytes(array) == array.nbytes


def test_strings_of_variable_width_count_their_text() -> None:
    """The text of NumPy 2's string arrays is added to what nbytes tells."""
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("NumPy 1 has no StringDType")
    short, long = (np.array([text] * 10, np.dtypes.StringDType()) for text in ("x", "x" * 1_000))
    assert adapter.fingerprint(long[::2]) == adapter.fingerprint(long[:5])
    assert adapter.nbytes(long) >= long.nbytes + 1_000
    assert adapter.nbytes(long) > adapter.nbytes(short)


def test_a_masked_array_adds_its_mask() -> None:
    """Data and mask of a masked array are both counted."""
    assert adapter.nbytes(np.ma.array(np.zeros(10), mask=np.ones(10, bool))) >= 90


# Views of one buffer in the cache


def test_views_are_aliases_of_their_argument() -> None:
    """A view of an argument takes no memory of its own and is evicted with it."""
    check_aliases(lambda: np.arange(1_000.0), np.reshape, np.asarray, 8_000)


def test_a_part_that_the_caller_holds_keeps_the_whole_counted() -> None:
    """An evicted result stays counted as long as any view of its memory is held outside."""
    with rc.Cache() as cache:
        value = rc.ap(lambda: np.arange(1_000.0).reshape(10, 100))
        row = value.get()[0]
        assert value.evict()
        assert (cache.stats().used, cache.stats().held) == (8_000, 8_000)
        del row
        assert (cache.stats().used, cache.stats().held) == (0, 0)


def test_a_part_of_what_lives_elsewhere_is_not_counted_after_eviction() -> None:
    """Evicting and recomputing a slice of a global over and over leaves nothing counted behind."""
    check_part_of_a_global(lambda: BIG[:10], np.asarray, 80)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda a: a + 1,
    "transpose": lambda a: a.T,
    "slice": lambda a: a[::-1, 1:] if a.shape[1] > 2 else a[:1],
    "copy": lambda a: a.copy(),
    "split": lambda a: np.vstack([a, a])[: a.shape[0]],
}


@given(program=programs(FUNCTIONS), slack=st.integers(0, 4))
def test_programs_of_views_give_what_they_give_without_a_cache(program: list[tuple[int, str]], slack: int) -> None:
    """Within any budget that fits, arrays and views of them come back as they were, and the books balance."""
    start = np.arange(64.0).reshape(8, 8)
    check_program(program, FUNCTIONS, start, start.nbytes * (5 + slack), np.asarray)


# Read-only results


def test_results_are_read_only_and_sources_are_not_touched() -> None:
    """What an operation returns cannot be written to; what the caller gave to pure still can."""
    mine = np.zeros(3)
    with rc.Cache():
        source = rc.pure(mine)
        result = source.map(np.exp).get()
    assert mine.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        result[0] = 1


def test_the_mask_of_a_result_is_read_only_too() -> None:
    """Neither cells nor mask of a frozen masked array can be set."""
    array = np.ma.array([1.0, 2.0], mask=[False, True])
    adapter.freeze(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = np.ma.masked


# What decides the size of a result


@given(ARRAYS)
def test_signatures_depend_on_shape_and_dtype(array: Any) -> None:
    """Arrays of one shape and dtype have one signature, which can be a key; of another shape, another."""
    same, other = np.empty_like(array), np.empty((*array.shape, 2), array.dtype)
    if array.shape or array.dtype.kind not in "biu":
        assert adapter.signature(array) == adapter.signature(same)
    assert hash(adapter.signature(array)) == hash(adapter.signature(array.copy()))
    assert adapter.signature(array) != adapter.signature(other)


@pytest.mark.parametrize("make", [np.int64, np.uint8, np.bool_, lambda number: np.array(number, np.int32)])
def test_the_value_of_a_single_integer_may_be_a_size(make: Callable[[int], Any]) -> None:
    """Integer scalars of different value differ in signature; floats do not, they would only fill the table."""
    assert adapter.signature(make(0)) != adapter.signature(make(1))
    assert adapter.signature(np.float64(0)) == adapter.signature(np.float64(1))


# Digests


@given(ARRAYS)
def test_digests_do_not_depend_on_layout(array: Any) -> None:
    """A copy, in either order or with gaps, has the digest of the array."""
    gaps = np.repeat(array[..., None], 2, axis=-1)[..., 0]
    digests = {adapter.fingerprint(layout) for layout in (array.copy(), np.array(array, order="F"), gaps)}
    assert digests == {adapter.fingerprint(array)}


@given(FLOATS, st.data())
def test_any_bit_changes_the_digest(array: Any, data: st.DataObject) -> None:
    """Arrays that differ in one bit have different digests."""
    other = array.copy()
    bits = other.reshape(-1).view(np.uint8)
    bits[data.draw(st.integers(0, bits.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert adapter.fingerprint(array) != adapter.fingerprint(other)


def test_digests_tell_apart_what_compares_equal() -> None:
    """Signed zeros, payloads of NaN, dtypes with their metadata, shapes, and fill values are part of the digest."""
    payload = np.array([0x7FF8000000000001]).view(np.float64)
    different = [
        np.array([0.0]),
        np.array([-0.0]),
        np.array([np.nan]),
        payload,
        np.array([0.0], np.float32),
        np.array([[0.0]]),
        np.array([0.0], ">f8"),
        np.array([0.0]).view(np.matrix),
        np.float64(0.0),
        np.ma.array([0.0]),
        np.ma.array([0.0], mask=[True]),
        np.ma.array([0.0], fill_value=1),
        np.ma.array([0.0], hard_mask=True),
        np.array([0.0], np.dtype("f8", metadata={"unit": "m"})),
        np.array([0.0], np.dtype("f8", metadata={"unit": "km"})),
    ]
    assert len({adapter.fingerprint(array) for array in different}) == len(different)


def test_attributes_of_a_subclass_are_content(tmp_path: Path) -> None:
    """Numbers in another unit are others; but not what an array knows of itself, or of the file that it lies in."""

    class Quantity(np.ndarray[Any, Any]):
        @cached_property
        def total(self) -> Any:
            return self.sum()

    def quantity(unit: Any) -> Any:
        made = np.ones(3).view(Quantity)
        made.unit = unit
        return made

    metres = quantity("m")
    assert adapter.fingerprint(metres) != adapter.fingerprint(quantity("km"))
    assert adapter.fingerprint(quantity(lambda: 0)) is None
    assert metres.total == 3
    assert adapter.fingerprint(metres) == adapter.fingerprint(quantity("m"))
    mapped = [np.memmap(tmp_path / name, np.float64, "w+", shape=3) for name in ("a", "b")]
    assert adapter.fingerprint(mapped[0]) == adapter.fingerprint(mapped[1]) is not None


def test_padding_is_not_content() -> None:
    """Bytes between the fields of a record, behind a long double or under a mask may be anything."""
    dtype = np.dtype("i1,f8", align=True)
    noisy = np.frombuffer(bytes([1]) + bytes([7] * 7) + bytes(8), dtype)
    clean = np.frombuffer(bytes([1]) + bytes([0] * 7) + bytes(8), dtype)
    assert adapter.fingerprint(noisy) == adapter.fingerprint(clean)
    long = np.ones(3, np.longdouble)
    noisy = long.copy()
    if np.finfo(np.longdouble).nmant == 63:  # x86
        noisy.view(np.uint8)[15] = 7
    assert adapter.fingerprint(noisy) == adapter.fingerprint(long)
    assert adapter.fingerprint(long + np.finfo(np.longdouble).eps) != adapter.fingerprint(long)
    masked = [np.ma.array([1.0, cell], mask=[False, True]) for cell in (2.0, 3.0)]
    assert adapter.fingerprint(masked[0]) == adapter.fingerprint(masked[1])


def test_digests_of_objects_are_those_of_their_content() -> None:
    """Object arrays are compared by their elements, not by addresses; what cannot be compared has no digest."""
    one, same, other = (np.array([list("abc"), None, number], dtype=object) for number in (1.5, 1.5, 2.5))
    assert adapter.fingerprint(one) == adapter.fingerprint(same)
    assert adapter.fingerprint(one) != adapter.fingerprint(other)
    assert adapter.fingerprint(np.array([lambda: 0], dtype=object)) is None


def test_the_masked_constant_is_an_array_like_any_other() -> None:
    """numpy.ma.masked has a size, a signature and a digest."""
    assert adapter.nbytes(np.ma.masked) >= 8
    assert adapter.signature(np.ma.masked) == ((), np.dtype(np.float64))
    assert adapter.fingerprint(np.ma.masked) is not None


def test_an_impure_function_is_found_out() -> None:
    """With verify=True a function whose second run gives another array is named."""
    runs: list[int] = []

    def noise() -> Any:
        runs.append(1)
        return np.full(3, float(len(runs)))

    with rc.Cache(verify=True):
        value = rc.ap(noise)
        value.evict()
        with pytest.raises(rc.ImpureError, match="noise"):
            value.get()


def test_a_source_of_few_large_elements() -> None:
    """However large its elements are, some of them are looked at: an array of long strings is a source."""
    with rc.Cache("1MB"):
        for count in (1, 30, 64, 100):
            words = np.array(["x" * 2_000] * count)
            assert (rc.pure(words).get() == words).all()
