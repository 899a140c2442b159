"""Candidate search: which of the resident, unlocked storages of a pool has the smallest score.

`exact` is a kinetic tournament for scores that are lines in time, and a scan for others. `sample`, `ignore small` and
`batch` are approximations; the first two are those of the DTR prototype (Kirisame et al., section 5).

`Candidates.choose` finds the victim. Of a foreign policy, whose score is the user's code, it would run that under the
lock of the cache: instead, `Candidates.snapshot` takes the facts under the lock, and `rank` scores them without it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan, isqrt
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, final

from recompute._engine.graph import Storage, name_of
from recompute._policy.formulas import Nothing, Policy, Scored
from recompute._policy.neighbourhoods import Neighbourhood
from recompute._policy.tournament import Tournament

if TYPE_CHECKING:
    from recompute._engine.pool import Pool

SearchName = Literal["exact", "sample", "ignore small", "batch"]

_SCORES_A_CHOICE: Final = 8
"""A rise of the pressure changes all n scores: of many candidates it is measured only every n / 8 choices."""

_FEW: Final = 2000
"""Of no more candidates than these it is measured at each choice."""

_UNNEEDED: Final = 1e150
"""Added to one over the score of what nobody needs: it is above all others."""

_STEEPER: Final = 2.0**600
"""Times its slope: so that these keep their order among themselves in spite of rounding."""


@dataclass(frozen=True)
class Search:
    """How to look for the candidate of smallest score: one of the classes below."""

    name: ClassVar[str]
    together: ClassVar[bool] = False
    """Whether all that `rank` returns are evicted at once, instead of the first that still can be."""


@final
@dataclass(frozen=True)
class Exact(Search):
    """The smallest score, in O(log n) amortised where the policy is a line in staleness, else by a scan."""

    name = "exact"


@final
@dataclass(frozen=True)
class Sample(Search):
    """The smallest score of a random sample, the square root of the pool in size."""

    name = "sample"
    seed: int = 0


@final
@dataclass(frozen=True)
class IgnoreSmall(Search):
    """Candidates below `share` of the mean size are looked at only when there is nothing else."""

    name = "ignore small"
    share: float = 0.01


@final
@dataclass(frozen=True)
class Batch(Search):
    """Everything up to `factor` times the smallest score is evicted at once: fewer searches, more evictions."""

    name = "batch"
    together = True
    factor: float = 2.0


SEARCHES: Final[dict[str, type[Search]]] = {search.name: search for search in (Exact, Sample, IgnoreSmall, Batch)}
"""The searches by name."""


def search_of(search: SearchName | Search | type[Search]) -> Search:
    """A search from its name, its class, or an object."""
    if isinstance(search, str):
        found = SEARCHES.get(search.replace("-", " ").replace("_", " "))
        if found is None:
            raise ValueError(f"unknown search {search!r}; choose from {', '.join(SEARCHES)}")
        return found()
    if (search if isinstance(search, type) else type(search)) not in SEARCHES.values():
        classes = ", ".join(known.__name__ for known in SEARCHES.values())
        raise TypeError(f"a search is a name, or one of {classes}, not {search!r}")
    return search() if isinstance(search, type) else search


class Facts(NamedTuple):
    """What a score is computed from, of one candidate."""

    storage: Storage
    cost: float
    neighbours: float
    size: int
    staleness: float
    unneeded: bool


class Snapshot(list[Facts]):
    """The candidates that a search looks at, at one moment."""

    pressure = 0.0


def rank(policy: Policy, search: Search, snapshot: Snapshot) -> list[Storage]:
    """The storages of a snapshot, best victim first; only those to be evicted at once if `search.together`.

    If the policy is foreign, this runs the user's code: call it without the lock, and check afterwards who can still be
    evicted. Raises what the score raises, TypeError if it is no number, and ValueError if it is nan.
    """
    scores = _scores(policy, snapshot)
    if isinstance(search, Batch):
        return _together(scores, search.factor)
    return [storage for _, storage in sorted(scores, key=itemgetter(0))]


def _scores(policy: Policy, snapshot: Snapshot) -> list[tuple[float, Storage]]:
    """The scores by their definition; that of what nobody needs is below all others."""
    under = policy.under(snapshot.pressure)
    scores: list[tuple[float, Storage]] = []
    for storage, cost, neighbours, size, staleness, unneeded in snapshot:
        score = under.score(cost, neighbours, size, staleness)
        try:
            undefined = isnan(score)
        except TypeError:
            raise TypeError(f"{_name(policy)} returned {score!r}: a score is a number") from None
        if undefined:
            raise ValueError(f"{_name(policy)}{(cost, neighbours, size, staleness)} returned nan: a score is a number")
        scores.append((min(score, 1e100) * 1e-200 if unneeded else score, storage))
    return scores


def _name(policy: Policy) -> str:
    return name_of(policy.function) if isinstance(policy, Scored) else f"{name_of(type(policy))}.score"


def _together(scores: list[tuple[float, Storage]], factor: float) -> list[Storage]:
    """Everything up to `factor` times the least."""
    if not scores:
        return []
    scores.sort(key=lambda scored: (scored[0], -scored[1].number))
    least = scores[0][0]
    most = factor * least if 0 < least < inf else least
    return [scores[0][1]] + [storage for score, storage in scores[1:] if score <= most < inf]


class Candidates(ABC):
    """The storages that a pool may evict, and the choice among them.

    A locked storage may stay among them: it is passed over.
    """

    pool: Pool

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        self.policy = policy
        self.neighbourhood = neighbourhood
        self.pressure = neighbourhood.pressure
        self.scored = 0  # scores computed so far
        self._choices = 0  # since the pressure changed

    @abstractmethod
    def add(self, storage: Storage) -> None:
        """`storage` is resident and unlocked from now on. O(1)."""

    @abstractmethod
    def remove(self, storage: Storage) -> None:
        """`storage` is no candidate any more. O(1)."""

    def changed(self, storage: Storage) -> None:
        """The cost or the size of `storage` changed, or the cost of its neighbourhood decreased. O(1)."""

    def rest(self) -> None:
        """Nobody will be chosen in a while."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all of them, whatever state they are in."""

    @abstractmethod
    def choose(self, now: float) -> list[Storage]:
        """Whom to evict, best first; empty if there is nobody."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are, locked ones included."""

    @abstractmethod
    def __iter__(self) -> Iterator[Storage]: ...

    def snapshot(self, now: float) -> Snapshot:
        """The facts of every candidate that this search looks at; runs no code of the user's."""
        around = self.neighbourhood.cost
        snapshot = Snapshot()
        for storage in self._looked_at():
            cost, neighbours = self._costs(storage, around(storage))
            staleness = now - storage.last_access
            snapshot.append(Facts(storage, cost, neighbours, storage.size, staleness, self._unneeded(storage)))
        snapshot.pressure = self.pressure
        self.scored += len(snapshot)
        return snapshot

    def _costs(self, storage: Storage, neighbours: float) -> tuple[float, float]:
        """(own cost, cost of the neighbours) of losing a storage, by the cheaper way back."""
        tiers = self.pool.tiers
        return (storage.cost, neighbours) if tiers is None else tiers.cheapest(storage, neighbours)

    def _unneeded(self, storage: Storage) -> bool:
        """Whether nobody will miss a storage that can be brought back."""
        tiers = self.pool.tiers
        return self.neighbourhood.unneeded(storage) and (tiers is None or tiers.can_drop(storage))

    def _looked_at(self) -> list[Storage]:
        """All that are not locked."""
        self._update_pressure()
        return [storage for storage in self if not storage.locks]

    def _update_pressure(self) -> None:
        neighbourhood = self.neighbourhood
        self._choices += 1
        if _SCORES_A_CHOICE * self._choices > len(self) - _FEW:
            neighbourhood.measure_pressure(self.pool)
        if neighbourhood.pressure != self.pressure:
            self.pressure = neighbourhood.pressure
            self._choices = 0


