"""After an interrupt: the books of a cache, made again from what is there.

KeyboardInterrupt can strike between any two instructions of the main thread, in the middle of the bookkeeping too. What
cannot be half done is kept: which payload a value has, which operation made it, who refers to it. All counters, locks,
candidates and components follow from that.
"""

from __future__ import annotations

import gc
import sys
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Final

from recompute._engine.graph import EVICTED, Storage, Value

if TYPE_CHECKING:
    from recompute._engine.references import Lifetimes


_INSIDE: Final = ("_at_once", "_engine", "_cache")

HANDLES: Final[list[type]] = []
"""The types of outside references, which the surface enters."""


def elsewhere() -> bool:
    """Whether another thread is inside this package: what it does there must not be repaired."""
    for thread, frame in sys._current_frames().items():
        inside: FrameType | None = frame
        while inside is not None and thread != get_ident():
            if inside.f_globals.get("__name__", "") in {
                "recompute._engine.at_once",
                "recompute._engine.engine",
                "recompute._cache",
            }:
                return True
            inside = inside.f_back
    return False


def repair(cache: Lifetimes) -> None:
    """Make all books of an idle cache right. O(objects of the process): interrupts are rare. Holds the lock."""
    interrupts = cache._dropped.count(None)
    cache._dropped.clear()  # references are counted anew
    cache._dropped.extend([None] * interrupts)
    pools = set(cache._pools.values())
    everything = gc.get_objects()
    # An object that was interrupted before it was complete lacks the slot that is set last.
    storages = {each for each in everything if type(each) is Storage and hasattr(each, "held") and each.pool in pools}
    values = [
        each for each in everything if type(each) is Value and hasattr(each, "ghost") and each.storage in storages
    ]
    operations = {value.operation for value in values if value.operation is not None}
    for value in values:
        value.refs = value.uses = 0
        value.using = None
    for each in everything:
        if issubclass(type(each), tuple(HANDLES)) and hasattr(each, "_value") and each._cache is cache:
            each._value.refs += 1
    for operation in operations:
        operation.frame = None
        operation.outputs = tuple(
            [each if each is not None and each.operation is operation else None for each in operation.outputs]
        )
    by_storage: dict[Storage, list[Value]] = {storage: [] for storage in storages}
    for value in values:
        maker = value.operation
        if maker is not None and value not in maker.outputs:
            if value.refs:  # made, but not yet entered, or half forgotten: it can only stay as it is
                value.operation = None
            else:
                continue
        if value.payload is EVICTED and value.operation is None:
            continue
        by_storage[value.storage].append(value)
    living = {value.operation for kept in by_storage.values() for value in kept if value.operation is not None}
    for operation in living:
        for argument in operation.arguments:
            argument.add_user(operation)
    _count_again(cache, by_storage)
    cache._history = sum(not value.refs and value.uses > 0 for kept in by_storage.values() for value in kept)
    if cache.release == "eager":
        for storage, kept in by_storage.items():
            if kept:
                cache._evict_unreferenced(storage)
    unused = [value for kept in by_storage.values() for value in kept if not value.refs and not value.uses]
    for value in unused:
        if value in value.storage.values and not cache._ignored(value):
            cache._forget(value)


def _count_again(cache: Lifetimes, by_storage: dict[Storage, list[Value]]) -> None:
    for pool in cache._pools.values():
        held = sum(each.size for each in cache._held if each.pool is pool)
        pool.used = pool.held = held
        pool.fixed = pool.sources = pool.pinned = 0
        pool.candidates.clear()
    cache._executing = 0
    cache._late.clear()
    cache._banishable.clear()
    for storage, kept in sorted(by_storage.items(), key=lambda item: item[0].number):
        storage.values = tuple(kept)
        storage.slot = -1
        storage.component = None
        storage.cost = sum(operation.cost for operation in {each.operation for each in kept} if operation is not None)
        storage.resident = any(value.payload is not EVICTED for value in kept)
        storage.locks = 0
        if not storage.resident:
            storage.buffer = 0
            continue
        if storage.held is not None and storage.held in cache._held:
            cache._let_go(storage.held)
        storage.held = None
        storage.locks = sum((value.operation is None) + value.pinned for value in kept)
        pool = storage.pool
        pool.sources += storage.size if any(value.operation is None for value in kept) else 0
        pool.pinned += storage.size * sum(value.pinned for value in kept)
        cache._settle_in(storage)
    cache._neighbourhood.restart(each for each in by_storage if not each.resident and each.values)
