"""Joins, run: an array is made empty, and then filled from one block after another.

Each step is an operation of the cache, which takes the array and one block, writes into the array, and returns it: a
view of the same memory. Nothing else ever needs the array as it was before a step. If its memory is evicted, all steps
run again, on a new array, in the same order; and only the block that is needed next has to be there.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

import recompute as rc
from recompute.extend import node_of
from recompute_dask._opened import Join, Part, Span
from recompute_dask._payloads import protected
from recompute_dask._recipe import Held, made


class UnlikeMetadata(Exception):
    """A block has another type or shape than the metadata say: then the task is run as it is."""


def joined(cache: rc.Cache, join: Join, data: Mapping[Any, Any]) -> Held:
    """The array that a join puts together. `data`: what the task takes, by key.

    Raises UnlikeMetadata if that is not known to be the same as what the task itself returns.
    """
    by_source: dict[Hashable, list[Part]] = {}
    for part in join.parts:
        by_source.setdefault(part.source, []).append(part)
    for source in by_source:
        if not isinstance(data[source], Held) and type(data[source]) is not np.ndarray:
            raise UnlikeMetadata
    place = (joined.__code__, 0)  # no frame: with a name in itself it would hold what is in it
    (array,) = cache.extend.run(_Empty(join), (), (), place, handle=Held)
    for source in sorted(by_source, key=lambda source: isinstance(data[source], Held) and not data[source].resident):
        block = data[source]
        fill = _Fill(join, by_source[source], source, None if isinstance(block, Held) else protected(block))
        nodes = (node_of(array), node_of(block)) if isinstance(block, Held) else (node_of(array),)
        (array,) = cache.extend.run(fill, nodes, nodes, place, handle=Held)
    held = [data[source] for source in by_source if isinstance(data[source], Held)]
    result: Held = made(array, held, writable=True, unique=False)
    return result


class _Empty:
    """Makes the array."""

    __name__ = "join"

    def __init__(self, join: Join) -> None:
        self._join = join

    def size_key(self) -> Hashable:
        """The size is known."""
        return _Empty, self._join.nbytes

    def expect(self, device: str) -> list[tuple[str, int]]:
        """Bytes of the result."""
        return [(device, self._join.nbytes)]

    def __call__(self) -> Any:
        return protected(_first(np.empty(self._join.memory, self._join.block.dtype), self._join.block.shape))


class _Fill:
    """Writes parts of one block into the array."""

    __name__ = "join"

    def __init__(self, join: Join, parts: list[Part], source: Hashable, plain: Any) -> None:
        self._dtype = join.block.dtype
        self._shape = join.sources[source].shape
        self._parts = parts
        self._plain = plain
        """The block, if it is no matter of the cache."""

    def size_key(self) -> Hashable:
        """The result has no memory of its own."""
        return _Fill, len(self._parts)

    def expect(self, device: str) -> list[tuple[str, int]]:
        """Nothing."""
        return []

    def __call__(self, array: Any, block: Any = None) -> Any:
        if self._plain is not None:
            block = self._plain
        if type(block) is not np.ndarray or block.shape != self._shape or block.dtype != self._dtype:
            raise UnlikeMetadata
        owner = array if array.base is None else array.base
        owner.flags.writeable = True
        for part in self._parts:
            owner[_slices(part.place)] = block[_slices(part.cut)]
        return protected(_first(owner, array.shape))


def _first(memory: Any, shape: tuple[int, ...]) -> Any:
    """The first elements along each axis."""
    return memory[tuple(map(slice, shape))]


def _slices(span: Span) -> tuple[slice, ...]:
    return tuple([slice(along.start, along.stop if along.stop >= 0 else None, along.step) for along in span])