class Scan(Candidates):
    """Every candidate is scored: O(n)."""

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

    def choose(self, now: float) -> list[Storage]:
        scores = _scores(self.policy, self.snapshot(now))
        return [min(scores, key=itemgetter(0))[1]] if scores else []


class Never(Scan):
    """Nobody is ever chosen."""

    def _looked_at(self) -> list[Storage]:
        return []


class Sampled(Scan):
    """A random sample is scored, the square root of the pool in size."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, seed: int) -> None:
        super().__init__(policy, neighbourhood)
        self._random = random.Random(seed)

    def _looked_at(self) -> list[Storage]:
        count = isqrt(max(0, len(self._storages) - 1)) + 1
        sample = self._random.sample(self._storages, min(count, len(self._storages)))
        return [storage for storage in sample if not storage.locks] or super()._looked_at()


class LargeOnly(Scan):
    """Every candidate of at least `share` of the mean size is scored."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, share: float) -> None:
        super().__init__(policy, neighbourhood)
        self._share = share

    def _looked_at(self) -> list[Storage]:
        unlocked = super()._looked_at()
        least = self._share * sum(storage.size for storage in unlocked) / max(1, len(unlocked))
        return [storage for storage in unlocked if storage.size >= least]


class Batched(Scan):
    """Every candidate is scored, and all up to `factor` times the smallest score are chosen."""

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood, factor: float) -> None:
        super().__init__(policy, neighbourhood)
        self._factor = factor

    def choose(self, now: float) -> list[Storage]:
        return _together(_scores(self.policy, self.snapshot(now)), self._factor)


