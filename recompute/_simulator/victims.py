"""The published machine's choice of a victim: storages, evicted neighbourhoods, and the search for the least score.

The neighbourhoods are those of section 4.1 of Kirisame et al. (ICLR 2021); the search is exact, or one of the
approximations of section 5. Ties go to the newest candidate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, isqrt
from operator import itemgetter
from typing import Final

from recompute._policy.tournament import Tournament
from recompute._traces.program import Call
from recompute.policies import Batch, IgnoreSmall, Nothing, Policy, Sample, Search


@dataclass(eq=False, slots=True)
class Operation:
    """A call of the program, and how often it has run."""

    call: Call
    arguments: tuple[Value, ...]
    cost: float
    """c0: of its cheapest run."""
    outputs: list[Value | None] = field(default_factory=list)
    """None: forgotten."""
    makes: list[tuple[Pool, int]] = field(default_factory=list)
    """The bytes of each storage that it makes: not those of its arguments."""
    runs: int = 0


@dataclass(eq=False, slots=True)
class Value:
    """A result of an operation, or a source, which has none."""

    number: int
    storage: Storage
    operation: Operation | None
    users: dict[Operation, None] = field(default_factory=dict)
    """The operations that have taken it."""
    resident: bool = False
    referred: bool = False
    """Whether the program can name it."""
    pinned: bool = False


@dataclass(eq=False, slots=True)
class Storage:
    """A buffer that its values share: the unit of eviction."""

    number: int
    """That of its first value."""
    size: int
    pool: Pool
    values: dict[Value, None] = field(default_factory=dict)
    resident: bool = False
    locks: int = 0
    """Operations in flight, pins, and values that are sources."""
    cost: float = 0.0
    """Of the operations that make its values, each counted once."""
    last_access: float = 0.0
    slot: int = -1
    """Where the candidates have it; -1: it is none."""
    above: dict[Storage, int] = field(default_factory=dict)
    """The storages that its values are made from, and how many are."""
    below: dict[Storage, int] = field(default_factory=dict)
    """Those made from it."""
    evicted_above: dict[Storage, None] = field(default_factory=dict)
    evicted_below: dict[Storage, None] = field(default_factory=dict)
    component: Component | None = None
    """While it is evicted."""


@dataclass(eq=False, slots=True)
class Pool:
    """The memory of one device."""

    device: str
    limit: float
    candidates: Candidates
    used: int = 0
    """Bytes that are resident or reserved."""
    fixed: int = 0
    """Of these, what is locked or reserved."""
    peak: int = 0

    def reserve(self, size: int) -> None:
        self.used += size
        self.fixed += size
        self.peak = max(self.peak, self.used)

    def give_back(self, size: int) -> None:
        self.used -= size
        self.fixed -= size


class Neighbourhood:
    """The evicted neighbourhood of a storage: this one is always empty.

    The search remembers costs, and must be told of those that fall: `_fell`. Of small falls it need not know, since it
    works with a lower bound, and asks for the cost of whom it is about to choose.
    """

    def __init__(self) -> None:
        self.waiting: Operation | None = None
        """The operation that runs for the first time, from before its arguments are there."""

    def cost(self, storage: Storage) -> float:
        return 0.0

    def lower_bound(self, storage: Storage) -> float:
        """A bound below which the cost does not fall unless that is told."""
        return self.cost(storage)

    def evicted(self, storage: Storage) -> None:
        """It was evicted just now."""

    def restored(self, storage: Storage) -> None:
        """It was evicted, and becomes resident or is forgotten."""

    def unlinking(self, storage: Storage) -> None:
        """It is evicted, and about to lose a value, with its links."""

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        """Of one that is evicted."""


class Linked(Neighbourhood):
    """Knows which neighbours of a storage are evicted."""

    def evicted(self, storage: Storage) -> None:
        for other in storage.above:
            other.evicted_below[storage] = None
        for other in storage.below:
            other.evicted_above[storage] = None

    def restored(self, storage: Storage) -> None:
        for other in storage.above:
            other.evicted_below.pop(storage, None)
        for other in storage.below:
            other.evicted_above.pop(storage, None)


class Closure(Linked):
    """e*: exactly the evicted ancestors, and the evicted descendants if wanted, found by a walk each time."""

    def __init__(self, *, descendants: bool) -> None:
        super().__init__()
        self.descendants = descendants

    def cost(self, storage: Storage) -> float:
        total = 0.0
        seen = set(storage.evicted_above)
        path = list(storage.evicted_above)
        for visited in path:  # grows
            total += visited.cost
            for other in visited.evicted_above:
                if other not in seen:
                    seen.add(other)
                    path.append(other)
        if not self.descendants or not storage.evicted_below:
            return total
        descendants = set(storage.evicted_below)
        path = list(storage.evicted_below)
        for visited in path:
            if visited not in seen:
                total += visited.cost
            for other in visited.evicted_below:
                if other not in descendants:
                    descendants.add(other)
                    path.append(other)
        first = self.waiting
        if first is not None and any(argument.storage in descendants for argument in first.arguments):
            total += first.cost * len(first.makes)
        return total

    def restored(self, storage: Storage) -> None:
        self.unlinking(storage)
        super().restored(storage)

    def unlinking(self, storage: Storage) -> None:
        """It falls for all candidates at the ends of the evicted storages around it."""
        self._tell(storage, lambda other: other.below)
        if self.descendants:
            self._tell(storage, lambda other: other.above)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        self.unlinking(storage)

    def _tell(self, storage: Storage, direction: Callable[[Storage], dict[Storage, int]]) -> None:
        seen = {storage}
        path = [storage]
        for visited in path:
            for other in direction(visited):
                if other.slot >= 0:
                    other.pool.candidates.changed(other)
                elif not other.resident and other not in seen:
                    seen.add(other)
                    path.append(other)


class Component:
    """A node of a union-find; its root stands for evicted storages that are connected, and has their cost."""

    __slots__ = ("candidates", "compact_at", "cost", "lower_bound", "members", "parent", "weight")

    def __init__(self, cost: float) -> None:
        self.parent: Component | None = None
        self.weight = 1  # nodes below: union by size
        self.cost = cost
        self.members = 1
        self.lower_bound = 0.0
        self.candidates: set[Storage] = set()  # told when the cost falls below that
        self.compact_at = 16  # so many: then those that are none any more are dropped

    def root(self) -> Component:
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent  # path halving
            node = node.parent
        return node

    def join(self, other: Component) -> Component:
        """The root of both, which are roots."""
        if self is other:
            return self
        large, small = (self, other) if self.weight >= other.weight else (other, self)
        small.parent = large
        large.weight += small.weight
        large.cost += small.cost
        large.members += small.members
        large.lower_bound += small.lower_bound
        if len(large.candidates) < len(small.candidates):
            large.candidates, small.candidates = small.candidates, large.candidates
            large.compact_at = small.compact_at
        large.candidates |= small.candidates
        small.candidates = set()
        return large

    def add_cost(self, change: float) -> None:
        """To a root."""
        self.cost = max(0.0, self.cost + change) if self.members else 0.0
        if self.cost < self.lower_bound or not self.members:
            self.lower_bound = 0.0
            candidates, self.candidates = self.candidates, set()  # scored again, they are entered again
            for storage in candidates:
                storage.pool.candidates.changed(storage)


_MARGIN: Final = 0.95
"""The lower bound of a component's cost, as a share of it: a lower one lets the search check more in vain."""


