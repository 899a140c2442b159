"""The engine's public interface, for authors of adapters; besides it, they need only the surface.

A value is known by a handle, which is a `Recomputable` (or of a subclass with slots of its own), and inside that by its
`node`, a `Value`: it knows the `Operation` that makes it, and the `Storage` that it lives on. Read them, but do not
write to them. All functions here are called without any lock, may be interrupted anywhere, and leave the cache in a
valid state.

    perform, source, adopt, view          make values: run an operation, enter an existing value, view an evicted one
    bring, keep_resident, detach          bring them into memory: now, for a block, permanently
    refer_if_there                        another handle of a value that is in memory
    look                                  a value if it is in memory
    overwrite, exchange, written          let handles refer to something else; sources change
    needed, dependents, history           what the graph knows
    released_sources, forget_outline      what an adapter may do about what it made
    outline_of                            what an adapter wanted to know of an evicted value
    running, clock_of, spend_elsewhere    the time that counts as the cost of the running function
    set_room, flush, paste                sizes that become known later; traces, and what a report says to paste
    be_lenient                            admit what cannot fit: at the end, when values are given back
    leave_small                           never evict smaller values
    cure_thrashing                        what the warning of thrashing says
    lap, counts, pools                    the peak of a part of a run; what it did; what is in memory now
    hold, let_go, room                    count memory that belongs to no value, and see whether it fits
    count_operation                       count an operation that ran without the cache
    outlive                               keep memory that would be freed with the references to it
    tell, listen, advise, Advice, Pool    know of operations before they run, and say what is not needed for a while:
                                          an error there is said, ends the advice, and stops nobody
    foresee                               tell listeners what is known
    resident, referred, fullest, load, moved, spent      what there is, and what it took
    identity, constant, Outputs           what a function says about itself: see `perform`
    bound                                 a function with what its names are bound to now
    handle_like                           the class of handles of results, by that of the arguments
    is_array                              whether an adapter for arrays serves a value
    is_interrupt                          whether an error is from the handler of a signal: let it pass
    Table, List, seconds, warn, outside   for people: tables, warnings and what they point to
    Generators                            how the states of generators of random numbers are saved and set again
    Tier, Store, Link, lie_above          a tier of your own for evicted values
    end_ahead                             end the thread that moves values ahead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from recompute._adapters.adapter import kinds
from recompute._adapters.generators import Generators
from recompute._background import BackgroundThread
from recompute._budget import bytes_or_share, format_bytes, parse_budget
from recompute._engine import requests, wall
from recompute._engine.advice import Advice
from recompute._engine.arguments import Container, Outputs, pack
from recompute._engine.bindings import bound
from recompute._engine.finalizer import Held
from recompute._engine.frames import Frame, HandleOf
from recompute._engine.frames import running as _running
from recompute._engine.graph import EVICTED, Operation, Options, ReleaseMode, Storage, Value
from recompute._engine.options import EngineOptions
from recompute._engine.pool import Pool
from recompute._engine.sizes import constant, identity
from recompute._engine.stats import TIER_COLUMNS, PoolStats, Stats
from recompute._engine.story import Step, Steps
from recompute._handle import common_engine
from recompute._interrupts import is_interrupt
from recompute._names import name_of
from recompute._recomputable import Recomputable, handle_like
from recompute._tables import List, Table, seconds
from recompute._tiers.link import Link
from recompute._tiers.tier import Store, Tier
from recompute._tiers.tiers import Tiers
from recompute._warned import outside, warn

if TYPE_CHECKING:
    from collections import deque

    from recompute._cache import Cache
    from recompute._engine.events import Listener

H = TypeVar("H", bound=Recomputable[Any])

Place = FrameType | tuple[CodeType, int]
"""Where an operation was created, for error messages: a frame, or its code and the instruction in it."""


def perform(
    cache: Cache,
    function: Callable[..., Any],
    positional: Sequence[Any],
    arguments: Sequence[Value],
    place: Place,
    *,
    keywords: dict[str, Any] | None = None,
    nout: int = 1,
    nbytes: Sequence[int] | None = None,
    handle: HandleOf = Recomputable,
) -> list[Any]:
    """Run an operation, and remember it; the handles of its outputs.

    Parameters
    ----------
    function
        Called with the payloads, without the lock. It may have `size_key()`, a hashable that decides the sizes of
        its results together with the signatures of its arguments (alone, if it has an attribute `sizes_alone` that is
        true), and `expect(device)`, which gives (device, bytes) of the results before the first run. Neither is asked
        under the lock. An attribute `keeps_states` that is true says that a repeated run draws the same random numbers.
    positional, keywords
        The arguments of the function, with nodes in place of values.
    arguments
        All nodes among them. All belong to `cache`.
    nout
        How many outputs there are; 0: the first run decides, by returning one value or an `Outputs` of several.
    nbytes
        The size of each output, if it is known better than the adapter knows it.
    handle
        The class of the handles, or a function from a payload to that. Slots beyond those of Recomputable are unset.

    Raises what the function raises, and BudgetError.
    """
    code, instruction = place if isinstance(place, tuple) else (place.f_code, place.f_lasti)
    options = None
    if nout != 1 or nbytes is not None or keywords:
        options = Options(keywords, nout, None if nbytes is None else tuple(nbytes))
    nodes = tuple(arguments)
    given = nodes if positional is arguments else tuple(positional)
    operation = Operation(function, given, nodes, code, instruction, options)
    return requests.apply(cache.engine, operation, handle)


@overload
def source(cache: Cache, payload: Any, handle: type[H], *, moves: bool = True, waits: Literal[True] = True) -> H: ...
@overload
def source(cache: Cache, payload: Any, handle: type[H], *, moves: bool = True, waits: bool) -> H | None: ...
def source(cache: Cache, payload: Any, handle: type[H], *, moves: bool = True, waits: bool = True) -> H | None:
    """A value without a recipe, as `pure` makes it, with a handle of some class.

    `moves`: it may move to a tier. Not if it changes without a call of `written`: a copy in a tier would not change.
    `waits`: as for `adopt`.
    """
    return requests.add_source(cache.engine, payload, handle, moves, waits)  # type: ignore[no-any-return]  # as asked


def adopt(
    cache: Cache,
    payload: Any,
    function: Callable[..., Any],
    positional: Sequence[Any],
    arguments: Sequence[Value],
    place: Place,
    *,
    cost: float,
    handle: type[H],
    waits: bool = True,
) -> H | None:
    """A value that exists already, with its recipe and the seconds that the recipe takes. Nothing runs.

    `waits`: evict for it if need be. Otherwise nothing that takes time happens here, as an event loop requires, and
    the result is None if there is no room. Raises BudgetError if there can be none.
    """
    code, instruction = place if isinstance(place, tuple) else (place.f_code, place.f_lasti)
    operation = Operation(function, tuple(positional), tuple(arguments), code, instruction)
    return requests.adopt(cache.engine, payload, operation, cost, handle, waits)  # type: ignore[no-any-return]  # as asked


def look(handle: Recomputable[Any]) -> Any:
    """The value if it is in memory, at once, and without an event; otherwise EVICTED."""
    return requests.look(handle.engine, handle.node)


def view(of: H, function: Callable[[Any], Any], outline: Any, place: FrameType) -> H | None:
    """A view of an evicted value, as an evicted value: nothing runs until it is needed. None: the value is not evicted.

    `outline` is what its adapter's `evicted` would say of it.
    """
    operation = Operation(function, (of.node,), (of.node,), place.f_code, place.f_lasti)
    return requests.view(of.engine, operation, outline, type(of))  # type: ignore[no-any-return]  # of that class


def bring(cache: Cache, node: Value) -> None:
    """Bring a value into memory now; recompute it if needed. It may be evicted again at any time."""
    requests.bring(cache.engine, node, lambda engine, value: None)


@contextmanager
def keep_resident(cache: Cache, node: Value) -> Iterator[None]:
    """Keep a value in memory inside the block."""
    stay = requests.keep_resident(cache.engine, node)
    try:
        yield
    finally:
        del stay


def evict(cache: Cache, node: Value) -> bool:
    """`Recomputable.evict` of a value that may have no handle."""
    return requests.evict(cache.engine, node)


def detach(cache: Cache, node: Value, *, moves: bool | None = None) -> None:
    """`Recomputable.detach` of a value that may have no handle. `moves`: as for a `source`; None: as it was.

    What an operation made may move from then on.
    """
    requests.detach(cache.engine, node, moves)


def written(cache: Cache, node: Value) -> None:
    """Call this before writing to the memory of a source that a running operation takes.

    A copy in a tier is out of date from then on. Never write to values that an operation made.
    """
    requests.written(cache.engine, node)


def overwrite(handle: Recomputable[Any], by: Recomputable[Any]) -> None:
    """Let `handle` refer to the output of `by`, which took over the memory of the value that `handle` referred to.

    The old value is no longer in memory: if it is needed, it is recomputed elsewhere.
    """
    requests.overwrite(handle.engine, handle, by)


def exchange(one: Recomputable[Any], other: Recomputable[Any]) -> None:
    """Swap what two handles refer to."""
    requests.exchange(one.engine, one, other)


def refer_if_there(cache: Cache, node: Value, handle: type[H]) -> H | None:
    """Another handle of a value that is in memory; None: it is not, and may be forgotten."""
    return requests.refer_if_there(cache.engine, node, handle)  # type: ignore[no-any-return]  # of that class


def hold(cache: Cache, buffer: Any, device: str, nbytes: int) -> Held:
    """Only count memory as in use, until `buffer` is freed or `let_go`: it is no value, and cannot be evicted.

    For listeners it is a source.
    """
    return requests.hold(cache.engine, buffer, device, nbytes)


def let_go(cache: Cache, held: Held) -> None:
    """Stop counting memory that was held."""
    requests.let_go(cache.engine, held)


def room(cache: Cache, device: str) -> float:
    """Bytes of a device that can be taken without an eviction; none where the budget is a function."""
    return requests.room(cache.engine, device)


def dependents(cache: Cache, node: Value, most: float = inf) -> list[Value] | None:
    """The values that the program refers to and that are made from `node`; None: more than `most` to search."""
    return requests.dependents(cache.engine, node, most)


def needed(cache: Cache, node: Value) -> bool:
    """Whether `node` is an argument of a running operation, or of one whose results may still be needed."""
    return requests.needed(cache.engine, node)


def forget_outline(node: Value) -> None:
    """Do not call `Adapter.restored` when an evicted value comes back: what `evicted` returned is no longer valid."""
    requests.forget_outline(node)


def history(cache: Cache) -> int:
    """How many values are remembered that only operations refer to."""
    return cache.engine.references.history


def history_exceeded(cache: Cache) -> int:
    """The same if it is ten times as many as ever before: then the program should be warned. Otherwise 0."""
    references = cache.engine.references
    if references.history <= references.history_limit:
        return 0
    references.history_limit = 10 * references.history
    return references.history


def released_sources(cache: Cache) -> deque[Value]:
    """Sources that only operations still refer to: each is added when its last handle is gone."""
    return requests.released_sources(cache.engine)


def count_coercion(handle: Recomputable[Any]) -> None:
    """Count that a wrapped value was turned into a plain one."""
    handle.engine.journal.coercions += 1


def outline_of(node: Value) -> Any:
    """What its adapter keeps of an evicted value; None if it is not evicted, or nothing was kept."""
    return None if node.remains is None else node.remains.outline


def running() -> Frame | None:
    """The operation whose function runs here, the innermost: `engine` is that of its cache."""
    return _running.frame()


def clock_of(frame: Frame) -> Callable[[], float]:
    """Seconds by the clock that `frame` is timed with. What is added to `frame.elsewhere` is not its cost."""
    return frame.engine.meter.clock


def spend_elsewhere(seconds: float) -> None:
    """Seconds that the function running here, if any, has spent on something that is not its cost: compilation."""
    frame = running()
    if frame is not None:
        frame.elsewhere += seconds


def set_room(node: Value, sizes: Sequence[tuple[str, int]]) -> None:
    """(device, bytes) that a repeated run of the operation which made `node` needs."""
    requests.set_room(node, sizes)


def paste(cache: Cache, line: str, *, keeps: bool = True) -> None:
    """Let the trace of a cache, if there is one, say how a program gets a budget: `'rt.budget("{budget}")'`.

    A report (`rc.report`, `recompute report`) shows that line, with a budget filled in.
    `keeps`: whether values that are released can stay; not if their memory goes with the program's references, so that
    a replay evicts them, too.
    """
    for listener, _ in tuple(cache.engine.journal.listeners):
        add_settings = getattr(listener, "add_settings", None)
        if add_settings is not None:
            add_settings(paste=line, keeps=keeps)


def be_lenient(cache: Cache) -> None:
    """From now on admit what cannot fit, too, as an overshoot: for values that have to be given back."""
    cache.engine.memory.lenient = True


def leave_small(cache: Cache, nbytes: int) -> None:
    """Never evict values of fewer bytes to make room. For a cache in which nothing was made yet."""
    cache.engine.memory.smallest = nbytes


def cure_thrashing(cache: Cache, cure: str, package: str) -> None:
    """What the warning of thrashing advises, and the package whose calls are not the program's own."""
    cache.engine.thrashing.cure, cache.engine.thrashing.inside = cure, package


