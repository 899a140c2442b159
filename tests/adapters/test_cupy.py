"""The CuPy adapter: memory, lifetimes and views, on real CuPy arrays over host memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from sys import maxsize
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._adapters import adapter as _adapter
from recompute._arrays.dispatch import _place_of_out
from recompute.testing import check_adapter, check_invariants
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
cupy = pytest.importorskip("cupy", reason="the extra 'cupy' is not installed")

from cached_views import NUMBERS, VIEWS, check_aliases, check_part_of_a_global, check_program, programs  # noqa: E402
from cupy.lib.stride_tricks import as_strided  # noqa: E402  # after importorskip
from host_memory import UNIT, ExactPool, HostAdapter, HostPool, add, allocating, count, on_host, seen  # noqa: E402

import recompute_cupy  # noqa: E402
from recompute_cupy import adapter  # noqa: E402

without_gpu = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a CUDA device")
host = HostAdapter()
BIG = on_host(NUMBERS)


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    """The cache sees arrays through the adapter."""
    with registered(host, cupy.ndarray):
        yield


@pytest.fixture
def pool() -> Iterator[HostPool]:
    """CuPy allocates from host memory."""
    with allocating(HostPool(1_000 * UNIT)) as pool:
        yield pool


@pytest.fixture
def known(pool: HostPool) -> Iterator[HostPool]:
    """CuPy allocates through the installed allocator, from host memory."""
    with recompute_cupy.install(rc.Cache(), limit=900 * UNIT, pool=pool):
        yield pool


def test_only_arrays_are_served() -> None:
    """Arrays of any subclass are the adapter's; NumPy's arrays, devices and kernels are not."""

    class Special(cupy.ndarray):  # type: ignore[misc]  # CuPy has no types
        pass

    served = [adapter.serves(cls) for cls in (cupy.ndarray, Special, np.ndarray, cupy.cuda.Device, cupy.RawKernel)]
    assert served == [True, True, False, False, False]


def test_without_cupy_the_import_says_what_to_install() -> None:
    """Importing the package where CuPy is not installed is an error that names the extra."""
    code = "import sys; sys.modules['cupy'] = None; import recompute_cupy"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in run.stderr
    assert "pip install '.[cupy]' in a checkout" in run.stderr


# Size and identity


def test_memory_is_counted_in_the_blocks_of_the_pool(pool: HostPool) -> None:
    """A small array takes the block that the pool gives it; memory of others, exactly its bytes."""
    assert adapter.nbytes(cupy.empty(3)) == UNIT
    assert adapter.nbytes(cupy.empty(65)) == 2 * UNIT
    assert adapter.nbytes(cupy.empty(0)) == 0
    assert adapter.nbytes(on_host(np.zeros(3))) == 24


@pytest.mark.parametrize(
    "view",
    [
        *VIEWS,
        pytest.param(lambda a: a[::-1], id="reversed"),
        pytest.param(lambda a: a[5], id="element"),
        pytest.param(lambda a: a.view(), id="the same"),
        pytest.param(lambda a: a[4:].view().view(np.int64), id="the same, of a part"),
        pytest.param(lambda a: a.view(type("Special", (cupy.ndarray,), {})), id="subclass"),
        pytest.param(lambda a: as_strided(a, (2, 2), (8, 16)), id="strided"),
    ],
)
def test_a_view_that_alone_keeps_the_memory_is_charged_for_all_of_it(view: Callable[[Any], Any]) -> None:
    """The only way to some memory takes all its bytes; one of several ways, its own at most."""
    alone, shared = view(on_host(NUMBERS)), view(BIG)
    assert adapter.nbytes(alone) == 8_000
    assert adapter.nbytes(shared) == min(8_000, -(-shared.nbytes // UNIT) * UNIT)
    assert adapter.buffer(shared) is adapter.buffer(BIG)
    assert adapter.buffer(shared) is shared.data.mem
    assert adapter.buffer(alone) is not adapter.buffer(BIG)


def test_the_charge_follows_those_who_keep_the_memory() -> None:
    """A view is charged in full once the other arrays and the pointers to its memory have gone."""
    owner = on_host(np.zeros(1_000))
    view = owner[:10]
    assert adapter.nbytes(view) == UNIT
    pointer = owner.data
    del owner
    assert adapter.nbytes(view) == UNIT
    del pointer
    assert adapter.nbytes(view) == 8_000
    other = view[5:]
    assert [adapter.nbytes(view), adapter.nbytes(other)] == [UNIT, UNIT]
    del view
    assert adapter.nbytes(other) == 8_000


@pytest.mark.parametrize(("name", "place"), [("round", 2), ("dot", 2), ("sum", 3), ("trace", 5), ("reshape", maxsize)])
def test_where_a_method_takes_out(name: str, place: int) -> None:
    """CuPy's methods have no signature, but begin their docstrings with one: `x.round(1, out)` writes to `out`."""
    assert _place_of_out(getattr(cupy.ndarray, name))[0] == place