class Components(Linked):
    """e~*: undirected components of evicted storages, by a union-find.

    It cannot split: a storage that comes back takes its cost along, and leaves phantom connections behind.
    """

    def cost(self, storage: Storage) -> float:
        return sum([root.cost for root in self._around(storage)], 0.0)

    def lower_bound(self, storage: Storage) -> float:
        total = 0.0
        for root in self._around(storage):
            root.lower_bound = max(root.lower_bound, root.cost * _MARGIN)
            total += root.lower_bound
            root.candidates.add(storage)
            if len(root.candidates) > root.compact_at:
                root.candidates = {listed for listed in root.candidates if listed.slot >= 0}
                root.compact_at = 2 * len(root.candidates) + 16
        return total

    def _around(self, storage: Storage) -> dict[Component, None]:
        """The roots next to it."""
        roots: dict[Component, None] = {}
        for near in (storage.evicted_above, storage.evicted_below):
            for other in near:
                component = other.component
                assert component is not None
                roots[component if component.parent is None else component.root()] = None
        return roots

    def evicted(self, storage: Storage) -> None:
        root = storage.component = Component(storage.cost)
        for other in self._around(storage):
            root = root.join(other)
        super().evicted(storage)

    def restored(self, storage: Storage) -> None:
        component, storage.component = storage.component, None
        assert component is not None
        root = component.root()
        root.members -= 1
        root.add_cost(-storage.cost)
        self.unlinking(storage)
        super().restored(storage)

    def unlinking(self, storage: Storage) -> None:
        for near in (storage.above, storage.below):
            for other in near:
                if other.slot >= 0:  # for which this may be the only link to the component
                    other.pool.candidates.changed(other)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        assert storage.component is not None
        storage.component.root().add_cost(change)


