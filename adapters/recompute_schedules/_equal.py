"""Steps that cost the same: the least time for any number of them and any bytes, by dynamic programming.

With one size for everything this is Griewank and Walther's revolve (ACM TOMS 26, 2000) where adjoint dependencies are
too large to be stored, and Maddison's mixed schedule (Journal of Computational Science 82, 2024) where they are not.
With a disk it is H-Revolve's (Herrmann and Pallez, ACM TOMS 46, 2020). Bytes instead of slots are the generalization.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from checkpoint_schedules import StorageType
from numpy.typing import NDArray

from recompute_schedules._levels import Levels, Sizes
from recompute_schedules._plan import Choice, Kind, Prices

Times = NDArray[np.float64]

_EXACT: Final = 1024
"""Steps up to which the table has every length; beyond, lengths that grow by 1/128, with lines between them."""


class EqualSteps:
    """A table of the least time for each length and level, made when first needed, in O(min(n, 1024)^2 x levels).

    Row: level; the last row is what does not fit. Column: a length. Time is in steps.
    """

    def __init__(self, steps: int, sizes: Sizes, prices: Prices) -> None:
        self.sizes = sizes
        self.levels = Levels(sizes, steps)
        self._prices = prices
        lengths = list(range(min(steps, _EXACT) + 1))
        while lengths[-1] < steps:
            lengths.append(min(steps, lengths[-1] + max(1, lengths[-1] // 128)))
        self._lengths = np.array(lengths)

    def choose(self, start: int, stop: int, ram: int, disk: int, kept: StorageType) -> Choice:
        """See `Plan`. O(steps)."""
        steps = stop - start
        if steps == 1:
            return Choice(Kind.LAST, stop)
        if (steps - 1) * self.sizes.deps <= ram:  # nothing runs twice
            return Choice(Kind.DEPS, start + 1, StorageType.RAM)
        level = self.levels.at(ram, disk)
        splits = self._splits(steps, len(self._lengths))
        tries = self._tries(splits, steps, np.array([level]), len(self._lengths))
        if kept is StorageType.DISK:
            tries.pop((Kind.STATE, StorageType.DISK), None)
        else:
            tries.pop((Kind.NOTHING, StorageType.DISK), None)
        kind, where = min(tries, key=lambda key: float(tries[key].min()))
        if kind is Kind.DEPS:
            return Choice(kind, start + 1, where)
        best = int(tries[kind, where][0].argmin())
        return Choice(kind, start + int(splits[best]), where)

    def time(self, steps: int, level: int) -> float:
        """The least time for so many steps."""
        return float(self._at(self._table[0], np.array([steps]), np.array([level]), len(self._lengths))[0, 0])

    @cached_property
    def _table(self) -> tuple[Times, Times]:
        """The least times from a state in working memory; and from one that is on the disk, too."""
        shape = (self.levels.count + 1, len(self._lengths))
        fresh, on_disk = np.full(shape, np.inf), np.full(shape, np.inf)
        fresh[:-1, 1] = on_disk[:-1, 1] = 1.0
        self.__dict__["_table"] = fresh, on_disk  # which is filled from the left
        every = np.arange(self.levels.count)
        for column in range(2, len(self._lengths)):
            steps = int(self._lengths[column])
            tries = self._tries(self._splits(steps, column), steps, every, column)
            back = tries.pop((Kind.NOTHING, StorageType.DISK), None)
            fresh[:-1, column] = np.min([times.min(1) for times in tries.values()], axis=0)
            on_disk[:-1, column] = fresh[:-1, column] if back is None else np.minimum(fresh[:-1, column], back.min(1))
        return fresh, on_disk

    def _splits(self, steps: int, known: int) -> NDArray[np.intp]:
        """How far to advance: all lengths, or those for which the table knows one of both parts."""
        if steps <= _EXACT:
            return np.arange(1, steps)
        lengths = self._lengths[1:known]
        lengths = lengths[lengths < steps]
        return np.unique(np.concatenate([lengths, steps - lengths]))

    def _tries(
        self, splits: NDArray[np.intp], steps: int, level: NDArray[np.intp], known: int
    ) -> dict[tuple[Kind, StorageType], Times]:
        """What could be done: the times it would take, a row for each level and a column for each split."""
        fresh, on_disk = self._table
        levels, prices = self.levels, self._prices
        tries = {}
        rest = steps - splits
        after = self._at(fresh, rest, levels.state_in_ram[level], known)
        tries[Kind.STATE, StorageType.RAM] = splits + self._at(fresh, splits, level, known) + after
        one = np.array([steps - 1])
        tries[Kind.DEPS, StorageType.RAM] = 1 + self._at(fresh, one, levels.deps_in_ram[level], known)
        if self.sizes.has_disk:
            after = self._at(fresh, rest, levels.state_on_disk[level], known)
            back = splits + after + prices.read_state + self._at(on_disk, splits, level, known)
            tries[Kind.NOTHING, StorageType.DISK] = back
            hidden = splits if prices.overlap else 0
            tries[Kind.STATE, StorageType.DISK] = back + np.maximum(0, prices.write_state - hidden)
            waits = max(0.0, prices.write_deps - int(prices.overlap)) + prices.read_deps
            tries[Kind.DEPS, StorageType.DISK] = 1 + waits + self._at(fresh, one, levels.deps_on_disk[level], known)
        return tries

    def _at(self, table: Times, steps: NDArray[np.intp], level: NDArray[np.intp], known: int) -> Times:
        """Entries for lengths of which the table knows that many, the first ones; between and beyond them on a line."""
        if steps[-1] < min(known, _EXACT + 1) and steps[0] < min(known, _EXACT + 1):
            if len(steps) > 1 and len(level) > 1:  # a slice is quicker than a choice of single entries
                down = steps[0] > steps[-1]
                part = table[:, steps[-1] : steps[0] + 1][:, ::-1] if down else table[:, steps[0] : steps[-1] + 1]
                return part[level]
            return table[np.ix_(level, steps)]
        lengths = self._lengths[:known]
        left = np.minimum(np.searchsorted(lengths, steps, side="right") - 1, known - 2)
        share = (steps - lengths[left]) / (lengths[left + 1] - lengths[left])
        below, above = table[np.ix_(level, left)], table[np.ix_(level, left + 1)]
        with np.errstate(invalid="ignore"):
            between = below + share * (above - below)
        return np.where(share == 0, below, np.where(np.isnan(between), np.inf, between))
