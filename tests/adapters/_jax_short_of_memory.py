"""A test for a process of its own, whose memory it limits; test_jax_devices.py runs it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from _jax_oracle import registered

import recompute as rc
from recompute_jax import ap, op_by_op
from recompute_jax._arrays import OUT_OF_MEMORY

COUNT = 16 * 2**20  # float32: 64 MiB
ROOM = 96 * 2**20  # for one of them


def limit_memory(room: int) -> None:
    """No more address space than there is now, and `room` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + room, resource.RLIM_INFINITY))


def filled(value: float) -> Any:
    return jnp.full(COUNT, value).block_until_ready()


def test_the_cache_gives_back_what_the_device_lacks() -> None:
    """When allocations really fail, the cache evicts and the operation runs: equations, trees, and recomputation."""
    with registered(), rc.Cache() as cache:
        make = op_by_op(lambda: jnp.full(COUNT, 2.0), recomputable=True)
        kept = [make() for _ in range(3)]
        for value in kept:
            value.get().block_until_ready()
        filled(1.0)
        limit_memory(ROOM)
        with pytest.raises(OUT_OF_MEMORY, match="Out of memory"):
            [filled(1.0), filled(1.0)]
        more = [make() for _ in range(2)]
        assert [value.resident for value in (*kept, *more)].count(False) == 1
        tree = ap(lambda: {"a": filled(3.0)})
        assert [value.resident for value in (*kept, *more)].count(False) == 2
        first = op_by_op(lambda x: jnp.concatenate([x, x[:8]]))(tree["a"])  # compiled now, and timed
        assert [value.resident for value in (*kept, *more)].count(False) >= 3
        assert (first.shape, float(first[-1])) == ((COUNT + 8,), 3.0)
        del first
        for value in (*kept, *more):
            assert float(value.get()[-1]) == 2.0
        assert cache.stats().rematerializations > 0
        for value in (*kept, *more, tree["a"]):
            value.evict()
        held: list[Any] = []
        with pytest.raises(OUT_OF_MEMORY, match="Out of memory") as caught:
            held.extend(make().pin() for _ in range(20))
        assert held
        assert any("broadcast_in_dim (" in note for note in caught.value.__notes__)
