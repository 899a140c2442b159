"""The scores. When room is needed, the candidate of smallest score is evicted.

    policy      score                    neighbours C  source
    ----------  -----------------------  ------------  ------------------------------------------------------------
    needed      (c0 + C) / (m s^w)       needed        this library, docs/policies.md; what is not needed goes first
    dtr         (c0 + C) / (m s)         exact         h_DTR of Kirisame et al., ICLR 2021, section 4.1
    dtr-eq      (c0 + C) / (m s)         components    h_DTR-eq, the same
    dtr-local   c0 / (m s)               none          h_DTR-local, the same
    lru         1 / s                    none          least recently used
    size        1 / m                    none          largest first: GreedyRemat, Kumar et al., NeurIPS 2019
    msps        (c0 + C) / m             ancestors     Capuchin, Peng et al., ASPLOS 2020
    random      drawn once a candidate   none          a baseline
    none        nothing is a candidate   none          the budget is a hard limit

c0 is the cost of the operations that make the storage (seconds), m its size (bytes), s its staleness (seconds on the
compute clock since the last access), C the cost of its evicted neighbourhood of the kind named (seconds), and
w = 1 - x / 2, where the pressure x (0 to 1) says how much of what is needed is evicted.

For each of these 1 / score, or a power of it, is a line in staleness, base + slope * s: so exact search finds the
smallest score in logarithmic time. Scores of another form are searched by a scan.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Final, Literal, cast

NeighbourhoodName = Literal["none", "ancestors", "exact", "components", "needed"]
PolicyName = Literal["default", "needed", "dtr", "dtr-eq", "dtr-local", "lru", "size", "msps", "random", "none"]
Line = tuple[float, float]
Score = Callable[[float, float, int, float], float]
"""A function of (cost, neighbours, size, staleness)."""

_TINY: Final = 1e-30  # seconds; instead of a cost of zero, so that a quotient stays finite


@dataclass(frozen=True)
class Policy(ABC):
    """A score, and the neighbourhood whose cost it takes."""

    name: ClassVar[str]
    neighbourhood: ClassVar[NeighbourhoodName] = "none"
    published: ClassVar[bool] = True
    """Whether others published it: then it is compared in the form in which they did."""
    prunes_victims: ClassVar[bool] = False
    """Whether a victim stays if those chosen after it free enough without it."""
    bounds_need: ClassVar[bool] = False
    """Whether a victim is passed over if bringing it back would lock too much of the memory; by the exact search."""

    @property
    def power(self) -> float:
        """p where `line` is (0, `steepness` to this power), which the search computes at once; 0: it asks `line`."""
        return 0.0

    @property
    def foreign(self) -> bool:
        """Whether its score is code from outside this package, which must not run under the lock of a cache."""
        return type(self).__module__.partition(".")[0] != "recompute"

    def under(self, pressure: float) -> Policy:
        """The policy at this pressure; see `Neighbourhood.pressure`."""
        return self

    @abstractmethod
    def line(self, cost: float, neighbours: float, size: int) -> Line | None:
        """(base, slope) of 1 / score = base + slope * staleness; None, for all arguments, if it is no line."""

    def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
        """The smaller, the sooner it is evicted. A policy without a line overrides this."""
        line = self.line(cost, neighbours, size)
        assert line is not None, "a policy without a line overrides score"
        inverse = line[0] + line[1] * staleness
        return 1 / inverse if inverse > 0 else inf


def steepness(cost: float, neighbours: float, size: int, power: float) -> float:
    """(size / (cost + neighbours)) ** power."""
    total = cost + neighbours
    ratio = size / (total if total else _TINY)
    return ratio if power == 1.0 else ratio**power


class _CostPerByteAndTime(Policy):
    @property
    def power(self) -> float:
        return 1.0

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, steepness(cost, neighbours, size, self.power)


@dataclass(frozen=True)
class Dtr(_CostPerByteAndTime):
    """(c0 + cost of the exact evicted neighbourhood e*) / (size * staleness)."""

    name = "dtr"
    neighbourhood = "exact"


@dataclass(frozen=True)
class DtrEq(_CostPerByteAndTime):
    """(c0 + cost of the evicted components e~*) / (size * staleness)."""

    name = "dtr-eq"
    neighbourhood = "components"


@dataclass(frozen=True)
class DtrLocal(_CostPerByteAndTime):
    """c0 / (size * staleness)."""

    name = "dtr-local"


@dataclass(frozen=True)
class Lru(Policy):
    """1 / staleness: the least recently used goes first."""

    name = "lru"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, 1.0


@dataclass(frozen=True)
class Size(Policy):
    """1 / size: the largest goes first."""

    name = "size"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return float(size), 0.0


@dataclass(frozen=True)
class Msps(Policy):
    """(c0 + cost of the evicted ancestors) / size: the reciprocal of the memory saved per second."""

    name = "msps"
    neighbourhood = "ancestors"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return steepness(cost, neighbours, size, 1.0), 0.0


@dataclass(frozen=True)
class Needed(Policy):
    """(c0 + cost of the needed neighbourhood) / (size * staleness ** w), w = 1 - pressure / 2; the unneeded go first.

    With memory to spare this is h_DTR without the unneeded. The shorter memory gets, the less it trusts staleness,
    which misleads in a program that returns to its early values, as a backward pass does.
    """

    name = "needed"
    neighbourhood = "needed"
    published = False
    prunes_victims = True
    bounds_need = True
    pressure: float = 0.0

    def under(self, pressure: float) -> Policy:
        under: Policy = object.__new__(type(self))
        under.__dict__.update(self.__dict__, pressure=pressure)  # `replace` runs Python, which a change must not
        return under

    @property
    def power(self) -> float:
        """1 / w: (1 / score) ** (1 / w) has the order of 1 / score, and is a line in staleness."""
        return 1 / (1 - self.pressure / 2)

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, steepness(cost, neighbours, size, self.power)


@dataclass(frozen=True)
class Random(Policy):
    """Any of them: each candidate draws its place once, when it becomes one."""

    name = "random"
    seed: int = 0
    _draw: Callable[[], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_draw", random.Random(self.seed).random)

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return self._draw(), 0.0


@dataclass(frozen=True)
class Nothing(Policy):
    """Evicts nothing."""

    name = "none"

    def line(self, cost: float, neighbours: float, size: int) -> Line:
        return 0.0, 0.0


@dataclass(frozen=True)
class Scored(Policy):
    """A function of the user's; `of` says of which neighbourhood it gets the cost ("none": 0)."""

    function: Score
    of: NeighbourhoodName = "components"
    name = "own"
    foreign = True

    @property
    def neighbourhood(self) -> NeighbourhoodName:  # type: ignore[override]  # here it is the user's choice
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


def policy_of(policy: PolicyName | Policy | type[Policy] | Score) -> Policy:
    """A policy from its name, its class, an object, or a function of (cost, neighbours, size, staleness)."""
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
