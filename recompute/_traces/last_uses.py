"""When values are used for the last time, in a sequence of runs that may repeat."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TypeVar

V = TypeVar("V", bound=Hashable)


def last_uses(runs: Sequence[tuple[Collection[V], Collection[V]]], lasting: Iterable[V]) -> list[list[V]]:
    """For each run, the values that nothing needs once it is over.

    A run is (what it makes, what it reads). A value is needed up to the last run that reads it before it is made again,
    if it is; what is `lasting`, after the last run, too. What nothing reads goes with the run that makes it. So does,
    after its last use, what is read and never made: count sources as lasting if they stay. What a run makes comes
    before what it reads, each value once. O(what all runs make and read).
    """
    needed = set(lasting)
    dying: list[list[V]] = []
    for makes, reads in reversed(runs):
        dying.append([value for value in dict.fromkeys((*makes, *reads)) if value not in needed])
        needed.difference_update(makes)
        needed.update(reads)
    dying.reverse()
    return dying
