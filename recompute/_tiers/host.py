"""Host memory as a tier, below the memory of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from recompute._adapters.packing import Load
from recompute._tiers.link import Link
from recompute._tiers.tier import Store, Tier


@dataclass(frozen=True)
class Host(Tier):
    """Host memory, for what is evicted from a device: `Cache({"cuda:0": "20GB"}, tiers={"cuda:0": [Host("64GB")]})`.

    It is not counted in the budget of "cpu".

    Parameters
    ----------
    limit
        Bytes ("64GB"); None: unlimited.
    always
        Move whatever fits, instead of recomputing what is cheaper to recompute.
    ahead
        Move values before their room is needed, in a thread of its own, so that the program waits less.
    """

    name = "host memory"

    def open(self) -> Store:
        return _HostStore(self)


class _HostStore(Store):
    """Copies in buffers that are used again for others of the same size: new memory costs more than to copy bytes.

    Together the buffers are never larger than the copies have been at most.
    """

    checks = False  # what is in memory stays as it is

    def __init__(self, tier: Host) -> None:
        super().__init__(tier, Link(20e-6, 5e9), Link(20e-6, 5e9))
        self._lock = Lock()
        self._used = 0  # bytes of buffers that have a copy
        self._most = 0
        self._spare: dict[int, list[bytearray]] = {}  # by size
        self._spare_bytes = 0
        self._returned: deque[bytearray] = deque()  # lately, by destructors, which can wait for no lock

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        try:
            buffers = [self._buffer(len(part)) for part in parts]
        except MemoryError as error:
            raise OSError("there is no host memory left") from error
        for buffer, part in zip(buffers, parts, strict=True):
            memoryview(buffer)[:] = part
        return buffers

    def _buffer(self, size: int) -> bytearray:
        with self._lock:
            while self._returned:
                buffer = self._returned.popleft()
                self._used -= len(buffer)
                self._spare_bytes += len(buffer)
                self._spare.setdefault(len(buffer), []).append(buffer)
            self._used += size
            self._most = max(self._most, self._used)
            if self._spare.get(size):
                return self._take(size)
            while self._spare and self._used + self._spare_bytes > self._most:
                self._take(next(iter(self._spare)))
        try:
            return bytearray(size)
        except MemoryError:
            with self._lock:
                self._spare.clear()
                self._spare_bytes = 0
            return bytearray(size)

    def _take(self, size: int) -> bytearray:
        buffers = self._spare[size]
        buffer = buffers.pop()
        if not buffers:
            del self._spare[size]
        self._spare_bytes -= size
        return buffer

    @contextmanager
    def read(self, where: Any) -> Iterator[Load]:
        parts = iter(where)

        def load(memory: Any) -> None:
            memory[:] = next(parts)

        yield load

    def remove(self, where: Any) -> None:
        self._returned.extend(where)

    def after_fork(self, *, child: bool) -> None:
        if child:
            self._lock = Lock()  # another thread may have held it