NEIGHBOURHOODS: Final[Mapping[str, Callable[[], Neighbourhood]]] = {
    "none": Neighbourhood,
    "ancestors": lambda: Closure(descendants=False),
    "exact": lambda: Closure(descendants=True),
    "components": Components,
}
"""By the names that policies have for them."""


def knows(policy: Policy) -> bool:
    """Whether the published machine can run a policy: not if that looks at a neighbourhood of this library's own."""
    return policy.neighbourhood in NEIGHBOURHOODS


class Candidates:
    """The resident, unlocked storages of a pool, of which none is chosen: every search has its own form."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        self.policy = policy
        self.neighbourhood = neighbourhood
        self.scored = 0
        """Scores computed so far."""
        self.storages: list[Storage] = []

    def add(self, storage: Storage) -> None:
        storage.slot = len(self.storages)
        self.storages.append(storage)

    def remove(self, storage: Storage) -> None:
        last = self.storages.pop()
        if last is not storage:
            self.storages[storage.slot] = last
            last.slot = storage.slot
        storage.slot = -1

    def changed(self, storage: Storage) -> None:
        """It has become cheaper."""

    def choose(self, now: float) -> Sequence[Storage]:
        """The storages to evict."""
        return ()


class Scan(Candidates):
    """Scores all candidates, or a random sample of the square root in size, or those that are not small."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, search: Search) -> None:
        super().__init__(policy, neighbourhood)
        self.search = search
        self.random = random.Random(search.seed) if isinstance(search, Sample) else None

    def choose(self, now: float) -> Sequence[Storage]:
        scores = [(self._score(storage, now), storage) for storage in self._looked_at()]
        self.scored += len(scores)
        if not scores:
            return ()
        if not isinstance(self.search, Batch):
            return (min(scores, key=itemgetter(0))[1],)
        scores.sort(key=lambda scored: (scored[0], -scored[1].number))
        least = scores[0][0]
        most = self.search.factor * least if 0 < least < inf else least
        return [scores[0][1]] + [storage for score, storage in scores[1:] if score <= most < inf]

    def _looked_at(self) -> Sequence[Storage]:
        storages = self.storages
        if self.random is not None and storages:
            return self.random.sample(storages, isqrt(len(storages) - 1) + 1)
        if isinstance(self.search, IgnoreSmall):
            least = self.search.share * sum(storage.size for storage in storages) / max(1, len(storages))
            return [storage for storage in storages if storage.size >= least]
        return storages

    def _score(self, storage: Storage, now: float) -> float:
        around = self.neighbourhood.cost(storage)
        score = self.policy.score(storage.cost, around, storage.size, now - storage.last_access)
        try:
            undefined = isnan(score)
        except TypeError:
            raise TypeError(f"the policy {self.policy!r} returned {score!r}: a score is a number") from None
        if undefined:
            raise ValueError(f"the policy {self.policy!r} returned nan: a score is a number")
        return score


