"""The least time to reverse a number of steps within any bytes, by dynamic programming, and what to do next for it.

Of steps that cost the same: with one size for everything this is Griewank and Walther's revolve (ACM TOMS 26, 2000)
where adjoint dependencies are too large to be stored, and Maddison's mixed schedule (Journal of Computational Science
82, 2024) where they are not. With a disk it is H-Revolve's (Herrmann and Pallez, ACM TOMS 46, 2020). Bytes instead of
slots are the generalization.

Of steps that differ in cost: Griewank and Walther (Evaluating Derivatives, chapter 12) reverse a chain of unequal steps
so, with slots; here with bytes, with adjoint dependencies that may be stored, and with a disk. Many steps are taken
together in blocks, inside of which they count as equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import inf
from typing import Any, Final

import numpy as np
from checkpoint_schedules import StorageType
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from recompute_schedules._costs import Levels, Prices, Sizes

Times = NDArray[np.float64]
Times32 = NDArray[np.float32]

_EXACT_STEPS: Final = 1024
"""Steps up to which the table has every length; beyond, lengths that grow by 1/128, with lines between them."""
_MAX_ENTRIES: Final = 6_000_000
"""Of the table, twice, at 4 bytes each."""
_MAX_ADDITIONS: Final = 1_000_000_000
"""Additions to fill it: some seconds."""
_MAX_CALLS: Final = 16_000
"""Calls to fill it, each for all ranges of one length at one level."""


class Kind(Enum):
    """What a forward advance leaves in a storage."""

    STATE = "restart data of its first step"
    DEPS = "adjoint dependencies of its one step"
    NOTHING = "nothing: the restart data of its first step are in the storage already"
    LAST = "nothing: the step is reversed next"


@dataclass(frozen=True)
class Choice:
    """Advance to a step, and store this there."""

    kind: Kind
    stop: int
    where: StorageType = StorageType.WORK


class EqualSteps:
    """A table of the least time for each length and level, made when first needed, in O(min(n, 1024)^2 x levels).

    Row: level; the last row is what does not fit. Column: a length. Time is in steps.
    """

    def __init__(self, steps: int, sizes: Sizes, prices: Prices) -> None:
        self.sizes = sizes
        self.levels = Levels(sizes, steps)
        self._prices = prices
        lengths = list(range(min(steps, _EXACT_STEPS) + 1))
        while lengths[-1] < steps:
            lengths.append(min(steps, lengths[-1] + max(1, lengths[-1] // 128)))
        self._lengths = np.array(lengths)

    def choose(self, start: int, stop: int, ram: int, disk: int, kept: StorageType) -> Choice:
        """What to do with the forward at `start` and the adjoint at `stop`, and so many bytes free. O(steps).

        `kept`: where the restart data of `start` are: then they count as free. NONE: only in working memory.
        """
        steps = stop - start
        if steps == 1:
            return Choice(Kind.LAST, stop)
        if (steps - 1) * self.sizes.deps <= ram:  # nothing runs twice
            return Choice(Kind.DEPS, start + 1, StorageType.RAM)
        level = self.levels.at(ram, disk)
        splits = self._splits(steps, len(self._lengths))
        tries = self._tries(splits, steps, np.array([level]), len(self._lengths))
        kind, where, best = _least(tries, kept)
        if best is None:
            return self._beside_levels(start, stop, ram, disk, kept)
        return Choice(kind, start + (1 if kind is Kind.DEPS else int(splits[best])), where)

    def _beside_levels(self, start: int, stop: int, ram: int, disk: int, kept: StorageType) -> Choice:
        """What to do where no level of a hierarchy tells: a part of RAM is free and a part of the disk."""
        state = self.sizes.state
        where = StorageType.RAM if state <= ram else StorageType.DISK
        kind = Kind.NOTHING if kept is where is StorageType.DISK else Kind.STATE
        has_two = ram // state + disk // state > 1  # the part after the split needs one, too, if it has several steps
        return Choice(kind, (start + stop + 1) // 2 if has_two else stop - 1, where)

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
        if steps <= _EXACT_STEPS:
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
        if steps[-1] < min(known, _EXACT_STEPS + 1) and steps[0] < min(known, _EXACT_STEPS + 1):
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
        while (
            max(count**2 * levels / _MAX_ENTRIES, count**3 * levels / (6 * _MAX_ADDITIONS), count * levels / _MAX_CALLS)
            > 1
            < count
        ):
            count = count * 19 // 20
        edges = {steps * block // count for block in range(count + 1)}
        self._edges = sorted(edges | {state for state in states if 0 < state < steps})
        self._until = (until[self._edges] / self._unit).astype(np.float32)
        self._as_equal: list[tuple[int, int]] = []
        """Ranges in which whole blocks do not fit: with one checkpoint, say, and a block of two steps."""
        self._deps_in = StorageType.RAM
        """Where the dependencies of the latest block of which they are stored are."""

    def choose(self, start: int, stop: int, ram: int, disk: int, kept: StorageType) -> Choice:
        """As of `EqualSteps`. O(blocks), or O(steps of a block)."""
        if stop - start > 1 and (stop - start - 1) * self.sizes.deps <= ram:
            return Choice(Kind.DEPS, start + 1, StorageType.RAM)
        if any(begin <= start and stop <= end for begin, end in self._as_equal):
            return self._inside.choose(start, stop, ram, disk, kept)
        first, last = bisect_right(self._edges, start) - 1, bisect_left(self._edges, stop)
        if last - first == 1:
            return self._inside.choose(start, stop, ram, disk, kept)
        if start != self._edges[first]:  # the dependencies of a whole block are being stored
            if self.sizes.deps <= (ram if self._deps_in is StorageType.RAM else disk):
                return Choice(Kind.DEPS, start + 1, self._deps_in)
            return self._inside.choose(start, stop, ram, disk, kept)
        level = self.levels.at(ram, disk)
        tries = self._tries(last - first, level, slice(first, first + 1))
        kind, where, best = _least(tries, kept)
        if best is None:
            self._as_equal.append((start, stop))
            return self._inside.choose(start, stop, ram, disk, kept)
        if kind is Kind.DEPS:
            self._deps_in = where
            return Choice(kind, start + 1, where)
        return Choice(kind, self._edges[first + 1 + best], where)

    def time(self) -> float:
        """The least time for all steps."""
        highest = self.levels.count - 1
        time = float(self._table[0][highest, 0, -1])
        return self._unit * (time if time < inf else self._inside.time(self._edges[-1], highest))

    def _tries(self, blocks: int, level: int, starts: slice) -> dict[tuple[Kind, StorageType], Times32]:
        """What could be done at the first of so many blocks: the times it would take.

        A row for each first block in `starts`, and a column for each block to advance to.
        """
        ahead, behind, on_disk = self._table
        levels, prices, until = self.levels, self._prices, self._until
        count = len(until) - blocks
        advance = _diagonals(until[None], count, blocks - 1)[starts] - until[:count][starts, None]

        def after(below: int) -> Times32:
            return _diagonals(behind[below], count, blocks - 1, blocks)[starts]

        inner = ahead[level, :count, 1:blocks][starts]
        tries = {(Kind.STATE, StorageType.RAM): advance + inner + after(levels.state_in_ram[level])}
        tries[Kind.DEPS, StorageType.RAM] = self._deps(blocks, level, starts, levels.deps_in_ram, 0.0)
        if self.sizes.has_disk:
            back = advance + on_disk[level, :count, 1:blocks][starts] + after(levels.state_on_disk[level])
            back += np.float32(prices.read_state)
            tries[Kind.NOTHING, StorageType.DISK] = back
            tries[Kind.STATE, StorageType.DISK] = back + self._waits(prices.write_state, advance)
            waits = self._waits(prices.write_deps, advance[:, 0]) + np.float32(prices.read_deps)
            tries[Kind.DEPS, StorageType.DISK] = self._deps(blocks, level, starts, levels.deps_on_disk, waits)
        return tries

    def _deps(self, blocks: int, level: int, starts: slice, less: NDArray[np.intp], waits: Times32 | float) -> Times32:
        """The times if the dependencies of the first block are stored, which take the level down for each of its steps.

        `waits`: for the disk, for each step.
        """
        first = np.arange(len(self._until) - blocks)[starts]
        steps = np.diff(self._edges)[first]
        after = np.full(len(first), level)
        for step in range(int(steps.max())):
            after = np.where((step < steps) & (after >= 0), less[after], after)
        taken = np.diff(self._until)[first] + steps.astype(np.float32) * waits
        result: Times32 = taken + self._table[1][after, first + blocks, first + 1]
        return result[:, None]

    def _waits(self, write: float, advance: Times32) -> Times32:
        """How long a write takes on top of the advance."""
        waits: Times32 = np.maximum(np.float32(0), np.float32(write) - np.float32(self._prices.overlap) * advance)
        return waits

    @cached_property
    def _table(self) -> tuple[Times32, Times32, Times32]:
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
                tries = self._tries(blocks, level, slice(None))
                back = tries.pop((Kind.NOTHING, StorageType.DISK), None)
                best = np.min([times.min(1) for times in tries.values()], axis=0)
                starts = np.arange(count - blocks + 1)
                ahead[level, starts, blocks] = behind[level, starts + blocks, starts] = best
                if back is not None:
                    on_disk[level, starts, blocks] = np.minimum(best, back.min(1))
        return ahead, behind, on_disk


def _least(
    tries: dict[tuple[Kind, StorageType], NDArray[Any]], kept: StorageType
) -> tuple[Kind, StorageType, int | None]:
    """What takes least time, of one row, and to which of the splits; None: nothing fits.

    `kept`: where the restart data are already.
    """
    tries.pop((Kind.STATE if kept is StorageType.DISK else Kind.NOTHING, StorageType.DISK), None)
    kind, where = min(tries, key=lambda key: float(tries[key].min()))
    times = tries[kind, where]
    return kind, where, None if times.min() == inf else int(times.argmin())


def _diagonals(table: Times32, starts: int, splits: int, row: int | None = None) -> Times32:
    """[start, split] -> table[row + start, start + 1 + split]; without a row, of the first row alone. No copy."""
    by_row, by_column = table.strides
    first, down = (table, 0) if row is None else (table[row:], by_row)
    return as_strided(first[:, 1:], (starts, splits), (down + by_column, by_column), writeable=False)
