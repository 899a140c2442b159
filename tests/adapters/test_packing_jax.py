"""Arrays of JAX as bytes and back: bits, weak types, keys, and whether they are bound to their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from packed import fetched, fetched_source, packed, unpacked  # noqa: E402  # it lies beside other tests

from recompute_jax import adapter  # noqa: E402  # after importorskip

jnp = jax.numpy

DTYPES = "float32 float64 float16 bfloat16 float8_e4m3fn int4 int32 int64 uint8 bool complex64 complex128".split()

pytestmark = pytest.mark.usefixtures("registered_jax")


@st.composite
def recipes(draw: st.DrawFn) -> Callable[[], Any]:
    """Makes the same array each time: of random bits, double precision too, weakly typed, on a given device; keys."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 99))
    weak, committed, keys = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 9)) == 0
    implementation = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))

    def make() -> Any:
        device = jax.devices()[0] if committed else None
        if keys:
            return jax.device_put(jax.random.split(jax.random.key(seed, impl=implementation), tuple(shape)), device)
        bits = np.random.default_rng(seed).integers(0, 2, [*shape, jnp.dtype(dtype).itemsize], np.uint8)
        with jax.enable_x64(True):
            if weak:
                return jax.device_put(jnp.asarray(3.5) * seed, device)
            return jax.device_put(bits.view(jnp.dtype(dtype))[..., 0], device)

    return make


def looks(array: Any) -> tuple[Any, ...]:
    """All there is to know of an array."""
    return (
        *(type(array), array.aval, array.sharding, array.committed, adapter.fingerprint(array)),
        *(array.weak_type if hasattr(array, "weak_type") else None, adapter.nbytes(array)),
    )


@given(recipes())
def test_an_array_comes_back_to_the_last_bit(make: Callable[[], Any]) -> None:
    """By itself, and inside of something, where one array is one again."""
    array = make()
    assert looks(unpacked(array)) == looks(array)
    back = unpacked([array, {"key": array}, 1.5])
    assert looks(back[0]) == looks(array)
    assert back[1]["key"] is back[0]


@given(recipes())
def test_an_array_comes_back_from_a_disk(make: Callable[[], Any]) -> None:
    """Results and sources of a cache."""

    def check(found: Any) -> None:
        assert looks(found) == looks(make())

    if adapter.nbytes(make()):
        fetched(make, check)
        fetched_source(make, check)


def test_memory_of_the_host_is_not_copied() -> None:
    """On a CPU the bytes that are written are those of the array, and it has those that were read."""
    array = jnp.arange(100.0)
    head, (buffer,) = adapter.pack(array)
    assert buffer.ctypes.data == array.unsafe_buffer_pointer()
    filled: list[Any] = []

    def load(memory: Any) -> None:
        memory[:] = buffer
        filled.append(memory)

    assert adapter.unpack(head, load).unsafe_buffer_pointer() == filled[0].ctypes.data


def test_it_comes_back_while_a_function_is_traced(tmp_path: Any) -> None:
    """As an array, though whatever else JAX makes then is a traced value."""
    with rc.Cache(tiers=[rc.Disk(folder=tmp_path, always=True)]) as cache:
        value = rc.pure(jnp.arange(3.0))
        assert value.evict()
        assert jax.jit(lambda x: x + value.get())(1.0).tolist() == [1, 2, 3]
        assert isinstance(value.get(), jax.Array)
        assert cache.stats().tiers[0].fetches == 1


def test_what_is_gone_is_not_packed() -> None:
    """A deleted array raises what JAX says of it."""
    array = jnp.arange(3.0) + 1
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        packed(array)


def test_a_donated_array_comes_back_from_its_copy(tmp_path: Any) -> None:
    """A jitted function may take the memory of a cached array that a disk has: a source, too, is fetched."""
    with rc.Cache(tiers=[rc.Disk(folder=tmp_path, always=True)]):
        value = rc.pure(jnp.arange(4.0))
        assert value.evict()
        assert jax.jit(lambda x: x * 2, donate_argnums=0)(value.get()).tolist() == [0, 2, 4, 6]
        assert value.get().tolist() == [0, 1, 2, 3]
