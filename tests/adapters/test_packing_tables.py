"""Tables as bytes and back: columns of every kind, indexes, chunks; what they hold is not pickled, but written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute.testing import check_adapter
from recompute.testing.conformance import registered
from recompute_tables import arrow, pandas, polars, xarray

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
pd = pytest.importorskip("pandas", reason="pandas is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pl = pytest.importorskip("polars", reason="polars is not installed")
xr = pytest.importorskip("xarray", reason="xarray is not installed")

from packed import fetched, packed, unpacked  # noqa: E402  # it lies beside other tests

from recompute_numpy import adapter as numpy_adapter  # noqa: E402  # after importorskip

ROWS = 2_000
SMALL = 4_096
"""Bytes of pickle that a table with large columns has at most, and of what is remembered of it."""


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapters serve their types, whether or not the package is installed."""
    with (
        registered(pandas, pd.DataFrame, pd.Series, pd.Index),
        registered(arrow, pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array, pa.Buffer),
        registered(polars, pl.DataFrame, pl.Series),
        registered(xarray, xr.Dataset, xr.DataArray),
        registered(numpy_adapter, np.ndarray, np.generic),
    ):
        yield


COLUMNS: dict[str, Callable[[int], Any]] = {
    "integer": lambda n: np.arange(n),
    "float": lambda n: np.arange(n) / 7,
    "text": lambda n: pd.Series([f"text {number}" for number in range(n)]),
    "category": lambda n: pd.Categorical.from_codes(np.arange(n) % 3, ["w", "v", "u"], ordered=True),
    "time": lambda n: pd.date_range("2020", periods=n, freq="s"),
    "time zone": lambda n: pd.date_range("2020", periods=n, freq="s", tz="Europe/Vienna"),
    "duration": lambda n: pd.timedelta_range(0, periods=n, freq="s"),
    "period": lambda n: pd.period_range("2020", periods=n, freq="s"),
    "interval": lambda n: pd.arrays.IntervalArray.from_breaks(np.arange(n + 1)),
    "nullable": lambda n: pd.array([1, None] * (n // 2), "Int64"),
    "boolean": lambda n: pd.array([True, None] * (n // 2), "boolean"),
    "sparse": lambda n: pd.arrays.SparseArray(np.arange(n) % 2),
    "arrow": lambda n: pd.array(np.arange(n), "int64[pyarrow]"),
}


def frame(names: list[str]) -> Any:
    return pd.DataFrame({name: COLUMNS[name](ROWS) for name in names}).rename_axis("row")


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_frames_are_not_pickled(name: str) -> None:
    """A frame comes back equal, with dtypes, categories, index and names; its pickle is small, and so what remains."""
    made = frame([name])
    head, parts = packed(made)
    assert head.length + len(head.stream) < SMALL
    assert sum(map(len, parts)) <= pandas.nbytes(made) + SMALL
    pd.testing.assert_frame_equal(unpacked(made), made, check_freq=True)
    assert pandas.fingerprint(unpacked(made)) == pandas.fingerprint(made)


@given(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4, unique=True), st.data())
def test_frames_come_back_from_a_disk(names: list[str], data: st.DataObject) -> None:
    """Frames, rows of them, columns and indexes, and what is in several levels."""
    views: list[Callable[[Any], Any]] = [
        *(lambda f: f, lambda f: f[:10], lambda f: f[names[0]], lambda f: f.index, lambda f: f.columns),
        *(lambda f: f.set_index(names).index, lambda f: f.set_index(names[0], append=True), lambda f: f[:0]),
        *(lambda f: f[::-1].copy(), lambda f: pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=list("abc"))),
    ]
    view = data.draw(st.sampled_from(views))
    expected = pandas.fingerprint(view(frame(names)))

    def check(found: Any) -> None:
        assert type(found) is type(view(frame(names)))
        assert pandas.fingerprint(found) == expected

    fetched(lambda: view(frame(names)), check)


def test_blocks_of_frames_keep_their_strides() -> None:
    """The order of the axes of a frame's memory decides how its sums are rounded."""
    for order in "CF":
        made = pd.DataFrame(np.array(np.arange(12.0).reshape(4, 3), order=order))
        assert unpacked(made).to_numpy().strides == made.to_numpy().strides


CELLS: dict[str, Callable[[], Any]] = {
    "integers": lambda: pa.array(range(ROWS)),
    "text": lambda: pa.array([f"text {number}" for number in range(ROWS)]),
    "nulls": lambda: pa.array([1, None] * (ROWS // 2)),
    "lists": lambda: pa.array([[1, 2], []] * (ROWS // 2)),
    "structs": lambda: pa.array([{"a": 1, "b": "x"}] * ROWS),
    "dictionary": lambda: pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode(),
    "views": lambda: pa.array(["a" * 20] * ROWS, pa.string_view()),
    "run ends": lambda: pa.RunEndEncodedArray.from_arrays([ROWS // 2, ROWS], [1, 2]),
    "nothing": lambda: pa.nulls(ROWS),
}


@given(st.sampled_from(sorted(CELLS)), st.integers(0, ROWS), st.integers(0, ROWS), st.integers(0, ROWS))
def test_arrow_comes_back_with_its_chunks(name: str, start: int, length: int, cut: int) -> None:
    """A part of an array takes what it shows and not the whole; a table has the chunks that it had."""
    whole = CELLS[name]()
    part = whole.slice(start, length)
    chunked = pa.chunked_array([whole.slice(0, cut), whole.slice(cut)], whole.type)
    table = pa.table({"a": chunked, "b": chunked}, metadata={"key": "value"}).slice(start, length)
    for value in (part, chunked, table, pa.table({"a": part}).to_batches(), table.schema):
        assert unpacked(value) == value
    back = unpacked(table)
    assert back.schema.equals(table.schema, check_metadata=True)
    assert [len(chunk) for chunk in back["a"].chunks] == [len(chunk) for chunk in table["a"].chunks]
    assert arrow.fingerprint(back) == arrow.fingerprint(table)
    head, parts = packed(part)
    assert sum(map(len, parts)) <= 1.2 * part.nbytes + 2_048
    assert head.length == 0


def test_buffers_of_arrow_are_not_copied() -> None:
    """What is written of a table is its own memory."""
    numbers = np.arange(1_000)
    _, (buffer,) = arrow.pack(pa.table({"a": numbers}))
    numbers[0] = 7
    assert memoryview(buffer).cast("B").cast("l")[0] == 7


SORTED = ("SORTED_ASC", "SORTED_DESC")

POLARS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: pl.Series("a", np.arange(ROWS) / 7),
    "text": lambda: pl.Series("a", [f"text {number}" for number in range(ROWS)]),
    "nulls": lambda: pl.Series("a", [1, None] * (ROWS // 2)),
    "lists": lambda: pl.Series("a", [[1, 2], [3]] * (ROWS // 2)),
    "structs": lambda: pl.Series("a", [{"a": 1, "b": "x"}] * ROWS),
    "category": lambda: pl.Series("a", ["u", "v"] * (ROWS // 2), dtype=pl.Categorical),
    "enum": lambda: pl.Series("a", ["u", "v"] * (ROWS // 2), dtype=pl.Enum(["u", "v"])),
    "sorted": lambda: pl.Series("a", range(ROWS)).set_sorted(),
    "nothing": lambda: pl.Series("a", [], dtype=pl.Float32),
}


@given(st.sampled_from(sorted(POLARS)), st.lists(st.integers(0, ROWS), max_size=3), st.sampled_from([None, *SORTED]))
def test_polars_comes_back_with_its_chunks(name: str, cuts: list[int], flag: str | None) -> None:
    """Series and frames, cut as they were: a sum of floats depends on that. What is sorted is known to be."""
    whole = POLARS[name]()
    ends = [0, *sorted(cuts), len(whole)]
    pieces = [whole[start:stop] for start, stop in pairwise(ends)]
    series = pl.concat(pieces, rechunk=False)
    if flag is not None:
        series = series.set_sorted(descending=flag == "SORTED_DESC")
    frame = pl.DataFrame({"b": range(len(series))}).with_columns(series)
    for value in (series, frame, {"key": [series]}, frame[:0], frame[["a"]]):
        back = unpacked(value)
        if isinstance(value, dict):
            value, back = value["key"][0], back["key"][0]
        assert value.equals(back)
        if isinstance(value, pl.DataFrame):
            assert value.schema == back.schema
            assert [column.n_chunks() for column in back] == [column.n_chunks() for column in value]
            continue
        assert (back.name, back.dtype, back.n_chunks()) == (value.name, value.dtype, value.n_chunks())
        assert [back.flags[flag] for flag in SORTED] == [value.flags[flag] for flag in SORTED]


def test_polars_without_columns_and_with_objects() -> None:
    """A frame of rows alone comes back; what Polars cannot write is not packed."""
    rows = pl.DataFrame(height=3) if "height" in signature(pl.DataFrame).parameters else pl.DataFrame()
    assert unpacked(rows).shape == rows.shape
    with pytest.raises(pl.exceptions.ComputeError, match="Object"):
        packed(pl.DataFrame({"a": pl.Series([object()], dtype=pl.Object)}))


def test_datasets_come_back() -> None:
    """xarray's arrays with their coordinates, attributes and the order of their axes."""

    def make() -> Any:
        data = np.asfortranarray(np.arange(1_200.0).reshape(30, 40))
        return xr.Dataset({"a": (("x", "y"), data)}, {"x": pd.date_range("2020", periods=30)}, {"key": [1]})

    def check(found: Any) -> None:
        assert found.identical(make())
        assert found["a"].data.strides == make()["a"].data.strides

    fetched(make, check)
    head, _ = packed(make())
    assert head.length + len(head.stream) < SMALL


@pytest.mark.slow
def test_the_kit_passes() -> None:
    """Frames, tables and series keep what adapters promise."""
    check_adapter(pandas, [lambda name=name: frame([name]) for name in COLUMNS])
    check_adapter(arrow, [*CELLS.values(), lambda: pa.table({"a": CELLS["text"]()}), lambda: pa.py_buffer(b"some")])
    check_adapter(polars, [*POLARS.values(), lambda: pl.DataFrame({"a": [1], "b": ["x"]})])
