"""The published machine's operations, values and storages, and the evicted neighbourhoods of these.

The neighbourhoods are those of section 4.1 of Kirisame et al. (ICLR 2021). The search for the least score, which asks
for their cost, is that of the library: a leaf, which knows numbers and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from recompute._policy.candidate import Around, Candidate
from recompute._policy.search import Candidates
from recompute._traces.program import Call
from recompute.policies import Policy


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


class Storage(Candidate):
    """A buffer that its values share: the unit of eviction. Its number is that of its first value."""

    __slots__ = ("above", "below", "component", "evicted_above", "evicted_below", "pool", "resident", "values")

    def __init__(self, number: int, size: int, pool: Pool) -> None:
        self.number = number
        self.size = size
        self.pool = pool
        self.cost = self.last_access = 0.0
        self.locks = 0  # operations in flight, pins, and values that are sources
        self.slot = -1
        self.resident = False
        self.values: dict[Value, None] = {}
        self.above: dict[Storage, int] = {}  # the storages that its values are made from, and how many are
        self.below: dict[Storage, int] = {}  # those made from it
        self.evicted_above: dict[Storage, None] = {}
        self.evicted_below: dict[Storage, None] = {}
        self.component: Component | None = None  # while it is evicted


@dataclass(eq=False, slots=True)
class Pool:
    """The memory of one device."""

    device: str
    limit: float
    candidates: Candidates
    used: int = 0
    """Bytes that are resident."""
    fixed: int = 0
    """Those of them that are locked."""
    peak: int = 0


class Neighbourhood(Around):
    """The evicted neighbourhood of a storage: this one is always empty.

    The search remembers costs, and must be told of those that fall: `Candidates.changed`. Of small falls it need not
    know, since it works with a lower bound, and asks for the cost of whom it is about to choose.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Operation | None = None
        """The operation that runs for the first time, from before its arguments are there."""

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