class Exact(Candidates):
    """The least score, of equals the newest candidate's, for policies whose 1 / score is a line in staleness.

    A kinetic tournament finds the highest line. Only the slots of what has become cheaper are noted, and set at the
    next choice: so a line may be too high, never too low. The winner gets its exact one, and is chosen if it still
    wins.
    """

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        super().__init__(policy, neighbourhood)
        self._slots: list[Storage | None] = []  # in the order in which they became candidates
        self._gaps = 0
        self._changed: set[int] = set()
        self._tournament: Tournament | None = None

    def add(self, storage: Storage) -> None:
        storage.slot = len(self._slots)
        self._slots.append(storage)
        self._changed.add(storage.slot)

    def remove(self, storage: Storage) -> None:
        self._slots[storage.slot] = None
        self._changed.add(storage.slot)
        storage.slot = -1
        self._gaps += 1
        if 2 * self._gaps > len(self._slots) + 64:
            self._compact()

    def changed(self, storage: Storage) -> None:
        if storage.slot >= 0:
            self._changed.add(storage.slot)

    def choose(self, now: float) -> Sequence[Storage]:
        alone = type(self.neighbourhood) is Neighbourhood
        tournament = self._update(now)
        while (slot := tournament.highest(now)) >= 0:
            storage = self._slots[slot]
            assert storage is not None
            known = tournament.line(slot)
            if alone and known[2] == storage.last_access:
                return (storage,)
            line = (*self._line(storage, self.neighbourhood.cost(storage)), storage.last_access)
            if line == known:
                return (storage,)
            tournament.set(slot, *line, now)
            self._changed.add(slot)  # exact now; for the next choice the lower bound will do
        return ()

    def _line(self, storage: Storage, around: float) -> tuple[float, float]:
        """(base, slope) of 1 / score."""
        self.scored += 1
        line = self.policy.line(storage.cost, around, storage.size)
        assert line is not None
        return line

    def _update(self, now: float) -> Tournament:
        """The tournament with all that has changed since the last choice."""
        lower_bound, tournament, slots = self.neighbourhood.lower_bound, self._tournament, len(self._slots)
        many = len(self._changed) * slots.bit_length() > 3 * slots + 64  # then to build it anew takes less
        if tournament is None or tournament.capacity < slots or many:
            self._compact()
            tournament = self._tournament = Tournament(2 * len(self._slots) + 64)
            for slot, storage in enumerate(self._slots):
                assert storage is not None
                tournament.enter(slot, *self._line(storage, lower_bound(storage)), storage.last_access)
            tournament.build(len(self._slots), now)
        else:
            for slot in self._changed:
                storage = self._slots[slot]
                if storage is None:
                    tournament.clear(slot, now)
                else:
                    tournament.set(slot, *self._line(storage, lower_bound(storage)), storage.last_access, now)
            self._changed.clear()
        return tournament

    def _compact(self) -> None:
        """Close the gaps; the tournament must be built again. O(n), after as many changes."""
        slots = [storage for storage in self._slots if storage is not None]
        for slot, storage in enumerate(slots):
            storage.slot = slot
        self._slots[:] = slots
        self._gaps = 0
        self._changed.clear()
        self._tournament = None


def candidates(search: Search, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
    """An empty set of them that is searched this way."""
    if isinstance(policy, Nothing):
        return Candidates(policy, neighbourhood)
    if search.name == "exact" and not policy.foreign and policy.line(1.0, 1.0, 1) is not None:
        return Exact(policy, neighbourhood)
    return Scan(policy, neighbourhood, search)
