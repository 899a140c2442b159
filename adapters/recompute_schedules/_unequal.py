"""Steps that differ in cost: the least time to reverse any range of them within any bytes, by dynamic programming.

Griewank and Walther (Evaluating Derivatives, chapter 12) reverse a chain of unequal steps so, with slots; here with
bytes, with adjoint dependencies that may be stored, and with a disk. Many steps are taken together in blocks, inside of
which they count as equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import inf
from typing import Final

import numpy as np
from checkpoint_schedules import StorageType
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from recompute_schedules._equal import EqualSteps
from recompute_schedules._levels import Sizes
from recompute_schedules._plan import Choice, Kind, Prices

Times = NDArray[np.float32]

_ENTRIES: Final = 6_000_000
"""Of the table, twice, at 4 bytes each."""
_WORK: Final = 1_000_000_000
"""Additions to fill it: some seconds."""
_ROWS: Final = 16_000
"""Calls to fill it, each for all ranges of one length at one level."""


class UnequalSteps:
    """A table of the least time for each range of blocks and each level.

    Made when it is first needed, in O(blocks^3 x levels) and a few seconds at most. Up to some 500 steps with few
    checkpoints, or 250 with many, each step is a block.
    """

    def __init__(self, seconds: Sequence[float], sizes: Sizes, prices: Prices, states: Iterable[int] = ()) -> None:
        """`seconds`: of each step. `states`: steps whose restart data are there already, where blocks have to begin."""
        steps = count = len(seconds)
        self.sizes = sizes
        until = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
        self._unit = float(until[-1]) / steps or 1.0
        self._prices = prices.divided(self._unit)
        self._inside = EqualSteps(steps, sizes, self._prices)
        self.levels = self._inside.levels
        levels = self.levels.count
        while max(count**2 * levels / _ENTRIES, count**3 * levels / (6 * _WORK), count * levels / _ROWS) > 1 < count:
            count = count * 19 // 20
        edges = {steps * block // count for block in range(count + 1)}
        self._edges = sorted(edges | {state for state in states if 0 < state < steps})
        self._until = (until[self._edges] / self._unit).astype(np.float32)
        self._as_equal: list[tuple[int, int]] = []
        """Ranges in which whole blocks do not fit: with one checkpoint, say, and a block of two steps."""

    def choose(self, start: int, stop: int, ram: int, disk: int, kept: StorageType) -> Choice:
        """See `Plan`. O(blocks), or O(steps of a block)."""
        if stop - start > 1 and (stop - start - 1) * self.sizes.deps <= ram:
            return Choice(Kind.DEPS, start + 1, StorageType.RAM)
        if any(begin <= start and stop <= end for begin, end in self._as_equal):
            return self._inside.choose(start, stop, ram, disk, kept)
        first, last = bisect_right(self._edges, start) - 1, bisect_right(self._edges, stop) - 1
        if first == last or (last - first == 1 and stop == self._edges[last]):
            return self._inside.choose(start, stop, ram, disk, kept)
        if start != self._edges[first]:  # the dependencies of a whole block are being stored
            where = StorageType.RAM if self.sizes.deps <= ram else StorageType.DISK
            return Choice(Kind.DEPS, start + 1, where)
        level = self.levels.at(ram, disk)
        tries = self._tries(first, last, level)
        tries.pop((Kind.STATE if kept is StorageType.DISK else Kind.NOTHING, StorageType.DISK), None)
        kind, where = min(tries, key=lambda key: float(tries[key].min()))
        if tries[kind, where].min() == inf:
            self._as_equal.append((start, stop))
            return self._inside.choose(start, stop, ram, disk, kept)
        if kind is Kind.DEPS:
            return Choice(kind, start + 1, where)
        return Choice(kind, self._edges[first + 1 + int(tries[kind, where].argmin())], where)

    def time(self) -> float:
        """The least time for all steps."""
        highest = self.levels.count - 1
        time = float(self._table[0][highest, 0, -1])
        return self._unit * (time if time < inf else self._inside.time(self._edges[-1], highest))

    def _tries(self, first: int, last: int, level: int) -> dict[tuple[Kind, StorageType], Times]:
        """What could be done at the start of these blocks: the times it would take, for each block to advance to."""
        ahead, behind, on_disk = self._table
        levels, prices = self.levels, self._prices
        inner, splits = slice(1, last - first), slice(first + 1, last)
        advance = self._until[splits] - self._until[first]
        after = behind[levels.state_in_ram[level], last, splits]
        tries = {(Kind.STATE, StorageType.RAM): advance + ahead[level, first, inner] + after}
        tries[Kind.DEPS, StorageType.RAM] = self._deps(first, last, level, levels.deps_in_ram, 0.0)
        if self.sizes.has_disk:
            after = behind[levels.state_on_disk[level], last, splits] + np.float32(prices.read_state)
            tries[Kind.NOTHING, StorageType.DISK] = back = advance + on_disk[level, first, inner] + after
            tries[Kind.STATE, StorageType.DISK] = back + self._waits(prices.write_state, advance)
            waits = prices.read_deps + float(self._waits(prices.write_deps, advance[:1])[0])
            tries[Kind.DEPS, StorageType.DISK] = self._deps(first, last, level, levels.deps_on_disk, waits)
        return tries

    def _deps(self, first: int, last: int, level: int, less: NDArray[np.intp], waits: float) -> Times:
        """The time if the dependencies of the first block are stored, which take the level down for each of its steps.

        `waits`: for the disk, for each step.
        """
        steps = self._edges[first + 1] - self._edges[first]
        for _ in range(steps):
            level = int(less[level]) if level >= 0 else -1
        taken = self._until[first + 1] - self._until[first] + np.float32(steps * waits)
        result: Times = taken + self._table[1][level, last, first + 1 : first + 2]
        return result

    def _waits(self, write: float, advance: Times) -> Times:
        """How long a write takes on top of the advance."""
        waits: Times = np.maximum(np.float32(0), np.float32(write) - np.float32(self._prices.overlap) * advance)
        return waits

    @cached_property
    def _table(self) -> tuple[Times, Times, Times]:
        """The least times: [level, first block, number of blocks], [level, end, first block], and from the disk, too.

        The third is as the first, with the state of the first block on the disk. The last level is what does not fit.
        """
        count, levels = len(self._edges) - 1, self.levels.count
        ahead = np.full((levels + 1, count, count + 1), np.inf, dtype=np.float32)
        behind = np.full((levels + 1, count + 1, count), np.inf, dtype=np.float32)
        on_disk = ahead.copy() if self.sizes.has_disk else ahead
        self.__dict__["_table"] = ahead, behind, on_disk
        for first in range(count):
            steps = self._edges[first + 1] - self._edges[first]
            mean = float(self._until[first + 1] - self._until[first]) / steps
            for level in range(levels):
                time = self._inside.time(steps, level)
                time = mean * time if time < inf else inf  # 0 x inf is no number
                ahead[level, first, 1] = behind[level, first + 1, first] = on_disk[level, first, 1] = time
        for blocks in range(2, count + 1):
            for level in range(levels):
                best, back = self._best(blocks, level)
                starts = np.arange(count - blocks + 1)
                ahead[level, starts, blocks] = behind[level, starts + blocks, starts] = best
                if self.sizes.has_disk:
                    on_disk[level, starts, blocks] = np.minimum(best, back)
        return ahead, behind, on_disk

    def _best(self, blocks: int, level: int) -> tuple[Times, Times]:
        """As `_tries` for all: the least times of so many blocks, by first one; and with its state on the disk."""
        ahead, behind, on_disk = self._table
        levels, prices, until = self.levels, self._prices, self._until
        starts = len(until) - blocks
        advance = _diagonals(until[None], starts, blocks - 1) - until[:starts, None]
        base = advance + ahead[level, :starts, 1:blocks]

        def after(below: int) -> Times:  # [first block, split]
            return _diagonals(behind[below], starts, blocks - 1, blocks)

        best = (base + after(levels.state_in_ram[level])).min(1)
        best = np.minimum(best, self._best_deps(blocks, level, levels.deps_in_ram, np.zeros(starts, np.float32)))
        if not self.sizes.has_disk:
            return best, best
        back = advance + on_disk[level, :starts, 1:blocks] + after(levels.state_on_disk[level])
        back += np.float32(prices.read_state)
        best = np.minimum(best, (back + self._waits(prices.write_state, advance)).min(1))
        waits = self._waits(prices.write_deps, advance[:, 0]) + np.float32(prices.read_deps)
        return np.minimum(best, self._best_deps(blocks, level, levels.deps_on_disk, waits)), back.min(1)

    def _best_deps(self, blocks: int, level: int, less: NDArray[np.intp], waits: Times) -> Times:
        """As `_deps`, for each first block."""
        starts = np.arange(len(waits))
        steps = np.diff(self._edges)[: len(waits)]
        after = np.full(len(waits), level)
        for step in range(int(steps.max())):
            after = np.where((step < steps) & (after >= 0), less[after], after)
        taken = np.diff(self._until)[: len(waits)] + steps.astype(np.float32) * waits
        result: Times = taken + self._table[1][after, starts + blocks, starts + 1]
        return result


def _diagonals(table: Times, starts: int, splits: int, row: int | None = None) -> Times:
    """[start, split] -> table[row + start, start + 1 + split]; without a row, of the first row alone. No copy."""
    by_row, by_column = table.strides
    first, down = (table, 0) if row is None else (table[row:], by_row)
    return as_strided(first[:, 1:], (starts, splits), (down + by_column, by_column), writeable=False)
