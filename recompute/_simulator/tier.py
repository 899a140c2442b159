"""A simulated tier, whose transfers take virtual time.

Either transfers stop the compute, or they overlap with it: then they share one link beside it, which takes them in
turn, and whatever they make wait is there in time. So that is a lower bound: the whole takes as long as the compute, or
until the link is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from re import IGNORECASE, fullmatch
from typing import Any, Final, Self

from recompute._budget import format_bytes, parse_bytes
from recompute.extend import Link, Store, Tier

_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

_BESIDE: Final = 0.1
"""The price of a transfer beside the compute, as a share of its time: it may delay another one."""


@dataclass(frozen=True)
class SimulatedTier(Tier):
    """`bandwidth` in bytes a second, `latency` in seconds; `overlap`: transfers do not stop the compute."""

    name = "tier"
    bandwidth: float = 12e9
    latency: float = 0.0
    overlap: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(f"a tier has a bandwidth above 0 and a latency of 0 or more, not {self!r}")

    @classmethod
    def read(cls, text: str) -> Self:
        """A tier from words: "12GB/s,overlap", "200MB/s,1ms,50GB,always". Raises ValueError for what is none."""
        given: dict[str, Any] = {}
        for word in text.replace(" ", "").split(","):
            number = fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)(s|ms|us)", word, IGNORECASE)
            said: tuple[str, Any]
            if word in ("overlap", "always"):
                said = word, True
            elif word.lower().endswith("/s"):
                said = "bandwidth", float(parse_bytes(word[:-2], "the bandwidth of a tier"))
            elif number:
                said = "latency", float(number[1]) * _SECONDS[number[2].lower()]
            else:
                said = "limit", parse_bytes(word, "the limit of a tier")
            if said[0] in given:
                raise ValueError(f"a tier has one {said[0]}, and {text!r} says it twice")
            given.update([said])
        if "bandwidth" not in given:
            raise ValueError(f"a tier needs a bandwidth, such as 12GB/s, and {text!r} has none")
        return cls(**given)

    def seconds(self, nbytes: int) -> float:
        """Of a transfer, either way."""
        return self.latency + nbytes / self.bandwidth

    def open(self) -> Store:
        return SimulatedStore(self)

    def __str__(self) -> str:
        return f"{format_bytes(self.bandwidth)}/s{', overlap' if self.overlap else ''}"


class SimulatedStore(Store):
    """Takes placeholders, and passes the time."""

    def __init__(self, tier: SimulatedTier) -> None:
        self._pass: Callable[[float], None] = lambda units: None
        self._now: Callable[[], float] = lambda: 0.0
        self._unit = 1.0
        self._tier = tier
        self.free = 0.0
        """When the link has nothing to do any more, in units of the program."""
        super().__init__(tier, _Link(self), _Link(self))

    def run_in(self, unit: float, now: Callable[[], float], pass_time: Callable[[float], None]) -> None:
        """The seconds of a unit of the program, what its clock says, and how to let it go on."""
        self._unit, self._now, self._pass = unit, now, pass_time

    @property
    def backlog(self) -> float:
        """In units of the program."""
        return max(0.0, self.free - self._now())

    def units(self, nbytes: int) -> float:
        """The time of a transfer, in units of the program."""
        return self._tier.seconds(nbytes) / self._unit

    def price_of(self, nbytes: int) -> float:
        """The time that a transfer costs the program, estimated."""
        return _BESIDE * self.units(nbytes) if self._tier.overlap else self.units(nbytes)

    def transfer(self, nbytes: int) -> None:
        """Move so many bytes."""
        if self._tier.overlap:
            self.free = max(self.free, self._now()) + self.units(nbytes)
        else:
            self._pass(self.units(nbytes))

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        self.transfer(nbytes)
        return list(parts), nbytes

    @contextmanager
    def read(self, where: Any) -> Iterator[Callable[[Any], None]]:
        parts, nbytes = where
        rest = iter(parts)
        self.transfer(nbytes)

        def load(memory: Any) -> None:
            memory[:] = next(rest)

        yield load

    def remove(self, where: Any) -> None:
        """The placeholder goes with what knows it."""


class _Link(Link):
    """Is known from the start."""

    def __init__(self, store: SimulatedStore) -> None:
        super().__init__(0.0, 1.0)
        self._store = store

    def seconds(self, nbytes: int) -> float:
        return self._store.price_of(nbytes)

    def learn(self, nbytes: int, seconds: float) -> None:
        self.transfers += 1
        self.nbytes += nbytes
        self.time += seconds
