"""A tier whose prices and failures a test sets, and whose time is that of a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import ENOSPC
from itertools import count
from math import inf
from typing import Any

from recompute.extend import Link, Store, Tier
from recompute.testing import ManualClock


def never(number: int) -> Exception | None:
    """Nothing fails."""
    return None


@dataclass(frozen=True)
class GivenTier(Tier):
    """Bytes in a dict. A transfer takes `latency` and its bytes over `bandwidth`, by `clock`.

    `fail_write` and `fail_read` are asked for the error of the n-th transfer of their kind, counted from 1.
    """

    name = "given tier"
    latency: float = 0.0
    bandwidth: float = inf
    clock: ManualClock = field(default_factory=ManualClock)
    fail_write: Callable[[int], Exception | None] = never
    fail_read: Callable[[int], Exception | None] = never
    opened: list[GivenStore] = field(default_factory=list)

    def open(self) -> Store:
        self.opened.append(GivenStore(self))
        return self.opened[-1]

    @property
    def store(self) -> GivenStore:
        """The one that was opened last."""
        return self.opened[-1]


class GivenStore(Store):
    """Counts what is done, and keeps the bytes where a test can see and change them."""

    def __init__(self, tier: GivenTier) -> None:
        super().__init__(tier, GivenLink(tier), GivenLink(tier))
        self.tier = tier
        self.kept: dict[int, list[bytearray]] = {}
        self.writes = self.reads = 0
        self._names = count()

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        self.writes += 1
        self._transfer(self.tier.fail_write(self.writes), nbytes)
        name = next(self._names)
        self.kept[name] = [bytearray(part) for part in parts]
        return name

    @contextmanager
    def read(self, where: Any) -> Iterator[Callable[[Any], None]]:
        self.reads += 1
        parts = iter(self.kept[where])
        self._transfer(self.tier.fail_read(self.reads), sum(map(len, self.kept[where])))

        def load(memory: Any) -> None:
            memory[:] = next(parts)

        yield load

    def remove(self, where: Any) -> None:
        self.kept.pop(where, None)

    def _transfer(self, error: Exception | None, nbytes: int) -> None:
        self.tier.clock.advance(self.tier.latency + nbytes / self.tier.bandwidth)
        if error is not None:
            try:
                raise error
            finally:
                del error  # or its traceback would be part of a cycle, with all that its callers hold


class GivenLink(Link):
    """Is known from the start."""

    def __init__(self, tier: GivenTier) -> None:
        super().__init__(tier.latency, tier.bandwidth)

    def learn(self, nbytes: int, seconds: float) -> None:
        self.transfers += 1
        self.nbytes += nbytes
        self.time += seconds


@dataclass(frozen=True)
class FullDisk(Tier):
    """Takes nothing."""

    name = "full disk"
    opened: list[_FullStore] = field(default_factory=list)

    def open(self) -> Store:
        self.opened.append(_FullStore(self, Link(0.0, 1e9), Link(0.0, 1e9)))
        return self.opened[-1]

    @property
    def tried(self) -> int:
        """How often something was to be written."""
        return self.opened[-1].tried


class _FullStore(Store):
    tried = 0

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        self.tried += 1
        raise OSError(ENOSPC, "there is no room")

    def read(self, where: Any) -> Any:
        raise AssertionError("nothing was written")

    def remove(self, where: Any) -> None:
        raise AssertionError("nothing was written")
