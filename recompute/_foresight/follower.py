"""Following a script while the program runs: what it says is advice, and the engine decides as ever if it is wrong.

Before an operation runs for the first time, what the script runs again before it is brought back, and what is not
needed for the time being is put in a queue. Memory that runs short takes from this queue: no search, no scores. Then
goes what the program holds beyond its last use in the script: a part of it that is not in the script may need it. What
is needed last goes in rounds that need more than the script foresaw.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Final

from recompute import extend
from recompute._foresight.script import Alignment, Script
from recompute.extend import EVICTED, Operation, Pool, Storage, Value

_LOST: Final = 6.0
"""Operations that did not come next, of which each one that did makes a twentieth forgotten, after which it is lost."""

_LONGER: Final = 1000
"""Operations that did not come next, besides as many as the script has, after which it is lost, whichever they are."""


class Follower:
    """One round of a program, beside the script that was made of an earlier one. It is the engine's `Advice`."""

    def __init__(
        self,
        script: Script,
        bring: Callable[[Value], float],
        resident: Iterable[Storage],
        wanted: Callable[[Storage], bool] = lambda storage: False,
    ) -> None:
        self.script = script
        self.lost = ""
        """Why it is followed no more."""
        self._bring = bring
        self._alignment = alignment = Alignment(script)
        self._spare = Spare(script, alignment, resident, wanted)
        self._place = 0  # the operation of the script before which everything was done
        self._acted = 0  # acts in front of that one that were done already
        self._again: dict[int, float] = {}  # operation -> seconds that it took when it ran again
        self._misses = 0.0
        self._others = 0  # operations that made something of another size
        self._last: Operation | None = None  # the operation before, if it was the one that came next

    @property
    def differs(self) -> bool:
        """Whether the round is another one so far: an operation did not come next, or made something else."""
        return self._alignment.unknown > 0 or self._others > 0

    @property
    def planned(self) -> float:
        """Seconds that the script has repeated by now."""
        return self.script.spent[min(self._place, len(self.script.spent) - 1)]

    def begins(self, operation: Operation) -> None:
        """An operation is about to run for the first time: without the lock."""
        if self.lost:
            return
        script, last = self.script, self._last
        if last is not None:
            for storage in script.outlives[self._place - 1]:
                self._spare.outlive(storage)
        made = None if last is None else _own_storage(last)
        if last is not None and made is not None and made.size != script.sizes[self._place - 1]:
            self._others += 1
            self._miss(f"{last.name} made {made.size} bytes, not {script.sizes[self._place - 1]} as before")
        place = self._alignment.find(operation)
        if place < 0:
            self._last = None
            if self._alignment.places[operation] < 0:
                self._miss(f"{operation.name} is not what came next before")
            elif self._alignment.unknown > _LONGER + len(script.calls):
                self.lost = "the round is much longer than before"
            return
        if self._misses:
            self._misses *= 0.95
        for storage in script.makes[place]:
            self._spare.need(storage)
        if place < self._place:  # it comes late
            self._last = None
            return
        while self._place < place:  # left out
            self._act(self._place)
            self._place += 1
            self._acted = 0
        self._act(place)
        self._place = place + 1
        self._acted = 0
        self._last = operation
        for act, storage, _ in script.acts[place + 1]:  # what it takes for the last time can go as soon as it has run
            if act != "free" or storage in script.makes[place]:
                break
            self._spare.free(storage)
            self._acted += 1

    def _miss(self, why: str) -> None:
        self._misses += 1.0
        if self._misses > _LOST:
            self.lost = why

    def wants(self, value: Value) -> None:
        """An evicted value is about to be got: do what the script does before that, if it knows of it."""
        place = self._alignment.places.get(value.operation)
        if self.lost or place is None or place < 0 or self._place >= len(self.script.acts):
            return
        operation = self._alignment.nodes[place]
        if operation is None or value not in operation.outputs:
            return
        got = ("get", place, (operation.outputs.index(value),))
        acts = self.script.acts[self._place]
        if got in acts[self._acted :]:
            until = acts.index(got, self._acted) + 1
            self._act(self._place, until)
            self._acted = until

    def costs(self) -> list[float | None]:
        """Seconds that another run of each operation would take, as this round has it; None: it was not run.

        What ran again is known; others take longer than the first time by the same ratio.
        """
        nodes = self._alignment.nodes
        once = sum([node.c0 for place in self._again if (node := nodes[place]) is not None])
        ratio = sum(self._again.values()) / once if once else 1.0
        return [None if node is None else self._again.get(place, ratio * node.c0) for place, node in enumerate(nodes)]

    def _act(self, place: int, until: int | None = None) -> None:
        """Do what the script does before an operation, or the first so many acts of that."""
        acts = self.script.acts[place]
        if len(acts) == self._acted:
            return
        for act, which, outputs in acts[self._acted : until]:
            if self.lost:
                return
            if act == "free":
                self._spare.free(which)
            elif act == "again":
                self._run_again(which, outputs)

    def _run_again(self, place: int, wanted: tuple[int, ...]) -> None:
        made = self.script.makes[place]
        operation = self._alignment.nodes[place]
        if operation is not None:
            outputs = operation.outputs
            for output in wanted:
                value = outputs[output] if output < len(outputs) else None
                if value is not None and value.payload is EVICTED and not self._brought(place, value):
                    return
        for output in wanted:
            self._spare.need(made[output])  # not before: a copy that is there still may make room

    def _brought(self, place: int, value: Value) -> bool:
        """Whether a value could be made again; if not, the program will learn why: BudgetError is one reason."""
        for last in (False, False, True):  # its arguments may have been dropped meanwhile, and another try succeeds
            try:
                self._again[place] = self._bring(value)
                return True
            except Exception as error:
                if extend.is_interrupt(error):
                    raise
                if last:
                    what = "a source" if value.operation is None else value.operation.name
                    self.lost = f"{what} could not run again: {type(error).__name__}"
        return False

    # What the engine asks, under its lock

    def victims(self, pool: Pool, size: int) -> list[Storage]:
        """Storages to evict until `size` more bytes fit: what is not needed for the time being, or is needed last."""
        return self._spare.victims(pool, size, self._place)

    def keeps(self, storage: Storage) -> bool:
        """Whether a storage without references will be needed to make something again."""
        return not self.lost and self._spare.keeps(storage)


