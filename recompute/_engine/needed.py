"""The neighbourhood of the default policy: what is evicted and will be needed again.

A storage is needed if the program refers to it, or if a needed evicted storage is made from it. To evict one that is
not needed costs nothing, so these go first, and once evicted they hardly make others dearer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor, inf, sqrt
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from recompute._engine.graph import EVICTED, Operation, Storage, Value
from recompute._engine.neighbours import (
    Closure,
    Components,
    Neighbourhood,
    NoNeighbours,
    OnDecrease,
    above,
    below,
    fetch,
    stride_below,
)
from recompute._policy.formulas import NeighbourhoodName

if TYPE_CHECKING:
    from recompute._engine.pool import Pool

_REACH: Final = 32
"""How many evicted storages a walk visits before it extrapolates."""

_FAR: Final = 512
"""How many a walk visits that checks such an extrapolation over several branches."""

_GROSSLY: Final = 4.0
"""Times the extrapolated cost: what is more than that counts instead."""

_WIDE: Final = 256
"""Where more operations take a value, a walk looks at a sample of at least half as many."""

_ENDS: Final = 4
"""How many of the storages where a segment ends are remembered."""

_STEPS: Final = 64
"""The pressure rises in so many steps, because all candidates are scored again after each."""

_OPERATIONS: Final = 8
"""For each storage of the reach, so many operations are looked at to tell what bringing it back needs."""

_UP, _DOWN = 0, 1

Segment = tuple[float, tuple[Storage, ...]]
"""The evicted storages above or below another: their cost, and some of the resident storages where they end."""


class Needs(Neighbourhood):
    """C = w (above + below) + (1 - x) unneeded, with the pressure x and w = 1 - x / 2.

    above: the cost of the evicted ancestors; below: that of the needed evicted descendants; unneeded: that of the
    evicted storages that are made from it in one step and are not needed.

    A walk marks what it has seen with its number.
    """

    __slots__ = (
        "_costs_given",
        "_last",
        "_missing",
        "_missing_bytes",
        "_needed_by",
        "_needs",
        "_segments",
        "_walks",
        "reach",
    )

    def __init__(self, on_decrease: OnDecrease) -> None:
        super().__init__(on_decrease)
        self.active = True  # what is needed is counted from the start
        self._costs_given = False  # until a cost is asked for, decreases need not be told
        self._needs: dict[Storage, tuple[Storage, ...]] = {}  # needed and evicted -> the storages it is made from
        self._needed_by: dict[Storage, int] = {}  # -> how many needed evicted storages are made from it
        self._missing: dict[Storage, int] = {}  # evicted, but referred to from outside -> bytes
        self._missing_bytes: dict[Pool, int] = {}
        self._segments: dict[Storage, tuple[Segment, Segment]] = {}  # evicted -> above and below it at that time
        self._last: tuple[Storage, Segment, Segment] | None = None  # the newest walks up and down
        self._walks = 0  # so far
        self.reach = _REACH

    # How short memory is

    def measure_pressure(self, pool: Any) -> None:
        """x = sqrt(E / (E + B)): E bytes are dropped but referred to, B is the limit without sources and pins.

        It rises until nothing is evicted that is referred to, and half of the memory is free: between the rounds of a
        program that repeats, say.
        """
        missing = self._missing_bytes.get(pool, 0)
        if not missing:
            return
        room = self.room(pool)
        if room < inf:
            step = floor(_STEPS * sqrt(missing / (missing + max(1, room)))) / _STEPS
            if step > self.pressure:
                self.pressure = step

    def room(self, pool: Any) -> float:
        home: Pool = pool
        return float(home.limit - home.sources - home.movable - home.pinned)

    # What is needed

    def unneeded(self, candidate: Any) -> bool:
        storage: Storage = candidate
        return storage not in self._needed_by and not storage.needed_outside()

    def wanted(self, storage: Storage) -> bool:
        return storage in self._needed_by

    def evicted(self, storage: Storage) -> None:
        if self._costs_given:
            if self._last is None or self._last[0] is not storage:
                self._walk(storage)
            assert self._last is not None
            self._segments[storage] = self._last[1:]
        storage.nearby = None
        if storage.needed_outside():
            self._missing[storage] = storage.size
            self.missing += storage.size
            self._missing_bytes[storage.pool] = self._missing_bytes.get(storage.pool, 0) + storage.size
            self._count(storage)
        elif storage in self._needed_by:
            self._count(storage)

    def restored(self, storage: Storage) -> None:
        self.unlinking(storage)
        self._no_longer_missing(storage)
        self._discount(storage)
        self._segments.pop(storage, None)

    def released(self, storage: Storage) -> None:
        if self.pressure and not self._missing:
            pool = storage.pool
            sources = pool.sources + pool.movable
            if 2 * (pool.used - sources) < pool.limit - sources:
                self.pressure = 0.0
        if storage.resident:
            self._decreased(storage)
            return
        self._no_longer_missing(storage)
        if storage not in self._needed_by:
            self.unlinking(storage)
            self._discount(storage)

    def moving(self, value: Value) -> list[Storage]:
        value.storage.nearby = None
        homes = {output.storage for user in value.each_user() for output in user.outputs if output is not None}
        users = [storage for storage in homes if storage in self._needs]
        for storage in users:
            self._discount(storage)
        return users

    def moved(self, users: list[Storage]) -> None:
        for storage in users:
            self._count(storage)

    def rest(self, storages: Iterable[Storage]) -> None:
        if self._costs_given:
            self._costs_given, self._last = False, None
            self._segments.clear()
            for storage in storages:
                storage.nearby = None

    def restart(self, evicted: Iterable[Storage]) -> None:
        self._last = None
        for counts in (self._needs, self._needed_by, self._missing, self._missing_bytes, self._segments):
            counts.clear()
        self.missing = 0
        self.kept.clear()
        self.unwanted.clear()
        for storage in evicted:
            self.evicted(storage)

    def _no_longer_missing(self, storage: Storage) -> None:
        size = self._missing.pop(storage, 0)
        if size:
            self._missing_bytes[storage.pool] -= size
            self.missing -= size

    def _count(self, storage: Storage) -> None:
        """An evicted storage is needed: so are those that it is made from."""
        stack = [storage]
        while stack:
            needed = stack.pop()
            if needed in self._needs:
                continue
            arguments = self._needs[needed] = needed.neighbours_up()
            for argument in arguments:
                self._needed_by[argument] = self._needed_by.get(argument, 0) + 1
                if argument.dropped:
                    stack.append(argument)

    def _discount(self, storage: Storage) -> None:
        """An evicted storage is no longer needed, or no longer evicted."""
        stack = [storage]
        while stack:
            for argument in self._needs.pop(stack.pop(), ()):
                left = self._needed_by[argument] - 1
                if left:
                    self._needed_by[argument] = left
                    continue
                del self._needed_by[argument]
                if argument.resident:
                    self._decreased(argument)
                    if argument in self.kept:
                        self.unwanted.append(argument)
                elif argument.dropped and argument not in self._missing:
                    stack.append(argument)

    # What it takes to bring it back

    def need(self, candidate: Any, enough: float = -1.0) -> int:
        """An estimate: the most for it, or for a needed evicted storage whose way back its eviction makes longer.

        Sources are there anyway. Looks at some `_OPERATIONS * reach` operations at most. If all that these take and
        make is no more than `enough`, as mostly, that is the answer.
        """
        storage: Storage = candidate
        needs = self._needs
        walk = self._begin(storage)
        homes = [storage]
        for visited in homes:  # grows
            if len(homes) > self.reach:
                break
            for descendant in below(visited, stride_below(visited, _WIDE)):
                if descendant.seen != walk:
                    descendant.seen = walk
                    if descendant in needs:
                        homes.append(descendant)
        path: list[Operation] = []
        known: dict[Operation, int] = {}  # -> bytes locked at once while it runs with all that it needs
        for home in homes:
            for value in home.values:
                operation = value.operation
                if operation is not None and operation not in known:
                    known[operation] = 0
                    path.append(operation)
        ends = len(path)
        total = 0
        for operation in path:  # grows
            if len(path) > _OPERATIONS * self.reach:
                enough = -1.0
                break
            for argument in operation.arguments:
                maker = argument.operation
                if maker is not None:
                    total += argument.storage.size
                    away = argument.payload is EVICTED or argument.storage is storage
                    if away and maker not in known:
                        known[maker] = 0
                        path.append(maker)
            for output in operation.outputs:
                if output is not None:
                    total += output.storage.size
        if total <= enough:
            return total
        if len(path) > 1:
            for operation in sorted(path, key=_number):  # what makes arguments before what takes them
                known[operation] = _locked(operation, storage, known)
            return max([known[operation] for operation in path[:ends]])
        return _locked(path[0], storage, known) if path else 0

    # What it costs

    def cost(self, candidate: Any) -> float:
        storage: Storage = candidate
        self._costs_given = True
        needed, unneeded = self._walk(storage)
        return self._weigh(needed, unneeded)

    def lower_bound(self, candidate: Any) -> float:
        """The cost when it was last computed, if it has not decreased since: a walk for each would be too much."""
        storage: Storage = candidate
        known = storage.nearby
        if not isinstance(known, tuple):
            return self.cost(storage)
        needed, unneeded = known
        return self._weigh(needed, unneeded)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        if change < 0:
            self.unlinking(storage)

    def unlinking(self, storage: Storage) -> None:
        if self._costs_given:
            storage.nearby = None
            self._decreased_from(storage, _UP)
            self._decreased_from(storage, _DOWN)

    def _decreased_from(self, storage: Storage, side: int) -> None:
        """What an evicted storage cost decreases: as do the neighbours of the resident ones where the evicted end."""
        walk = self._begin(storage)
        path = [storage]
        for visited in path:  # grows
            for neighbour in above(visited) if side == _UP else below(visited):
                if neighbour.seen != walk:
                    neighbour.seen = walk
                    if neighbour.resident:
                        self._decreased(neighbour)
                    elif neighbour.dropped:
                        path.append(neighbour)
            if len(path) > self.reach:
                break

    def _decreased(self, storage: Storage) -> None:
        storage.nearby = None
        if storage.slot >= 0:
            self.on_decrease(storage)

    def _weigh(self, needed: float, unneeded: float) -> float:
        return (1 - self.pressure / 2) * needed + (1 - self.pressure) * unneeded

    def _walk(self, storage: Storage) -> tuple[float, float]:
        """The costs of the needed and of the unneeded storages around it; remembered."""
        up = self._walk_up(storage)
        down, unneeded = self._walk_down(storage)
        self._last = storage, up, down
        needed = up[0] + down[0]
        storage.nearby = needed, unneeded
        return needed, unneeded

    def _begin(self, storage: Storage) -> int:
        """The number of a new walk."""
        self._walks += 1
        storage.seen = self._walks
        return self._walks

    def _walk_up(self, storage: Storage) -> Segment:
        """The evicted ancestors; sources do not count as ends."""
        cost = 0.0
        walk = self._begin(storage)
        path = [storage]
        ends: list[Storage] = []
        for visited in path:  # grows
            for value in visited.values:
                operation = value.operation
                if operation is not None:
                    for argument in operation.arguments:
                        ancestor = argument.storage
                        if ancestor.seen != walk:
                            ancestor.seen = walk
                            if ancestor.dropped:
                                cost += ancestor.cost
                                path.append(ancestor)
                            elif not ancestor.resident:
                                cost += fetch(ancestor)
                            elif argument.operation is not None and len(ends) < _ENDS:
                                ends.append(ancestor)
            if len(path) > self.reach:
                front = path[path.index(visited) + 1 :]
                segment = self._extrapolate(_UP, cost, front, walk)
                return self._checked(segment, storage) if len(front) > 1 and self.keeps else segment
        return cost, tuple(ends)

    def _checked(self, segment: Segment, storage: Storage) -> Segment:
        """The segment above a storage, with the cost that a longer walk finds if it is grossly higher.

        Where branches meet, the dearest one says little of all of them: half a program once depended on a value that
        seemed cheap. Twice as much is no reason to doubt it, though: some ancestors are evicted for others as well.
        """
        cost = 0.0
        walk = self._begin(storage)
        path = [storage]
        for visited in path:  # grows
            for ancestor in above(visited):
                if ancestor.seen != walk:
                    ancestor.seen = walk
                    if ancestor.dropped:
                        cost += ancestor.cost
                        path.append(ancestor)
            if len(path) > _FAR:
                break
        return (cost, segment[1]) if cost > _GROSSLY * segment[0] else segment

    def _walk_down(self, storage: Storage) -> tuple[Segment, float]:
        """The needed evicted descendants, and the cost of the unneeded evicted storages made from it in one step."""
        cost = unneeded = 0.0
        needs = self._needs
        walk = self._begin(storage)
        path = [storage]
        ends: list[Storage] = []
        for visited in path:  # grows
            stride = stride_below(visited, _WIDE)
            for descendant in below(visited, stride):
                if descendant.seen != walk:
                    descendant.seen = walk
                    if descendant.resident:
                        if len(ends) < _ENDS:
                            ends.append(descendant)
                    elif descendant in needs:
                        cost += stride * descendant.cost
                        path.append(descendant)
                    elif descendant.dropped and visited is storage:
                        unneeded += stride * descendant.cost
            if len(path) > self.reach:
                return self._extrapolate(_DOWN, cost, path[path.index(visited) + 1 :], walk), unneeded
        return (cost, tuple(ends)), unneeded

    def _extrapolate(self, side: int, cost: float, front: Sequence[Storage], walk: int) -> Segment:
        """Go on from `front` in the segments of its storages, along the dearest."""
        ends: tuple[Storage, ...] = ()
        for _ in range(_REACH):
            if not front:
                break
            segments = [self._segment(storage, side) for storage in front]
            beyond, ends = max(segments, key=itemgetter(0))
            front = [storage for storage in ends if storage.dropped and storage.seen != walk]
            for storage in front:
                storage.seen = walk
            cost += beyond
            cost += sum([storage.cost for storage in front])
        return cost, ends

    def _segment(self, storage: Storage, side: int) -> Segment:
        """What an evicted storage remembers from its eviction; what left before costs were asked for looks now."""
        known = self._segments.get(storage)
        if known is None:
            known = self._segments[storage] = self._look(storage, _UP), self._look(storage, _DOWN)
        return known[side]

    def _look(self, storage: Storage, side: int) -> Segment:
        """What is evicted on one side, as far as the reach, and some of those where that ends, which may be evicted."""
        cost = 0.0
        looked = 0
        path = [storage]
        seen = {storage}
        ends: list[Storage] = []
        for visited in path:  # grows
            if visited.resident or looked > self.reach:
                if len(ends) < _ENDS:
                    ends.append(visited)
                continue
            if looked:
                cost += visited.cost
            looked += 1
            for neighbour in above(visited) if side == _UP else below(visited, stride_below(visited, _WIDE)):
                if neighbour not in seen:
                    seen.add(neighbour)
                    wanted = side == _UP or neighbour in self._needs
                    if (neighbour.dropped and wanted) or (neighbour.resident and neighbour.cost):  # no source
                        path.append(neighbour)
        return cost, tuple(ends)


def _number(operation: Operation) -> int:
    return operation.number


def _locked(operation: Operation, gone: Storage, known: dict[Operation, int]) -> int:
    """The most bytes that are locked at once while an operation runs, its arguments brought back before.

    What needs most beyond what it leaves comes back first (Sethi and Ullman, Journal of the ACM 17, 1970). `known`: the
    same for the operations that make the arguments.
    """
    missing: dict[Storage, int] = {}  # -> bytes beyond its own while it is brought back
    there: set[Storage] = set()
    kept = most = own = 0
    for argument in operation.arguments:
        maker = argument.operation
        if maker is not None:  # else a source
            home = argument.storage
            if argument.payload is EVICTED or home is gone:
                missing[home] = max(missing.get(home, 0), known.get(maker, 0) - home.size)
            elif home not in there:
                there.add(home)
                kept += home.size
    order: Any = missing.items()
    if len(missing) > 1:
        order = sorted(order, key=itemgetter(1), reverse=True)
    for home, beyond in order:
        kept += home.size
        most = max(most, kept + beyond)
    for output in operation.outputs:
        if output is not None:
            home = output.storage
            for argument in operation.arguments:
                if argument.storage is home:
                    break
            else:
                if home not in there:
                    there.add(home)
                    own += home.size
    return max(most, kept + own)


NEIGHBOURHOODS: Final[dict[NeighbourhoodName, Callable[[OnDecrease], Neighbourhood]]] = {
    "none": NoNeighbours,
    "ancestors": lambda on_decrease: Closure(on_decrease, descendants=False),
    "exact": lambda on_decrease: Closure(on_decrease, descendants=True),
    "components": Components,
    "needed": Needs,
}
"""The neighbourhoods by the names that policies have for them."""