def lap(cache: Cache) -> dict[str, int]:
    """The most bytes in use on each device since the last call."""
    engine = cache.engine
    with engine.changes.alone(), engine.changes.begun(python=True):
        return {device: pool.lap() for device, pool in engine.memory.pools.items()}


def pools(cache: Cache) -> dict[str, Pool]:
    """The memory of each device that has been used."""
    return dict(cache.engine.memory.pools)


def count_operation(cache: Cache, cost: float = 0.0) -> None:
    """Count an operation that an adapter has run itself, because there was nothing for the cache to do.

    `cost`: the seconds that it took, by which the values in memory have become staler.
    """
    engine = cache.engine
    engine.journal.operations += 1
    if cost:
        with engine.changes.alone(), engine.changes.begun(python=True):
            engine.meter.bill(cost, False)


def counts(cache: Cache) -> tuple[int, int, int]:
    """(operations, evictions, operations that ran again) so far: as in `stats`, but quicker."""
    journal = cache.engine.journal
    return journal.operations, journal.evictions, journal.rematerializations


def tell(
    cache: Cache, before: Callable[[Operation], None] | None, wanted: Callable[[Value], None] | None = None
) -> None:
    """Call `before(operation)` before each first run, and `wanted(value)` before an evicted value is brought back.

    They are called without the lock. None: call nothing.
    """
    cache.engine.before = before
    cache.engine.wanted = wanted


