"""Requests: what the surface, the arrays and the adapters ask of the engine, each as one function.

All are called without the lock, and leave nothing to be settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from recompute._adapters.adapter import fingerprint, kinds
from recompute._adapters.result_sizes import checked_size
from recompute._engine import destroyed
from recompute._engine.events import Accessed, Added, Detached, Foresaw, Pinned, Unpinned
from recompute._engine.finalizer import HeldReference, Stay, StayReference
from recompute._engine.frames import Frame, HandleOf, Request, running
from recompute._engine.graph import EVICTED, Held, Operation, Options, Value, copy_of, remains_of
from recompute._engine.results import attach, blank, buffer_of
from recompute._engine.states import DROPPED
from recompute._errors import BudgetError

if TYPE_CHECKING:
    from recompute._budget import Limits
    from recompute._engine.engine import Engine


def apply(engine: Engine, operation: Operation, handle: HandleOf) -> list[Any]:
    """Perform a new operation; what refers to its outputs."""
    if engine.watchful:
        if engine.results.fragile:
            destroyed.evict_needed(engine, operation.arguments)
        _note_found(engine, operation.arguments)
    if engine.before is not None:
        try:  # not `with`, which takes as long as all that this tells
            engine.before(operation)
        except BaseException as error:
            if not engine.wall.stops(error):
                raise
    frame = Frame(engine, operation)
    frame.handle = handle
    engine.perform(frame)
    settle(engine)
    return frame.handles


def add_source(engine: Engine, payload: Any, handle: type[Any], *, moves: bool = True, waits: bool = True) -> Any:
    """A value without a recipe, and what refers to it. `moves`: it may lie in a tier. `waits`: see `_enter`."""
    kind = kinds.of(type(payload))
    if kind.readonce:
        raise TypeError(
            f"a {type(payload).__name__} can be read only once, but a value may be read again; make a list of it"
        )
    size = checked_size(kind.nbytes(payload), payload)
    if kind.array is not None:
        payload = kind.array.source(payload)  # read-only, for the functions that take it
    sample = None if kind.remember is None else kind.adapter.sample(payload)
    digest = None if engine.fingerprints is None else fingerprint(payload)
    device = "cpu" if kind.device is None else kind.device(payload)
    if kind.timer is not None and device != "cpu":
        engine.meter.timers.setdefault(device, kind.timer)
    buffer = buffer_of(payload)
    if kind.destroyed is not None:
        engine.results.fragile = engine.watchful = True
        engine.watch()
    made = blank(handle)

    def enter() -> None:
        if held is not None:
            memory.machine.let_go(held)  # it is counted as the source now
        source = engine.results.add_source(payload, size, buffer, device, digest, moves)
        if sample is not None:
            engine.results.samples[source] = sample
        attach(made, engine, source, engine.note)
        if engine.journal.listeners:
            pool = source.storage.pool
            engine.journal.events.append(Added(engine.meter.now, pool.used, source.number, size, device))

    memory = engine.memory
    held = (
        memory.held_as(buffer, size) if buffer and memory.machine.held else None
    )  # a result that was got is a source now
    if held is not None and (held.reference is None or held.reference.is_dead):
        held = None  # it has gone, and its identity is another buffer's
    return made if _enter(engine, device, size if held is None else 0, enter, waits=waits) else None


def adopt(
    engine: Engine, payload: Any, operation: Operation, cost: float, handle: type[Any], *, waits: bool = True
) -> Any:
    """A value that exists already, with the operation that makes it again and what that costs; what refers to it.

    `waits`: see `_enter`.
    """
    made = engine.results.measure(operation, 0, payload)
    refers = blank(handle)

    def enter() -> None:
        engine.meter.bill(cost, False)
        for argument in operation.arguments:
            argument.storage.last_access = engine.meter.now
            argument.add_user(operation)
        engine.results.create(operation, [made], cost)
        attach(refers, engine, operation.outputs[0], engine.note)  # type: ignore[arg-type]  # it was made just now
        engine.journal.operations += 1
        if engine.journal.listeners:
            engine.journal.events.append(engine.results.performed(operation, name, cost, False, ()))

    name = operation.name
    for argument in operation.arguments:
        if argument not in argument.storage.values:
            raise ValueError(f"an argument of {name} is gone")
    _, size, _, device, _, shares = made
    if engine.before is not None:
        with engine.wall:
            engine.before(operation)
    return refers if _enter(engine, device, 0 if shares is not None else size, enter, waits=waits) else None


def _enter(engine: Engine, device: str, size: int, then: Callable[[], None], *, waits: bool) -> bool:
    """Make room, and call `then` under the lock. Not `waits`: False if something has to be evicted for it first."""
    if waits:
        engine.make_room(device, size, then)
        settle(engine)
        return True
    pool = engine.memory.pool(device)
    pool.ask_limit()
    with engine.changes.alone(), engine.changes.begun():
        fits = pool.used + size <= pool.limit
        if fits:
            then()
    engine.settling.settle(blocking=False)
    return fits


def look(engine: Engine, value: Value) -> Any:
    """The payload; EVICTED if it is evicted, or if reads are watched. Never waits."""
    payload = value.payload
    if engine.observed or engine.results.fragile:
        return EVICTED
    value.storage.last_access = engine.meter.now
    return payload


def bring(engine: Engine, value: Value, then: Callable[[Engine, Value], Any]) -> Any:
    """Make `value` resident and call `then` on it under the lock."""
    if engine.options.before_bringing is not None:
        engine.options.before_bringing()
    if engine.watchful:
        if engine.results.fragile:
            destroyed.evict_needed(engine, (value,))
        _note_found(engine, (value,))
    request = Request(engine, value, then)
    engine.perform(request)
    settle(engine)
    return request.result


def _bring_wanted(engine: Engine, value: Value, then: Callable[[Engine, Value], Any]) -> Any:
    """`bring`, because the program said so, and not foresight."""
    if engine.wanted is not None and value.payload is EVICTED:
        with engine.wall:
            engine.wanted(value)
    return bring(engine, value, then)


def _read(engine: Engine, value: Value) -> Any:
    if engine.journal.listeners and not engine.scheduler.mine():
        used = value.storage.pool.used
        engine.journal.events.append(Accessed(engine.meter.now, used, value.number))
    return value.payload


def get(engine: Engine, value: Value) -> Any:
    """The payload, by the slow path: evicted, inside an operation, or watched."""
    if running.frame() is None:
        engine.reads += 1
    payload = _bring_wanted(engine, value, _read)
    if engine.fingerprints is not None:
        engine.fingerprints.check_untouched(value)
    return payload


def evict(engine: Engine, value: Value) -> bool:
    """Drop a value now; False if it cannot be."""
    with engine.changes.alone(), engine.changes.begun():
        storage = value.storage
        evictable = value.payload is not EVICTED and not storage.locks
        if evictable:
            evictable = engine.evict(storage, "request")
    settle(engine)
    return evictable and (storage.pool.tiers is None or not storage.resident)


def pin(engine: Engine, value: Value) -> None:
    def then(engine: Engine, value: Value) -> None:
        engine.references.pin(value)
        if engine.journal.listeners:
            engine.journal.events.append(Pinned(engine.meter.now, value.storage.pool.used, value.number))

    _bring_wanted(engine, value, then)


def unpin(engine: Engine, value: Value) -> None:
    with engine.changes.alone(), engine.changes.begun():
        if value.pinned:
            engine.references.unpin(value)
            if engine.journal.listeners:
                engine.journal.events.append(Unpinned(engine.meter.now, value.storage.pool.used, value.number))
    settle(engine)


def detach(engine: Engine, value: Value, *, moves: bool | None = None) -> None:
    """Forget how a value was made. `moves`: whether a tier may have it; None: unless it is a source."""

    def then(engine: Engine, value: Value) -> None:
        if engine.journal.listeners:
            engine.journal.events.append(Detached(engine.meter.now, value.storage.pool.used, value.number))
        engine.references.detach(value)
        if moves is False and not value.stays:
            engine.references.keep(value)
        elif moves and value.stays:
            engine.references.let_move(value)

    _bring_wanted(engine, value, then)


def written(engine: Engine, value: Value) -> None:
    """The memory of a source is about to be written: a copy in a tier and a digest hold no longer. It is in memory."""
    if engine.fingerprints is not None:
        engine.fingerprints.forget(value)
    tiers = value.storage.pool.tiers
    if tiers is not None:
        with engine.changes.alone(), engine.changes.begun():
            copy = copy_of(value.storage)
            if copy is not None and value.storage.resident:
                tiers.lose(copy)
    settle(engine)


def keep_resident(engine: Engine, value: Value) -> Stay:
    """Bring a value; it stays in memory as long as the returned object lives."""
    stay = Stay()

    def lock(engine: Engine, value: Value) -> None:
        reference = StayReference(stay, engine.note)
        reference.storage = value.storage
        engine.finalizer.stays.add(reference)
        engine.machine.lock(value.storage)

    bring(engine, value, lock)
    return stay


def refer_again(engine: Engine, value: Value, handle: Any) -> None:
    """One more Recomputable of a value."""
    with engine.changes.alone(), engine.changes.begun():
        attach(handle, engine, value, engine.note)


def refer_if_there(engine: Engine, value: Value, handle: type[Any]) -> Any:
    """One more Recomputable of a value that is in memory; None: it is not, and may be forgotten."""
    made = blank(handle)
    with engine.changes.alone(), engine.changes.begun():
        there = value.payload is not EVICTED
        if there:
            attach(made, engine, value, engine.note)
    return made if there else None


def view(engine: Engine, operation: Operation, outline: Any, handle: type[Any]) -> Any:
    """A view of an evicted value, as an evicted value: nothing runs before it is needed. None: nothing was done."""
    (argument,) = operation.arguments
    if engine.fingerprints is not None:
        return None
    made = None
    with engine.changes.alone(), engine.changes.begun():
        if argument.payload is EVICTED:
            value = Value()
            engine.results.number = value.number = engine.results.number + 1
            value.operation, value.storage = operation, argument.storage
            operation.number, operation.outputs, operation.runs = value.number, (value,), 1
            remains_of(value).outline = outline
            argument.storage.add_value(value)
            argument.add_user(operation)
            engine.journal.operations += 1
            made = blank(handle)
            attach(made, engine, value, engine.note)
            if engine.journal.listeners:
                event = engine.results.performed(operation, "view", 0.0, False, ())
                engine.journal.events.append(event)
    if made is not None and engine.before is not None:  # not before it is clear that nothing runs
        with engine.wall:
            engine.before(operation)
    settle(engine)
    return made


def overwrite(engine: Engine, handle: Any, by: Any) -> None:
    """Let `handle` refer to what `by` refers to, an output that was written over the memory of what it referred to.

    Should the old value be needed again, it is made again, elsewhere.
    """
    with engine.changes.alone(), engine.changes.begun():
        value = handle._node
        operation = value.operation
        assert operation is not None, "a source that is written over cannot be made again"
        reference = value.reference_of(handle)
        handle._node = by._node
        by._node.refer(reference)  # before the other forgets it: an interrupt must not lose it
        value.forget_reference(reference)
        engine.references.lose_copy(value)
        engine.finalizer.garbage += [value.payload, value.remains]
        value.payload = EVICTED
        value.remains = None
        own = engine.results.new_storage(value.storage)
        engine.results.move(value, operation, own)
        engine.machine.move(own, DROPPED, "written over")
        if value.references is None:
            engine.references.released(value)
    settle(engine)


def exchange(engine: Engine, one: Any, other: Any) -> None:
    """Let two Recomputables refer to what the other one did."""
    with engine.changes.alone(), engine.changes.begun():
        _exchange(one, other)


def _exchange(one: Any, other: Any) -> None:
    first, second = one._node, other._node
    if first is second:
        return
    mine, others = first.reference_of(one), second.reference_of(other)
    one._node, other._node = second, first
    first.refer(others)  # before the others forget them: an interrupt must not lose any
    second.refer(mine)
    first.forget_reference(mine)
    second.forget_reference(others)
    first.outlined = second.outlined = first.outlined or second.outlined


def set_limits(engine: Engine, limits: Limits) -> None:
    """Set another budget; raises BudgetError, and changes nothing, if it is too small."""
    memory = engine.memory
    before = memory.limits
    try:
        with engine.changes.alone(), engine.changes.begun():
            engine.set_limits(limits)
        for device in list(memory.pools):
            try:
                engine.make_room(device, 0, None)
            except BudgetError as error:
                raise BudgetError(f"the new budget is too small: {error}") from None
    except BaseException:
        with engine.changes.alone(), engine.changes.begun():
            engine.set_limits(before)
        raise
    finally:
        settle(engine)


def release_memory(engine: Engine, wanted: int | None, device: str) -> int:
    """Evict until `wanted` bytes are free that were not before, or all that can be (None); the bytes freed."""
    memory = engine.memory
    with engine.changes.alone(), engine.changes.begun():
        pool = memory.pools.get(device)
        before = 0 if pool is None else pool.used
    if pool is None:
        return 0
    used = before + 1 if wanted is None and memory.policy.name != "none" else 0
    while pool.used < used:  # what went may have kept something else
        with engine.changes.alone(), engine.changes.begun():
            used = pool.used
            for storage in list(pool.candidates):
                if storage.resident and not storage.locks:
                    engine.evict(storage, "request")
        settle(engine)
    settle(engine)
    evicted, most = 0, 2 * len(pool.candidates)
    while wanted is not None and before - pool.used < wanted:
        victims = engine.next_victims(pool, evicted <= most)
        evicted += len(victims)
        if not victims:
            break
        with engine.changes.alone(), engine.changes.begun():
            for victim in victims:
                if victim.resident and not victim.locks:
                    engine.evict(victim, "request")
        settle(engine)
    return before - pool.used


def needed(engine: Engine, value: Value) -> bool:
    """Whether an operation takes `value` that runs now, or whose output can still be needed."""
    settle(engine)
    return value.users is not None or engine.references.in_flight(value.storage)


def hold(engine: Engine, buffer: Any, device: str, size: int) -> Held:
    """Count the memory of a buffer that is no value of the cache as in use until the buffer goes."""
    memory = engine.memory
    reference = HeldReference(buffer, engine.note)
    pool = memory.pool(device)
    pool.ask_limit()
    with engine.changes.alone(), engine.changes.begun():
        engine.settling.drain()
        engine.results.number = number = engine.results.number + 1
        held = reference.held = Held(pool, size, number, id(buffer), alone=True)
        held.reference = reference
        memory.machine.hold(held)
        if engine.journal.listeners:
            engine.journal.events.append(Added(engine.meter.now, pool.used, number, size, device))
    if pool.used > pool.limit:
        engine.make_room(device, 0)
    settle(engine)
    return held


def let_go(engine: Engine, held: Held) -> None:
    """Stop counting a held buffer."""
    with engine.changes.alone(), engine.changes.begun():
        engine.settling.gone(held)
    settle(engine)


def room(engine: Engine, device: str) -> float:
    """Bytes that can be taken without an eviction; none where the budget is a function."""
    pool = engine.memory.pool(device)
    return 0.0 if pool.adaptive is not None else pool.limit - pool.used


def forget_outline(value: Value) -> None:
    """What an adapter wanted to know of a value while it is evicted holds no longer."""
    if value.remains is not None:
        value.remains.outline = None


def dependents(engine: Engine, source: Value, most: float) -> list[Value] | None:
    """Values that the program refers to and that are made from `source`; None: more than `most` values to see."""
    alive: dict[Value, None] = {}
    seen = {source}
    stack = [source]
    settle(engine)
    with engine.changes.alone(), engine.changes.begun():
        while stack and len(seen) <= most:
            for user in stack.pop().each_user():
                for output in user.outputs:
                    if output is not None and output not in seen:
                        seen.add(output)
                        if output.referred:
                            alive[output] = None
                        else:
                            stack.append(output)
    return list(alive) if len(seen) <= most else None


def released_sources(engine: Engine) -> deque[Value]:
    """Sources that only operations need, as their last outside reference goes."""
    references = engine.references
    if references.released_sources is None:
        references.released_sources = deque()
    return references.released_sources


def set_room(value: Value, sizes: Sequence[tuple[str, int]]) -> None:
    """(device, bytes) that a repeated run of the operation which made a value needs."""
    operation = value.operation
    if operation is not None:
        options = operation.options = operation.options or Options()
        options.room = sizes


def foresee(engine: Engine, state: str, why: str) -> None:
    """Tell listeners of the rounds of a program."""
    if engine.journal.listeners:
        used = sum([pool.used for pool in list(engine.memory.pools.values())])
        engine.journal.events.append(Foresaw(engine.meter.now, used, state, why))
    settle(engine)


def settle(engine: Engine) -> None:
    """Process dropped references, garbage and events, if there are any."""
    finalizer = engine.finalizer
    waiting = finalizer.queue or finalizer.garbage or finalizer.departures or engine.memory.neighbourhood.unwanted
    if waiting or engine.journal.events or finalizer.interrupts:
        began = engine.meter.turn_begins()
        engine.settling.settle()
        engine.meter.turn_ends(began, 0.0)


def _note_found(engine: Engine, values: Sequence[Value]) -> None:
    """Inside an operation's function: what it asks for, and did not make itself, is a dependency. A fetch has none."""
    outer = running.frame()
    if outer is not None and outer.engine is engine and outer.copy is None:
        if outer.found is None:
            outer.found = []
        outer.found += [value for value in values if value.storage.number <= outer.born]