def test_an_array_of_another_device_has_another_pool() -> None:
    """The pool is named after the device of the memory, whichever device is current."""
    there = cupy.cuda.UnownedMemory(0, 0, None, 3)
    assert adapter.device(cupy.ndarray(0, np.float64, cupy.cuda.MemoryPointer(there, 0))) == "cuda:3"
    assert adapter.device(BIG) == "cuda:0"


@without_gpu
def test_without_a_driver_nothing_is_seen() -> None:
    """There are no devices, no free memory and no events, and that is no error."""
    assert adapter.devices() == []
    assert adapter.free_memory("cuda:0") is None
    assert adapter.timer("cuda:0") is None
    recompute_cupy.join()


def test_free_memory_of_no_device_is_unknown() -> None:
    """A device that does not exist, or is no GPU, has no free memory to tell of."""
    assert adapter.free_memory("cuda:4000") is None
    assert adapter.free_memory("cpu") is None


def test_signatures_depend_on_shape_dtype_and_device() -> None:
    """Equal for equal shapes and dtypes, whatever the content; else different; a key."""
    signatures = [
        adapter.signature(on_host(array)) for array in (np.zeros(3), np.ones(3), np.zeros(3, "f4"), np.zeros(4))
    ]
    assert signatures[0] == signatures[1]
    assert len(set(signatures)) == 3


def test_digests_tell_content_dtype_and_shape_but_not_layout() -> None:
    """Any bit matters, and so do dtype and shape; the order of axes in memory does not."""
    array = on_host(NUMBERS.reshape(20, 50))
    turned = on_host(NUMBERS.reshape(20, 50).T).T
    assert host.fingerprint(array) == host.fingerprint(turned)
    others = [array.T, array[1:], array.reshape(1_000), array.view(np.int64), on_host(-NUMBERS.reshape(20, 50))]
    assert len({host.fingerprint(other) for other in (array, *others)}) == 6
    assert host.fingerprint(array) != _adapter.fingerprint(seen(array))


# Lifetimes


def change(array: Any) -> None:
    seen(array)[...] = 1 - seen(array)