def listen(cache: Cache, listener: Listener) -> Callable[[], None]:
    """`Cache.subscribe` for what advises: an error of the listener ends the advice."""
    return cache.engine.subscribe(listener, advises=True)


def advise(cache: Cache, advice: Advice | None) -> None:
    """Follow this advice from now on: what to evict, and what to keep without references to it; None: no advice.

    Values kept only by older advice are dropped.
    """
    wall.advise(cache.engine, advice)


def resident(cache: Cache) -> list[Storage]:
    """The storages that are in memory, the oldest first. O(n log n)."""
    engine = cache.engine
    with engine.changes.alone(), engine.changes.begun(python=True):
        found = [storage for storage in engine.memory.storages if storage.resident]
    return sorted(found, key=lambda storage: storage.number)


def referred(cache: Cache) -> list[Value]:
    """The values in memory that have outside references, the oldest first. O(n log n)."""
    return [value for storage in resident(cache) for value in storage.values if value.referred]


def fullest(cache: Cache) -> Pool | None:
    """Of the devices with a budget, the one with most bytes in use."""
    pools = [pool for pool in list(cache.engine.memory.pools.values()) if pool.limit < inf]
    return max(pools, key=lambda pool: pool.used, default=None)


def is_array(value: Any) -> bool:
    """Whether an adapter for arrays serves the value."""
    return kinds[type(value)].array is not None


