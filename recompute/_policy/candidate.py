"""What the search for a victim knows of the world: candidates, what is evicted around them, and the way out."""

from __future__ import annotations

from math import inf
from typing import Any, Protocol


class Candidate:
    """What may be evicted. A subclass sets all of these, and `slot` to -1."""

    __slots__ = ("cost", "last_access", "locks", "number", "size", "slot")

    number: int
    """In order of creation."""
    size: int
    """Bytes."""
    cost: float
    """Seconds to make it again, from what it is made of."""
    last_access: float
    """On the compute clock (seconds)."""
    locks: int
    """Reasons to keep it for now: while it has one, it is passed over."""
    slot: int
    """Where the search keeps it; -1: nowhere; less: passed over while it was locked."""


class Around:
    """What is evicted around candidates: what their own eviction would make dearer. Here: nothing is."""

    __slots__ = ("pressure",)

    def __init__(self) -> None:
        self.pressure = 0.0
        """From 0 to 1: how short memory is. Where a policy uses it, each change of it changes all scores."""

    def measure_pressure(self, pool: Any) -> None:
        """See how short memory is in the pool that the candidates are in: the pressure rises if it is shorter."""

    def unneeded(self, candidate: Any) -> bool:
        """Whether evicting it costs nothing, because it will not be needed."""
        return False

    def cost(self, candidate: Any) -> float:
        """Seconds: the cost of what is evicted around it."""
        return 0.0

    def lower_bound(self, candidate: Any) -> float:
        """Seconds that the cost does not fall below without news."""
        return self.cost(candidate)

    def room(self, pool: Any) -> float:
        """Bytes of the pool that candidates and what is made may take."""
        return inf

    def need(self, candidate: Any, enough: float = -1.0) -> int:
        """About how many bytes are locked at once while it is brought back after an eviction.

        An answer of at most `enough` need not be more than an upper bound.
        """
        return 0


class WayOut(Protocol):
    """Where evicted bytes may go instead of being lost."""

    def cheapest(self, candidate: Any, neighbours: float, /) -> tuple[float, float]:
        """(own cost, cost of the neighbours) of losing it, by the cheaper way back."""

    def can_drop(self, candidate: Any, /) -> bool:
        """Whether it can be brought back at all if it is needed."""
