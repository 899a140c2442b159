"""Plain arrays that meet wrapped ones: one source for one array, as long as it is alive and unchanged."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

from recompute._adapters.arrays import ArrayAdapter
from recompute._cache import Cache
from recompute._recomputable import Recomputable
from recompute.extend import EVICTED, Value


class _Known:
    """A source that was made of an array, and what tells that this array is still the same."""

    __slots__ = ("node", "owner")

    def __init__(self, owner: ReferenceType[Any], node: Value) -> None:
        self.owner = owner
        """Of its memory, which the array may be a view of."""
        self.node = node


def source_of(cache: Cache, adapter: ArrayAdapter, array: Any) -> Recomputable[Any]:
    """A source with the content of a plain array.

    It is the one that was made before of the same memory, if an operation needs that still and the content is the same
    to the last bit: O(bytes) to see, which is no more than the copy that another source would take.
    """
    place = adapter.place(array)
    owner = adapter.buffer(array)
    if place is None or owner is None:
        return cache.extend.source(adapter.snapshot(array), Recomputable)
    sources: dict[Hashable, _Known] = cache.__dict__.setdefault("_plain", {})
    key = id(owner), place
    known = sources.get(key)
    if known is not None and known.owner() is owner:
        payload = known.node.payload
        if payload is not EVICTED and adapter.same(array, payload):
            del payload
            handle = cache.extend.refer(known.node, Recomputable)
            if handle is not None:
                return handle

    def gone(_: object) -> None:
        if sources.get(key) is known:
            sources.pop(key, None)

    source = cache.extend.source(adapter.snapshot(array), Recomputable)
    with suppress(TypeError):  # its memory belongs to something that cannot be watched
        known = sources[key] = _Known(ref(owner, gone), source._node)
    return source
