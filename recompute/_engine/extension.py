"""`cache.extend`: what adapters, the array wrapper, foresight and the simulator ask of the engine of a cache.

Two protocols: `Values` makes, holds and changes values, `Watch` knows what happens. The third, what is set when a cache
is made, is `Settings` (options.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, overload

from recompute._engine import requests
from recompute._engine.advice import Advice, advise
from recompute._engine.events import Listener
from recompute._engine.frames import HandleOf
from recompute._engine.graph import Held, Operation, Options, Storage, Value
from recompute._engine.pool import Pool
from recompute._tiers.tier import Tier
from recompute._tiers.tiers import Tiers

if TYPE_CHECKING:
    from recompute._engine.engine import Engine


class Handle(Protocol):
    """What refers to a value: a Recomputable."""

    _node: Value


H = TypeVar("H", bound=Handle)

Place = FrameType | tuple[CodeType, int]
"""Where an operation was created, for error messages: a frame, or its code and the instruction in it."""


class Counts(NamedTuple):
    """What a cache has done so far: as in `stats`, but quicker."""

    operations: int
    evictions: int
    rematerializations: int
    """Operations that ran again."""
    seconds: float
    """Of all runs, and of moving bytes."""
    repeated_seconds: float
    """Of the repeated ones among them, and of moving bytes."""


class Load(NamedTuple):
    """Bytes, on all devices together."""

    missing: int
    """Evicted but referred to. With the default policy."""
    used: int
    moved: int
    """Copies in tiers."""


class Values:
    """Runs operations, and makes, holds and changes values.

    A value is known by a handle, which is a `Recomputable` (or of a subclass with slots of its own), and inside that by
    its `node`, a `Value`: it knows the `Operation` that makes it, and the `Storage` that it lives on. Read them, but do
    not write to them. All methods are called without any lock, may be interrupted anywhere, and leave the cache in a
    valid state.
    """

    __slots__ = ("engine",)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(
        self,
        function: Callable[..., Any],
        positional: Sequence[Any],
        arguments: Sequence[Value],
        place: Place,
        *,
        handle: HandleOf,
        keywords: dict[str, Any] | None = None,
        nout: int = 1,
        nbytes: Sequence[int] | None = None,
        device: str | None = None,
    ) -> list[Any]:
        """Run an operation, and remember it; the handles of its outputs.

        Parameters
        ----------
        function
            Called with the payloads, without the lock. It may have `size_key()`, a hashable that decides the sizes of
            its results together with the signatures of its arguments (alone, if its class has an attribute
            `sizes_alone` that is true), and its class may have `expect(device)`, which gives (device, bytes) of the
            results before the first run. Neither is asked under the lock. An attribute `keeps_states` that is true says
            that a repeated run draws the same random numbers.
        positional, keywords
            The arguments of the function, with nodes in place of values.
        arguments
            All nodes among them. All belong to this cache.
        handle
            The class of the handles, or a function from a payload to that. Slots beyond those of Recomputable are
            unset.
        nout
            How many outputs there are; 0: the first run decides, by returning one value or an `Outputs` of several.
        nbytes
            The size of each output, if it is known better than the adapter knows it.
        device
            Where outputs of these sizes will be, if not where the first argument is, or the host if there is none.

        Raises what the function raises, and BudgetError.
        """
        code, instruction = place if isinstance(place, tuple) else (place.f_code, place.f_lasti)
        options = None
        if nout != 1 or nbytes is not None or keywords:
            options = Options(keywords, nout, None if nbytes is None else tuple(nbytes), device)
        nodes = tuple(arguments)
        given = nodes if positional is arguments else tuple(positional)
        operation = Operation(function, given, nodes, code, instruction, options)
        return requests.apply(self.engine, operation, handle)

    @overload
    def source(self, payload: Any, handle: type[H], *, moves: bool = True, waits: Literal[True] = True) -> H: ...
    @overload
    def source(self, payload: Any, handle: type[H], *, moves: bool = True, waits: bool) -> H | None: ...
    def source(self, payload: Any, handle: type[H], *, moves: bool = True, waits: bool = True) -> H | None:
        """A value without a recipe, as `pure` makes it, with a handle of some class.

        `moves`: it may move to a tier. Not if it changes without a call of `written`: a copy in a tier would not
        change. `waits`: as for `adopt`.
        """
        return requests.add_source(self.engine, payload, handle, moves=moves, waits=waits)  # type: ignore[no-any-return]  # as asked

    def adopt(
        self,
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
        return requests.adopt(self.engine, payload, operation, cost, handle, waits=waits)  # type: ignore[no-any-return]  # as asked

    def view(self, of: H, function: Callable[[Any], Any], outline: Any, place: FrameType) -> H | None:
        """A view of an evicted value, evicted itself: nothing runs until it is needed. None: the value is in memory.

        `outline` is what its adapter's `evicted` would say of it.
        """
        operation = Operation(function, (of._node,), (of._node,), place.f_code, place.f_lasti)
        return requests.view(self.engine, operation, outline, type(of))  # type: ignore[no-any-return]  # of that class

    def look(self, handle: Handle) -> Any:
        """The value if it is in memory, without waiting and without an event; otherwise EVICTED."""
        return requests.look(self.engine, handle._node)

    def refer(self, node: Value, handle: type[H]) -> H | None:
        """Another handle of a value that is in memory; None: it is not, and may be forgotten."""
        return requests.refer_if_there(self.engine, node, handle)  # type: ignore[no-any-return]  # of that class

    def bring(self, node: Value) -> None:
        """Bring a value into memory now; recompute it if needed. It may be evicted again at any time."""
        requests.bring(self.engine, node, lambda engine, value: None)

    @contextmanager
    def keep(self, node: Value) -> Iterator[None]:
        """Keep a value in memory inside the block."""
        stay = requests.keep_resident(self.engine, node)
        try:
            yield
        finally:
            del stay

    def evict(self, node: Value) -> bool:
        """`Recomputable.evict` of a value that may have no handle."""
        return requests.evict(self.engine, node)

    def detach(self, node: Value, *, moves: bool | None = None) -> None:
        """`Recomputable.detach` of a value that may have no handle. `moves`: as for a `source`; None: as it was.

        What an operation made may move afterwards.
        """
        requests.detach(self.engine, node, moves=moves)

    def written(self, node: Value) -> None:
        """Call this before writing to the memory of a source that a running operation takes.

        A copy in a tier, and the digest of `verify`, are then out of date. Never write to values that an operation
        made.
        """
        requests.written(self.engine, node)

    def overwrite(self, handle: Handle, by: Handle) -> None:
        """Let `handle` refer to the output of `by`, which took over the memory of the value that `handle` referred to.

        The old value is no longer in memory: if it is needed, it is recomputed elsewhere.
        """
        requests.overwrite(self.engine, handle, by)

    def exchange(self, one: Handle, other: Handle) -> None:
        """Swap what two handles refer to."""
        requests.exchange(self.engine, one, other)

    def set_room(self, node: Value, sizes: Sequence[tuple[str, int]]) -> None:
        """(device, bytes) that a repeated run of the operation which made `node` needs."""
        requests.set_room(node, sizes)

    def hold(self, buffer: Any, device: str, nbytes: int) -> Held:
        """Only count memory as in use, until `buffer` is freed or `unhold`: it is no value, and cannot be evicted.

        For listeners it is a source.
        """
        return requests.hold(self.engine, buffer, device, nbytes)

    def unhold(self, held: Held) -> None:
        """Stop counting memory that was held."""
        requests.let_go(self.engine, held)

    def needed(self, node: Value) -> bool:
        """Whether `node` is an argument of a running operation, or of one whose results may still be needed."""
        return requests.needed(self.engine, node)

    def dependents(self, node: Value, most: float = inf) -> list[Value] | None:
        """The values that the program refers to and that are made from `node`; None: more than `most` to search."""
        return requests.dependents(self.engine, node, most)


class Watch:
    """Knows of operations before they run, of what is in memory and what it took, and advises what to keep.

    An error of a callback or of advice is logged once, ends the advice, and stops no operation.
    """

    __slots__ = ()

    engine: Engine

    @property
    def before(self) -> Callable[[Operation], None] | None:
        """Called before each first run, without the lock; None: nothing is."""
        return self.engine.before

    @before.setter
    def before(self, before: Callable[[Operation], None] | None) -> None:
        self.engine.before = before

    @property
    def wanted(self) -> Callable[[Value], None] | None:
        """Called before an evicted value is brought back, without the lock; None: nothing is."""
        return self.engine.wanted

    @wanted.setter
    def wanted(self, wanted: Callable[[Value], None] | None) -> None:
        self.engine.wanted = wanted

    def listen(self, listener: Listener) -> None:
        """`Cache.subscribe` for what advises: an error of the listener ends the advice."""
        self.engine.subscribe(listener, advises=True)

    def stop_listening(self, listener: Listener) -> None:
        """It hears of no more events; nothing happens if it did not."""
        self.engine.unsubscribe(listener)

    def advise(self, advice: Advice | None) -> None:
        """Follow this advice: what to evict, and what to keep without references to it; None: no advice.

        Values kept only by older advice are dropped.
        """
        advise(self.engine, advice)

    def foresee(self, state: str, why: str) -> None:
        """Tell listeners the state of planning for a program that repeats."""
        requests.foresee(self.engine, state, why)

    def counts(self) -> Counts:
        """What the cache has done so far."""
        journal, meter = self.engine.journal, self.engine.meter
        return Counts(
            journal.operations,
            journal.evictions,
            journal.rematerializations,
            meter.now + meter.moving_time,
            meter.remat_time + meter.moving_time,
        )

    def count_operation(self, cost: float = 0.0) -> None:
        """Count an operation that an adapter has run itself, because there was nothing for the cache to do.

        `cost`: the seconds that it took, by which the values in memory have become staler.
        """
        engine = self.engine
        engine.journal.operations += 1
        if cost:
            with engine.changes.alone(), engine.changes.begun(python=True):
                engine.meter.bill(cost, False)

    def count_coercion(self) -> None:
        """Count that a wrapped value was turned into a plain one."""
        self.engine.journal.coercions += 1

    def pools(self) -> dict[str, Pool]:
        """The memory of each device that has been used."""
        return dict(self.engine.memory.pools)

    def fullest(self) -> Pool | None:
        """Of the devices with a budget, the one with most bytes in use."""
        pools = [pool for pool in list(self.engine.memory.pools.values()) if pool.limit < inf]
        return max(pools, key=lambda pool: pool.used, default=None)

    def lap(self) -> dict[str, int]:
        """The most bytes in use on each device since the last call."""
        engine = self.engine
        with engine.changes.alone(), engine.changes.begun(python=True):
            return {device: pool.lap() for device, pool in engine.memory.pools.items()}

    def load(self) -> Load:
        """How many bytes are needed, in memory and moved."""
        engine, memory, moved = self.engine, self.engine.memory, 0
        if memory.tiers is not None:
            with engine.changes.alone(), engine.changes.begun(python=True):
                moved = sum([store.used for _, store in memory.tiers.all()])
        return Load(memory.neighbourhood.missing, sum([pool.used for pool in list(memory.pools.values())]), moved)

    def room(self, device: str) -> float:
        """Bytes of a device that can be taken without an eviction; none where the budget is a function."""
        return requests.room(self.engine, device)

    def resident(self) -> list[Storage]:
        """The storages that are in memory, the oldest first. O(n log n)."""
        engine = self.engine
        with engine.changes.alone(), engine.changes.begun(python=True):
            storages = [storage for storage in engine.memory.storages if storage.resident]
        return sorted(storages, key=lambda storage: storage.number)

    @property
    def was_short(self) -> bool:
        """Whether something was evicted so far because room was needed."""
        return self.engine.journal.evictions > 0

    def is_wanted(self, storage: Storage) -> bool:
        """Whether something that is evicted, and needed, is made from it. With the default policy."""
        return self.engine.memory.neighbourhood.wanted(storage)

    @property
    def history(self) -> int:
        """How many values are remembered that only operations refer to."""
        return self.engine.references.history

    def history_exceeded(self) -> int:
        """The same if it is ten times as many as ever before: then the program should be warned. Otherwise 0."""
        references = self.engine.references
        if references.history <= references.history_limit:
            return 0
        references.history_limit = 10 * references.history
        return references.history

    def released_sources(self) -> deque[Value]:
        """Sources that only operations still refer to: each is added when its last handle is gone."""
        return requests.released_sources(self.engine)

    def settle(self) -> bool:
        """Process dropped references, and whatever else is left to do. O(these).

        False: another thread is telling listeners of an event.
        """
        self.engine.tidy()
        return self.engine.journal.is_told()

    def be_lenient(self) -> None:
        """Admit what cannot fit, too, as an overshoot: for values that have to be given back."""
        self.engine.memory.lenient = self.engine.memory.closing = True

    def add_tiers(self, tiers: Sequence[Tier]) -> None:
        """Let a cache in which nothing was made yet move what it evicts to these tiers. Raises OSError."""
        self.engine.memory.lie_above(Tiers(tiers))

    def stop_ahead(self) -> None:
        """End the thread that moves values before their room is needed (`Tier.ahead`): the cache is about to close."""
        if self.engine.moving.ahead is not None:
            self.engine.moving.ahead.end()


class Extension(Values, Watch):
    """Both, of one cache."""

    __slots__ = ()
