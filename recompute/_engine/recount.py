"""Counting again, after a change that was cut short.

An exception from the handler of a signal can strike between any two instructions of the main thread, in the middle of a
change too, and a fork can come while another thread is in one. What cannot be half done is kept: which payload a value
has, which operation made it, who refers to it, and what the frames of living calls have taken. Every count, lock,
candidate and component follows from that, and is made again by whoever holds the lock next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recompute._engine.copies import Copy, copy_of
from recompute._engine.frames import Frame
from recompute._engine.graph import EVICTED, NOWHERE, Reference, Storage, Value
from recompute._tiers.tier import Store

if TYPE_CHECKING:
    from recompute._engine.engine import Engine


def recount(engine: Engine) -> None:
    """Make all that is counted right again. O(values); holds the lock."""
    for departure in engine.finalizer.departures:
        if not departure.taken:
            departure.take()
    frames = _living_frames(engine)
    storages = engine.memory.storages
    storages |= {frame_storage for frame in frames for frame_storage in _made_by(frame) if frame_storage.values}
    _count_copies(engine)
    by_storage = _values_by_storage(storages)
    _link_users(by_storage, frames)
    _count_bytes(engine, by_storage, frames)
    values = [value for kept in by_storage.values() for value in kept]
    _look_for_references(values)
    engine.references.restart(values)
    for storage, kept in by_storage.items():
        if kept and engine.references.release == "eager":
            engine.references.evict_unreferenced(storage)
    engine.references.forget_unused(values)


def _living_frames(engine: Engine) -> list[Frame]:
    """The frames of all calls that are going on; those that an interrupt has left behind are dropped."""
    scheduler = engine.scheduler
    alive = engine.calls_going_on()
    frames: list[Frame] = []
    for bottom in list(engine.unlocked):
        if bottom not in alive or bottom in scheduler.stacks:
            del engine.unlocked[bottom]
            bottom.running = bottom in alive
        else:  # it was about to lock its arguments, which it does when this change goes on
            bottom.locked = bottom.missing = None
            bottom.counts = False
            frames += bottom.stack  # what it has reserved counts
    for bottom in list(scheduler.stacks):
        if bottom in alive:
            frames += bottom.stack
        else:
            del scheduler.stacks[bottom]
            for frame in bottom.stack:
                frame.running = frame.counts = False
    scheduler.blocked = [bottom for bottom in scheduler.blocked if bottom in scheduler.stacks]
    if scheduler.leader not in scheduler.stacks:
        scheduler.leader = None
    scheduler.in_flight = {frame.operation: frame for frame in frames if frame.operation is not None}
    waiting = {id(bottom.stack) for bottom in scheduler.blocked}
    scheduler.executing = sum(frame.counts and id(frame.stack) not in waiting for frame in frames)
    return frames


def _made_by(frame: Frame) -> list[Storage]:
    """What an operation in flight may have entered already."""
    operation = frame.operation
    outputs = () if operation is None else (*operation.outputs, operation)
    return [output.storage for output in outputs if output is not None and output.storage is not NOWHERE]


def _values_by_storage(storages: set[Storage]) -> dict[Storage, list[Value]]:
    known = dict.fromkeys(value for storage in storages for value in storage.values)
    operations = dict.fromkeys(value.operation for value in known if value.operation is not None)
    for operation in operations:  # one that was about to move, or to be entered
        known.update(dict.fromkeys(output for output in operation.outputs if output is not None))
        known.update(dict.fromkeys(operation.arguments))
    made = {value.operation for value in known if value.operation is not None}
    outputs = {operation: set(operation.outputs) for operation in made}
    kept: dict[Storage, list[Value]] = {storage: [] for storage in sorted(storages, key=lambda one: one.number)}
    for value in sorted(known, key=lambda one: one.number):
        if value.operation is not None and value not in outputs[value.operation]:
            value.operation = None  # made, but not yet entered, or half forgotten
        lost = value.operation is None and value.payload is EVICTED and value.copy is None
        if value.storage in kept and value.storage.pool is not None and not lost:
            kept[value.storage].append(value)
    for storage, values in kept.items():
        storage.values = tuple(values) if len(values) < 2 else dict.fromkeys(values)
    for storage in [storage for storage, values in kept.items() if not values]:
        del kept[storage]
        storages.discard(storage)
    return kept


def _look_for_references(values: list[Value]) -> None:
    """Whatever was noted of them: a Recomputable that is alive says itself to what it refers."""
    alive: dict[Value, list[Reference]] = {}
    for value in values:
        references = value.references
        for reference in list(references.values()) if isinstance(references, dict) else (references,):
            handle = None if reference is None else reference()
            if reference is not None and handle is not None:
                alive.setdefault(handle.node, []).append(reference)
    for value, kept in alive.items():  # first what they have, then what they have no more: an interrupt loses nothing
        for reference in kept:
            reference.value = value
        value.references = {id(each): each for each in kept} if len(kept) > 1 else kept[0]
    for value in values:
        if value not in alive:
            value.references = None


def _link_users(by_storage: dict[Storage, list[Value]], frames: list[Frame]) -> None:
    values = [value for kept in by_storage.values() for value in kept]
    operations = {value.operation for value in values if value.operation is not None}
    alive = set(values)
    for operation in operations:
        outputs = [
            output if output is not None and output.operation is operation and output in alive else None
            for output in operation.outputs
        ]
        operation.outputs = outputs if len(outputs) > 1 else tuple(outputs)
        living = [output.number - place for place, output in enumerate(outputs) if output is not None]
        if operation.options is not None and living:
            operation.options.first, operation.options.living = living[0], len(living)
    for value in values:
        value.users = None
    for operation in operations:
        for argument in operation.arguments:
            argument.add_user(operation)


def _count_bytes(engine: Engine, by_storage: dict[Storage, list[Value]], frames: list[Frame]) -> None:
    memory, finalizer = engine.memory, engine.finalizer
    for held in [held for held in memory.held if held.reference is None or held.reference.is_dead]:
        memory.held.discard(held)
    for pool in memory.pools.values():
        pool.held = sum(held.size for held in memory.held if held.pool is pool)
        pool.departing = sum(departure.size for departure in finalizer.departures if departure.pool is pool)
        pool.used = pool.held + pool.departing
        pool.fixed = pool.sources = pool.movable = pool.pinned = 0
        pool.candidates.clear()
    locks: dict[Storage, int] = {}
    for frame in frames:
        for pool, size in frame.reserved:
            pool.used += size
            pool.fixed += size
        for storage in frame.locked or ():
            locks[storage] = locks.get(storage, 0) + 1
    finalizer.stays = {stay for stay in finalizer.stays if stay() is not None}
    for stay in finalizer.stays:
        locks[stay.storage] = locks.get(stay.storage, 0) + 1
    for storage, kept in by_storage.items():
        made_by = {value.operation for value in kept if value.operation is not None}
        storage.cost = sum([operation.c0 for operation in made_by])
        storage.slot = -1
        storage.nearby = None
        storage.resident = any(value.payload is not EVICTED for value in kept)
        storage.dropped = not storage.resident and copy_of(storage) is None
        storage.locks = 0
        if not storage.resident:
            storage.buffer = 0
            continue
        if storage.remains is not None and storage.remains.held is not None:
            memory.let_go(storage.remains.held)
            storage.remains.held = None
        pool, size = storage.pool, storage.size
        storage.locks = sum(value.stays + value.pinned for value in kept) + locks.get(storage, 0)
        pool.sources += size if any(value.stays for value in kept) else 0
        pool.pinned += size * sum(value.pinned for value in kept)
        peak = pool.peak
        pool.enter(storage)
        pool.peak = max(peak, min(pool.peak, pool.used))
    memory.neighbourhood.restart(storage for storage, kept in by_storage.items() if storage.dropped and kept)


def _count_copies(engine: Engine) -> None:
    """Of values that live, written ones and those that are just being written."""
    if engine.memory.tiers is None:
        return
    writing = {departure.copy: departure for departure in engine.finalizer.departures if departure.copy is not None}
    displaced = {each for copy in writing for each in copy.displaced}
    copies: dict[Store, list[Copy]] = {store: [] for _, store in engine.memory.tiers.all()}
    reserved = dict.fromkeys(copies, 0)
    for storage in engine.memory.storages:
        for value in storage.values:
            copy = value.copy
            if copy is None or value.remains is None:
                continue
            if copy.fetching not in engine.scheduler.in_flight:
                copy.fetching.outputs = ()
            if copy.key is not None:
                if copy in displaced and copy.moves_down:
                    reserved[copy.store] += copy.nbytes
                    continue
                copy.store = copy.key.store
                copies[copy.store].append(copy)
            elif copy not in writing:
                value.remains.copy = None
    for copy, departure in writing.items():
        if copy.key is None:
            reserved[copy.store] += copy.nbytes
            engine.settling.guard(engine, departure)
    for store, found in copies.items():
        store.recount(reserved[store], found)
    for pool in engine.memory.pools.values():
        if pool.tiers is not None:
            pool.tiers.fixed = {storage for storage in pool.tiers.fixed if any(value.stays for value in storage.values)}
