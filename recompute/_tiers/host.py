"""Host memory as a tier, below the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    def __init__(self, tier: Host) -> None:
        super().__init__(tier, Link(20e-6, 5e9), Link(20e-6, 5e9))

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        try:
            return [bytes(part) for part in parts]
        except MemoryError as error:
            raise OSError("there is no host memory left") from error

    @contextmanager
    def read(self, where: Any) -> Iterator[Load]:
        parts = iter(where)

        def load(memory: Any) -> None:
            memory[:] = next(parts)

        yield load

    def remove(self, where: Any) -> None:
        pass  # it goes with what knows it
