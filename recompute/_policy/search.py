"""Candidate search: which of the resident, unlocked storages of a pool has the smallest score.

`exact` is a kinetic tournament for scores that are lines in time, and a scan for others. `sample`, `ignore small` and
`batch` are approximations; the first two are those of the DTR prototype (Kirisame et al., section 5).

A locked storage may stay in a search: it is passed over, and leaves the tournament for as long when it comes up.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isqrt
from typing import TYPE_CHECKING, ClassVar, Final

from recompute._engine.graph import Storage
from recompute._policy.formulas import Nothing, Policy
from recompute._policy.neighbourhoods import Neighbourhood
from recompute._policy.tournament import Tournament

if TYPE_CHECKING:
    from recompute._engine.memory import Pool


_AMORTISED: Final = 8  # scores a choice, at most: pressure is answered in time, but not all the time,
_FEW: Final = 2000  # unless there are few candidates
_ABOVE: Final = 1e150
_STEEPER: Final = 2.0**600  # keeps the order among those who are above


class Candidates(ABC):
    """The storages that a pool may evict, and the choice among them."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        self.policy = policy
        self.neighbourhood = neighbourhood
        self._pressure = neighbourhood.pressure
        self._choices = 0  # since all scores were new
        self.scored = 0  # scores computed so far
        self.pool: Pool  # whose candidates they are

    def prepare(self) -> bool:
        """Before a choice; True if all scores are new, because memory is shorter than it was."""
        neighbourhood = self.neighbourhood
        self._choices += 1
        if _AMORTISED * self._choices > len(self) - _FEW:  # to score all of them anew takes O(n)
            neighbourhood.prepare(self.pool)
        if neighbourhood.pressure == self._pressure:
            return False
        self._choices = 0
        self._pressure = neighbourhood.pressure
        self.policy = self.policy.under(self._pressure)
        return True

    def score(self, storage: Storage, now: float) -> float:
        """The score of one candidate by its definition; what nobody needs comes before all others."""
        self.scored += 1
        neighbours = self.neighbourhood.cost(storage)
        score = self.policy.score(storage.cost, neighbours, storage.size, now - storage.last_access)
        return min(score, 1e100) * 1e-200 if self.neighbourhood.superfluous(storage) else score

    def line(self, storage: Storage, neighbours: Callable[[Storage], float]) -> tuple[float, float]:
        """(base, slope) of one over the score; that of what nobody needs is above all others."""
        self.scored += 1
        line = self.policy.line(storage.cost, neighbours(storage), storage.size)
        assert line is not None
        if self.neighbourhood.superfluous(storage):
            return line[0] + _ABOVE, line[1] * _STEEPER
        return line

    @abstractmethod
    def add(self, storage: Storage) -> None:
        """`storage` is resident and unlocked from now on. O(1)."""

    @abstractmethod
    def remove(self, storage: Storage) -> None:
        """`storage` is no candidate any more. O(1)."""

    def changed(self, storage: Storage) -> None:  # a scan has nothing to remember
        """The own cost or the size of `storage` changed, or its neighbourhood's cost fell. O(1)."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all of them, whatever state they are in."""

    @abstractmethod
    def choose(self, now: float) -> list[Storage]:
        """Whom to evict, best first; empty if there is nobody."""

    @abstractmethod
    def __len__(self) -> int:
        """How many, roughly."""

    @abstractmethod
    def __iter__(self) -> Iterator[Storage]: ...


