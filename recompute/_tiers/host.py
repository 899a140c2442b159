"""Host memory as a tier, below the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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

    Together the buffers are never larger than the copies have been at most. There is no lock: a destructor, or a
    handler of a signal, may move values while the same thread is in here. An interrupt, or another thread at the same
    moment, can have a spare buffer be freed, no more.
    """

    checks = False  # what is in memory stays as it is

    def __init__(self, tier: Host) -> None:
        super().__init__(tier, Link(20e-6, 5e9), Link(20e-6, 5e9))
        self._spare: dict[int, list[bytearray]] = {}  # by size

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        try:
            buffers = [self._buffer(len(part)) for part in parts]
        except MemoryError as error:
            raise OSError("there is no host memory left") from error
        for buffer, part in zip(buffers, parts, strict=True):
            memoryview(buffer)[:] = part
        return buffers

    def _buffer(self, size: int) -> bytearray:
        try:
            return self._spare[size].pop()
        except (KeyError, IndexError):  # there is none
            self._give_up(size)
        try:
            return bytearray(size)
        except MemoryError:
            self._spare.clear()
            return bytearray(size)

    def _give_up(self, size: int) -> None:
        """Free spare buffers of at least so many bytes together, if there are: a new one takes their place."""
        for other in list(self._spare):
            with suppress(KeyError, IndexError):  # there are no more of them
                while size > 0:
                    self._spare[other].pop()
                    size -= other
                return
            self._spare.pop(other, None)

    @contextmanager
    def read(self, where: Any) -> Iterator[Load]:
        parts = iter(where)

        def load(memory: Any) -> None:
            memory[:] = next(parts)

        yield load

    def remove(self, where: Any) -> None:
        for buffer in where:
            self._spare.setdefault(len(buffer), []).append(buffer)
