"""The adapter of Polars: sizes as it estimates them, objects included, and digests of content, not of layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_adapter
from recompute.testing.conformance import registered
from recompute_tables import polars

pl = pytest.importorskip("polars", reason="the extra 'polars' is not installed")

MEGABYTE = 1_000_000
CELLS = st.one_of(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.none() | st.floats(allow_nan=False)),
    st.lists(st.none() | st.text(max_size=20)),
    st.lists(st.none() | st.booleans()),
    st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3)),
    st.lists(st.none() | st.lists(st.none() | st.booleans(), max_size=3)),
    st.lists(
        st.none() | st.fixed_dictionaries({"a": st.none() | st.booleans(), "b": st.none() | st.text(max_size=20)})
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapter serves its types, whether or not the package is installed."""
    with registered(polars, pl.DataFrame, pl.Series):
        yield


def frame(rows: int = 1_000) -> Any:
    return pl.DataFrame(
        {"number": range(rows), "text": ["some longer text"] * rows, "maybe": [None, True] * (rows // 2)}
    )


def test_the_adapter_does_not_import_the_framework() -> None:
    """Importing the package loads no Polars."""
    code = "import recompute_tables, sys; print('polars' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_it_keeps_the_promises_of_an_adapter() -> None:
    """Frames and series, of several chunks, empty, and of Python objects."""
    makers: list[Callable[[], Any]] = [
        frame,
        lambda: frame()["text"],
        lambda: pl.concat([frame(10), frame(20)], rechunk=False),
        pl.DataFrame,
        lambda: pl.Series("empty", [], dtype=pl.Int8),
        lambda: pl.Series("objects", [{1, 2}, None, (3,)], dtype=pl.Object),
    ]
    check_adapter(polars, makers)


def test_frames_and_series_are_served() -> None:
    """A plan, an expression or a type is a plain object."""
    assert [polars.serves(cls) for cls in (pl.DataFrame, pl.Series)] == [True] * 2
    assert [polars.serves(cls) for cls in (pl.LazyFrame, pl.Expr, pl.Int64, int)] == [False] * 4


@given(CELLS, st.integers(0, 10))
def test_sizes_are_what_polars_estimates(cells: list[Any], more: int) -> None:
    """Whatever the columns hold, alone or in a container."""
    table = pl.DataFrame({"cells": cells}).with_columns([pl.lit(number).alias(f"{number}") for number in range(more)])
    assert rc.sizeof(table) == table.estimated_size()
    assert rc.sizeof((table,)) == sys.getsizeof((table,)) + table.estimated_size()
    assert rc.sizeof(table["cells"]) == table["cells"].estimated_size()


def test_python_objects_in_a_column_are_counted() -> None:
    """Polars counts references; the adapter counts what they refer to, once."""
    large = bytearray(MEGABYTE)
    column = pl.Series("objects", [large, large, None], dtype=pl.Object)
    assert MEGABYTE < rc.sizeof(column) < MEGABYTE + 1_000
    assert MEGABYTE < rc.sizeof(pl.DataFrame([column])) < MEGABYTE + 1_000


def test_the_budget_holds_for_frames() -> None:
    """Sixty frames of 8 MB within 20 MB: the cache evicts, and each comes back."""
    with rc.Cache("20MB") as cache:
        frames = [
            rc.ap(lambda number: pl.DataFrame({"a": pl.zeros(MEGABYTE, eager=True) + number}), n) for n in range(60)
        ]
        assert cache.stats().used == 16 * MEGABYTE
        assert cache.stats().evictions == 58
        assert frames[3].get()["a"].to_list()[:2] == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore::recompute.SizeWarning")
def test_a_plan_is_measured_as_a_plain_object() -> None:
    """What a LazyFrame has to hold is its plan."""
    assert 0 < rc.sizeof(frame().lazy()) < 10_000


def test_signatures_are_shape_and_dtypes() -> None:
    """Frames of one shape and dtypes share a signature; another row, dtype or column gives another one."""
    one = frame(10)
    others = [one[:2], one.cast({"number": pl.Int8}), one[["number"]], one["number"], one.lazy().collect()["text"]]
    assert polars.signature(one) == polars.signature(one.with_columns(number=pl.lit(7, pl.Int64)))
    assert len({polars.signature(other) for other in [one, *others]}) == 6


@given(CELLS, st.data())
def test_digests_do_not_depend_on_layout(cells: list[Any], data: st.DataObject) -> None:
    """However a column is cut into chunks, and whatever larger one it is a slice of, its digest is the same."""
    plain = pl.Series("a", cells)
    cut = data.draw(st.integers(0, len(cells)))
    chunked = pl.concat([plain[:cut], plain[cut:]], rechunk=False)
    longer = pl.concat([plain, plain])[len(cells) :]
    assert polars.fingerprint(chunked) == polars.fingerprint(plain) is not None
    assert polars.fingerprint(longer) == polars.fingerprint(plain)
    assert polars.fingerprint(longer.to_frame()) == polars.fingerprint(plain.to_frame())


@given(CELLS, CELLS)
def test_digests_tell_columns_apart(one: list[Any], other: list[Any]) -> None:
    """Two columns have one digest if and only if they hold the same cells in the same type, bit by bit."""
    columns = [pl.Series("a", cells) for cells in (one, other)]
    same = repr(columns[0].to_list()) == repr(columns[1].to_list()) and columns[0].dtype == columns[1].dtype
    assert (polars.fingerprint(columns[0]) == polars.fingerprint(columns[1])) is same


@pytest.mark.parametrize(
    "column",
    [
        pl.Series(["u", "v", "u"], dtype=pl.Categorical),
        pl.Series(["u", "v"], dtype=pl.Enum(["v", "u"])),
        pl.Series([datetime(2020, 1, 1), None]),
        pl.Series([datetime(2020, 1, 1)]).dt.replace_time_zone("UTC"),
        pl.Series([timedelta(1)]),
        pl.Series(["1.25"]).cast(pl.Decimal(10, 2)),
        pl.Series([b"bytes"]),
        pl.Series([{"a": 1, "b": None}]),
        pl.Series([[1, 2]], dtype=pl.Array(pl.Int8, 2)),
        pl.Series([None, None]),
        pl.Series([(1,), {2: 3}], dtype=pl.Object),
    ],
    ids=lambda column: str(column.dtype),
)
def test_columns_of_every_kind_have_digests(column: Any) -> None:
    """Encoded, nested, time and object columns are measured, and told from one that is longer or has another name."""
    assert hash(polars.signature(column)) == hash(polars.signature(column.clone()))
    assert rc.sizeof(column) >= 0
    digest = polars.fingerprint(column)
    assert digest is not None
    assert digest == polars.fingerprint(column.clone())
    assert len({digest, polars.fingerprint(column[:-1]), polars.fingerprint(column.rename("other"))}) == 3


def test_categories_that_were_seen_before_are_not_content() -> None:
    """The codes of a categorical column depend on the rest of the process, its digest does not."""
    before = pl.Series("a", ["seen second", "seen third"], dtype=pl.Categorical)
    pl.Series(["seen first"], dtype=pl.Categorical)
    after = pl.concat([pl.Series("a", ["seen first"], dtype=pl.Categorical), before])[1:]
    assert polars.fingerprint(after) == polars.fingerprint(before)


def test_a_cell_without_a_digest_leaves_the_column_without_one() -> None:
    """What cannot be compared is said so, not passed over."""
    assert polars.fingerprint(pl.Series([lambda: 0], dtype=pl.Object)) is None
