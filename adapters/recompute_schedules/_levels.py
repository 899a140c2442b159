"""How many bytes are free, as levels: the second coordinate of the tables in which the least time is looked up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MOST: Final = 256
"""Levels of one storage: more are rounded to as many, which never exceeds the bytes that there are."""


@dataclass(frozen=True)
class Sizes:
    """Bytes: of the restart data of a step, of its adjoint dependencies, and of the storages for both."""

    state: int
    deps: int
    ram: int
    disk: int = 0

    @property
    def has_disk(self) -> bool:
        """Whether anything fits onto the disk."""
        return self.disk >= min(self.state, self.deps)


class Levels:
    """The bytes that may be free in RAM and on the disk: all pairs, or, if these are many, those of a hierarchy.

    There what lies on the disk is below what is in RAM on the stack of checkpoints, as in H-Revolve (Herrmann and
    Pallez, 2020): what is read seldom lies on the slow storage. So a level has all of RAM free, or no disk.
    """

    def __init__(self, sizes: Sizes, steps: int) -> None:
        """`steps`: no more checkpoints than steps are of use."""
        most = max(1, steps - 1) * max(sizes.state, sizes.deps)
        self._ram = _Ladder(min(sizes.ram, most), sizes)
        self._disk = _Ladder(min(sizes.disk, most) if sizes.has_disk else 0, sizes)
        rows, columns = len(self._ram.levels), len(self._disk.levels)
        self._is_hierarchy = rows * columns > _MOST
        pairs = [
            (row, column)
            for row in range(rows)
            for column in range(columns if not self._is_hierarchy or row == rows - 1 else 1)
        ]
        self._number = {pair: number for number, pair in enumerate(pairs)}
        self.count = len(pairs)
        """The last level has most free. Below zero: it does not fit."""
        self.state_in_ram = self._less(self._ram.state, 0)
        self.deps_in_ram = self._less(self._ram.deps, 0)
        self.state_on_disk = self._less(0, self._disk.state)
        self.deps_on_disk = self._less(0, self._disk.deps)

    def at(self, ram: int, disk: int) -> int:
        """The highest level with at most so many bytes free; -1: there is none."""
        row, column = self._ram.at(ram), self._disk.at(disk)
        if self._is_hierarchy and row < len(self._ram.levels) - 1:
            column = min(column, 0)
        return self._number.get((row, column), -1)

    def _less(self, ram: int, disk: int) -> NDArray[np.intp]:
        """Level -> the level after this was stored; -1: it does not fit."""
        free = [(self._ram.levels[row], self._disk.levels[column]) for row, column in self._number]
        return np.array([self.at(in_ram - ram, on_disk - disk) for in_ram, on_disk in free], dtype=np.intp)


class _Ladder:
    """The bytes of one storage that states and dependencies may leave free, in order."""

    def __init__(self, nbytes: int, sizes: Sizes) -> None:
        self.levels: Sequence[int] = []
        self.state, self.deps = sizes.state, sizes.deps
        free = {nbytes}
        new = [nbytes]
        while new and len(free) <= _MOST:
            new = [left for level in new for left in {level - self.state, level - self.deps} if left >= 0]
            new = [level for level in set(new) if level not in free]
            free.update(new)
        if len(free) <= _MOST:
            self.levels = sorted(free)
        else:
            unit = -(-nbytes // _MOST)
            self.state, self.deps = -(-self.state // unit) * unit, -(-self.deps // unit) * unit
            self.levels = range(0, nbytes + 1, unit)

    def at(self, nbytes: int) -> int:
        """The highest level of at most so many bytes; -1: there is none."""
        return bisect_right(self.levels, nbytes) - 1
