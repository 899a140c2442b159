"""What needs a GPU: kernels, streams, events, CuPy's own pool. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import recompute as rc
from recompute.testing import check_adapter, check_invariants
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
cupy = pytest.importorskip("cupy", reason="the extra 'cupy' is not installed")

import recompute_cupy  # noqa: E402  # after importorskip
from recompute_cupy import DeviceMemoryError, adapter, install  # noqa: E402

pytestmark = pytest.mark.skipif(not cupy.cuda.is_available(), reason="no CUDA device")

SPIN = r"""
extern "C" __global__ void spin(const volatile int* flag, const float* in, float* out) {
    while (*flag == 0) {}
    out[0] = in[0] + 1;
}
"""


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    """The cache sees arrays through the adapter."""
    with registered(adapter, cupy.ndarray):
        yield
    recompute_cupy.uninstall()


class Spin:
    """An operation that adds 1 on the device once the host says so."""

    def __init__(self) -> None:
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._flag = np.frombuffer(self._memory, np.int32, 1)
        self._kernel = cupy.RawKernel(SPIN, "spin")
        self.go()

    def __call__(self, array: Any) -> Any:
        out = cupy.empty_like(array)
        self._kernel((1,), (1,), (np.uint64(self._memory.ptr), array, out))
        return out

    def stop(self) -> None:
        self._flag[0] = 0

    def go(self) -> None:
        self._flag[0] = 1


def double(array: Any) -> Any:
    return array * 2


# The adapter


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint64", "bool", "complex64"])
def test_the_kit_passes(dtype: str) -> None:
    """The adapter keeps the promises of adapters, for arrays and views of every kind."""

    def make() -> Any:
        return (cupy.arange(24) % 5).astype(dtype).reshape(2, 3, 4)

    def change(array: Any) -> None:
        array[...] = (array == 0).astype(array.dtype)

    examples = [make, lambda: make()[1:], lambda: make().T, lambda: make()[:, ::2], lambda: make().real]
    check_adapter(adapter, examples, view=lambda array: array[:1], change=change)
    check_adapter(adapter, [*examples, lambda: make()[:0]], view=lambda array: array.view())


def test_the_kit_passes_with_the_allocator() -> None:
    """The same for memory of the installed allocator."""
    with install(rc.Cache(), limit="256 MiB", pool=cupy.cuda.MemoryPool()):
        check_adapter(
            adapter,
            [lambda: cupy.arange(100.0), lambda: cupy.arange(100.0)[10:], lambda: cupy.arange(100.0).reshape(10, 10).T],
            view=lambda array: array[1:],
        )


def test_devices_and_their_memory_are_seen() -> None:
    """The first device has a name, and some free memory."""
    assert adapter.devices()[0] == "cuda:0"
    free = adapter.free_memory("cuda:0")
    assert free is not None
    assert free > 0


def test_digests_tell_what_compares_equal() -> None:
    """Signed zeros, dtypes and shapes are part of the digest; the order in memory is not."""
    array = cupy.arange(6.0).reshape(2, 3)
    assert adapter.fingerprint(array) == adapter.fingerprint(cupy.asfortranarray(array))
    others = [cupy.zeros(1), -cupy.zeros(1), cupy.zeros(1, "f4"), cupy.zeros((1, 1))]
    assert len({adapter.fingerprint(other) for other in others}) == 4


def test_a_random_function_is_found_out() -> None:
    """With verify=True a function whose second run gives another array is named."""

    def noise() -> Any:
        return cupy.random.random(3)

    with rc.Cache(verify=True):
        value = rc.ap(noise)
        value.evict()
        with pytest.raises(rc.ImpureError, match="noise"):
            value.get()


def test_a_second_device_is_a_second_pool() -> None:
    """What lies on another device counts there, and copies and new arrays stay there."""
    if len(adapter.devices()) < 2:
        pytest.skip("one CUDA device only")
    with rc.Cache({"cuda:0": "1 MB", "cuda:1": "1 MB"}) as cache:
        with cupy.cuda.Device(1):
            value = rc.ap(cupy.ones, 1_000)
        assert {pool.device: pool.used for pool in cache.stats().pools if pool.used} == {"cuda:1": 8_192}
        assert [adapter.device(array) for array in (adapter.copy(value.get()), adapter.result(value.get()))] == [
            "cuda:1"
        ] * 2
        assert adapter.device(adapter.empty(adapter.outline(value.get()))) == "cuda:1"


# Kernels


def kernels() -> dict[str, Callable[[Any], Any]]:
    raw = cupy.RawKernel(
        'extern "C" __global__ void twice(const double* x, double* y, int n) {'
        " int i = blockDim.x * blockIdx.x + threadIdx.x; if (i < n) y[i] = 2 * x[i]; }",
        "twice",
    )
    elementwise = cupy.ElementwiseKernel("float64 x", "float64 y", "y = 2 * x", "twice_elementwise")
    reduction = cupy.ReductionKernel("float64 x", "float64 y", "x", "a + b", "y = a", "0", "summed")

    @cupy.fuse()  # type: ignore[untyped-decorator]  # CuPy has no types
    def fused(array: Any) -> Any:
        return cupy.sqrt(array) * 2 + array

    def launch(array: Any) -> Any:
        out = cupy.empty_like(array)
        raw((array.size // 128 + 1,), (128,), (array, out, np.int32(array.size)))
        return out

    return {
        "raw": launch,
        "elementwise": elementwise,
        "fused": fused,
        "reduction": lambda array: array * 0 + reduction(array),
        "ufunc": cupy.exp,
        "library": lambda array: cupy.sort(array)[::-1],
        "matmul": lambda array: (array.reshape(20, 50).T @ array.reshape(20, 50)).ravel()[:1_000],
        "fft": lambda array: cupy.fft.ifft(cupy.fft.fft(array)).real,
    }


@pytest.mark.parametrize("name", ["raw", "elementwise", "fused", "reduction", "ufunc", "library", "matmul", "fft"])
def test_kernels_of_all_kinds_run_again(name: str) -> None:
    """Raw kernels, fused functions, ufuncs and library calls give the same bits when they are recomputed."""
    function = kernels()[name]
    start = cupy.linspace(0, 1, 1_000)
    first = function(start)
    second = function(first)
    with rc.Cache() as cache:
        value = rc.ap(function, rc.ap(function, rc.pure(start)))
        for _ in range(2):
            assert cupy.array_equal(value.get(), second)
            cache.release_memory(device="cuda:0")
        assert cache.stats().rematerializations > 0


def test_array_code_runs_on_wrapped_arrays_within_a_budget() -> None:
    """Array code gives the same bits on wrapped arrays of which few fit."""

    def network(x: Any, weights: list[Any]) -> list[Any]:
        layers = []
        for w in weights:
            x = np.maximum(x @ w, 0.1 * x)
            layers.append(x)
        return layers

    images = cupy.linspace(-1, 1, 50 * 64).reshape(50, 64)
    weights = [cupy.sin(cupy.arange(64.0 * 64) + number).reshape(64, 64) for number in range(12)]
    plain = network(images, weights)
    budget = sum(held.nbytes for held in (*weights, images)) + 8 * images.nbytes
    with rc.Cache(budget) as cache:
        layers = network(rc.array(images), rc.array(weights))
        assert all(
            cupy.array_equal(one.get(), other) for one, other in zip(reversed(layers), reversed(plain), strict=True)
        )
        assert cache.stats().peak <= budget
        assert cache.stats().evictions > 0


def test_methods_take_out_by_its_place() -> None:
    """What CuPy's methods take as `out` without a name is written to, and refers to the result."""
    with rc.Cache():
        target = rc.array(cupy.zeros(3))
        assert rc.array(cupy.asarray([0.26, 1.44, -2.0])).round(1, target) is target
        assert target.get().tolist() == [0.3, 1.4, -2.0]


