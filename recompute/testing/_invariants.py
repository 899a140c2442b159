"""Invariants of a cache, checked from scratch: slow, simple, and independent of how the engine keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import isclose
from typing import Any

from recompute._cache import Cache
from recompute._engine.device_tiers import moves_source
from recompute._engine.engine import Engine
from recompute._engine.graph import EVICTED, Operation, Storage, Value, copy_of
from recompute._engine.needed import Needs
from recompute._engine.neighbours import Closure, Component, Components
from recompute._engine.pool import Pool
from recompute._engine.states import IN_MEMORY, LOST


def check_invariants(cache: Cache, roots: Iterable[Any] = ()) -> None:
    """Raise AssertionError, and say what is wrong, if the books of `cache` do not agree with what it holds.

    `roots` are all the Recomputables of the cache that are alive: what only they keep alive is found through them.
    May be called whenever the calling thread is not inside the cache. O(everything alive, squared in small things).
    """
    values = [root._node for root in roots]
    engine = cache._engine
    if engine.moving.ahead is not None:
        engine.moving.ahead.wait()
    cache.stats()  # takes in references that went
    with engine.lock:
        storages = _alive(engine, values)
        operations = _operations(storages)
        idle = not engine.scheduler.stacks
        for storage in storages:
            _check_storage(engine, storage, idle=idle)
        for value in (value for storage in storages for value in storage.values):
            _check_value(value)
        _check_users(storages, operations)
        _check_operations(engine, operations, idle=idle)
        _check_tiers(engine, storages, idle=idle)
        for pool in engine.memory.pools.values():
            _check_pool(engine, pool, [storage for storage in storages if storage.pool is pool], idle=idle)
        _check_sets(engine, storages)
        neighbourhood = engine.memory.neighbourhood
        if isinstance(neighbourhood, Components):
            _check_components(neighbourhood, storages)
        elif isinstance(neighbourhood, Closure):
            _check_closures(neighbourhood, storages)
        elif isinstance(neighbourhood, Needs):
            _check_needs(neighbourhood, storages)


def _alive(engine: Engine, values: list[Value]) -> list[Storage]:
    """Every storage that the roots and the candidates lead to, up and down."""
    stack = [value.storage for value in values]
    for pool in engine.memory.pools.values():
        stack.extend(pool.candidates)
    reached = dict.fromkeys(stack)
    while stack:
        storage = stack.pop()
        near: list[Value | None] = []
        for value in storage.values:
            if value.operation is not None:
                near += value.operation.arguments
                near += value.operation.outputs
            for user in value.each_user():
                near += user.outputs
        for value_near in near:
            if value_near is not None and value_near.storage not in reached:
                reached[value_near.storage] = None
                stack.append(value_near.storage)
    return sorted(reached, key=lambda storage: storage.number)


def _lives(operation: Operation) -> bool:
    """Whether one of its outputs can still be needed."""
    return any(output is not None for output in operation.outputs)


def _operations(storages: list[Storage]) -> list[Operation]:
    operations: dict[Operation, None] = {}
    for storage in storages:
        for value in storage.values:
            if value.operation is not None:
                operations[value.operation] = None
            operations.update(dict.fromkeys(user for user in value.each_user() if _lives(user)))
    return list(operations)


def _check_storage(engine: Engine, storage: Storage, *, idle: bool) -> None:
    who = f"storage {storage.number}"
    assert storage.values, f"{who} is alive without a value"
    assert storage.size >= 0, f"{who} has a size of {storage.size}"
    assert engine.memory.pools.get(storage.pool.device) is storage.pool, (
        f"{who} is in a pool that the cache does not know"
    )
    assert storage.resident == IN_MEMORY[storage.state], f"{who} is resident in state {storage.state}"
    assert storage.dropped == LOST[storage.state], f"{who} is dropped in state {storage.state}"
    present = [value for value in storage.values if value.payload is not EVICTED]
    if storage.resident:
        assert present, f"{who} counts as resident, but none of its values is"
        assert storage.held is None, f"{who} is both resident and held outside"
        assert not isinstance(storage.nearby, Component), f"{who} is resident and in an evicted component"
        assert not storage.dropped, f"{who} is both resident and dropped"
    else:
        assert not present, f"{who} is evicted, but {present[0].payload!r} is there"
        assert not storage.locks, f"{who} is evicted and locked {storage.locks} times"
        assert storage.buffer == 0, f"{who} is evicted and remembers its memory"
        assert storage.dropped == (copy_of(storage) is None), f"{who} is evicted: dropped is {storage.dropped}"
    reasons = sum(value.stays + value.pinned for value in storage.values)
    if idle:
        assert storage.locks == reasons, f"{who} has {storage.locks} locks for {reasons} pins and sources"
    else:
        assert storage.locks >= reasons, f"{who} has {storage.locks} locks for {reasons} pins and sources"
    made_by = {value.operation for value in storage.values if value.operation is not None}
    cost = sum(operation.c0 for operation in made_by)
    assert _close(engine, storage.cost, cost), f"{who} costs {storage.cost}, its operations {cost}"
    candidate = storage in list(storage.pool.candidates)
    if not storage.resident:
        assert not candidate, f"{who} is evicted and a candidate for eviction"
    elif not storage.locks and storage.size >= storage.pool.smallest:
        assert candidate, f"{who} is resident and unlocked, but no candidate"
    assert (storage.slot != -1) == candidate, f"{who} has slot {storage.slot}, but candidate is {candidate}"


def _check_value(value: Value) -> None:
    storage, operation = value.storage, value.operation
    who = f"a value of storage {storage.number}"
    assert value in storage.values, f"{who} is not listed there"
    assert isinstance(storage.values, dict) == (len(storage.values) > 1), f"{who} is one of {storage.values!r}"
    if operation is None:
        assert value.payload is not EVICTED or value.copy is not None, f"{who} is a source and lost"
    else:
        assert _lives(operation), f"{who} was made by {operation}, which is dead"
        assert value in operation.outputs, f"{who} is not among the outputs of {operation}"
        options = operation.options
        if len(operation.outputs) > 1 and options is not None:
            assert operation.outputs[value.number - operation.number] is value, f"{who} is elsewhere among the outputs"
            living = sum(output is not None for output in operation.outputs)
            assert options.living == living, f"{operation} counts {options.living} outputs, and has {living}"
    if value.pinned:
        assert value.payload is not EVICTED, f"{who} is pinned and evicted"


def _check_users(storages: list[Storage], operations: list[Operation]) -> None:
    users: dict[Value, set[Operation]] = {}
    for operation in operations:
        for argument in operation.arguments:
            users.setdefault(argument, set()).add(operation)
    for storage in storages:
        for value in storage.values:
            who = f"a value of storage {storage.number}"
            listed = {user for user in value.each_user() if user.runs}  # others run right now
            true = users.get(value, set())
            assert listed == true, f"{who} lists {listed} as its users, and not {true}"
    known = {value for storage in storages for value in storage.values}
    for operation in operations:
        for argument in operation.arguments:
            assert argument in known, f"{operation} takes a value that was forgotten"


def _check_operations(engine: Engine, operations: list[Operation], *, idle: bool) -> None:
    for operation in operations:
        assert _lives(operation), f"{operation} is dead and has outputs"
        assert operation.c0 >= 0, f"{operation} costs {operation.c0} s"
    if idle:
        assert not engine.scheduler.in_flight, f"{engine.scheduler.in_flight} count as in flight, but none runs"
        assert not engine.scheduler.executing, f"{engine.scheduler.executing} functions count as running"


def _check_pool(engine: Engine, pool: Pool, storages: list[Storage], *, idle: bool) -> None:
    resident = [storage for storage in storages if storage.resident]
    held = sum(held.size for held in engine.machine.held if held.pool is pool)
    facts = {
        "held": (pool.held, held),
        "sources": (
            pool.sources,
            sum(storage.size for storage in storages if any(value.stays for value in storage.values)),
        ),
        "in sources that move": (
            pool.movable,
            sum(
                storage.size
                for storage in resident
                if moves_source(storage) and not any(value.stays for value in storage.values)
            ),
        ),
        "pinned": (
            pool.pinned,
            sum(storage.size for storage in storages for value in storage.values if value.pinned),
        ),
    }
    if idle:  # else operations that run for the first time have reserved room, and are not yet in the graph
        facts["departing"] = (pool.departing, 0)
        facts["used"] = (pool.used, sum(storage.size for storage in resident) + held)
        facts["fixed"] = (pool.fixed, sum(storage.size for storage in resident if storage.locks))
    for what, (booked, true) in facts.items():
        assert booked == true, f"{pool.device}: {booked} bytes {what} are booked, {true} are true"
    assert pool.peak >= pool.used, f"{pool.device}: {pool.used} bytes used, above the peak of {pool.peak}"
    if idle and pool.adaptive is None:
        assert pool.used <= pool.limit, f"{pool.device}: {pool.used} bytes used of a budget of {pool.limit}"
    candidates = list(pool.candidates)
    assert len(candidates) == len(set(candidates)), f"{pool.device}: a candidate is listed twice"
    slots = {candidate.slot for candidate in candidates}
    assert len(slots) == len(candidates), f"{pool.device}: two candidates share a slot"
    for storage in candidates:
        who = f"candidate {storage.number} of {pool.device}"
        assert storage.pool is pool, f"{who} belongs to {storage.pool.device}"
        assert storage.resident, f"{who} is evicted"


def _check_sets(engine: Engine, storages: list[Storage]) -> None:
    alive, known = set(storages), engine.memory.storages
    for storage in known - alive:
        assert storage.values, f"storage {storage.number} is known, but has no values"
    for storage in storages:
        assert storage in known, f"storage {storage.number} is alive, but not known"
        held = storage.held
        if held is not None and held in engine.machine.held:
            assert held.size == storage.size, f"storage {storage.number} is held with another size"


def _check_tiers(engine: Engine, storages: list[Storage], *, idle: bool) -> None:
    """Tiers count as many bytes as the copies of living values take."""
    if engine.memory.tiers is None:
        assert not any(value.copy for storage in storages for value in storage.values), "a copy without a tier"
        return
    copies = [value.copy for storage in storages for value in storage.values if value.copy is not None]
    for _, store in engine.memory.tiers.all():
        size = sum(copy.nbytes for copy in copies if copy.store is store)
        assert not idle or store.used == size, f"{store.name}: {store.used} bytes are booked, {size} are true"
        assert not idle or not store.reserved, f"{store.name}: {store.reserved} bytes are reserved for nothing"
        assert store.used <= store.limit, f"{store.name}: {store.used} bytes of a limit of {store.limit}"
    if idle:
        for copy in copies:
            assert copy.key is not None, f"{copy} was never written"
            assert not copy.fetching.outputs, f"{copy} counts as being fetched"


def neighbours(storage: Storage) -> set[Storage]:
    """The storages one operation away, evicted or not."""
    near: set[Storage] = set()
    for value in storage.values:
        if value.operation is not None:
            near.update(argument.storage for argument in value.operation.arguments)
        for user in value.each_user():
            near.update(output.storage for output in user.outputs if output is not None)
    near.discard(storage)
    return near


def evicted_components(storages: Iterable[Storage]) -> list[set[Storage]]:
    """The undirected connected components of the evicted storages, from scratch."""
    left = {storage for storage in storages if storage.dropped}
    components = []
    while left:
        stack = [left.pop()]
        component = set(stack)
        while stack:
            for other in neighbours(stack.pop()) & left:
                left.discard(other)
                component.add(other)
                stack.append(other)
        components.append(component)
    return components


def evicted_neighbourhood(storage: Storage, *, descendants: bool = True) -> set[Storage]:
    """The evicted ancestors that bringing `storage` back would need, and the evicted descendants that need it."""

    def parents(one: Storage) -> set[Storage]:
        made_by = [value.operation for value in one.values if value.operation is not None]
        return {argument.storage for operation in made_by for argument in operation.arguments}

    def children(one: Storage) -> set[Storage]:
        users = [user for value in one.values for user in value.each_user()]
        return {output.storage for user in users for output in user.outputs if output is not None}

    neighbourhood: set[Storage] = set()
    for direction in (parents, children) if descendants else (parents,):
        reached: set[Storage] = set()
        frontier = {storage}
        while frontier:
            frontier = {other for one in frontier for other in direction(one) if other.dropped} - reached
            reached |= frontier
        neighbourhood |= reached
    neighbourhood.discard(storage)
    return neighbourhood


def _check_components(neighbourhood: Components, storages: list[Storage]) -> None:
    evicted = [storage for storage in storages if storage.dropped]
    if not neighbourhood.active:
        assert all(storage.nearby is None for storage in evicted), "components are joined before the first question"
        return
    for component in evicted_components(storages):
        roots = {member.nearby.root() if isinstance(member.nearby, Component) else None for member in component}
        numbers = sorted(member.number for member in component)
        assert len(roots) == 1, f"the evicted storages {numbers} are connected, but not one component"
    members: dict[Any, list[Storage]] = {}
    for storage in evicted:
        if isinstance(storage.nearby, Component):
            members.setdefault(storage.nearby.root(), []).append(storage)
    for root, together in members.items():
        numbers = [member.number for member in together]
        assert root.members == len(together), f"the component of {numbers} counts {root.members} members"
        cost = sum(member.cost for member in together)
        assert isclose(root.cost, cost, rel_tol=1e-6, abs_tol=1e-9), f"component {numbers}: {root.cost}, not {cost}"


def _check_closures(neighbourhood: Closure, storages: list[Storage]) -> None:
    for storage in storages:
        if storage.resident and not neighbourhood.tiers:
            cost = sum(other.cost for other in evicted_neighbourhood(storage, descendants=neighbourhood.descendants))
            answer = neighbourhood.cost(storage)
            assert isclose(answer, cost, rel_tol=1e-6, abs_tol=1e-9), (
                f"the evicted neighbourhood of storage {storage.number} costs {cost}, not {answer}"
            )


def _check_needs(neighbourhood: Needs, storages: list[Storage]) -> None:
    evicted = [storage for storage in storages if storage.dropped]
    out = {other: other.size for other in evicted if any(value.referred for value in other.values)}
    assert neighbourhood._missing == out, "what is evicted but referred to is not what counts as missing"
    for pool, size in neighbourhood._missing_bytes.items():
        assert size == sum(other.size for other in out if other.pool is pool), f"{pool} has not {size} bytes missing"
    needed, stack = set(out), list(out)
    while stack:
        for other in stack.pop().neighbours_up():
            if other.dropped and other not in needed:
                needed.add(other)
                stack.append(other)
    lost = [other.number for other in needed - neighbourhood._needs.keys()]
    assert not lost, f"the evicted storages {lost} are needed, but not counted"
    times = Counter(argument for above in neighbourhood._needs.values() for argument in above)
    assert times == Counter(neighbourhood._needed_by), "storages are not counted as often as they are needed"
    assert not any(storage.resident for storage in neighbourhood._needs), "a resident storage counts as evicted"
    for other in neighbourhood.kept:
        assert other.resident, f"storage {other.number} stays because it is wanted, but is evicted"
        assert other in neighbourhood._needed_by, f"storage {other.number} stays, but nothing evicted wants it"


def _close(engine: Engine, a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-6, abs_tol=1e-9 * max(1.0, engine.meter.now))