def _own_storage(operation: Operation) -> Storage | None:
    """What it made, if that is one value on memory of its own."""
    outputs = operation.outputs
    storage = outputs[0].storage if len(outputs) == 1 and outputs[0] is not None else None
    return storage if storage is not None and storage.number == operation.number else None


_SMALL: Final = 1e-4
"""Of a memory: what is smaller stays while there is anything else, since the round may need it after all."""

_MOST: Final = 32
"""Storages that are looked at to tell what one costs to get back."""


_WINDOW: Final = 32
"""Storages that may be needed later, of which the cheapest one goes next."""


class Spare:
    """The storages of a script, as one round has them."""

    def __init__(
        self,
        script: Script,
        alignment: Alignment,
        left_over: Iterable[Storage],
        wanted: Callable[[Storage], bool],
    ) -> None:
        self._script = script
        self._wanted = wanted  # whether something evicted that is needed is made from it
        self._alignment = alignment
        self._is_free = bytearray(len(script.values))  # storage -> not needed for the time being
        self._queue: deque[int] = deque()  # such storages, the first one first
        self._small: deque[int] = deque()  # of these, what would make hardly any room
        ages = [(self._is_wanted(storage), storage.last_access, storage.number, storage) for storage in left_over]
        self._later = deque([(storage, then, -1) for _, then, _, storage in sorted(ages)])
        """What may be needed after all: the storage, its last access, and its number if the script has it."""
        self._gone: dict[int, None] = {}  # those of them that were evicted
        self._outliving: set[int] = set()  # storages whose memory stays without references
        self._needed: dict[int, None] = {}  # storages that were made and are not free

    def need(self, storage: int) -> None:
        """It is made now, or again."""
        self._is_free[storage] = 0
        self._needed[storage] = None
        self._gone.pop(storage, None)

    def free(self, storage: int) -> None:
        """It is not needed for the time being."""
        self._is_free[storage] = 1
        self._needed.pop(storage, None)
        self._queue.append(storage)

    def outlive(self, storage: int) -> None:
        """It was made, and will be needed without references."""
        value = self._value(storage)
        if value is not None and storage not in self._outliving and extend.outlive(value):
            self._outliving.add(storage)

    def keeps(self, storage: Storage) -> bool:
        """Whether a storage of the cache will be needed to make something again; of an older round the cache knows."""
        places, nodes = self._alignment.places, self._alignment.nodes
        for value in storage.values:
            place = places.get(value.operation)
            if place is None:
                return self._wanted(storage)
            operation = None if place < 0 else nodes[place]
            if operation is not None:
                outputs = operation.outputs
                made = self._script.makes[place]
                number = outputs.index(value) if value in outputs else -1
                if 0 <= number < len(made) and made[number] in self._outliving and not self._is_free[made[number]]:
                    return True
        return False

    def victims(self, pool: Pool, size: int, place: int) -> list[Storage]:
        """Storages to evict until `size` more bytes fit or there are no more, before an operation of the script."""
        short = pool.used - pool.departing + size - pool.limit
        victims: dict[Storage, None] = {}
        for source in (
            self._not_needed(pool, self._queue, place),
            self._needed_later(pool),
            self._needed_last(pool, place),
            self._not_needed(pool, self._small, place),
        ):
            while short > 0 and (storage := next(source, None)) is not None:
                if storage not in victims:
                    victims[storage] = None
                    short -= storage.size
            source.close()
        return list(victims)

    def _not_needed(self, pool: Pool, queue: deque[int], place: int) -> Generator[Storage]:
        """From the front of the queue, but for what the program still holds after the last use that is known."""
        first, least = queue is self._queue, _SMALL * pool.limit
        locked: list[int] = []
        try:
            while queue:
                number = queue.popleft()
                storage = self._storage(number, pool)
                if storage is None or not self._is_free[number]:
                    continue
                if storage.locks:
                    locked.append(number)
                elif first and storage.size < least:
                    self._small.append(number)
                elif first and storage.needed_outside() and not self._is_used_from(place, number):
                    self._later.append((storage, storage.last_access, number))
                else:
                    self._gone[number] = None
                    yield storage
        finally:
            queue.extendleft(reversed(locked))

    def _needed_later(self, pool: Pool) -> Generator[Storage]:
        """What may be needed after all and was not used since: of the oldest ones, what costs least for its size."""
        later = self._later
        window: list[tuple[float, float, int, int, Storage]] = []
        others: list[tuple[Storage, float, int]] = []
        try:
            while True:
                while later and len(window) < _WINDOW:
                    storage, then, number = later.popleft()
                    if not storage.resident or storage.last_access != then:
                        continue
                    if storage.locks or storage.pool is not pool:
                        others.append((storage, then, number))
                    else:
                        cost = _cost(storage) / max(1, storage.size) if self._is_wanted(storage) else 0.0
                        window.append((cost, then, storage.number, number, storage))
                if not window:
                    return
                window.sort()
                *_, number, storage = window.pop(0)
                if number >= 0:
                    self._gone[number] = None
                yield storage
        finally:
            others += [(storage, then, number) for _, then, _, number, storage in window]
            later.extendleft(sorted(others, key=_age, reverse=True))

    def _is_wanted(self, storage: Storage) -> bool:
        return storage.needed_outside() or self._wanted(storage)

    def _needed_last(self, pool: Pool, place: int) -> Generator[Storage]:
        """What came back though the script does not need it; the rest by cost over size and time until its next use."""
        least = _SMALL * pool.limit
        for number in list(self._gone):  # another thread may change it meanwhile
            storage = self._storage(number, pool)
            if storage is not None and not storage.locks and storage.size >= least:
                yield storage
        scores: list[tuple[float, int, Storage]] = []
        for number in list(self._needed):
            storage = self._storage(number, pool)
            if storage is not None and not storage.locks and storage.size >= least:
                uses = self._script.uses[number]
                at = bisect_left(uses, place)
                distance = (uses[at] if at < len(uses) else len(self._script.calls)) - place + 1
                scores.append((_cost(storage) / (storage.size * distance), number, storage))
        scores.sort()
        for _, _, storage in scores:
            yield storage

    def _is_used_from(self, place: int, number: int) -> bool:
        """Whether the script uses a storage from an operation on."""
        uses = self._script.uses[number]
        return bool(uses) and uses[-1] >= place

    def _storage(self, number: int, pool: Pool) -> Storage | None:
        """The storage of the cache that one of the script is now; None: it is not there, or not in this memory."""
        value = self._value(number)
        storage = None if value is None else value.storage
        return storage if storage is not None and storage.resident and storage.pool is pool else None

    def _value(self, number: int) -> Value | None:
        """A value in memory on a storage of the script; None: there is none."""
        nodes = self._alignment.nodes
        for place, output in self._script.values[number]:
            operation = nodes[place]
            if operation is not None and output < len(operation.outputs):
                value = operation.outputs[output]
                if value is not None and value.payload is not EVICTED:
                    return value
        return None


def _age(entry: tuple[Storage, float, int]) -> tuple[float, int]:
    storage, then, _ = entry
    return then, storage.number


def _cost(storage: Storage) -> float:
    """Seconds to get a storage back: its own, and of the evicted ones that it is made from, `_MOST` at most."""
    seen = {storage}
    todo = [storage]
    for storage in todo:
        for other in storage.neighbours_up():
            if not other.resident and other not in seen and len(todo) < _MOST:
                seen.add(other)
                todo.append(other)
    return sum([storage.cost for storage in todo])