# Streams and events


def test_nothing_waits_for_the_device() -> None:
    """Operations, evictions and recomputations are launched while the device is still busy with the first of them."""
    spin = Spin()
    with rc.Cache() as cache:
        source = rc.pure(cupy.zeros(1, "f4"))

        def chain() -> Any:
            last = source.map(spin).map(double).map(double)
            last.evict()
            last.get()
            return last

        chain().get().get()  # kernels are compiled and loaded, and the pool has blocks
        spin.stop()
        try:
            last = chain()
            assert not cupy.cuda.get_current_stream().done
        finally:
            spin.go()
        assert float(last.get()[0]) == 4
        check_invariants(cache, [source, last])


def test_the_device_tells_costs_when_it_knows_them() -> None:
    """A timer gives nothing before the work is done, and seconds after it."""
    spin, array = Spin(), cupy.zeros(1, "f4")
    spin(array).get()
    spin.stop()
    try:
        launched = adapter.timer("cuda:0")
        assert launched is not None
        spin(array)
        ask = launched()
        assert ask() is None
    finally:
        spin.go()
    cupy.cuda.Device(0).synchronize()
    seconds = ask()
    assert seconds is not None
    assert seconds > 0


def test_the_cache_takes_the_costs_of_the_device() -> None:
    """What an operation costs is what it took on the device, once that is known."""
    square = cupy.ones((2_000, 2_000))
    with rc.Cache() as cache:
        source = rc.pure(square)
        products = [source.map(lambda array: array @ array) for _ in range(5)]
        cupy.cuda.Device(0).synchronize()
        source.map(double)  # asks
        assert len(cache._engine.meter.unknown) == 1
        assert all(product._node.operation.c0 > 0 for product in products)


