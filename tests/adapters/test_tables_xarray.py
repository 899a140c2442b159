"""The adapter of xarray: arrays, indexes and attributes in memory, each once; nothing is loaded to be measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_adapter
from recompute.testing.conformance import registered
from recompute_tables import pandas, xarray

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
pd = pytest.importorskip("pandas", reason="the extra 'pandas' is not installed")
xr = pytest.importorskip("xarray", reason="the extra 'xarray' is not installed")

from recompute_numpy import adapter as numpy_adapter  # noqa: E402  # after importorskip

MEGABYTE = 1_000_000
OVERHEAD = 3_000  # bytes that small parts may take


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapters serve their types, whether or not the package is installed."""
    with (
        registered(xarray, xr.Variable, xr.DataArray, xr.Dataset, xr.DataTree),
        registered(pandas, pd.DataFrame, pd.Series, pd.Index),
        registered(numpy_adapter, np.ndarray, np.generic),
    ):
        yield


def array(size: int = 1_000) -> Any:
    return xr.DataArray(
        np.arange(float(size)), {"x": np.arange(size), "name": ("x", ["n"] * size)}, ["x"], "a", {"unit": "m"}
    )


def dataset(size: int = 1_000) -> Any:
    return xr.Dataset({"a": array(size), "b": (("x", "y"), np.ones((size, 2)))}, {"t": 7}, {"title": "test"})


def test_the_adapter_does_not_import_the_framework() -> None:
    """Importing the package loads no xarray, no pandas and no NumPy."""
    code = "import recompute_tables, sys; print({'numpy', 'pandas', 'xarray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_it_keeps_the_promises_of_an_adapter() -> None:
    """Variables, arrays, datasets and trees; empty ones, too."""
    makers: list[Callable[[], Any]] = [
        array,
        dataset,
        lambda: array().variable,
        lambda: array()["x"].variable,
        lambda: xr.DataTree(dataset()),  # with children it would be a cycle, which lives until the collector runs
        lambda: xr.DataArray(1.5),
        xr.Dataset,
    ]
    check_adapter(xarray, makers)


def change(value: Any) -> None:
    value[...] = 3.0


def test_it_sees_a_change() -> None:
    """What is written into an array in place changes its digest."""
    check_adapter(xarray, [array, lambda: array().variable], change=change)


def test_what_holds_arrays_is_served() -> None:
    """Coordinates and groups are plain objects."""
    assert [xarray.serves(cls) for cls in (xr.Variable, xr.IndexVariable, xr.DataArray, xr.Dataset)] == [True] * 4
    assert [xarray.serves(type(coord)) for coord in (array().coords, array().groupby("name"), 1)] == [False] * 3


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=5))
def test_each_array_is_counted_once(variables: list[tuple[int, bool]]) -> None:
    """Bytes of the distinct arrays of all variables, and little more; a tree of datasets counts theirs."""
    shared = np.zeros(50_000)
    content: dict[str, Any] = {}
    expected = 0
    for number, (dimensions, again) in enumerate(variables):
        values = shared if again else np.ones((100, 10, 10)[:dimensions])
        content[f"v{number}"] = ([f"d{number}_{axis}" for axis in range(values.ndim)], values)
        expected += 0 if again else values.nbytes
    expected += shared.nbytes if any(again for _, again in variables) else 0
    value = xr.Dataset(content)
    assert expected <= rc.sizeof(value) <= expected + OVERHEAD
    assert expected <= rc.sizeof(xr.DataTree(value)) <= expected + OVERHEAD
    assert expected <= rc.sizeof([value, value]) <= expected + OVERHEAD


def test_indexes_attributes_and_objects_are_counted() -> None:
    """Labels of text, and whatever an attribute or an array of objects holds."""
    labels = [f"label {number:06}" for number in range(1_000)]
    text = xr.DataArray(np.zeros(1_000), {"x": pd.Index(labels, dtype=object)}, ["x"])
    assert rc.sizeof(text) > 8_000 + sum(map(sys.getsizeof, labels))
    assert MEGABYTE < rc.sizeof(array().assign_attrs(raw=bytes(MEGABYTE))) < MEGABYTE + 100_000
    objects = np.empty(1, object)
    objects[0] = bytearray(MEGABYTE)
    assert MEGABYTE < rc.sizeof(xr.DataArray(objects)) < MEGABYTE + OVERHEAD


def test_an_array_of_another_library_is_counted_as_that_library_does() -> None:
    """xarray calls a masked, sparse or device array "not in memory": it counts all the same."""

    class Duck:
        """An array that xarray leaves as it is."""

        shape, dtype, ndim = (MEGABYTE,), np.dtype("uint8"), 1

        def __init__(self) -> None:
            self.memory = bytearray(MEGABYTE)

        def __array_namespace__(self) -> Any:
            """Never asked."""

        def __array_function__(self, *arguments: Any) -> Any:
            """Never asked."""

        def __array_ufunc__(self, *arguments: Any) -> Any:
            """Never asked."""

    assert MEGABYTE < rc.sizeof(xr.Variable("x", Duck())) < MEGABYTE + OVERHEAD


