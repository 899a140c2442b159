"""What may leave memory: first what the script does not need for the time being, then what it needs last.

The first is a queue, so that memory that runs short costs no search. The second is for rounds that need more than the
script foresaw.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Iterable
from typing import Final

from recompute import extend
from recompute._foresight.alignment import Alignment
from recompute._foresight.script import Script
from recompute.extend import EVICTED, Node, Pool

_SMALL: Final = 1e-4
"""Of a memory: what is smaller stays while there is anything else, since the round may need it after all."""

_MOST: Final = 32
"""Storages that are looked at to tell what one costs to get back."""


class Spare:
    """The storages of a script, as one round has them."""

    def __init__(self, script: Script, alignment: Alignment, left_over: Iterable[Node]) -> None:
        self._script = script
        self._alignment = alignment
        self._free = bytearray(len(script.values))  # storage -> not needed for the time being
        self._queue: deque[int] = deque()  # such storages, the first one first
        self._small: deque[int] = deque()  # of these, what would make hardly any room
        self._left_over = [(storage, storage.last_access) for storage in left_over]
        self._gone: dict[int, None] = {}  # those of them that were evicted
        self._outliving: set[int] = set()  # storages whose memory stays when nobody refers to them
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
        """It was made, and will be needed when nobody refers to it any more."""
        value = self._value(storage)
        if value is not None and storage not in self._outliving and extend.outlive(value):
            self._outliving.add(storage)

    def keeps(self, storage: Node) -> bool:
        """Whether a storage of the cache will be needed to make something again."""
        places, nodes = self._alignment.places, self._alignment.nodes
        for value in storage.values:
            place = places.get(value.operation)
            operation = None if place is None or place < 0 else nodes[place]
            if place is not None and operation is not None:
                outputs = operation.outputs
                made = self._script.makes[place]
                number = outputs.index(value) if value in outputs else -1
                if 0 <= number < len(made) and made[number] in self._outliving and not self._free[made[number]]:
                    return True
        return False

    def victims(self, pool: Pool, size: int, place: int) -> list[Node]:
        """Storages to evict until `size` more bytes fit or there are no more, before an operation of the script."""
        short = pool.used - pool.departing + size - pool.limit
        found: dict[Node, None] = {}
        for source in (
            self._not_needed(pool, self._queue),
            self._from_before(pool),
            self._needed_last(pool, place),
            self._not_needed(pool, self._small),
        ):
            while short > 0 and (storage := next(source, None)) is not None:
                if storage not in found:
                    found[storage] = None
                    short -= storage.size
            source.close()
        return list(found)

    def _not_needed(self, pool: Pool, queue: deque[int]) -> Generator[Node]:
        """From the front of the queue."""
        least = 0.0 if queue is self._small else _SMALL * pool.limit
        locked: list[int] = []
        try:
            while queue:
                number = queue.popleft()
                storage = self._storage(number, pool)
                if storage is None or not self._free[number]:
                    continue
                if storage.locks:
                    locked.append(number)
                elif storage.size < least:
                    self._small.append(number)
                else:
                    self._gone[number] = None
                    yield storage
        finally:
            queue.extendleft(reversed(locked))

    def _from_before(self, pool: Pool) -> Generator[Node]:
        """What was there when the round began, and was not used since: first what nobody refers to."""
        there = [
            (storage.needed_outside, then, storage.number, storage)
            for storage, then in self._left_over
            if storage.resident and storage.pool is pool and storage.last_access == then and not storage.locks
        ]
        for _, _, _, storage in sorted(there):
            yield storage

    def _needed_last(self, pool: Pool, place: int) -> Generator[Node]:
        """What came back though the script does not need it; the rest by cost over size and time until its next use."""
        least = _SMALL * pool.limit
        for number in list(self._gone):  # another thread may change it meanwhile
            storage = self._storage(number, pool)
            if storage is not None and not storage.locks and storage.size >= least:
                yield storage
        scores: list[tuple[float, int, Node]] = []
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

    def _storage(self, number: int, pool: Pool) -> Node | None:
        """The storage of the cache that one of the script is now; None: it is not there, or not in this memory."""
        value = self._value(number)
        storage = None if value is None else value.storage
        return storage if storage is not None and storage.resident and storage.pool is pool else None

    def _value(self, number: int) -> Node | None:
        """A value in memory on a storage of the script; None: there is none."""
        nodes = self._alignment.nodes
        for place, output in self._script.values[number]:
            operation = nodes[place]
            if operation is not None and output < len(operation.outputs):
                value = operation.outputs[output]
                if value is not None and value.payload is not EVICTED:
                    return value
        return None


def _cost(storage: Node) -> float:
    """Seconds to get a storage back: its own, and of the evicted ones that it is made from, `_MOST` at most."""
    seen = {storage}
    todo = [storage]
    for each in todo:
        for other in each.neighbours_up():
            if not other.resident and other not in seen and len(todo) < _MOST:
                seen.add(other)
                todo.append(other)
    return sum([each.cost for each in todo])
