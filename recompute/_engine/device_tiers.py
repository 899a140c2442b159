"""The tiers below the memory of one device: when to move a value instead of dropping it, and what makes room there.

A value that is evicted can come back in two ways: its operation runs again, or a copy of it is fetched from a tier. The
cost of losing it is that of the cheaper way. A copy stays valid as long as the value lives, because values do not
change: to evict it a second time costs nothing. When a tier is full, what is cheapest to lose there makes room, or goes
one further down.

Bookkeeping under the engine's lock; bytes are moved without it (see moving).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from recompute._engine.graph import EVICTED, Operation, Options, Storage, Value, copy_of, remains_of
from recompute._engine.states import DROPPED
from recompute._tiers.tier import Key, Store

if TYPE_CHECKING:
    from recompute._engine.finalizer import Finalizer
    from recompute._engine.memory import Memory

_SURELY: Final = 0.9
"""What recomputing seems to cost is believed to this share: neighbourhoods count what they share several times."""

_MOMENT: Final = 1e-9
"""Seconds: staleness is never nothing."""

_LOOKED_AT: Final = 64
"""Copies, the oldest ones, among which a full tier looks for those that are cheapest to lose."""


class _WayOut(NamedTuple):
    """How a copy can leave a full tier."""

    loss: float
    """Seconds that it costs."""
    copy: Copy
    below: Store | None
    """Where it goes; None: it is lost."""


class DeviceTiers:
    """The tiers below the memory of one device, the fastest first."""

    def __init__(self, stores: Sequence[Store], memory: Memory, finalizer: Finalizer) -> None:
        self.stores = stores
        self._memory = memory
        self._finalizer = finalizer
        self.fixed: set[Storage] = set()
        """Sources that could not be moved: in memory until a tier has room again."""

    # The score

    def cheapest(self, storage: Storage, neighbours: float) -> tuple[float, float]:
        """(own cost, cost of the neighbours) of losing a storage, by the cheaper way back.

        What a move has to wait for now says whether to move, but hardly what: of that each counts its share of memory.
        """
        price = self.price(storage)
        if self.can_drop(storage) and _SURELY * (storage.cost + neighbours) <= price:
            return storage.cost, neighbours
        if price == inf:
            return inf, 0.0
        alone = self.price(storage, waiting=False)
        return alone + (price - alone) * storage.size / storage.pool.limit, 0.0

    def price(self, storage: Storage, *, waiting: bool = True) -> float:
        """Seconds to move a storage out, unless a copy is there, and to fetch it back.

        `waiting`: with what has to be waited for now, whatever is moved.
        """
        copy = copy_of(storage)
        if copy is not None:
            return copy.seconds
        for store in self.stores:
            if storage.size <= store.limit:
                if store.always:
                    return 0.0
                return store.price(storage.size) + (store.backlog if waiting else 0.0)
        return inf

    def can_drop(self, storage: Storage) -> bool:
        """Whether recipes, or a copy, can bring back everything on a storage that can be needed."""
        return copy_of(storage) is not None or all(
            value.operation is not None or not _is_needed(value) for value in storage.values
        )

    def moves(self, storage: Storage) -> bool:
        """Whether a resident storage that is evicted is fetched and not recomputed, as far as one can tell now."""
        if copy_of(storage) is not None or not self.can_drop(storage):
            return True
        neighbourhood = self._memory.neighbourhood
        if neighbourhood.unneeded(storage) or not any(map(_is_needed, storage.values)):
            return False
        return self.price(storage) < _SURELY * (storage.cost + neighbourhood.cost(storage))

    def restore_limits(self, *, now: bool) -> None:
        """See `Store.restore_limit`."""
        for store in self.stores:
            store.restore_limit(now=now)

    # Copies

    def has_room(self, storage: Storage) -> bool:
        """Whether a tier takes a storage as it is, without the loss of another copy."""
        return bool(storage.values) and any(_has_room(store, storage.size) for store in self.stores)

    def begin(self, storage: Storage, now: float) -> Copy | None:
        """A copy to be written of a resident storage; None if no tier has room for it."""
        root = root_of(storage)
        if root is None:
            return None
        again = inf
        if self.can_drop(storage):
            again = storage.cost + self._memory.neighbourhood.cost(storage)
        for number, store in enumerate(self.stores):
            rest = self.stores[number + 1 :]
            other = min([lower.price(storage.size) for lower in rest if _has_room(lower, storage.size)], default=inf)
            displaced = self._make_room(store, rest, storage, now, min(again, other) - store.price(storage.size))
            if displaced is not None:
                copy = Copy(root, store)
                copy.displaced = displaced
                store.reserved += copy.nbytes
                remains_of(root).copy = copy
                return copy
        return None

    def _make_room(
        self, store: Store, rest: Sequence[Store], storage: Storage, now: float, gain: float
    ) -> list[Copy] | None:
        """Let a tier have room for a storage: by the loss of copies, or by moving them down to the `rest`.

        Those that are to move down; None: there is no room, or what has to go is worth more than `gain` (seconds).
        """
        short = store.used + storage.size - store.limit
        if short <= 0:
            return []
        if storage.size > store.limit:
            return None
        chosen = _cheapest(self._ways_out(store, rest, storage.last_access, now), short, gain)
        displaced: list[Copy] = []
        for way in chosen or ():
            if not self._go(way, displaced):
                for copy in displaced:
                    self.moved_down(copy, None)
                return None
        return None if chosen is None else displaced

    def _ways_out(self, store: Store, rest: Sequence[Store], last_access: float, now: float) -> Iterator[_WayOut]:
        """How the oldest copies can leave a full tier for what was needed last then: each by its cheaper way."""
        for copy in store.oldest(_LOOKED_AT):
            if copy.root.copy is copy and not copy.fetching.outputs:
                loss = self._loss(copy)
                below = next((lower for lower in rest if _has_room(lower, copy.nbytes)), None)
                if below is not None:
                    staleness = now - copy.root.storage.last_access
                    lower = below.price(copy.nbytes) * (now - last_access + _MOMENT) / (staleness + _MOMENT)
                    if lower < loss:
                        yield _WayOut(lower, copy, below)
                        continue
                if loss < inf:
                    yield _WayOut(loss, copy, None)

    def _go(self, way: _WayOut, displaced: list[Copy]) -> bool:
        """Lose a copy, or let it be one of the `displaced`; False if those before it have taken its way out."""
        copy, below = way.copy, way.below
        if below is not None and _has_room(below, copy.nbytes) and copy.key is not None:
            copy.store.leave(copy)
            copy.store = below
            below.reserved += copy.nbytes
            displaced.append(copy)
        elif self._loss(copy) < inf:
            self.lose(copy)
        else:
            return False
        return True

    def stay_up(self, copy: Copy) -> None:
        """What should make room for a copy does not, if it has not done so yet: that is over."""
        while copy.displaced:
            if copy.displaced[-1].moves_down:
                self.moved_down(copy.displaced[-1], None)
            copy.displaced.pop()

    def _loss(self, copy: Copy) -> float:
        """Seconds that it costs to be without a copy; infinite if there is no other way back."""
        root, storage = copy.root, copy.root.storage
        if root.payload is not EVICTED:  # else a view of it may be in memory, from which it cannot come back
            return copy.store.writing.seconds(copy.nbytes)
        if root.operation is None:
            return inf
        return max(0.0, storage.cost + self._memory.neighbourhood.cost(storage) - copy.seconds)

    def elsewhere(self, copy: Copy) -> bool:
        """There is no room for a copy after all where it was to be; whether there is some further down."""
        rest = self.stores[self.stores.index(copy.store) + 1 :]
        below = next((lower for lower in rest if _has_room(lower, copy.nbytes)), None)
        if below is not None:
            copy.store.reserved -= copy.nbytes
            copy.store = below
            below.reserved += copy.nbytes
        return below is not None

    def moved_down(self, copy: Copy, key: Key | None) -> None:
        """The bytes of a copy are in the slower tier now; None: they could not be written there."""
        copy.store.reserved -= copy.nbytes
        before = copy.key
        if copy.root.copy is not copy or before is None:
            return  # it is not needed any more
        if key is not None:
            copy.fetching.function.key = copy.key = key  # type: ignore[attr-defined]  # a Fetch
            copy.store.enter(copy)
            self._finalizer.garbage.append(before)
            return
        copy.store = before.store
        if _has_room(copy.store, copy.nbytes) or self._loss(copy) == inf:
            copy.store.enter(copy)
        else:
            self.lose(copy)

    def lose(self, copy: Copy) -> None:
        """There is no copy any more: what was moved has been dropped now."""
        root, storage = copy.root, copy.root.storage
        copy.store.leave(copy)
        self._finalizer.garbage.append(copy)
        if root.remains is None or root.remains.copy is not copy:
            return
        root.remains.copy = None
        if not storage.resident and not storage.dropped and storage.values:
            self._memory.machine.move(storage, DROPPED, "its copy is lost")

    def failed(self, copy: Copy) -> None:
        """The bytes could not be written."""
        copy.store.reserved -= copy.nbytes
        self.lose(copy)

    def written(self, copy: Copy, key: Key) -> None:
        """The bytes are in the tier."""
        copy.store.reserved -= copy.nbytes
        copy.fetching.function.key = copy.key = key  # type: ignore[attr-defined]  # a Fetch
        copy.store.enter(copy)


def _cheapest(ways: Iterable[_WayOut], short: float, gain: float) -> list[_WayOut] | None:
    """Those with the smallest loss a byte that free what a tier is `short` of; None if all cost more than `gain`."""
    chosen = []
    for way in sorted(ways, key=lambda way: way.loss / max(1, way.copy.nbytes)):
        if short <= 0:
            break
        gain -= way.loss
        short -= way.copy.nbytes
        chosen.append(way)
    return None if short > 0 or gain < 0 else chosen


def _has_room(store: Store, nbytes: int) -> bool:
    return store.used + nbytes <= store.limit


def _is_needed(value: Value) -> bool:
    """Whether it can be asked for, by the program or to make something else."""
    return value.users is not None or value.referred


class Copy:
    """What a tier has of one value, or is about to have."""

    __slots__ = ("displaced", "fetching", "key", "nbytes", "root", "store")

    def __init__(self, root: Value, store: Store) -> None:
        self.root = root
        self.store = store
        """Where it counts: before it goes one further down already."""
        self.displaced: list[Copy] = []
        """Those that go one further down first, to make room for it."""
        self.nbytes = root.storage.size
        self.key: Key | None = None
        """By which the tier knows the bytes, which go with it; None: they are not written yet."""
        made_by = root.operation
        options = Options(declared=(self.nbytes,))
        options.room = [(root.storage.pool.device, self.nbytes)]
        code, instruction = (None, 0) if made_by is None else (made_by.code, made_by.instruction)
        self.fetching = Operation(Fetch(), (), (), code, instruction, options)
        """The operation that brings the value back from the tier. It has outputs while it is in flight."""
        self.fetching.runs = 1

    @property
    def moves_down(self) -> bool:
        """Whether its bytes are on their way to a slower tier."""
        return self.key is not None and self.key.store is not self.store

    @property
    def seconds(self) -> float:
        """What it takes to fetch it."""
        return self.store.reading.seconds(self.nbytes)

    def __repr__(self) -> str:
        return f"<copy of value {self.root.number} in {self.store.name}>"


class Fetch:
    """The function of the operation that brings a value back: reads the bytes, and makes the value of them."""

    __name__ = "fetch"
    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Key | None = None

    def __call__(self) -> Any:
        assert self.key is not None, "a fetch waits until the copy is written"
        return self.key.load()


def moves_source(storage: Storage) -> bool:
    """Whether there is a source on a storage that may move."""
    return any(value.operation is None and not value.stays for value in storage.values)


def root_of(storage: Storage) -> Value | None:
    """The one value in memory that the others on a storage are views of; None: there is no such value."""
    roots = [
        value
        for value in storage.values
        if value.operation is None or all(argument.storage is not storage for argument in value.operation.arguments)
    ]
    return roots[0] if len(roots) == 1 and roots[0].payload is not EVICTED else None
