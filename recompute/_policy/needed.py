"""Which evicted values will be asked for again, and what it takes to bring them back.

A storage is needed when somebody outside refers to it, or when a needed evicted storage is made from it: that is the
dead rule. What is not needed costs nothing to lose, goes first, and does not make its neighbours dearer. The pressure
says how much of what is needed is already out; the scarcer memory is, the less a policy should trust the past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor, inf, sqrt
from typing import TYPE_CHECKING, Final

from recompute._engine.graph import Storage, Value
from recompute._policy.formulas import Neighbourhood as Name
from recompute._policy.neighbourhoods import Closure, Components, Fell, Neighbourhood, NoNeighbours

if TYPE_CHECKING:
    from recompute._engine.memory import Pool

_REACH: Final = 32
"""Evicted storages that one walk looks at; beyond them it leaps, over what was found when others went."""

_RIM: Final = 4

_STEPS: Final = 64
"""Pressure is known in so many steps, and never falls: all scores are new after each."""


Stretch = tuple[float, tuple[Storage, ...]]
"""Evicted storages on one side of another: their cost, and some of the resident ones at their far end."""


class Needs(Neighbourhood):
    """The cost at stake, w (above + below) + (1 - x) dead: x is the pressure, w = 1 - x / 2.

    above: the nearest evicted ancestors; below: the nearest needed evicted descendants; dead: the evicted storages made
    from it that nobody needs.
    """

    def __init__(self, fell: Fell) -> None:
        super().__init__(fell)
        self.asked = True  # who refers to what cannot be made up for later
        self._needing: dict[Storage, int] = {}  # storage -> needed evicted storages that are made from it
        self._counted: dict[Storage, tuple[Storage, ...]] = {}  # needed and evicted -> where it is counted in _needing
        self._out: dict[Storage, int] = {}  # evicted, but referred to -> bytes
        self._bytes_out: dict[Pool, int] = {}
        self._beyond: dict[Storage, tuple[Stretch, Stretch]] = {}  # evicted -> above and below it, when it went
        self._last: tuple[Storage, Stretch, Stretch] | None = None  # the newest answer
        self._questioned = False  # nobody reckons with a cost before the first question

    def prepare(self, pool: Pool) -> None:
        out = self._bytes_out.get(pool, 0)
        room = pool.limit - pool.sources - pool.pinned
        if out and room < inf:
            step = floor(_STEPS * sqrt(out / (out + max(1, room)))) / _STEPS
            if step > self.pressure:
                self.pressure = step

    def cost(self, storage: Storage) -> float:
        self._questioned = True
        return self._cost(storage)

    def floor(self, storage: Storage) -> float:
        """As it was when it was last asked for, if it has not fallen since: most of a search would be walks else."""
        stake = storage.stake
        if stake is None:
            return self.cost(storage)
        return (1 - self.pressure / 2) * stake[0] + (1 - self.pressure) * stake[1]

    def _cost(self, storage: Storage) -> float:
        above = self._above(storage)
        below, dead = self._below(storage)
        self._last = storage, above, below
        needed = above[0] + below[0]
        storage.stake = needed, dead
        return (1 - self.pressure / 2) * needed + (1 - self.pressure) * dead

    def superfluous(self, storage: Storage) -> bool:
        return storage not in self._needing and not referred(storage)

    def evicted(self, storage: Storage) -> None:
        if self._questioned:
            if self._last is None or self._last[0] is not storage:
                self._cost(storage)
            assert self._last is not None
            self._beyond[storage] = self._last[1:]
        storage.stake = None
        if referred(storage):
            self._out[storage] = storage.size
            self._bytes_out[storage.pool] = self._bytes_out.get(storage.pool, 0) + storage.size
            self._count(storage)
        elif storage in self._needing:
            self._count(storage)

    def restored(self, storage: Storage) -> None:
        self.unlinking(storage)
        self._no_longer_out(storage)
        self._discount(storage)
        self._beyond.pop(storage, None)

    def released(self, storage: Storage) -> None:
        if storage.resident:
            self._fell(storage)
            return
        self._no_longer_out(storage)
        if storage not in self._needing:
            self.unlinking(storage)
            self._discount(storage)

    def own_cost_changed(self, storage: Storage, change: float) -> None:
        if change < 0:
            self.unlinking(storage)

    def _fell(self, storage: Storage) -> None:
        storage.stake = None
        if storage.slot >= 0:
            self.fell(storage)

    def unlinking(self, storage: Storage) -> None:
        if not self._questioned:
            return
        storage.stake = None
        for direction in (Storage.neighbours_up, Storage.neighbours_down):
            for each in _rim(storage, direction):
                self._fell(each)

    def moving(self, value: Value) -> list[Storage]:
        outputs = [each for user in value.living_users() for each in user.outputs if each is not None]
        value.storage.stake = None
        users = [each for each in {output.storage for output in outputs} if each in self._counted]
        for each in users:
            self._discount(each)
        return users

    def moved(self, users: list[Storage]) -> None:
        for each in users:
            self._count(each)

    def restart(self, evicted: Iterable[Storage]) -> None:
        self._last = None
        for books in (self._needing, self._counted, self._out, self._bytes_out, self._beyond):
            books.clear()
        for each in evicted:
            self.evicted(each)

    def _no_longer_out(self, storage: Storage) -> None:
        size = self._out.pop(storage, 0)
        if size:
            self._bytes_out[storage.pool] -= size

    def _count(self, storage: Storage) -> None:
        """An evicted storage is needed: so are those that it is made from."""
        stack = [storage]
        while stack:
            each = stack.pop()
            if each in self._counted:
                continue
            above = self._counted[each] = tuple(set(each.neighbours_up()))
            for argument in above:
                self._needing[argument] = self._needing.get(argument, 0) + 1
                if not argument.resident:
                    stack.append(argument)

    def _discount(self, storage: Storage) -> None:
        """An evicted storage is no longer needed, or no longer evicted."""
        stack = [storage]
        while stack:
            for argument in self._counted.pop(stack.pop(), ()):
                left = self._needing[argument] - 1
                if left:
                    self._needing[argument] = left
                    continue
                del self._needing[argument]
                if argument.resident:
                    self._fell(argument)
                elif argument not in self._out:
                    stack.append(argument)

    def _above(self, storage: Storage) -> Stretch:
        """The own costs of the nearest evicted ancestors: loops written out, because a search mostly walks."""
        total = 0.0
        seen = {storage}
        near = [storage]
        rim: list[Storage] = []
        for each in near:  # grows
            for value in each.values:
                operation = value.operation
                if operation is not None:
                    for argument in operation.arguments:
                        other = argument.storage
                        if other not in seen:
                            seen.add(other)
                            if not other.resident:
                                total += other.cost
                                near.append(other)
                            elif argument.operation is not None:
                                rim.append(other)
            if len(near) > _REACH:
                return self._leap(0, total, near[near.index(each) + 1 :], seen)
        return total, tuple(rim[:_RIM])

    def _below(self, storage: Storage) -> tuple[Stretch, float]:
        """The own costs of the nearest needed evicted descendants, and of the dead storages made from it."""
        total = dead = 0.0
        counted = self._counted
        seen = {storage}
        near = [storage]
        rim: list[Storage] = []
        for each in near:  # grows
            for value in each.values:
                using = value.using
                if using is None:
                    continue
                for user in using if isinstance(using, list) else (using,):
                    for output in user.outputs:
                        if output is None or output.storage in seen:
                            continue
                        other = output.storage
                        seen.add(other)
                        if other.resident:
                            rim.append(other)
                        elif other in counted:
                            total += other.cost
                            near.append(other)
                        elif each is storage:
                            dead += other.cost
            if len(near) > _REACH:
                return self._leap(1, total, near[near.index(each) + 1 :], seen), dead
        return (total, tuple(rim[:_RIM])), dead

    def _leap(self, direction: int, total: float, near: Sequence[Storage], seen: set[Storage]) -> Stretch:
        """Go on from stretch to stretch, each as it was when its near end went, along the dearest where they meet."""
        rim: tuple[Storage, ...] = ()
        for _ in range(_REACH):
            stretches = [self._beyond[each][direction] for each in near if each in self._beyond]
            if not stretches:
                break
            cost, rim = max(stretches, key=_cost)
            total += cost
            near = [each for each in rim if not each.resident and each not in seen]
            seen.update(near)
            total += sum([each.cost for each in near])
        return total, rim


def _cost(stretch: Stretch) -> float:
    return stretch[0]


def referred(storage: Storage) -> bool:
    """Whether somebody outside refers to a value on it."""
    values = storage.values
    return values[0].refs > 0 if len(values) == 1 else any(each.refs for each in values)


def _rim(storage: Storage, direction: Callable[[Storage], Iterable[Storage]]) -> set[Storage]:
    """The resident storages whose walk may have come by."""
    seen = {storage}
    near = [storage]
    rim: set[Storage] = set()
    for each in near:  # grows
        for other in direction(each):
            if other.resident:
                rim.add(other)
            elif other not in seen:
                seen.add(other)
                near.append(other)
        if len(near) > _REACH:
            break
    return rim


NEIGHBOURHOODS: Final[dict[Name, Callable[[Fell], Neighbourhood]]] = {
    "none": NoNeighbours,
    "ancestors": lambda fell: Closure(fell, descendants=False),
    "exact": lambda fell: Closure(fell, descendants=True),
    "components": Components,
    "needed": Needs,
}
