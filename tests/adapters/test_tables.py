"""The adapters of pandas and Arrow: sizes as they report them, and digests of content, not of layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing.conformance import registered
from recompute_tables import arrow, pandas

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
pd = pytest.importorskip("pandas", reason="pandas is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from recompute_numpy import adapter as numpy_adapter  # noqa: E402  # after importorskip

FRAME = {
    "integer": [1, 2, 3],
    "float": [0.0, -0.0, float("nan")],
    "text": ["a", "b", None],
    "object": [{"key": [1]}, None, 2.5],
}
CELLS = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))),
    st.lists(st.one_of(st.none(), st.floats(allow_nan=False))),
    st.lists(st.one_of(st.none(), st.text(max_size=3))),
    st.lists(st.one_of(st.none(), st.booleans())),
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=3))),
)


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapters serve their types, whether or not the package is installed."""
    with (
        registered(pandas, pd.DataFrame, pd.Series, pd.Index),
        registered(arrow, pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array, pa.Buffer),
        registered(numpy_adapter, np.ndarray, np.generic),
    ):
        yield


def test_the_adapters_import_neither_framework() -> None:
    """Importing the package loads no pandas, no pyarrow and no numpy."""
    code = "import recompute_tables, sys; print({'numpy', 'pandas', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_tables_and_columns_are_served() -> None:
    """Frames, series, indexes; tables, batches, arrays, buffers. A timestamp, a schema or a type is a plain object."""
    assert [pandas.serves(cls) for cls in (pd.DataFrame, pd.Series, pd.RangeIndex, pd.MultiIndex)] == [True] * 4
    assert [pandas.serves(cls) for cls in (pd.Timestamp, pd.Timedelta, np.ndarray)] == [False] * 3
    assert [arrow.serves(cls) for cls in (pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Int8Array, pa.Buffer)] == [
        True
    ] * 5
    assert [arrow.serves(cls) for cls in (pa.Schema, pa.DataType, pa.Int64Scalar)] == [False] * 3


# pandas


def test_pandas_sizes_include_labels_and_objects() -> None:
    """Frames, series and indexes take what pandas says they take, deeply."""
    frame = pd.DataFrame(FRAME)
    assert pandas.nbytes(frame) == frame.memory_usage(deep=True).sum()
    assert pandas.nbytes(frame["object"]) == frame["object"].memory_usage(deep=True)
    assert pandas.nbytes(frame.columns) == frame.columns.memory_usage(deep=True)
    assert pandas.nbytes(frame["object"]) > frame["object"].memory_usage()


def test_the_cache_counts_a_frame_by_its_adapter() -> None:
    """An operation's frame is counted as pandas measures it, evicted, and made again."""
    with rc.Cache() as cache:
        value = rc.ap(pd.DataFrame, FRAME)
        assert cache.stats().used == pandas.nbytes(value.get())
        assert value.evict()
        assert cache.stats().used == 0
        pd.testing.assert_frame_equal(value.get(), pd.DataFrame(FRAME))


def test_pandas_signatures_are_shape_and_dtypes() -> None:
    """Frames of one shape and dtypes share a signature; another row, dtype or column gives another one."""
    frame = pd.DataFrame(FRAME)
    others = [frame[:2], frame.astype({"integer": "float"}), frame[["integer"]], frame["integer"], frame.index]
    assert pandas.signature(frame) == pandas.signature(frame.rename(columns=str.upper))
    assert len({pandas.signature(other) for other in [frame, *others]}) == 6


def with_attrs(frame: Any, **attributes: Any) -> Any:
    copied = frame.copy()
    copied.attrs.update(attributes)
    return copied


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda f: f.assign(integer=[1, 2, 4]), id="cell"),
        pytest.param(lambda f: f.assign(float=[0.0, 0.0, np.nan]), id="sign of zero"),
        pytest.param(lambda f: f.assign(object=[{"key": [2]}, None, 2.5]), id="inside an object"),
        pytest.param(lambda f: f.astype({"integer": "int32"}), id="dtype"),
        pytest.param(lambda f: f.astype({"integer": "Int64"}), id="nullable dtype"),
        pytest.param(lambda f: f.rename(columns={"text": "t"}), id="column"),
        pytest.param(lambda f: f.rename_axis("rows"), id="index name"),
        pytest.param(lambda f: f.set_index([[0, 1, 3]]), id="index"),
        pytest.param(lambda f: f[::-1], id="order of rows"),
        pytest.param(lambda f: f[["text", "integer", "float", "object"]], id="order of columns"),
        pytest.param(lambda f: f["integer"], id="series"),
        pytest.param(lambda f: with_attrs(f, unit="m"), id="attribute"),
        pytest.param(lambda f: f.set_flags(allows_duplicate_labels=False), id="flag"),
    ],
)
def test_any_change_of_a_frame_changes_its_digest(change: Callable[[Any], Any]) -> None:
    """Cells, dtypes, labels, names, order and attributes are part of the digest; a deep copy has the same."""
    frame = pd.DataFrame(FRAME)
    assert pandas.fingerprint(frame.copy(deep=True)) == pandas.fingerprint(frame)
    assert pandas.fingerprint(change(frame)) != pandas.fingerprint(frame)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pd.array([1, None], "Int64"), pd.array([0, None], "Int64")),
        (pd.array(["a", None], "string"), pd.array(["a", ""], "string")),
        (pd.Categorical(["u", "v"]), pd.Categorical(["u", "v"], categories=["v", "u"])),
        (pd.Categorical(["u", "v"]), pd.Categorical(["u", "v"], ordered=True)),
        (pd.to_datetime(["2020", "2021"]), pd.to_datetime(["2020", "2021"]).tz_localize("UTC")),
        (pd.period_range("2020", periods=2, freq="D"), pd.period_range("2020", periods=2, freq="h")),
        (pd.date_range("2020", periods=2), pd.DatetimeIndex(["2020-01-01", "2020-01-02"])),
        (pd.MultiIndex.from_tuples([(1, "a")]), pd.MultiIndex.from_tuples([(1, "b")])),
        (pd.arrays.IntervalArray.from_breaks([0, 1]), pd.arrays.IntervalArray.from_breaks([0, 2])),
    ],
    ids=lambda values: str(values.dtype),
)
def test_columns_of_every_kind_have_digests(one: Any, other: Any) -> None:
    """Nullable, text, categorical, time and interval columns, and indexes of several levels, are told apart."""
    columns = [column if isinstance(column, pd.Index) else pd.Series(column) for column in (one, other)]
    digests = [pandas.fingerprint(column) for column in (columns[0], columns[0].copy(), columns[1])]
    assert None not in digests
    assert digests[0] == digests[1] != digests[2]


