"""What must always be true of a cache, checked from scratch: slow, simple, and blind to how the engine does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import isclose
from typing import Any

from recompute._cache import Cache
from recompute._engine.graph import EVICTED, Operation, Storage, Value
from recompute._engine.memory import Pool
from recompute._policy.needed import Needs
from recompute._policy.neighbourhoods import Closure, Components


def check_invariants(cache: Cache, roots: Iterable[Any] = ()) -> None:
    """Raise AssertionError, and say what is wrong, if the books of `cache` do not agree with what it holds.

    `roots` are all the Recomputables of the cache that are alive: what only they keep alive is found through them.
    May be called whenever the calling thread is not inside the cache. O(everything alive, squared in small things).
    """
    values = [root._value for root in roots]
    cache.stats()  # sees to references that went
    with cache._lock:
        storages = _alive(cache, values)
        operations = _operations(storages)
        idle = not cache._executing and not cache._blocked
        for storage in storages:
            _check_storage(cache, storage, idle)
        for value in (value for storage in storages for value in storage.values):
            _check_value(value)
        _check_uses(storages, operations)
        _check_operations(cache, operations, idle)
        for pool in cache._pools.values():
            _check_pool(cache, pool, [each for each in storages if each.pool is pool], operations, idle)
        _check_sets(cache, storages)
        neighbourhood = cache._neighbourhood
        if isinstance(neighbourhood, Components):
            _check_components(neighbourhood, storages)
        elif isinstance(neighbourhood, Closure):
            _check_closures(neighbourhood, storages)
        elif isinstance(neighbourhood, Needs):
            _check_needs(neighbourhood, storages)


def _alive(cache: Cache, values: list[Value]) -> list[Storage]:
    """Every storage that the roots and the candidates lead to, up and down."""
    stack = [value.storage for value in values]
    for pool in cache._pools.values():
        stack.extend(pool.candidates)
    found = dict.fromkeys(stack)
    while stack:
        storage = stack.pop()
        near: list[Value | None] = []
        for value in storage.values:
            if value.operation is not None:
                near += value.operation.arguments
                near += value.operation.outputs
            for user in value.users or ():
                near += user.outputs
        for each in near:
            if each is not None and each.storage not in found:
                found[each.storage] = None
                stack.append(each.storage)
    return sorted(found, key=lambda storage: storage.number)


def _lives(operation: Operation) -> bool:
    """Whether one of its outputs can still be needed."""
    return any(output is not None for output in operation.outputs)


def _operations(storages: list[Storage]) -> list[Operation]:
    found: dict[Operation, None] = {}
    for storage in storages:
        for value in storage.values:
            if value.operation is not None:
                found[value.operation] = None
            found.update(dict.fromkeys(user for user in value.users or () if _lives(user)))
    return list(found)


def _check_storage(cache: Cache, storage: Storage, idle: bool) -> None:
    who = f"storage {storage.number}"
    assert storage.values, f"{who} is alive without a value"
    assert storage.size >= 0, f"{who} has a size of {storage.size}"
    assert cache._pools.get(storage.pool.device) is storage.pool, f"{who} is in a pool that the cache does not know"
    present = [value for value in storage.values if value.payload is not EVICTED]
    if storage.resident:
        assert present, f"{who} counts as resident, but none of its values is"
        assert storage.held is None, f"{who} is resident and held outside at once"
        assert storage.component is None, f"{who} is resident and in an evicted component"
    else:
        assert not present, f"{who} is evicted, but {present[0].payload!r} is there"
        assert not storage.locks, f"{who} is evicted and locked {storage.locks} times"
        assert storage.buffer == 0, f"{who} is evicted and remembers its memory"
    reasons = sum((value.operation is None) + value.pinned for value in storage.values)
    if idle:
        assert storage.locks == reasons, f"{who} has {storage.locks} locks for {reasons} pins and sources"
    else:
        assert storage.locks >= reasons, f"{who} has {storage.locks} locks for {reasons} pins and sources"
    made_by = {value.operation for value in storage.values if value.operation is not None}
    cost = sum(operation.cost for operation in made_by)
    assert _close(cache, storage.cost, cost), f"{who} costs {storage.cost}, its operations {cost}"
    candidate = storage in list(storage.pool.candidates)
    if not storage.resident:
        assert not candidate, f"{who} is evicted and a candidate for eviction"
    elif not storage.locks and storage.size:
        assert candidate, f"{who} is resident and unlocked, but no candidate"
    assert (storage.slot != -1) == candidate, f"{who} has slot {storage.slot}, but candidate is {candidate}"


def _check_value(value: Value) -> None:
    storage, operation = value.storage, value.operation
    who = f"a value of storage {storage.number}"
    assert storage.values.count(value) == 1, f"{who} is listed {storage.values.count(value)} times"
    assert value.refs >= 0, f"{who} has {value.refs} references"
    if operation is None:
        assert value.payload is not EVICTED, f"{who} is a source and evicted"
    else:
        assert _lives(operation), f"{who} was made by {operation}, which is dead"
        assert value in operation.outputs, f"{who} is not among the outputs of {operation}"
    if value.pinned:
        assert value.payload is not EVICTED, f"{who} is pinned and evicted"


def _check_uses(storages: list[Storage], operations: list[Operation]) -> None:
    uses = Counter(argument for operation in operations if operation.runs for argument in operation.arguments)
    for storage in storages:
        for value in storage.values:
            who = f"a value of storage {storage.number}"
            assert value.uses == uses[value], f"{who} counts {value.uses} uses, but has {uses[value]}"
            listed = Counter(user for user in value.users or () if _lives(user))
            assert sum(listed.values()) == value.uses, f"{who} has {value.uses} uses and {listed.total()} users"
            for user in listed:
                assert value in user.arguments, f"{who} is used by {user}, which does not take it"
    known = {value for storage in storages for value in storage.values}
    for operation in operations:
        for argument in operation.arguments:
            assert argument in known, f"{operation} takes a value that was forgotten"


def _check_operations(cache: Cache, operations: list[Operation], idle: bool) -> None:
    for operation in operations:
        assert _lives(operation), f"{operation} is dead and has outputs"
        assert operation.cost >= 0, f"{operation} costs {operation.cost} s"
        if idle:
            assert operation.frame is None, f"{operation} counts as in flight, but nobody runs"
    if idle:
        assert not cache._executing, f"{cache._executing} functions count as running"


def _check_pool(cache: Cache, pool: Pool, storages: list[Storage], operations: list[Operation], idle: bool) -> None:
    resident = [storage for storage in storages if storage.resident]
    reserved = sum(
        size
        for operation in operations
        if operation.frame is not None
        for room, size in operation.frame.reserved or ()
        if room is pool
    )
    held = sum(each.size for each in cache._held if each.pool is pool)
    facts = {
        "held": (pool.held, held),
        "sources": (
            pool.sources,
            sum(each.size for each in storages if any(value.operation is None for value in each.values)),
        ),
        "pinned": (pool.pinned, sum(each.size for each in storages for value in each.values if value.pinned)),
    }
    if idle:  # operations that run for the first time have reserved room, and are not yet in the graph
        facts["used"] = (pool.used, sum(each.size for each in resident) + reserved + held)
        facts["fixed"] = (pool.fixed, sum(each.size for each in resident if each.locks) + reserved)
    for what, (booked, true) in facts.items():
        assert booked == true, f"{pool.device}: {booked} bytes {what} are booked, {true} are true"
    assert pool.peak >= pool.used, f"{pool.device}: {pool.used} bytes used, above the peak of {pool.peak}"
    if idle and pool.adaptive is None:
        assert pool.used <= pool.limit, f"{pool.device}: {pool.used} bytes used of a budget of {pool.limit}"
    candidates = list(pool.candidates)
    assert len(candidates) == len(set(candidates)), f"{pool.device}: a candidate is listed twice"
    assert len({each.slot for each in candidates}) == len(candidates), f"{pool.device}: two candidates share a slot"
    for storage in candidates:
        who = f"candidate {storage.number} of {pool.device}"
        assert storage.pool is pool, f"{who} belongs to {storage.pool.device}"
        assert storage.resident, f"{who} is evicted"


def _check_sets(cache: Cache, storages: list[Storage]) -> None:
    alive = set(storages)
    for what, some in (("banished", cache._banishable), ("evicted when unlocked", cache._late)):
        for storage in some:
            assert storage in alive, f"storage {storage.number} is dead and still to be {what}"
    for storage in storages:
        if storage.held is not None and storage.held in cache._held:
            assert storage.held.size == storage.size, f"storage {storage.number} is held with another size"


def neighbours(storage: Storage) -> set[Storage]:
    """The storages one operation away, evicted or not."""
    near: set[Storage] = set()
    for value in storage.values:
        if value.operation is not None:
            near.update(argument.storage for argument in value.operation.arguments)
        for user in value.users or ():
            near.update(output.storage for output in user.outputs if output is not None)
    near.discard(storage)
    return near


def evicted_components(storages: Iterable[Storage]) -> list[set[Storage]]:
    """The undirected connected components of the evicted storages, from scratch."""
    left = {storage for storage in storages if not storage.resident}
    components = []
    while left:
        stack = [left.pop()]
        component = set(stack)
        while stack:
            for each in neighbours(stack.pop()) & left:
                left.discard(each)
                component.add(each)
                stack.append(each)
        components.append(component)
    return components


def evicted_neighbourhood(storage: Storage, descendants: bool = True) -> set[Storage]:
    """The evicted ancestors that bringing `storage` back would need, and the evicted descendants that need it."""

    def parents(one: Storage) -> set[Storage]:
        made_by = [value.operation for value in one.values if value.operation is not None]
        return {argument.storage for operation in made_by for argument in operation.arguments}

    def children(one: Storage) -> set[Storage]:
        users = [user for value in one.values for user in value.users or ()]
        return {output.storage for user in users for output in user.outputs if output is not None}

    found: set[Storage] = set()
    for direction in (parents, children) if descendants else (parents,):
        reached: set[Storage] = set()
        rim = {storage}
        while rim:
            rim = {each for one in rim for each in direction(one) if not each.resident} - reached
            reached |= rim
        found |= reached
    found.discard(storage)
    return found


def _check_components(neighbourhood: Components, storages: list[Storage]) -> None:
    evicted = [storage for storage in storages if not storage.resident]
    if not neighbourhood.asked:
        assert all(each.component is None for each in evicted), "components are joined before the first question"
        return
    for component in evicted_components(storages):
        roots = {None if each.component is None else each.component.root() for each in component}
        numbers = sorted(each.number for each in component)
        assert len(roots) == 1, f"the evicted storages {numbers} are connected, but not one component"
    members: dict[Any, list[Storage]] = {}
    for storage in evicted:
        if storage.component is not None:
            members.setdefault(storage.component.root(), []).append(storage)
    for root, together in members.items():
        numbers = [each.number for each in together]
        assert root.members == len(together), f"the component of {numbers} counts {root.members} members"
        cost = sum(each.cost for each in together)
        assert isclose(root.cost, cost, rel_tol=1e-6, abs_tol=1e-9), f"component {numbers}: {root.cost}, not {cost}"


def _check_closures(neighbourhood: Closure, storages: list[Storage]) -> None:
    for storage in storages:
        if storage.resident:
            cost = sum(each.cost for each in evicted_neighbourhood(storage, neighbourhood.descendants))
            answer = neighbourhood.cost(storage)
            assert isclose(answer, cost, rel_tol=1e-6, abs_tol=1e-9), (
                f"the evicted neighbourhood of storage {storage.number} costs {cost}, not {answer}"
            )


def _check_needs(neighbourhood: Needs, storages: list[Storage]) -> None:
    evicted = [storage for storage in storages if not storage.resident]
    out = {each: each.size for each in evicted if any(value.refs for value in each.values)}
    assert neighbourhood._out == out, "what is evicted but referred to is not what is counted as out"
    for pool, size in neighbourhood._bytes_out.items():
        assert size == sum(each.size for each in out if each.pool is pool), f"{pool} has not {size} bytes out"
    needed, stack = set(out), list(out)
    while stack:
        for each in stack.pop().neighbours_up():
            if not each.resident and each not in needed:
                needed.add(each)
                stack.append(each)
    lost = [each.number for each in needed - neighbourhood._counted.keys()]
    assert not lost, f"the evicted storages {lost} are needed, but not counted"
    times = Counter(argument for above in neighbourhood._counted.values() for argument in above)
    assert times == Counter(neighbourhood._needing), "storages are not counted as often as they are needed"
    assert not any(each.resident for each in neighbourhood._counted), "a resident storage counts as evicted"


def _close(cache: Cache, a: float, b: float) -> bool:
    return isclose(a, b, rel_tol=1e-6, abs_tol=1e-9 * max(1.0, cache.now))
