"""Values packed and unpacked: by themselves, and by a cache that moves what is evicted to a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import recompute as rc
from recompute._adapters.adapter import adapter_for


def packed(value: Any) -> tuple[Any, list[bytes]]:
    """What its adapter remembers of a value, and the bytes that go to a tier."""
    head, buffers = adapter_for(value).pack(value)
    return head, [bytes(memoryview(buffer).cast("B")) for buffer in buffers]


def unpacked(value: Any) -> Any:
    """The value made again of what its adapter packs, with each byte used once."""
    head, parts = packed(value)
    left = deque(parts)

    def load(memory: Any) -> None:
        memoryview(memory).cast("B")[:] = left.popleft()

    back = adapter_for(value).unpack(head, load)
    assert not left
    return back


def fetched(make: Callable[[], Any], check: Callable[[Any], None]) -> None:
    """Check the result of an operation that was evicted to a disk, and is fetched from there."""
    with TemporaryDirectory() as folder, rc.Cache(tiers=[rc.Disk(folder=Path(folder), always=True)]) as cache:
        value = rc.ap(make)
        _evicted_and_back(cache, value, check)


def fetched_source(make: Callable[[], Any], check: Callable[[Any], None]) -> None:
    """The same of a source."""
    with TemporaryDirectory() as folder, rc.Cache(tiers=[rc.Disk(folder=Path(folder), always=True)]) as cache:
        value = rc.pure(make())
        _evicted_and_back(cache, value, check)


def _evicted_and_back(cache: rc.Cache, value: rc.Recomputable[Any], check: Callable[[Any], None]) -> None:
    assert value.evict()
    assert cache.stats().used == 0
    check(value.get())
    stats = cache.stats()
    (tier,) = stats.tiers
    assert (tier.moves, tier.fetches, stats.rematerializations) == (1, 1, 0)
    assert stats.overshoot == 0
