"""Evicted neighbourhoods: the evicted storages whose recomputation a storage's own eviction would make dearer.

`NoNeighbours` looks at none, `Closure` at exactly the evicted ancestors, or at e*: ancestors and descendants.
`Components` has e~*, the approximation of e* by undirected connected components, kept by a union-find (Kirisame et al.,
section 4.1). `Needs`, in needed, counts what is needed.

The search remembers scores. It computes that of a storage anew before it chooses it, so it need not be told when a
neighbourhood grows and its storages become dearer. When one shrinks they become cheaper, and the search must be told:
`on_decrease`. So that small decreases need not be told, it works with a `lower_bound` of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from math import inf
from typing import Any, Final

from recompute._engine.graph import Operation, Storage, Value
from recompute._policy.candidate import Around

OnDecrease = Callable[[Storage], None]
Direction = Callable[[Storage], list[Storage]]
"""`above` or `below`."""


class Neighbourhood(Around):
    """Is told which storages are evicted and come back; knows the cost of what is evicted around a resident one."""

    __slots__ = ("active", "keeps", "kept", "missing", "on_decrease", "tiers", "unwanted")

    def __init__(self, on_decrease: OnDecrease) -> None:
        super().__init__()
        self.on_decrease = on_decrease
        self.active = False  # until it is asked for a cost, it need not be told of evictions
        self.tiers = False  # whether what is evicted may lie in a tier
        self.keeps = True  # whether what is released stays while it is wanted
        self.missing = 0
        """Bytes that are evicted but referred to from outside, on all devices; 0 where they are not counted."""
        self.kept: set[Storage] = set()
        """Released, and in memory because they are wanted."""
        self.unwanted: list[Storage] = []
        """Of those, the ones that are wanted no more: to be evicted immediately."""

    def evicted(self, storage: Storage) -> None:
        """`storage` was evicted just now."""

    def restored(self, storage: Storage) -> None:
        """`storage`, evicted until now, becomes resident or is forgotten; its links are still there."""

    def released(self, storage: Storage) -> None:
        """The last outside reference to `storage` has gone."""

    def wanted(self, storage: Storage) -> bool:
        """Whether something evicted that is needed is made from `storage`: then it stays when it is released."""
        return False

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        """The cost of an evicted `storage` has changed by `change` seconds."""

    def unlinking(self, storage: Storage) -> None:
        """An evicted `storage` is about to lose a value, with its links."""

    def moving(self, value: Value) -> list[Storage]:
        """`value` is about to move to another storage; returns what `moved` must be given afterwards."""
        return []

    def moved(self, users: list[Storage]) -> None:
        """The value has moved."""

    def rest(self, storages: Iterable[Storage]) -> None:
        """Costs will not be asked for in a while: forget those of all storages."""

    def restart(self, evicted: Iterable[Storage]) -> None:
        """All that was known is void: these are the evicted storages."""


class NoNeighbours(Neighbourhood):
    """For policies that look at the storage alone."""

    __slots__ = ()


class Closure(Neighbourhood):
    """Exactly the evicted ancestors, and the evicted descendants if wanted, by a walk through them each time."""

    __slots__ = ("descendants",)

    def __init__(self, on_decrease: OnDecrease, descendants: bool) -> None:
        super().__init__(on_decrease)
        self.descendants = descendants

    def cost(self, candidate: Any) -> float:
        storage: Storage = candidate
        self.active = True
        around = evicted_closure(storage, above)
        total = 0.0
        if self.descendants:
            around |= evicted_closure(storage, below)
        if self.tiers:
            total += fetches(evicted_closure(storage, above) | {storage})
        return sum([neighbour.cost for neighbour in around], total)

    def restored(self, storage: Storage) -> None:
        cheaper = boundary(storage, below)
        if self.descendants:
            cheaper |= boundary(storage, above)
        for candidate in cheaper:
            self.on_decrease(candidate)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        self.restored(storage)

    def unlinking(self, storage: Storage) -> None:
        self.restored(storage)


def above(storage: Storage) -> list[Storage]:
    """The storages it is made from, some more than once. Written out, like `below`: searches do little else."""
    found: list[Storage] = []
    for value in storage.values:
        if value.operation is not None:
            for argument in value.operation.arguments:
                found.append(argument.storage)
    return found


def below(storage: Storage, stride: int = 1) -> list[Storage]:
    """The storages made from it, likewise; with a `stride`, from every so many operations that take a value."""
    found: list[Storage] = []
    for value in storage.values:
        users = value.users
        if isinstance(users, Operation):  # mostly
            _add_made(users, found)
        elif users is not None:
            for user in users if stride == 1 else islice(users, 0, None, stride):
                _add_made(user, found)
    return found


def _add_made(operation: Operation, found: list[Storage]) -> None:
    for output in operation.outputs:
        if output is not None:
            found.append(output.storage)


def stride_below(storage: Storage, most: int) -> int:
    """One, or more where more than `most` operations take a value on it: with that `below` finds a sample."""
    stride = 1
    for value in storage.values:
        users = value.users
        if isinstance(users, dict) and len(users) > most:
            stride = max(stride, len(users) // most + 1)
    return stride


def evicted_neighbours(storage: Storage) -> list[Storage]:
    """The evicted storages one operation away, some more than once."""
    near = above(storage) + below(storage)
    return [neighbour for neighbour in near if neighbour.dropped and neighbour is not storage]


def evicted_closure(storage: Storage, direction: Direction) -> set[Storage]:
    """The evicted storages in one direction, up to resident ones."""
    found: set[Storage] = set()
    path = [storage]
    for visited in path:  # grows
        for neighbour in direction(visited):
            if neighbour.dropped and neighbour not in found:
                found.add(neighbour)
                path.append(neighbour)
    found.discard(storage)
    return found


def fetches(storages: Iterable[Storage]) -> float:
    """Seconds to fetch, each once, what lies in tiers of all that the storages are made from."""
    found = {neighbour for storage in storages for neighbour in above(storage) if not neighbour.resident}
    return sum([fetch(neighbour) for neighbour in found if not neighbour.dropped], 0.0)


def fetch(storage: Storage) -> float:
    """Seconds to fetch a storage from the tier where it lies."""
    return sum([value.copy.seconds for value in storage.values if value.copy is not None], 0.0)


def boundary(storage: Storage, direction: Direction, most: float = inf) -> set[Storage]:
    """The resident storages where the evicted ones in one direction end. Stops after `most` evicted ones."""
    found: set[Storage] = set()
    seen = {storage}
    path = [storage]
    for visited in path:  # grows
        for neighbour in direction(visited):
            if neighbour.resident:
                found.add(neighbour)
            elif neighbour.dropped and neighbour not in seen:
                seen.add(neighbour)
                path.append(neighbour)
        if len(path) > most:
            break
    return found


class Component:
    """A node of the union-find; a root stands for an undirected connected component of evicted storages."""

    __slots__ = ("candidates", "compact_at", "cost", "lower_bound", "members", "parent", "weight")

    def __init__(self, cost: float = 0.0, members: int = 0) -> None:
        self.parent: Component | None = None
        self.weight = 1  # nodes below: union by size
        self.cost = cost  # seconds: of its members
        self.members = members
        self.lower_bound = 0.0
        self.candidates: set[Storage] = set()  # told when the cost falls below the lower bound
        self.compact_at = 16  # so many in the set: then those that are no candidates any more are dropped

    def root(self) -> Component:
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent  # path halving
            node = node.parent
        return node


_MARGIN: Final = 0.95
"""The lower bound of a component's cost, as a share of it.

