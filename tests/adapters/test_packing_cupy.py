"""Arrays of CuPy as bytes and back, over memory of the host: the layout is that of the array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
cupy = pytest.importorskip("cupy", reason="the extra 'cupy' is not installed")

from host_memory import UNIT, HostAdapter, HostPool, allocating, count, seen  # noqa: E402  # they lie beside
from packed import packed, unpacked  # noqa: E402  # other tests

host = HostAdapter()


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The cache sees arrays through the adapter, and CuPy allocates from host memory."""
    with registered(host, cupy.ndarray), allocating(HostPool(10_000 * UNIT)):
        yield


@st.composite
def views(draw: st.DrawFn) -> Callable[[], Any]:
    """Makes the same view each time, which alone keeps its memory."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    order = draw(st.permutations(range(len(shape))))
    index = [slice(draw(st.integers(0, 1)) or None, None, draw(st.sampled_from([1, 2, -1]))) for _ in shape]
    repeated = draw(st.integers(0, 2))

    def make() -> Any:
        array = count(int(np.prod(shape))).reshape(shape).transpose(order)[(..., *[index[axis] for axis in order])]
        return cupy.broadcast_to(array, (repeated, *array.shape)) if repeated else array

    return make


@given(views())
def test_an_array_comes_back_with_its_strides(make: Callable[[], Any]) -> None:
    """Any order and view; what is written, and what comes back, takes no more than what is counted."""
    array = make()
    counted = host.nbytes(array)
    assert sum(map(len, packed(array)[1])) <= counted
    back = unpacked(array)
    assert (back.shape, back.strides, back.dtype) == (array.shape, array.strides, array.dtype)
    assert not array.size or np.array_equal(seen(back), seen(array))
    assert host.nbytes(back) <= counted


def test_gaps_in_memory_of_others_and_subclasses_are_not_packed() -> None:
    """A part with gaps of what others hold would come back larger, a subclass may be more than its memory."""

    class Special(cupy.ndarray):  # type: ignore[misc]  # CuPy has no types
        pass

    whole = count(1_000).reshape(10, 100)
    with pytest.raises(BufferError, match="others hold"):
        packed(whole[:, ::2])
    with pytest.raises(TypeError, match="Special"):
        packed(whole.view(Special))


def test_evicted_arrays_move(tmp_path: Any) -> None:
    """From a device to the host and further to a disk, and back."""
    with rc.Cache(tiers={"cuda:0": [rc.Host(1_000, always=True), rc.Disk(folder=tmp_path, always=True)]}) as cache:
        made = [rc.ap(count, size) for size in (100, 200, 300)]
        for value in made:
            assert value.evict()
        assert [seen(value.get()).tolist() for value in made] == [list(range(size)) for size in (100, 200, 300)]
        assert [tier.moves for tier in cache.stats().tiers] == [0, 3]