def test_operations_on_several_streams_wait_for_each_other_on_the_device() -> None:
    """What was made on one stream is complete when an operation on another reads it, and the host does not wait."""
    spin = Spin()
    one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with rc.Cache():
        source = rc.pure(cupy.zeros(1, "f4"))
        for warm in (True, False):
            cupy.cuda.Device(0).synchronize()
            if not warm:
                spin.stop()
            try:
                with one:
                    first = rc.ap(spin, source)
                with other:
                    second = first.map(double)
                    plain = second.get() + 1
                assert warm or not other.done
            finally:
                spin.go()
            other.synchronize()
            assert [float(second.get()[0]), float(plain[0])] == [2, 3]


def test_a_stream_can_wait_for_what_was_recomputed_on_another() -> None:
    """After `join` the current stream reads complete results, whichever stream they were recomputed on."""
    spin, stream = Spin(), cupy.cuda.Stream(non_blocking=True)
    with rc.Cache():
        value = rc.ap(spin, rc.pure(cupy.zeros(1, "f4")))
        double(value.get())
        value.evict()
        cupy.cuda.Device(0).synchronize()
        spin.stop()
        try:
            with stream:
                value.get()
            recompute_cupy.join()
            result = double(value.get())
            assert not cupy.cuda.get_current_stream().done
        finally:
            spin.go()
        assert float(result[0]) == 2


# The allocator over CuPy's own pool


def test_values_make_room_on_the_device() -> None:
    """Many times the limit is computed, temporaries of library calls included, and the pool never takes more."""
    pool, cache = cupy.cuda.MemoryPool(), rc.Cache()
    limit = 64 * 2**20
    with install(cache, limit=limit, pool=pool), cache:
        values = [rc.ap(cupy.full, (1_000, 500), float(number)) for number in range(40)]  # 4 MB each
        values += [value.map(lambda array: cupy.sort(array, axis=0) + cupy.cumsum(array, axis=1)) for value in values]
        for number, value in enumerate(values[:40]):
            assert float(value.get()[-1, -1]) == number
        for number, value in enumerate(values[40:]):
            assert float(value.get()[-1, -1]) == number + 500 * number
        assert pool.total_bytes() <= limit
        assert cache.stats().evictions > 40
        check_invariants(cache, values)


def test_a_request_that_does_not_fit_is_refused_and_nothing_is_lost() -> None:
    """The error is CuPy's and the library's, and the values are all there."""
    pool, cache = cupy.cuda.MemoryPool(), rc.Cache()
    with install(cache, limit=16 * 2**20, pool=pool), cache:
        values = [rc.ap(cupy.full, 2**18, float(number)) for number in range(20)]  # 2 MiB each
        mine = cupy.zeros(2**20)  # 8 MiB
        with pytest.raises(DeviceMemoryError, match="arrays that the cache does not know"):
            cupy.zeros(2**20 + 2**18)
        with pytest.raises(DeviceMemoryError, match="more than the limit"):
            cupy.zeros(2**22)
        del mine
        assert [float(value.get()[0]) for value in values] == list(range(20))


def test_a_fraction_of_the_device_is_a_limit_of_the_default_pool() -> None:
    """It is set while the allocator is installed, and what was there before is back afterwards."""
    pool = cupy.get_default_memory_pool()
    before, allocator = pool.get_limit(), cupy.cuda.get_allocator()
    total = cupy.cuda.runtime.memGetInfo()[1]
    with install(rc.Cache(), fraction=0.5):
        assert pool.get_limit() == int(0.5 * total)
        assert float(cupy.arange(10).sum()) == 45
    assert pool.get_limit() == before
    assert cupy.cuda.get_allocator() == allocator