class _List(Candidates):
    """Candidates in a dense list, for searches that look at many."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        super().__init__(policy, neighbourhood)
        self._storages: list[Storage] = []

    def add(self, storage: Storage) -> None:
        storage.slot = len(self._storages)
        self._storages.append(storage)

    def remove(self, storage: Storage) -> None:
        last = self._storages.pop()
        if last is not storage:
            self._storages[storage.slot] = last
            last.slot = storage.slot
        storage.slot = -1

    def clear(self) -> None:
        self._storages = []

    def __len__(self) -> int:
        return len(self._storages)

    def __iter__(self) -> Iterator[Storage]:
        return iter(self._storages)

    def unlocked(self) -> list[Storage]:
        self.prepare()
        return [storage for storage in self._storages if not storage.locks]

    def best(self, among: list[Storage], now: float) -> list[Storage]:
        return [min(among, key=lambda storage: self.score(storage, now))] if among else []


class Scan(_List):
    """Every candidate is scored: O(n)."""

    def choose(self, now: float) -> list[Storage]:
        return self.best(self.unlocked(), now)


class Never(_List):
    """Nobody is ever chosen."""

    def choose(self, now: float) -> list[Storage]:
        return []


class Sampled(_List):
    """The best of a random sample, square root of the pool in size."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, seed: int) -> None:
        super().__init__(policy, neighbourhood)
        self._random = random.Random(seed)

    def choose(self, now: float) -> list[Storage]:
        count = isqrt(max(0, len(self._storages) - 1)) + 1
        picked = self._random.sample(self._storages, min(count, len(self._storages)))
        return self.best([storage for storage in picked if not storage.locks] or self.unlocked(), now)


class LargeOnly(_List):
    """Every candidate of at least `share` of the mean size is scored; the small ones only when nothing else is left."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, share: float) -> None:
        super().__init__(policy, neighbourhood)
        self._share = share

    def choose(self, now: float) -> list[Storage]:
        unlocked = self.unlocked()
        least = self._share * sum(storage.size for storage in unlocked) / max(1, len(unlocked))
        return self.best([storage for storage in unlocked if storage.size >= least], now)


class Batched(_List):
    """Every candidate is scored, and all below `factor` times the smallest score are evicted together."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, factor: float) -> None:
        super().__init__(policy, neighbourhood)
        self._factor = factor

    def choose(self, now: float) -> list[Storage]:
        scores = sorted((self.score(storage, now), -storage.number, storage) for storage in self.unlocked())
        if not scores:
            return []
        least = scores[0][0]
        most = self._factor * least if 0 < least < inf else least
        return [scores[0][2]] + [storage for score, _, storage in scores[1:] if score <= most < inf]


class Tournaments(Candidates):
    """Exact, in O(log n) amortised, for a policy whose 1 / score is a line in staleness.

    Nothing is scored before the first choice. After it, what changed is noted by slot (`_changed`) and played at the
    next choice; what only made a candidate dearer (a later access, a neighbour evicted) is found when it comes up. The
    lines are estimates that are never too low; what comes up gets its exact line, and wins if it stays.
    """

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        super().__init__(policy, neighbourhood)
        self._storages: list[Storage | None] = []  # by slot, in the order in which they became candidates
        self._holes = 0
        self._changed: set[int] = set()
        self._tournament: Tournament | None = None

    def add(self, storage: Storage) -> None:
        slot = -2 - storage.slot
        if slot < 0:
            slot = len(self._storages)
            self._storages.append(storage)
        storage.slot = slot  # that it had before it was locked: then the order says nothing of past searches
        if self._tournament is not None:
            self._changed.add(slot)

    def remove(self, storage: Storage) -> None:
        slot = storage.slot if storage.slot >= 0 else -2 - storage.slot
        self._storages[slot] = None
        if self._tournament is not None:
            self._changed.add(slot)
        storage.slot = -1
        self._holes += 1
        if 2 * self._holes > len(self._storages) + 64:
            self._close_ranks()

    def clear(self) -> None:
        self._storages, self._holes, self._tournament = [], 0, None
        self._changed.clear()

    def changed(self, storage: Storage) -> None:
        if storage.slot >= 0 and self._tournament is not None:
            self._changed.add(storage.slot)

    def __len__(self) -> int:
        return len(self._storages) - self._holes

    def __iter__(self) -> Iterator[Storage]:
        return (storage for storage in self._storages if storage is not None)

    def choose(self, now: float) -> list[Storage]:
        if self.prepare():
            self._tournament = None
        tournament = self._catch_up(now)
        while (slot := tournament.highest(now)) >= 0:
            storage = self._storages[slot]
            assert storage is not None
            if storage.locks:
                tournament.clear(slot, now)
                storage.slot = -2 - slot  # until it is unlocked
                continue
            known = tournament.line(slot)
            if self.policy.neighbourhood == "none" and known[2] == storage.last_access:
                return [storage]
            line = (*self.line(storage, self.neighbourhood.cost), storage.last_access)
            if line == known:
                return [storage]
            tournament.set(slot, *line, now)
            self._changed.add(slot)  # exact for now; from the next choice on, an estimate again
        return []

    def _catch_up(self, now: float) -> Tournament:
        """Play what has changed since the last choice."""
        tournament = self._tournament
        slots = len(self._storages)
        many = len(self._changed) * slots.bit_length() > 3 * slots + 64  # then to play all anew takes less
        if tournament is None or tournament.capacity < slots or many:
            self._close_ranks()
            tournament = self._tournament = Tournament(2 * len(self._storages) + 64)
            for slot, storage in enumerate(self._storages):
                assert storage is not None
                tournament.enter(slot, *self.line(storage, self.neighbourhood.floor), storage.last_access)
            tournament.build(now)
        else:
            for slot in self._changed:
                storage = self._storages[slot]
                if storage is None:
                    tournament.clear(slot, now)
                else:
                    tournament.set(slot, *self.line(storage, self.neighbourhood.floor), storage.last_access, now)
            self._changed.clear()
        return tournament

    def _close_ranks(self) -> None:
        """Slots without holes; the tournament must be built again. O(n), after as many changes."""
        self._storages = [storage for storage in self._storages if storage is not None]
        for slot, storage in enumerate(self._storages):
            assert storage is not None
            storage.slot = slot
        self._holes = 0
        self._changed.clear()
        self._tournament = None