class Tournaments(Candidates):
    """Exact, in O(log n) amortised, for a policy whose 1 / score is a line in staleness: the highest line is chosen.

    Nothing is computed before the first choice. From then on the slots of what changed are noted, and their lines set
    at the next choice. What only makes a candidate dearer (an access, an evicted neighbour) is not noted: its line in
    the tournament is then too high, never too low. So the winner gets its exact line, and is chosen if it still wins.
    """

    def __init__(self, policy: Policy, neighbourhood: Neighbourhood) -> None:
        super().__init__(policy, neighbourhood)
        self._storages: list[Storage | None] = []  # by slot, in the order in which they became candidates
        self._gaps = 0
        self._changed: set[int] = set()  # slots
        self._tournament: Tournament | None = None
        self._policy = policy  # under the pressure of the tournament
        self._pressure = self.pressure

    def add(self, storage: Storage) -> None:
        slot = -2 - storage.slot  # where it was before it was locked: so the order does not depend on past choices
        if slot < 0:
            slot = len(self._storages)
            self._storages.append(storage)
        storage.slot = slot
        if self._tournament is not None:
            self._changed.add(slot)

    def remove(self, storage: Storage) -> None:
        slot = storage.slot if storage.slot >= 0 else -2 - storage.slot
        self._storages[slot] = None
        if self._tournament is not None:
            self._changed.add(slot)
        storage.slot = -1
        self._gaps += 1
        if 2 * self._gaps > len(self._storages) + 64:
            self._compact()

    def rest(self) -> None:
        self._tournament = None
        self._changed.clear()

    def clear(self) -> None:
        self._storages, self._gaps = [], 0
        self.rest()

    def changed(self, storage: Storage) -> None:
        if storage.slot >= 0 and self._tournament is not None:
            self._changed.add(storage.slot)

    def __len__(self) -> int:
        return len(self._storages) - self._gaps

    def __iter__(self) -> Iterator[Storage]:
        return (storage for storage in self._storages if storage is not None)

    def choose(self, now: float) -> list[Storage]:
        self._update_pressure()
        tournament = self._update(now)
        while (slot := tournament.highest(now)) >= 0:
            storage = self._storages[slot]
            assert storage is not None
            if storage.locks:
                tournament.clear(slot, now)
                storage.slot = -2 - slot  # until it is unlocked
                continue
            known = tournament.line(slot)
            if self._policy.neighbourhood == "none" and known[2] == storage.last_access:
                return [storage]
            line = (*self._line(storage, self.neighbourhood.cost(storage)), storage.last_access)
            if line == known:
                return [storage]
            tournament.set(slot, *line, now)
            self._changed.add(slot)  # exact now; for the next choice the lower bound will do
        return []

    def _line(self, storage: Storage, neighbours: float) -> tuple[float, float]:
        """(base, slope) of 1 / score."""
        self.scored += 1
        line = self._policy.line(*self._costs(storage, neighbours), storage.size)
        assert line is not None
        if self._unneeded(storage):
            return line[0] + _UNNEEDED, line[1] * _STEEPER
        return line

    def _update(self, now: float) -> Tournament:
        """The tournament with all that has changed since the last choice."""
        lower_bound = self.neighbourhood.lower_bound
        tournament = self._tournament
        slots = len(self._storages)
        many = len(self._changed) * slots.bit_length() > 3 * slots + 64  # then to build it anew takes less
        if tournament is None or self._pressure != self.pressure or tournament.capacity < slots or many:
            self._compact()
            self._pressure = self.pressure
            self._policy = self.policy.under(self.pressure)
            tournament = self._tournament = Tournament(2 * len(self._storages) + 64)
            for slot, storage in enumerate(self._storages):
                assert storage is not None
                tournament.enter(slot, *self._line(storage, lower_bound(storage)), storage.last_access)
            tournament.build(now)
        else:
            for slot in self._changed:
                storage = self._storages[slot]
                if storage is None:
                    tournament.clear(slot, now)
                else:
                    tournament.set(slot, *self._line(storage, lower_bound(storage)), storage.last_access, now)
            self._changed.clear()
        return tournament

    def _compact(self) -> None:
        """Close the gaps; the tournament must be built again. O(n), after as many changes."""
        self._storages = list(self)
        for slot, storage in enumerate(self):
            storage.slot = slot
        self._gaps = 0
        self._changed.clear()
        self._tournament = None


def candidates(search: Search, policy: Policy, neighbourhood: Neighbourhood) -> Candidates:
    """An empty set of candidates that is searched this way. Runs no code of the user's."""
    if isinstance(policy, Nothing):
        return Never(policy, neighbourhood)
    if isinstance(search, Sample):
        return Sampled(policy, neighbourhood, search.seed)
    if isinstance(search, IgnoreSmall):
        return LargeOnly(policy, neighbourhood, search.share)
    if isinstance(search, Batch):
        return Batched(policy, neighbourhood, search.factor)
    straight = not policy.foreign and policy.line(1.0, 1.0, 1) is not None
    return (Tournaments if straight else Scan)(policy, neighbourhood)
