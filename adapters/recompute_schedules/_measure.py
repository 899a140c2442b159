"""Seconds: what steps take, as the time between actions shows, and what the disk takes."""

from __future__ import annotations

import os
from statistics import fmean
from time import perf_counter
from typing import Any, Final

from checkpoint_schedules import Copy, Forward, Move, StorageType

import recompute as rc
from recompute.extend import Link
from recompute_schedules._levels import Sizes

_PROBE: Final = 1 << 25
"""Bytes, at most, that are written and read to see how quick the disk is."""


def probe(tier: rc.Disk, nbytes: int) -> tuple[float, float]:
    """Bytes a second, written and read, of a file as large as a state, or of 32 MB. Raises OSError as the disk does."""
    store = tier.open()
    part = memoryview(os.urandom(min(nbytes, _PROBE)))
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

    def __init__(self, measures: bool, reads: bool, bandwidth: tuple[float, float] | None) -> None:
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