@dataclass(frozen=True)
class Search(ABC):
    """How to look for the candidate of smallest score."""

    name: ClassVar[str]

    @abstractmethod
    def over(self, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
        """An empty set of candidates that is searched this way."""


@dataclass(frozen=True)
class Exact(Search):
    """The smallest score, in O(log n) amortised where the policy is a line in staleness, else by a scan."""

    name = "exact"

    def over(self, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
        straight = policy.line(1.0, 1.0, 1) is not None
        return (Tournaments if straight else Scan)(policy, neighbourhood)


@dataclass(frozen=True)
class Sample(Search):
    """The smallest score of a random sample, the square root of the pool in size."""

    name = "sample"
    seed: int = 0

    def over(self, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
        return Sampled(policy, neighbourhood, self.seed)


@dataclass(frozen=True)
class IgnoreSmall(Search):
    """Candidates below `share` of the mean size are looked at only when there is nothing else."""

    name = "ignore small"
    share: float = 0.01

    def over(self, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
        return LargeOnly(policy, neighbourhood, self.share)


@dataclass(frozen=True)
class Batch(Search):
    """Everything under `factor` times the smallest score goes at once: fewer searches, more evictions."""

    name = "batch"
    factor: float = 2.0

    def over(self, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
        return Batched(policy, neighbourhood, self.factor)


def candidates(search: Search, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
    """An empty set of candidates for a pool."""
    return Never(policy, neighbourhood) if isinstance(policy, Nothing) else search.over(policy, neighbourhood)


SEARCHES: Final[dict[str, type[Search]]] = {search.name: search for search in (Exact, Sample, IgnoreSmall, Batch)}
"""The searches by name."""


def search_of(search: str | Search | type[Search]) -> Search:
    """A search from its name or from an object."""
    if isinstance(search, str):
        found = SEARCHES.get(search.replace("-", " ").replace("_", " "))
        if found is None:
            raise ValueError(f"unknown search {search!r}; choose from {', '.join(SEARCHES)}")
        return found()
    if isinstance(search, type) and issubclass(search, Search):
        return search()
    if isinstance(search, Search):
        return search
    raise TypeError(f"a search is a name or a Search, not {search!r}")