@pytest.mark.parametrize("allocated", [False, True], ids=["memory of CuPy", "memory of the installed allocator"])
def test_the_kit_passes(allocated: bool, request: pytest.FixtureRequest) -> None:
    """The adapter keeps the promises of adapters, for owners and views, with either kind of memory."""
    if allocated:
        request.getfixturevalue("known")
    make: Callable[[int], Any] = count if allocated else lambda size: on_host(np.arange(float(size)))
    examples = [lambda: make(100), lambda: make(100)[10:], lambda: make(100).reshape(10, 10).T, lambda: make(10).view()]
    with nullcontext() if allocated else allocating(ExactPool()):
        check_adapter(host, examples, view=lambda array: array[1:], change=change)
        check_adapter(host, [*examples, lambda: make(0)], view=lambda array: array.view())
        check_adapter(host, [lambda: as_strided(make(100), (5, 5), (8, 16))], change=change)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda a: a, id="itself"),
        pytest.param(lambda a: a[3:], id="slice"),
        pytest.param(lambda a: a[3:].view(np.int64)[1:], id="view of a slice"),
    ],
)
@pytest.mark.parametrize("made", [lambda a: a, lambda a: a[1:], lambda a: a.view()], ids=["owner", "slice", "view"])
@pytest.mark.parametrize("allocated", [False, True], ids=["memory of CuPy", "memory of the installed allocator"])
def test_memory_is_counted_for_as_long_as_any_view_is_held(
    part: Callable[[Any], Any], made: Callable[[Any], Any], allocated: bool, request: pytest.FixtureRequest
) -> None:
    """An evicted result stays counted while the caller holds a view of it, whichever array owns the memory."""
    request.getfixturevalue("known" if allocated else "pool")
    with rc.Cache() as cache:
        value = rc.ap(lambda: made(count(1_000)))
        held = part(value.get())
        assert value.evict()
        used = -(-8_000 // UNIT) * UNIT
        assert (cache.stats().used, cache.stats().held) == (used, used)
        del held
        assert (cache.stats().used, cache.stats().held) == (0, 0)
        assert seen(value.get())[-1] == 999
        check_invariants(cache, [value])


def test_memory_of_the_installed_allocator_is_known_however_it_is_held(known: HostPool) -> None:
    """A pointer that is all the caller kept counts too, where the allocator is installed."""
    with rc.Cache() as cache:
        value = rc.ap(count, 100)
        pointer = value.get().data
        value.evict()
        assert cache.stats().held == 2 * UNIT
        windows = cupy.ndarray((2, 3), np.float64, pointer)
        del pointer
        assert cache.stats().held == 2 * UNIT
        del windows
        assert cache.stats().held == 0


def test_what_is_held_is_taken_back() -> None:
    """An evicted value that the caller still holds is not recomputed."""
    with rc.Cache() as cache:
        value = rc.ap(lambda: on_host(NUMBERS)[5:])
        held = value.get()
        value.evict()
        assert value.get() is held
        assert (cache.stats().recoveries, cache.stats().held, cache.stats().used) == (1, 0, 8_000)


def test_a_part_of_what_lives_elsewhere_is_not_counted_after_eviction() -> None:
    """Evicting and recomputing a slice of a global over and over leaves nothing counted behind."""
    check_part_of_a_global(lambda: BIG[:10], seen, UNIT)


def test_views_are_aliases_of_their_argument(pool: HostPool) -> None:
    """A view of an argument takes no memory of its own and is evicted with it."""
    check_aliases(lambda: count(1_000), cupy.reshape, seen, 16 * UNIT, pool.used_bytes)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda a: add(a, a),
    "transpose": lambda a: a.T,
    "slice": lambda a: a[::-1, 1:] if a.shape[1] > 2 else a[:1],
    "windows": lambda a: as_strided(a, (2, *a.shape[1:]), (0, *a.strides[1:])),
    "split": lambda a: add(a, a)[: max(1, a.shape[0] // 2)],
}


@given(program=programs(FUNCTIONS), slack=st.integers(0, 4))
def test_programs_of_views_give_what_they_give_without_a_cache(program: list[tuple[int, str]], slack: int) -> None:
    """Within any budget that fits, arrays and views of them come back as they were, and the books balance."""
    with allocating(HostPool(100 * UNIT)) as pool:
        check_program(program, FUNCTIONS, count(64).reshape(8, 8), UNIT * (5 + slack), seen)
        assert pool.used_bytes() == 0


# What the array wrapper asks for


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_new_arrays_have_the_order_of_axes_of_their_outline(order: tuple[int, ...], pool: HostPool) -> None:
    """The axes of a new array lie in memory as those of the array that it was outlined from; so do those of a copy."""
    array = on_host(np.arange(24.0).reshape(2, 3, 4)).transpose(order)
    new, copy = host.empty(host.outline(array)), host.copy(array)
    assert new.strides == copy.strides == array.strides
    assert (new.shape, new.dtype) == (array.shape, array.dtype)
    assert np.array_equal(seen(copy), seen(array))
    assert host.empty(rc.adapters.Outline(cupy.ndarray, (), np.dtype("f4"))).shape == ()
    assert host.empty(rc.adapters.Outline(cupy.ndarray, (2, 3), np.dtype("f4"))).shape == (2, 3)


def test_wrapped_arrays_hand_out_copies(pool: HostPool) -> None:
    """What a caller does to an array he got from a wrapped one changes nothing in the cache."""
    with rc.Cache() as cache:
        array = rc.array(on_host(NUMBERS.reshape(20, 50)))
        part = array.T[3:, ::2]
        got = part.get()
        seen(got)[...] = 0
        assert np.array_equal(seen(part.get()), NUMBERS.reshape(20, 50).T[3:, ::2])
        assert cache.stats().used == 8_000
        assert array.__array_namespace__().__wrapped__ is cupy
        assert (part.shape, part.dtype, type(part.evict())) == ((47, 10), np.float64, bool)


def test_plain_arrays_that_meet_wrapped_ones_are_copied(pool: HostPool) -> None:
    """A later change of a plain array is not seen by an operation that runs again."""
    with rc.Cache():
        plain = on_host(np.ones(3))
        total = rc.namespace(cupy).broadcast_to(rc.array(on_host(np.zeros(3))), (2, 3))
        assert np.array_equal(seen(total.get()), np.zeros((2, 3)))
        kept = host.snapshot(plain)
        seen(plain)[...] = 7
        assert np.array_equal(seen(kept), np.ones(3))
        assert not host.constant(plain)
        assert host.source(plain) is plain
