"""What only a GPU shows of JAX: what is free there, and a budget that is held there."""

from __future__ import annotations

from typing import Any

import pytest

import recompute as rc

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import bits  # noqa: E402  # after importorskip

from recompute_jax import adapter, op_by_op  # noqa: E402  # after importorskip

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU here"),
    pytest.mark.usefixtures("registered_jax"),
]

jnp = jax.numpy
COUNT = 2**22  # float32: 16 MiB


def backwards(x: Any) -> Any:
    """Takes the more memory the later what is made first is needed."""
    return sum([jnp.sin(x + number) for number in range(20)][::-1])


def test_arrays_count_on_their_device() -> None:
    """In the pool of the GPU, of which the adapter knows what is free."""
    x = jnp.ones(COUNT)
    pool = adapter.device(x)
    assert pool in adapter.devices()
    assert adapter.nbytes(x) == 4 * COUNT
    free = adapter.free_memory(pool)
    assert free is not None
    kept = jnp.ones(4 * COUNT).block_until_ready()
    assert adapter.free_memory(pool) <= free - 16 * COUNT
    del kept


def test_budget_of_the_gpu() -> None:
    """At half the memory the bits are the same, and the pool of the GPU keeps its budget."""
    x = jnp.ones(COUNT)
    evaluated = op_by_op(backwards)
    pool = adapter.device(x)
    with rc.Cache() as cache:
        expected = bits(evaluated(x))
        peak = cache.stats().peak
    with rc.Cache({pool: peak // 2}) as cache:
        assert bits(evaluated(x)) == expected
        (found,) = [figures for figures in cache.stats().pools if figures.device == pool]
    assert found.peak <= peak // 2
    assert cache.stats().rematerializations > 0


def test_more_than_the_device_has() -> None:
    """Results that may be evicted take more than the memory of the device, within a budget of most of it."""
    make = op_by_op(lambda number: jnp.full(64 * COUNT, number), recomputable=True)
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    with rc.Cache({adapter.device(jnp.ones(1)): int(0.8 * limit)}) as cache:
        made = [make(float(number)) for number in range(limit // (4 * 64 * COUNT) + 2)]
        assert cache.stats().evictions > 0
        for number, value in enumerate(made):
            assert float(value.get()[-1]) == number
