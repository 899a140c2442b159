"""Counting again, after a change that was cut short.

An exception from the handler of a signal can strike between any two instructions of the main thread, in the middle of a
change too, and a fork can come while another thread is in one. What cannot be half done is kept: which payload a value
has, which operation made it, who refers to it, and what the frames of living calls have taken. Every count, lock,
candidate and component follows from that, and is made again by the next holder of the lock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from recompute._engine.device_tiers import Copy
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
    for departure in engine.finalizer.departures:
        if departure.vacates or (departure.copy is not None and departure.copy.key is None):
            engine.settling.guard(engine, departure)
    by_storage = _values_by_storage(storages)
    _link_users(by_storage, frames)
    values = [value for kept in by_storage.values() for value in kept]
    _look_for_references(values)
    _count_bytes(engine, by_storage, frames)
    engine.references.restart(values)
    for storage, kept in by_storage.items():
        if kept:
            engine.references.mode.released(engine.references, storage)
    engine.references.forget_unused(values)


def _living_frames(engine: Engine) -> list[Frame]:
    """The frames of all calls that are going on; those that an interrupt has left behind are dropped."""
    scheduler = engine.scheduler
    frames: list[Frame] = []
    for bottom in list(scheduler.stacks):
        if bottom.goes_on:
            frames += bottom.stack
        else:
            for frame in bottom.stack:
                frame.running = frame.counts = False
            engine.finalizer.garbage += bottom.stack
            bottom.stack.clear()  # no cycle: what they hold is freed immediately
            del scheduler.stacks[bottom]
    scheduler.blocked = {bottom: what for bottom, what in scheduler.blocked.items() if bottom in scheduler.stacks}
    if scheduler.leader not in scheduler.stacks:
        scheduler.leader = None
    scheduler.in_flight = {frame.operation: frame for frame in frames if frame.operation is not None}
    waiting = {bottom.thread for bottom in scheduler.blocked}
    scheduler.executing = sum(frame.counts and frame.stack[0].thread not in waiting for frame in frames)
    return frames


def _made_by(frame: Frame) -> list[Storage]:
    """What an operation in flight may have entered already."""
    operation = frame.operation
    outputs = () if operation is None else operation.outputs
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
                alive.setdefault(handle._node, []).append(reference)
    for value, kept in alive.items():  # first what they have, then what they have no more: an interrupt loses nothing
        for reference in kept:
            reference.value = value
        value.references = {id(reference): reference for reference in kept} if len(kept) > 1 else kept[0]
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
        living = sum(output is not None for output in outputs)
        if operation.options is not None and living:
            operation.options.living = living
    for value in values:
        value.users = None
    for operation in operations:
        for argument in operation.arguments:
            argument.add_user(operation)
    for frame in frames:  # what has not run yet needs them, too
        if frame.operation is not None and not frame.operation.runs:
            for argument in frame.operation.arguments:
                if argument in alive:
                    argument.add_user(frame.operation)


def _count_bytes(engine: Engine, by_storage: dict[Storage, list[Value]], frames: list[Frame]) -> None:
    finalizer = engine.finalizer
    locks = Counter(storage for frame in frames for storage in frame.locked or ())
    finalizer.stays = {stay for stay in finalizer.stays if stay() is not None}
    locks.update(stay.storage for stay in finalizer.stays)
    for storage, kept in by_storage.items():
        storage.cost = sum([operation.c0 for operation in {value.operation for value in kept} if operation is not None])
    reserved = [room for frame in frames for room in frame.reserved]
    engine.machine.restart(engine.memory.pools.values(), by_storage, reserved, locks, finalizer.departures)


def _count_copies(engine: Engine) -> None:
    """Of values that live, written ones and those that are just being written."""
    if engine.memory.tiers is None:
        return
    writing = [departure.copy for departure in engine.finalizer.departures if departure.copy is not None]
    displaced = {other for copy in writing for other in copy.displaced}
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
                    continue
                copy.store = copy.key.store
                copies[copy.store].append(copy)
            elif copy not in writing:
                value.remains.copy = None
    for copy in displaced.union(writing):  # also of values that were forgotten meanwhile
        if copy.key is None or copy.moves_down:
            reserved[copy.store] += copy.nbytes
    for store, found in copies.items():
        store.recount(reserved[store], found)
    for pool in engine.memory.pools.values():
        if pool.tiers is not None:
            pool.tiers.fixed = {storage for storage in pool.tiers.fixed if any(value.stays for value in storage.values)}