def outlive(value: Value) -> bool:
    """Keep the memory of a value when nothing refers to it any more; False if it is not there, or cannot stay."""
    payload = value.payload
    if payload is EVICTED:
        return False
    kind = kinds[type(payload)]
    return kind.outlive is None or kind.outlive(payload)


def wanted(cache: Cache, storage: Storage) -> bool:
    """Whether something that is evicted, and needed, is made from it. With the default policy."""
    return cache.engine.memory.neighbourhood.wanted(storage)


def load(cache: Cache) -> tuple[int, int]:
    """(bytes that are evicted but referred to, bytes in use), on all devices. The former: with the default policy."""
    memory = cache.engine.memory
    return memory.neighbourhood.missing, sum([pool.used for pool in list(memory.pools.values())])


def moved(cache: Cache) -> int:
    """Bytes of the copies in tiers."""
    engine = cache.engine
    with engine.changes.alone(), engine.changes.begun(python=True):
        return 0 if engine.memory.tiers is None else sum([store.used for _, store in engine.memory.tiers.all()])


def foresee(cache: Cache, state: str, why: str) -> None:
    """Tell listeners the state of planning for a program that repeats."""
    requests.foresee(cache.engine, state, why)


def spent(cache: Cache) -> tuple[float, float]:
    """Seconds of all runs, and of the repeated ones among them; both with those of moving bytes."""
    meter = cache.engine.meter
    return meter.now + meter.moving_time, meter.remat_time + meter.moving_time