Near one, candidates are scored again after each small decrease; far below, the search checks many in vain.
"""


class Components(Neighbourhood):
    """e~*: connected components of evicted storages by union-find, O(log* n) amortised a step.

    A union-find cannot split: a storage that comes back takes its cost along, and leaves its connections behind. These
    phantom connections are part of the published algorithm. Nothing is joined before the first cost is asked for, so a
    cache that never runs short pays nothing, and starts with the true components if it does.
    """

    __slots__ = ()

    def cost(self, candidate: Any) -> float:
        storage: Storage = candidate
        self.active = True
        total = 0.0
        for root in self._roots_around(storage):
            total += root.cost
        return total + fetches((storage,)) if self.tiers else total

    def lower_bound(self, candidate: Any) -> float:
        storage: Storage = candidate
        self.active = True
        total = 0.0
        for root in self._roots_around(storage):
            bound = root.cost * _MARGIN
            if bound > root.lower_bound:  # candidates scored with the old one are told a little early
                root.lower_bound = bound
            total += root.lower_bound
            candidates = root.candidates
            candidates.add(storage)
            if len(candidates) > root.compact_at:
                root.candidates = {candidate for candidate in candidates if candidate.slot >= 0}
                root.compact_at = 2 * len(root.candidates) + 16
        return total

    def _roots_around(self, storage: Storage) -> set[Component]:
        """The components next to a storage."""
        return {self.root(neighbour) for neighbour in evicted_neighbours(storage)}

    def root(self, storage: Storage) -> Component:
        """The component of an evicted storage."""
        component = storage.nearby
        if not isinstance(component, Component):
            component = self._join_around(storage)
        return component.root()

    def evicted(self, storage: Storage) -> None:
        own = self._enter(storage)
        for neighbour in evicted_neighbours(storage):
            other = self.root(neighbour)  # may join all that was evicted before the first question
            own = self._union(own.root(), other)

    def restored(self, storage: Storage) -> None:
        component = storage.nearby
        if isinstance(component, Component):
            root = component.root()
            storage.nearby = None
            root.members -= 1
            self._add_cost(root, -storage.cost)
            self.unlinking(storage)

    def unlinking(self, storage: Storage) -> None:
        for neighbour in above(storage) + below(storage):
            if neighbour.slot >= 0:  # a candidate, for which this may be the only link to the component
                self.on_decrease(neighbour)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        if isinstance(storage.nearby, Component):
            self._add_cost(storage.nearby.root(), change)

    def _add_cost(self, root: Component, change: float) -> None:
        root.cost = max(0.0, root.cost + change) if root.members else 0.0
        if root.cost < root.lower_bound or not root.members:
            root.lower_bound = 0.0
            candidates, root.candidates = root.candidates, set()  # scored again, they are entered again
            for candidate in candidates:
                self.on_decrease(candidate)

    def _enter(self, storage: Storage) -> Component:
        """A component of its own for an evicted storage."""
        component = storage.nearby = Component(storage.cost, members=1)
        return component

    def _union(self, a: Component, b: Component) -> Component:
        """Join two roots; the root of both."""
        if a is b:
            return a
        if a.weight < b.weight:
            a, b = b, a
        b.parent = a
        a.weight += b.weight
        a.cost += b.cost
        a.lower_bound += b.lower_bound
        a.members += b.members
        if len(a.candidates) < len(b.candidates):
            a.candidates, b.candidates = b.candidates, a.candidates
            a.compact_at = b.compact_at
        a.candidates |= b.candidates
        b.candidates = set()
        return a

    def _join_around(self, storage: Storage) -> Component:
        """The component of a storage that was evicted before the first question: a walk through all of it."""
        own = self._enter(storage)
        stack = [storage]
        while stack:
            for neighbour in evicted_neighbours(stack.pop()):
                component = neighbour.nearby
                if not isinstance(component, Component):
                    component = self._enter(neighbour)
                    stack.append(neighbour)
                own = self._union(own, component.root())
        return own
