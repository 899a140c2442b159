"""Bytes and seconds: the levels of free bytes that tables count in, and what steps and the disk take."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from time import perf_counter
from typing import Any, Final, Literal

import numpy as np
from checkpoint_schedules import Copy, Forward, Move, StorageType
from numpy.typing import NDArray

import recompute as rc
from recompute.extend import Link

_MAX_LEVELS: Final = 256
"""Levels of one storage: more are rounded to as many, which never exceeds the bytes that there are."""

_PROBE_BYTES: Final = 1 << 25
"""Bytes, at most, that are written and read to see how quick the disk is."""


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
        self._is_hierarchy = rows * columns > _MAX_LEVELS
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
        while new and len(free) <= _MAX_LEVELS:
            new = [left for level in new for left in {level - self.state, level - self.deps} if left >= 0]
            new = [level for level in set(new) if level not in free]
            free.update(new)
        if len(free) <= _MAX_LEVELS:
            self.levels = sorted(free)
        else:
            unit = -(-nbytes // _MAX_LEVELS)
            self.state, self.deps = -(-self.state // unit) * unit, -(-self.deps // unit) * unit
            self.levels = range(0, nbytes + 1, unit)

    def at(self, nbytes: int) -> int:
        """The highest level of at most so many bytes; -1: there is none."""
        return bisect_right(self.levels, nbytes) - 1


@dataclass(frozen=True)
class Prices:
    """Seconds, or steps, that the disk takes for restart data and for adjoint dependencies."""

    write_state: float = 0.0
    read_state: float = 0.0
    write_deps: float = 0.0
    read_deps: float = 0.0
    overlap: bool = False
    """Writes go on while the forward does: only what takes longer than the steps to the next action counts."""

    def divided(self, unit: float) -> Prices:
        """In other units."""
        write, read = self.write_state / unit, self.read_state / unit
        return Prices(write, read, self.write_deps / unit, self.read_deps / unit, self.overlap)


def probe(tier: rc.Disk, nbytes: int) -> tuple[float, float]:
    """Bytes a second, written and read, of a file as large as a state, or of 32 MB. Raises OSError as the disk does."""
    store = tier.open()
    part = memoryview(os.urandom(min(nbytes, _PROBE_BYTES)))
    start = perf_counter()
    where = store.write([part], len(part))
    written = perf_counter()
    try:
        with store.read(where) as load:
            load(memoryview(bytearray(len(part))))
        read = perf_counter()
    finally:
        store.remove(where)
    return len(part) / (written - start), len(part) / (read - written)


class Meter:
    """What was measured: seconds of each step, and of transfers."""

    def __init__(self, bandwidth: tuple[float, float] | None, *, measures: bool, reads: bool) -> None:
        """`measures`: steps. `reads`: the bandwidth of later reads counts, too."""
        self.measures = measures
        self._reads = reads
        self._links = None if bandwidth is None else tuple(Link(0.0, pace) for pace in bandwidth)
        self._alone: dict[int, float] = {}  # step -> seconds, of one that ran alone
        self._among: dict[int, float] = {}  # of one that ran with others, their mean

    def writing(self, nbytes: int) -> float:
        """Seconds to write so much."""
        return 0.0 if self._links is None else self._links[0].seconds(nbytes)

    def reading(self, nbytes: int) -> float:
        """Seconds to read so much."""
        return 0.0 if self._links is None else self._links[1].seconds(nbytes)

    @property
    def mean(self) -> float | None:
        """Seconds of a step."""
        known = self._among | self._alone
        return fmean(known.values()) if known else None

    def seconds(self, steps: int | None) -> list[float] | None:
        """Of each step, if all are known."""
        known = self._among | self._alone
        return [known[step] for step in range(steps)] if steps and all(step in known for step in range(steps)) else None

    def learn(self, action: Any, seconds: float, sizes: Sizes, end: int) -> None:
        """So long it took until the next action was asked for, with the forward at `end`."""
        if isinstance(action, Forward) and self.measures:
            if action.storage is StorageType.DISK:
                nbytes = sizes.state * action.write_ics + sizes.deps * action.write_adj_deps
                seconds = max(0.0, seconds - self.writing(nbytes))
            steps = range(action.n0, min(action.n1, end))
            (self._alone if len(steps) == 1 else self._among).update(dict.fromkeys(steps, seconds / len(steps)))
        elif isinstance(action, (Copy, Move)) and action.from_storage is StorageType.DISK and self._reads:
            assert self._links is not None, "its bandwidth was measured first"
            self._links[1].learn(sizes.state, seconds)


def checked_seconds(given: Any, max_n: int | None) -> float | list[float] | Literal["measured"] | None:
    """What the user says of steps, checked."""
    if given is None or given == "measured":
        return given  # type: ignore[no-any-return]  # one of both
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not (isfinite(given) and given > 0):
            raise ValueError(f"step_seconds must be positive, not {given!r}")
        return float(given)
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise TypeError(f'step_seconds must be None, seconds, a sequence of them, or "measured", not {given!r}')
    seconds = [float(second) for second in given]
    if not seconds or not all(isfinite(second) and second >= 0 for second in seconds):
        raise ValueError("step_seconds must have a number for each step, none of them negative")
    if max_n is not None and len(seconds) != max_n:
        raise ValueError(f"step_seconds has {len(seconds)} steps, and max_n={max_n}; give one number for each step")
    return seconds
