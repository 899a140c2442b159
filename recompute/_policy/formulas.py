"""Eviction policies: which value is cheapest to lose. The smallest score goes first.

Most published scores are the reciprocal of a line in staleness: 1 / score = base + slope * staleness. A policy that
says so (`line`) is searched in logarithmic time; any other is a plain function and is searched by a scan.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Final, Literal, cast

Neighbourhood = Literal["none", "ancestors", "exact", "components", "needed"]

_LEAST: Final = 1e-30  # seconds; stands in for a cost of zero, so that a ratio stays finite
Line = tuple[float, float]
Score = Callable[[float, float, int, float], float]


@dataclass(frozen=True)
class Policy(ABC):
    """A score of a resident storage, and the facts it needs.

    `cost` is the storage's own compute, `neighbours` that of its evicted neighbourhood (seconds, of the kind that
    `neighbourhood` names), `size` is in bytes, `staleness` in seconds of compute since the last access.
    """

    name: ClassVar[str]
    neighbourhood: ClassVar[Neighbourhood] = "none"
    published: ClassVar[bool] = True
    """Whether it is somebody else's, to be compared in the form in which it was published."""
    reprieves: ClassVar[bool] = False
    """Whether a victim is spared that those chosen after it made superfluous."""

    def under(self, pressure: float) -> Policy:
        """The policy when the share `pressure` (0 to 1) of what is needed is out; see `Neighbourhood.pressure`."""
        return self

    @abstractmethod
    def line(self, cost: float, neighbours: float, size: int) -> Line | None:
        """(base, slope) of 1 / score as a line in staleness; None if it is none."""

    def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
        """The smaller, the sooner it is evicted; infinite if it was used just now."""
        line = self.line(cost, neighbours, size)
        assert line is not None, "a policy without a line overrides score"
        inverse = line[0] + line[1] * staleness
        return 1 / inverse if inverse > 0 else inf


class _DTR(Policy):
    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, size / (cost + neighbours or _LEAST)


@dataclass(frozen=True)
class Dtr(_DTR):
    """(c0 + cost of the exact evicted neighbourhood e*) / (size * staleness): h_DTR of Kirisame et al., section 4.1."""

    name = "dtr"
    neighbourhood = "exact"


@dataclass(frozen=True)
class DtrEq(_DTR):
    """The same with evicted components kept by union-find: h_DTR-eq of Kirisame et al., section 4.1."""

    name = "dtr-eq"
    neighbourhood = "components"


@dataclass(frozen=True)
class DtrLocal(_DTR):
    """c0 / (size * staleness): h_DTR-local of Kirisame et al., section 4.1."""

    name = "dtr-local"


@dataclass(frozen=True)
class Lru(Policy):
    """The least recently used first: 1 / staleness."""

    name = "lru"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, 1.0


@dataclass(frozen=True)
class Size(Policy):
    """The largest first: 1 / size (GreedyRemat)."""

    name = "size"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return float(size), 0.0


@dataclass(frozen=True)
class Msps(Policy):
    """(c0 + cost of the evicted ancestors) / size: the score of Capuchin (Peng et al., ASPLOS 2020)."""

    name = "msps"
    neighbourhood = "ancestors"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return size / (cost + neighbours or _LEAST), 0.0


@dataclass(frozen=True)
class Needed(Policy):
    """What nobody needs first; then (c0 + cost at stake) / (size * staleness ** q), q = 1 - pressure / 2.

    The library's own. At stake are the evicted ancestors and those evicted descendants that somebody still needs
    (`Needs`). With memory to spare it is h_DTR without the dead; the shorter memory gets, the less it trusts staleness,
    which in a program that returns to its early values, as a backward pass does, is wrong about the future.
    docs/policies.md has what was tried.
    """

    name = "needed"
    neighbourhood = "needed"
    published = False
    reprieves = True
    pressure: float = 0.0

    def under(self, pressure: float) -> Policy:
        return replace(self, pressure=pressure)

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        # (1 / score) ** (1 / q): the same order, and a line in staleness.
        return 0.0, (size / (cost + neighbours or _LEAST)) ** (1 / (1 - self.pressure / 2))


@dataclass(frozen=True)
class Random(Policy):
    """Any of them: each candidate draws its place once, when it becomes one."""

    name = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_draw", random.Random(self.seed).random)

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        draw: Callable[[], float] = self._draw  # type: ignore[attr-defined]  # a frozen dataclass hides its generator
        return draw(), 0.0


@dataclass(frozen=True)
class Nothing(Policy):
    """Evicts nothing: the budget is a hard limit."""

    name = "none"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, 0.0


@dataclass(frozen=True)
class Scored(Policy):
    """A user's own score, a function of (cost, neighbours, size, staleness), searched by a scan.

    `neighbourhood` says what `neighbours` is: "none" (0), "ancestors", "exact", "components" or "needed".
    """

    function: Score
    of: Neighbourhood = "components"
    name = "own"

    @property
    def neighbourhood(self) -> Neighbourhood:  # type: ignore[override]  # here it is the user's choice
        return self.of

    def line(self, cost: float, neighbours: float, size: int) -> None:
        return None

    def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
        return self.function(cost, neighbours, size, staleness)


DEFAULT: Final = "needed"
POLICIES: Final[dict[str, type[Policy]]] = {
    policy.name: policy for policy in (Needed, Dtr, DtrEq, DtrLocal, Lru, Size, Msps, Random, Nothing)
}
"""The policies by name."""


def policy_of(policy: str | Policy | type[Policy] | Score) -> Policy:
    """A policy from its name, from an object, or from a function of (cost, neighbours, size, staleness)."""
    if isinstance(policy, str):
        found = POLICIES.get(DEFAULT if policy == "default" else policy)
        if found is None:
            raise ValueError(f"unknown policy {policy!r}; choose from {', '.join(POLICIES)}, or give a function")
        return found()
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy()
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return Scored(cast(Score, policy))
    raise TypeError(
        f"a policy is a name, a Policy or a function of (cost, neighbours, size, staleness), not {policy!r}"
    )
