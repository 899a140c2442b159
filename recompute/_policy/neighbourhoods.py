"""The evicted neighbourhood of a storage: the compute that losing it would put at stake (Kirisame et al., section 4.1).

Four answers of rising price: nothing, the exact evicted ancestors, the exact neighbourhood e* (ancestors and
descendants), and its approximation by connected components in a union-find forest.

A neighbourhood that grows makes candidates dearer, which a search may notice late: it checks a candidate's cost before
it believes in it. One that shrinks makes them cheaper, and the search must hear of it: that is `fell`. So that not each
little fall makes the search look at everything again, it may reckon with a `floor` below the cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from recompute._engine.graph import Storage, Value

if TYPE_CHECKING:
    from recompute._engine.memory import Pool

_FLOOR: Final = 0.95
"""Of a component's cost: what its watchers reckon with, so that it may fall by a twentieth before they hear of it.

Nearer to one they are told, and scored anew, at each little fall; far below, the search checks many for nothing.
"""

Fell = Callable[[Storage], None]


class Neighbourhood(ABC):
    """Told of every change of residency; answers what surrounds a resident storage."""

    def __init__(self, fell: Fell) -> None:
        self.fell = fell
        self.asked = False  # nobody needs to be told before the first question
        self.pressure = 0.0  # from 0 to 1, in steps; where it matters, all costs are new after a step

    def prepare(self, pool: Pool) -> None:
        """Before a choice in `pool`: see how short memory is."""

    def superfluous(self, storage: Storage) -> bool:
        """Whether losing a resident storage costs nothing, as far as can be seen."""
        return False

    @abstractmethod
    def cost(self, storage: Storage) -> float:
        """Seconds of compute in the evicted neighbourhood of a resident storage."""

    def floor(self, storage: Storage) -> float:
        """A cost that the neighbourhood does not fall below without `fell` being told."""
        return self.cost(storage)

    def evicted(self, storage: Storage) -> None:
        """`storage` has just been evicted."""

    def restored(self, storage: Storage) -> None:
        """`storage`, evicted until now, becomes resident or is forgotten; its links are still there."""

    def released(self, storage: Storage) -> None:
        """Nobody outside refers to `storage` any more."""

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        """The own cost of an evicted `storage` has changed."""

    def unlinking(self, storage: Storage) -> None:
        """An evicted `storage` is about to lose a value, and the links that came with it."""

    def moving(self, value: Value) -> list[Storage]:
        """`value` is about to live on another storage; what `moved` must be told then."""
        return []

    def moved(self, users: list[Storage]) -> None:
        """It does."""

    def restart(self, evicted: Iterable[Storage]) -> None:
        """All that was known is void: these are the evicted storages."""


class NoNeighbours(Neighbourhood):
    """For policies that look at the storage alone."""

    def cost(self, storage: Storage) -> float:
        return 0.0


class Closure(Neighbourhood):
    """Exact sets, walked when asked for: O(size of the neighbourhood) a question."""

    def __init__(self, fell: Fell, descendants: bool) -> None:
        super().__init__(fell)
        self.descendants = descendants

    def cost(self, storage: Storage) -> float:
        self.asked = True
        evicted = evicted_above(storage)
        if self.descendants:
            evicted |= evicted_below(storage)
        return sum([each.cost for each in evicted])

    def restored(self, storage: Storage) -> None:
        directions = [Storage.neighbours_down]
        if self.descendants:
            directions.append(Storage.neighbours_up)
        for direction in directions:
            for each in closure(storage, direction):
                if each.resident:
                    self.fell(each)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        self.restored(storage)

    def unlinking(self, storage: Storage) -> None:
        self.restored(storage)


def evicted_above(storage: Storage) -> set[Storage]:
    """What it is made from, through evicted storages: loops written out, because exact policies do little else."""
    found: set[Storage] = set()
    stack = [storage]
    while stack:
        for value in stack.pop().values:
            operation = value.operation
            if operation is not None:
                for argument in operation.arguments:
                    each = argument.storage
                    if not each.resident and each not in found:
                        found.add(each)
                        stack.append(each)
    found.discard(storage)
    return found


def evicted_below(storage: Storage) -> set[Storage]:
    """What is made from it, through evicted storages."""
    found: set[Storage] = set()
    stack = [storage]
    while stack:
        for value in stack.pop().values:
            using = value.using
            if using is None:
                continue
            for user in using if isinstance(using, list) else (using,):
                for output in user.outputs:
                    if output is not None:
                        each = output.storage
                        if not each.resident and each not in found:
                            found.add(each)
                            stack.append(each)
    found.discard(storage)
    return found


def closure(storage: Storage, direction: Callable[[Storage], Iterator[Storage]]) -> set[Storage]:
    """What is reached from `storage` in one direction through evicted storages, and the resident ones at the rim."""
    seen: set[Storage] = set()
    stack = [storage]
    while stack:
        for each in direction(stack.pop()):
            if each not in seen and each is not storage:
                seen.add(each)
                if not each.resident:
                    stack.append(each)
    return seen


class Component:
    """A node of the union-find forest; a root stands for an undirected component of evicted storages."""

    __slots__ = ("cost", "floor", "members", "parent", "prune_at", "watchers", "weight")

    def __init__(self) -> None:
        self.parent: Component | None = None
        self.cost = 0.0  # seconds: the own costs of its members
        self.floor = 0.0  # what the watchers reckon with: told when the cost falls below it
        self.members = 0
        self.weight = 1  # nodes below: union by size
        self.watchers: set[Storage] = set()  # the candidates whose known score rests on the floor
        self.prune_at = 16

    def root(self) -> Component:
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent  # path halving
            node = node.parent
        return node


class Components(Neighbourhood):
    """e~*: connected components by union-find, O(log* n) amortised a step.

    Union-find cannot split, so a storage that comes back takes its cost with it and leaves its connections behind:
    the phantom connections of the published algorithm. Nothing is joined before the first question: a
    cache that never runs short pays nothing, and starts from the true components when it does.
    """

    def cost(self, storage: Storage) -> float:
        self.asked = True
        total = 0.0
        for root in self._roots(storage):
            total += root.cost
        return total

    def floor(self, storage: Storage) -> float:
        self.asked = True
        total = 0.0
        for root in self._roots(storage):
            floor = root.cost * _FLOOR
            if floor > root.floor:  # who reckons with less hears of a fall earlier than need be
                root.floor = floor
            total += root.floor
            watchers = root.watchers
            watchers.add(storage)
            if len(watchers) > root.prune_at:  # forget those that are no candidates any more
                root.watchers = {each for each in watchers if each.slot >= 0}
                root.prune_at = 2 * len(root.watchers) + 16
        return total

    def _roots(self, storage: Storage) -> set[Component]:
        """The components next to a storage: loops written out, because most of a search is spent here."""
        roots: set[Component] = set()
        for value in storage.values:
            operation = value.operation
            if operation is not None:
                for argument in operation.arguments:
                    each = argument.storage
                    if not each.resident and each is not storage:
                        component = each.component
                        if component is None or component.parent is not None:
                            component = self.root(each)
                        roots.add(component)
            using = value.using
            if using is not None:
                for user in using if isinstance(using, list) else (using,):
                    for output in user.outputs:
                        if output is not None:
                            each = output.storage
                            if not each.resident and each is not storage:
                                component = each.component
                                if component is None or component.parent is not None:
                                    component = self.root(each)
                                roots.add(component)
        return roots

    def root(self, storage: Storage) -> Component:
        """The component of an evicted storage."""
        if storage.component is None:
            self._explore(storage)
        assert storage.component is not None
        return storage.component.root()

    def evicted(self, storage: Storage) -> None:
        own = self._enter(storage)
        for each in evicted_neighbours(storage):
            other = self.root(each)  # which may join what was evicted before the first question, this storage included
            own = self._union(own.root(), other.root())

    def restored(self, storage: Storage) -> None:
        if storage.component is not None:
            root = storage.component.root()
            storage.component = None
            root.members -= 1
            self._change(root, -storage.cost)
            self.unlinking(storage)

    def unlinking(self, storage: Storage) -> None:
        for each in (*storage.neighbours_up(), *storage.neighbours_down()):
            if each.slot >= 0:  # a candidate, which may have no other link to the component
                self.fell(each)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        if storage.component is not None:
            self._change(storage.component.root(), change)

    def _change(self, root: Component, change: float) -> None:
        root.cost = max(0.0, root.cost + change) if root.members else 0.0
        if root.cost < root.floor or not root.members:
            root.floor = 0.0
            watchers, root.watchers = root.watchers, set()  # who is scored again will watch again
            for each in watchers:
                self.fell(each)

    def _enter(self, storage: Storage) -> Component:
        component = storage.component = Component()
        component.cost = storage.cost
        component.members = 1
        return component

    def _union(self, a: Component, b: Component) -> Component:
        if a is b:
            return a
        if a.weight < b.weight:
            a, b = b, a
        b.parent = a
        a.weight += b.weight
        a.cost += b.cost
        a.floor += b.floor
        a.members += b.members
        if len(a.watchers) < len(b.watchers):
            a.watchers, b.watchers = b.watchers, a.watchers
            a.prune_at = b.prune_at
        a.watchers |= b.watchers
        b.watchers = set()
        return a

    def _explore(self, storage: Storage) -> None:
        """Join what was evicted before the first question."""
        own = self._enter(storage)
        stack = [storage]
        while stack:
            for each in evicted_neighbours(stack.pop()):
                if each.component is None:
                    self._enter(each)
                    stack.append(each)
                assert each.component is not None
                own = self._union(own, each.component.root())


def evicted_neighbours(storage: Storage) -> Iterator[Storage]:
    """The evicted storages next to `storage`, some of them more than once."""
    for each in storage.neighbours_up():
        if not each.resident:
            yield each
    for each in storage.neighbours_down():
        if not each.resident:
            yield each