def test_what_is_yet_to_be_computed_counts_as_its_recipe() -> None:
    """A graph of tasks for 8 GB takes little; an array that the graph holds takes its bytes."""
    dask = pytest.importorskip("dask.array", reason="the extra 'dev' is not installed")
    later = xr.DataArray(dask.zeros((100_000, 10_000), chunks=(10_000, 10_000)))
    assert later.nbytes == 8_000_000_000
    assert rc.sizeof(later) < 100_000
    assert rc.sizeof(xr.DataArray(dask.from_array(np.zeros(MEGABYTE // 8)))) > MEGABYTE
    assert xarray.fingerprint(later) is None


def test_what_is_yet_to_be_read_is_not_read(tmp_path: Any) -> None:
    """A file that was opened is not loaded to be measured, nor to be compared; once it is loaded it counts."""
    pytest.importorskip("scipy", reason="the extra 'plan' is not installed")
    array(100_000).drop_vars("name").to_netcdf(tmp_path / "file.nc", engine="scipy")
    with xr.open_dataarray(tmp_path / "file.nc", engine="scipy") as opened:
        before = rc.sizeof(opened)
        assert xarray.fingerprint(opened) is None
        assert rc.sizeof(opened) == before < 1_000_000
        assert rc.sizeof(opened.load()) >= before + 800_000
        assert xarray.fingerprint(opened) is not None


def test_the_budget_holds_for_datasets() -> None:
    """Sixty datasets of 8 MB within 20 MB: the cache evicts, and each comes back."""
    with rc.Cache("20MB") as cache:
        values = [rc.ap(lambda n: xr.Dataset({"a": ("x", np.full(MEGABYTE, float(n)))}), n) for n in range(60)]
        assert 16 * MEGABYTE <= cache.stats().used <= 17 * MEGABYTE
        assert cache.stats().evictions == 58
        assert values[3].get()["a"].values[0] == 3


def test_signatures_are_names_shapes_and_dtypes() -> None:
    """Equal ones share a signature, whatever the content; another name, shape or dtype gives another one."""
    one = array(10)
    others = [one[:5], one.astype("f4"), one.rename(x="y"), one.drop_vars("name"), one.variable, one.to_dataset()]
    assert xarray.signature(one) == xarray.signature(one + 1)
    assert len({xarray.signature(other) for other in [one, *others]}) == 7


def with_encoding(one: Any, **encoding: Any) -> Any:
    copied = one.copy()
    copied.encoding = encoding
    return copied


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda one: one + 1, id="content"),
        pytest.param(lambda one: one.rename("b"), id="name"),
        pytest.param(lambda one: one.rename(x="y"), id="dimension"),
        pytest.param(lambda one: one.assign_attrs(unit="cm"), id="attribute"),
        pytest.param(lambda one: with_encoding(one, zlib=True), id="encoding"),
        pytest.param(lambda one: one.assign_coords(x=one.x + 1), id="index"),
        pytest.param(lambda one: one.assign_coords(name=("x", ["m"] * 10)), id="coordinate"),
        pytest.param(lambda one: one.astype("f4"), id="dtype"),
        pytest.param(lambda one: one[::-1], id="order"),
        pytest.param(lambda one: one.to_dataset(), id="type"),
    ],
)
def test_any_change_changes_the_digest(change: Callable[[Any], Any]) -> None:
    """Values, labels, names, attributes and order are all part of the digest; a deep copy has the same."""
    one = array(10)
    digests = [xarray.fingerprint(example) for example in (one, one.copy(deep=True), change(one))]
    assert None not in digests
    assert digests[0] == digests[1] != digests[2]


def test_a_tree_counts_all_its_datasets() -> None:
    """What its nodes inherit from their parents is counted once."""
    large = xr.Dataset(coords={"x": np.arange(MEGABYTE // 8)})
    below = xr.Dataset({"a": ("x", np.zeros(MEGABYTE // 8))})
    tree = xr.DataTree.from_dict({"/": large, "/one": below, "/one/two": below})
    assert 2 * MEGABYTE <= rc.sizeof(tree) <= 2 * MEGABYTE + OVERHEAD


def test_names_are_part_of_the_digest_of_a_tree() -> None:
    """Trees of equal datasets differ if these are elsewhere."""
    trees = [xr.DataTree.from_dict({path: dataset(3)}) for path in ("/a", "/b", "/a/b")]
    digests = {xarray.fingerprint(tree) for tree in trees}
    assert None not in digests
    assert len(digests) == 3