def settle(cache: Cache) -> bool:
    """See to references that have gone, and to whatever else is left to do. O(these).

    False: another thread is just telling listeners of an event.
    """
    cache.engine.tidy()
    return cache.engine.journal.is_told()


def lie_above(cache: Cache, tiers: Sequence[Tier]) -> None:
    """Let a cache in which nothing was made yet move what it evicts to these tiers. Raises OSError."""
    cache.engine.memory.lie_above(Tiers(tiers))


def end_ahead(cache: Cache) -> None:
    """End the thread that moves values before their room is needed (`Tier.ahead`): the cache is about to be closed."""
    if cache.engine.moving.ahead is not None:
        cache.engine.moving.ahead.end()


def flush(cache: Cache) -> None:
    """The trace of a cache, if it writes one, is a complete file from here on."""
    cache.flush()


__all__ = [
    "EVICTED",
    "TIER_COLUMNS",
    "Advice",
    "BackgroundThread",
    "Container",
    "EngineOptions",
    "Frame",
    "Generators",
    "HandleOf",
    "Link",
    "List",
    "Operation",
    "Outputs",
    "Pool",
    "PoolStats",
    "ReleaseMode",
    "Stats",
    "Step",
    "Steps",
    "Storage",
    "Store",
    "Table",
    "Tier",
    "Value",
    "adopt",
    "advise",
    "be_lenient",
    "bound",
    "bring",
    "bytes_or_share",
    "clock_of",
    "common_engine",
    "constant",
    "count_coercion",
    "counts",
    "cure_thrashing",
    "dependents",
    "detach",
    "end_ahead",
    "evict",
    "exchange",
    "flush",
    "foresee",
    "forget_outline",
    "format_bytes",
    "fullest",
    "handle_like",
    "history",
    "history_exceeded",
    "identity",
    "is_array",
    "is_interrupt",
    "keep_resident",
    "lap",
    "leave_small",
    "lie_above",
    "listen",
    "load",
    "look",
    "moved",
    "name_of",
    "needed",
    "outline_of",
    "outlive",
    "outside",
    "overwrite",
    "pack",
    "parse_budget",
    "paste",
    "perform",
    "pools",
    "refer_if_there",
    "referred",
    "released_sources",
    "resident",
    "running",
    "seconds",
    "set_room",
    "settle",
    "source",
    "spend_elsewhere",
    "spent",
    "tell",
    "view",
    "wanted",
    "warn",
    "written",
]
