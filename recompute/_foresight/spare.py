"""What may leave memory: first what is not needed for the time being, then what may be needed later, or is needed last.

The first is a queue, so that memory that runs short costs no search. The second is what the program holds beyond its
last use in the script: a part of it that is not in the script may need it. The third is for rounds that need more than
the script foresaw.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Final

from recompute import extend
from recompute._foresight.script import Alignment, Script
from recompute.extend import EVICTED, Pool, Storage, Value

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
        self._free = bytearray(len(script.values))  # storage -> not needed for the time being
        self._queue: deque[int] = deque()  # such storages, the first one first
        self._small: deque[int] = deque()  # of these, what would make hardly any room
        there = [(self._is_wanted(storage), storage.last_access, storage.number, storage) for storage in left_over]
        self._later = deque([(storage, then, -1) for _, then, _, storage in sorted(there)])
        """What may be needed after all: the storage, its last access, and its number if the script has it."""
        self._gone: dict[int, None] = {}  # those of them that were evicted
        self._outliving: set[int] = set()  # storages whose memory stays without references
        self._needed: dict[int, None] = {}  # storages that were made and are not free

    def need(self, storage: int) -> None:
        """It is made now, or again."""
        self._free[storage] = 0
        self._needed[storage] = None
        self._gone.pop(storage, None)

    def let_go(self, storage: int) -> None:
        """It is not needed for the time being."""
        self._free[storage] = 1
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
                if 0 <= number < len(made) and made[number] in self._outliving and not self._free[made[number]]:
                    return True
        return False

    def victims(self, pool: Pool, size: int, place: int) -> list[Storage]:
        """Storages to evict until `size` more bytes fit or there are no more, before an operation of the script."""
        short = pool.used - pool.departing + size - pool.limit
        found: dict[Storage, None] = {}
        for source in (
            self._not_needed(pool, self._queue, place),
            self._needed_later(pool),
            self._needed_last(pool, place),
            self._not_needed(pool, self._small, place),
        ):
            while short > 0 and (storage := next(source, None)) is not None:
                if storage not in found:
                    found[storage] = None
                    short -= storage.size
            source.close()
        return list(found)

    def _not_needed(self, pool: Pool, queue: deque[int], place: int) -> Generator[Storage]:
        """From the front of the queue, but for what the program still holds after the last use that is known."""
        first, least = queue is self._queue, _SMALL * pool.limit
        locked: list[int] = []
        try:
            while queue:
                number = queue.popleft()
                storage = self._storage(number, pool)
                if storage is None or not self._free[number]:
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