def test_a_cell_without_a_digest_leaves_the_frame_without_one() -> None:
    """What cannot be compared is said so, not passed over."""
    assert pandas.fingerprint(pd.DataFrame({"function": [lambda: 0]})) is None


# Arrow


def test_arrow_sizes_count_buffers_once_and_slices_in_part() -> None:
    """A column used twice is counted once; a slice takes its part of the table."""
    column = pa.array(range(1_000))
    table = pa.table({"one": column, "two": column})
    assert arrow.nbytes(column) == 8_000
    assert arrow.nbytes(table) == 8_000
    assert arrow.nbytes(column.slice(10, 5)) == 40
    assert arrow.nbytes(pa.chunked_array([column, column.slice(0, 500)])) == 8_000
    assert arrow.nbytes(table.to_batches()[0]) == 8_000
    assert arrow.nbytes(pa.py_buffer(b"12345")) == 5


def test_arrow_signatures_are_rows_and_types() -> None:
    """Tables of one length and schema share a signature, which can be a key; of others they do not."""
    values = [pa.table({"a": [1]}), pa.table({"a": [1, 2]}), pa.table({"b": [1]}), pa.table({"a": ["x"]})]
    values += [pa.array([1]), pa.array(["x"]), pa.py_buffer(b"x"), pa.chunked_array([[1.0]])]
    assert len({arrow.signature(value) for value in values}) == len(values)
    assert arrow.signature(pa.table({"a": [7]})) == arrow.signature(values[0])


@given(CELLS, st.data())
def test_arrow_digests_do_not_depend_on_layout(cells: list[Any], data: st.DataObject) -> None:
    """However a column is cut into chunks, and whatever larger array it is a slice of, its digest is the same."""
    plain = pa.array(cells)
    cut = data.draw(st.integers(0, len(cells)))
    chunked = pa.chunked_array([plain.slice(0, cut), plain.slice(cut)], plain.type)
    longer = pa.concat_arrays([plain, plain])
    assert arrow.fingerprint(longer.slice(len(cells))) == arrow.fingerprint(plain)
    assert arrow.fingerprint(longer.slice(0, len(cells))) == arrow.fingerprint(plain)
    assert arrow.fingerprint(chunked) == arrow.fingerprint(pa.chunked_array([plain]))


@given(CELLS, CELLS)
def test_arrow_digests_tell_columns_apart(one: list[Any], other: list[Any]) -> None:
    """Two columns have one digest if and only if they hold the same cells in the same type, bit by bit."""
    same = repr(one) == repr(other) and pa.array(one).type == pa.array(other).type
    assert (arrow.fingerprint(pa.array(one)) == arrow.fingerprint(pa.array(other))) is same


def test_what_lies_under_a_null_is_not_content() -> None:
    """Two columns that differ only where they are null are equal."""
    noisy = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([1, 7]))])
    assert arrow.fingerprint(noisy) == arrow.fingerprint(pa.array([1, None]))


@pytest.mark.parametrize(
    "value",
    [
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array([{"a": 1}, None]),
        pa.array([[1], None], pa.list_view(pa.int64())),
        pa.array(["a" * 20], pa.string_view()),
        pa.RunEndEncodedArray.from_arrays([1, 2], [1, 2]),
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]),
        pa.nulls(3),
        pa.chunked_array([], pa.int8()),
        pa.table({}),
        pa.table({"a": [1, None]}).to_batches()[0],
        pa.py_buffer(b"bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arrow_values_of_every_kind_are_measured(value: Any) -> None:
    """Nested, encoded, empty and plain values have a size, a signature that can be a key, and a digest that repeats."""
    assert arrow.nbytes(value) >= 0
    assert hash(arrow.signature(value)) == hash(arrow.signature(value))
    assert arrow.fingerprint(value) is not None
    assert arrow.fingerprint(value) == arrow.fingerprint(value)


def test_names_and_metadata_of_a_schema_are_content() -> None:
    """Renaming a column or changing the schema's metadata changes the digest of a table."""
    table = pa.table({"a": [1]})
    others = [table, table.rename_columns(["b"]), table.replace_schema_metadata({"k": "v"}), table["a"]]
    assert len({arrow.fingerprint(other) for other in others}) == 4
