"""The search: which of the candidates of a pool has the smallest score.

`exact` is a kinetic tournament for scores that are lines in time, and a scan for others. `sample`, `ignore small` and
`batch` are approximations; the first two are those of the DTR prototype (Kirisame et al., section 5).

`Candidates.choose` finds the victim. Of a foreign policy, whose score is the user's code, it would run that under the
lock of the cache: instead, `Candidates.snapshot` takes the facts under the lock, and `rank` scores them without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan, isqrt
from operator import itemgetter
from typing import Any, ClassVar, Final, Literal, NamedTuple, final

from recompute._policy.candidate import Around, Candidate, WayOut
from recompute._policy.formulas import Nothing, Policy, Scored, steepness
from recompute._policy.tournament import Tournament
from recompute.text import name_of

SearchName = Literal["exact", "sample", "ignore small", "batch"]

_SCORES_A_CHOICE: Final = 8
"""A rise of the pressure changes all n scores: of many candidates it is measured only every n / 8 choices."""

_FEW: Final = 2000
"""Of no more candidates than these it is measured at each choice."""

_SHARE: Final = 0.7
"""Of the room: who would lock more while it comes back is passed over."""

_TRIES: Final = 8
"""So many are passed over at most; then that of least need goes."""

_HOPELESS: Final = 16
"""When so many were passed over while room was made, the score alone decides: hopeless budgets must not take long."""

_UNNEEDED: Final = 1e150
"""Added to one over the score of what is not needed: it is above all others."""

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

    candidate: Any
    cost: float
    neighbours: float
    size: int
    staleness: float
    unneeded: bool


class Snapshot(list[Facts]):
    """The candidates that a search looks at, at one moment."""

    pressure = 0.0


def rank(policy: Policy, search: Search, snapshot: Snapshot) -> list[Any]:
    """The candidates of a snapshot, best victim first; only those to be evicted at once if `search.together`.

    If the policy is foreign, this runs the user's code: call it without the lock, and check afterwards who can still be
    evicted. Raises what the score raises, TypeError if it is no number, and ValueError if it is nan.
    """
    scores = _scores(policy, snapshot)
    if isinstance(search, Batch):
        return _together(scores, search.factor)
    return [candidate for _, candidate in sorted(scores, key=itemgetter(0))]


def _scores(policy: Policy, snapshot: Snapshot) -> list[tuple[float, Any]]:
    """The scores by their definition; that of what is not needed is below all others."""
    under = policy.under(snapshot.pressure)
    scores: list[tuple[float, Any]] = []
    for candidate, cost, neighbours, size, staleness, unneeded in snapshot:
        score = under.score(cost, neighbours, size, staleness)
        try:
            undefined = isnan(score)
        except TypeError:
            raise TypeError(f"{_name(policy)} returned {score!r}: a score is a number") from None
        except OverflowError:
            raise ValueError(f"{_name(policy)} returned an integer larger than any float: a score is a float") from None
        if undefined:
            raise ValueError(f"{_name(policy)}{(cost, neighbours, size, staleness)} returned nan: a score is a number")
        scores.append((min(score, 1e100) * 1e-200 if unneeded else score, candidate))
    return scores


def _name(policy: Policy) -> str:
    return name_of(policy.function) if isinstance(policy, Scored) else f"{name_of(type(policy))}.score"


def _together(scores: list[tuple[float, Any]], factor: float) -> list[Any]:
    """Everything up to `factor` times the least."""
    if not scores:
        return []
    scores.sort(key=lambda scored: (scored[0], -scored[1].number))
    least = scores[0][0]
    most = factor * least if 0 < least < inf else least
    return [scores[0][1]] + [candidate for score, candidate in scores[1:] if score <= most < inf]


class Candidates:
    """What a pool may evict, and the choice among it. Gives back what was added: whatever extends `Candidate`.

    A locked candidate may stay: it is passed over.
    """

    __slots__ = ("_choices", "around", "policy", "pool", "pressure", "scored", "tiers")

    def __init__(self, policy: Policy, around: Around) -> None:
        self.policy = policy
        self.around = around
        self.pressure = around.pressure
        self.scored = 0
        """Scores computed so far."""
        self.pool: object = None
        """Whose pressure is measured; what it is only `around` knows."""
        self.tiers: WayOut | None = None
        self._choices = 0  # since the pressure changed

    def add(self, candidate: Candidate) -> None:
        """Let it be chosen. O(1)."""
        raise NotImplementedError

    def remove(self, candidate: Candidate) -> None:
        """It is no candidate any more. O(1)."""
        raise NotImplementedError

    def changed(self, candidate: Candidate) -> None:
        """Its cost or size changed, or the cost of what is around it decreased. O(1)."""

    def rest(self) -> None:
        """Nothing will be chosen in a while."""

    def clear(self) -> None:
        """Forget all of them, whatever state they are in."""
        raise NotImplementedError

    def choose(self, now: float) -> list[Any]:
        """The victims, best first; empty if there is none."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many there are, locked ones included."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def snapshot(self, now: float) -> Snapshot:
        """The facts of every candidate that this search looks at; runs no code of the user's."""
        snapshot = Snapshot()
        for candidate in self._looked_at():
            cost, neighbours = self._costs(candidate, self.around.cost(candidate))
            staleness = now - candidate.last_access
            snapshot.append(Facts(candidate, cost, neighbours, candidate.size, staleness, self._unneeded(candidate)))
        snapshot.pressure = self.pressure
        self.scored += len(snapshot)
        return snapshot

    def _costs(self, candidate: Candidate, neighbours: float) -> tuple[float, float]:
        """(own cost, cost of the neighbours) of losing a candidate, by the cheaper way back."""
        if self.tiers is None:
            return candidate.cost, neighbours
        return self.tiers.cheapest(candidate, neighbours)

    def _unneeded(self, candidate: Candidate) -> bool:
        """Whether a candidate that can be brought back is not needed."""
        return self.around.unneeded(candidate) and (self.tiers is None or self.tiers.can_drop(candidate))

    def _looked_at(self) -> list[Any]:
        """All that are not locked."""
        self._update_pressure()
        return [candidate for candidate in self if not candidate.locks]

    def _update_pressure(self) -> None:
        self._choices += 1
        if _SCORES_A_CHOICE * self._choices > len(self) - _FEW:
            self.around.measure_pressure(self.pool)
        if self.around.pressure != self.pressure:
            self.pressure = self.around.pressure
            self._choices = 0


class Scan(Candidates):
    """Every candidate is scored: O(n)."""

    def __init__(self, policy: Policy, around: Around) -> None:
        super().__init__(policy, around)
        self._all: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        candidate.slot = len(self._all)
        self._all.append(candidate)

    def remove(self, candidate: Candidate) -> None:
        last = self._all.pop()
        if last is not candidate:
            self._all[candidate.slot] = last
            last.slot = candidate.slot
        candidate.slot = -1

    def clear(self) -> None:
        self._all = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def choose(self, now: float) -> list[Any]:
        scores = _scores(self.policy, self.snapshot(now))
        return [min(scores, key=itemgetter(0))[1]] if scores else []


class Never(Scan):
    """Nothing is ever chosen."""

    def _looked_at(self) -> list[Any]:
        return []


class Sampled(Scan):
    """A random sample is scored, the square root of the pool in size."""

    def __init__(self, policy: Policy, around: Around, seed: int) -> None:
        super().__init__(policy, around)
        self._random = random.Random(seed)

    def _looked_at(self) -> list[Any]:
        count = isqrt(max(0, len(self._all) - 1)) + 1
        sample = self._random.sample(self._all, min(count, len(self._all)))
        return [candidate for candidate in sample if not candidate.locks] or super()._looked_at()


class LargeOnly(Scan):
    """Every candidate of at least `share` of the mean size is scored."""

    def __init__(self, policy: Policy, around: Around, share: float) -> None:
        super().__init__(policy, around)
        self._share = share

    def _looked_at(self) -> list[Any]:
        unlocked = super()._looked_at()
        least = self._share * sum(candidate.size for candidate in unlocked) / max(1, len(unlocked))
        return [candidate for candidate in unlocked if candidate.size >= least]


class Batched(Scan):
    """Every candidate is scored, and all up to `factor` times the smallest score are chosen."""

    def __init__(self, policy: Policy, around: Around, factor: float) -> None:
        super().__init__(policy, around)
        self._factor = factor

    def choose(self, now: float) -> list[Any]:
        return _together(_scores(self.policy, self.snapshot(now)), self._factor)


class Tournaments(Candidates):
    """Exact, in O(log n) amortised, for a policy whose 1 / score is a line in staleness: the highest line is chosen.

    Nothing is computed before the first choice. From then on the slots of what changed are noted, and their lines set
    at the next choice. What only makes a candidate dearer (an access, an evicted neighbour) is not noted: its line in
    the tournament is then too high, never too low. So the winner gets its exact line, and is chosen if it still wins.

    If the policy bounds needs, a winner is passed over that would lock too much of the room while it is brought back.
    """

    __slots__ = (
        "_alone",
        "_changed",
        "_gaps",
        "_in_slot",
        "_needs",
        "_passed",
        "_policy",
        "_power",
        "_pressure",
        "_time",
        "_tournament",
    )

    def __init__(self, policy: Policy, around: Around) -> None:
        super().__init__(policy, around)
        self._in_slot: list[Candidate | None] = []  # in the order in which they became candidates
        self._gaps = 0
        self._changed: set[int] = set()  # slots
        self._tournament: Tournament | None = None
        self._policy = policy  # under the pressure of the tournament
        self._power = 0.0  # as the policy has it, if its lines are its own
        self._pressure = self.pressure
        self._alone = policy.neighbourhood == "none"
        self._needs: dict[int, int] = {}  # candidate -> what bringing it back would lock, at
        self._time = -1.0
        self._passed = 0  # so often was one passed over then

    def add(self, candidate: Candidate) -> None:
        slot = -2 - candidate.slot  # where it was before it was locked: so the order does not depend on past choices
        if slot < 0:
            slot = len(self._in_slot)
            self._in_slot.append(candidate)
        candidate.slot = slot
        if self._tournament is not None:
            self._changed.add(slot)

    def remove(self, candidate: Candidate) -> None:
        slot = candidate.slot if candidate.slot >= 0 else -2 - candidate.slot
        self._in_slot[slot] = None
        if self._tournament is not None:
            self._changed.add(slot)
        candidate.slot = -1
        self._gaps += 1
        if 2 * self._gaps > len(self._in_slot) + 64:
            self._compact()

    def rest(self) -> None:
        self._tournament = None
        self._changed.clear()

    def clear(self) -> None:
        self._in_slot, self._gaps = [], 0
        self.rest()

    def changed(self, candidate: Candidate) -> None:
        if candidate.slot >= 0 and self._tournament is not None:
            self._changed.add(candidate.slot)

    def __len__(self) -> int:
        return len(self._in_slot) - self._gaps

    def __iter__(self) -> Iterator[Any]:
        return iter([candidate for candidate in self._in_slot if candidate is not None])

    def choose(self, now: float) -> list[Any]:
        self._update_pressure()
        tournament = self._update(now)
        passed: Candidate | None = None
        least = tries = 0
        slot = tournament.highest(now)
        while slot >= 0:
            candidate = self._in_slot[slot]
            assert candidate is not None
            if candidate.locks:
                tournament.clear(slot, now)
                candidate.slot = -2 - slot  # until it is unlocked
            else:
                known_base, known_slope, origin = tournament.line(slot)
                accessed = candidate.last_access
                if self._alone and origin == accessed:
                    return [candidate]
                neighbours = self.around.cost(candidate)
                base, slope = self._line(candidate, neighbours)
                if base == known_base and slope == known_slope and origin == accessed:
                    if base >= _UNNEEDED or not self._policy.bounds_need or not self._is_dropped(candidate, neighbours):
                        return [candidate]
                    if now == self._time and self._passed >= _HOPELESS:
                        return [candidate]
                    enough = _SHARE * self.around.room(self.pool)
                    need = self._need(candidate, now, enough)
                    if need <= enough:
                        return [candidate]
                    self._passed += 1
                    if passed is None or need < least:
                        passed, least = candidate, need
                    tries += 1
                    if tries == _TRIES:
                        return [passed]
                    tournament.clear(slot, now)
                else:
                    tournament.set(slot, base, slope, accessed, now)
                self._changed.add(slot)  # exact now; for the next choice the lower bound will do
            slot = tournament.highest(now)
        return [] if passed is None else [passed]

    def _is_dropped(self, candidate: Candidate, neighbours: float) -> bool:
        """Whether it comes back by recomputation, not from a tier."""
        return self.tiers is None or self.tiers.cheapest(candidate, neighbours) == (candidate.cost, neighbours)

    def _need(self, candidate: Candidate, now: float, enough: float) -> int:
        """What bringing it back would lock. Asked once at a time: while room is made, it can only grow."""
        if now != self._time:
            self._time = now
            self._passed = 0
            self._needs.clear()
        need = self._needs.get(candidate.number)
        if need is None:
            need = self._needs[candidate.number] = self.around.need(candidate, enough)
        return need

    def _line(self, candidate: Candidate, neighbours: float) -> tuple[float, float]:
        """(base, slope) of 1 / score."""
        self.scored += 1
        cost = candidate.cost
        if self.tiers is not None:
            cost, neighbours = self.tiers.cheapest(candidate, neighbours)
        if self._power:
            base, slope = 0.0, steepness(cost, neighbours, candidate.size, self._power)
        else:
            line = self._policy.line(cost, neighbours, candidate.size)
            assert line is not None
            base, slope = line
        if self._unneeded(candidate):
            base, slope = base + _UNNEEDED, slope * _STEEPER
        return base, slope

    def _update(self, now: float) -> Tournament:
        """The tournament with all that has changed since the last choice."""
        tournament = self._tournament
        slots = len(self._in_slot)
        many = len(self._changed) * slots.bit_length() > 3 * slots + 64  # then to build it anew takes less
        if tournament is None or self._pressure != self.pressure or tournament.capacity < slots or many:
            return self._build(now)
        for slot in self._changed:
            candidate = self._in_slot[slot]
            if candidate is None:
                tournament.clear(slot, now)
            else:
                base, slope = self._line(candidate, self.around.lower_bound(candidate))
                tournament.set(slot, base, slope, candidate.last_access, now)
        self._changed.clear()
        return tournament

    def _build(self, now: float) -> Tournament:
        """The tournament from scratch: O(n)."""
        if self._gaps:
            self._compact()
        self._pressure = self.pressure
        self._policy = self.policy.under(self.pressure)
        self._power = self._policy.power if not self._policy.foreign else 0.0
        tournament = self._tournament
        if tournament is None or tournament.capacity < len(self._in_slot):
            tournament = self._tournament = Tournament(2 * len(self._in_slot) + 64)
        self._changed.clear()
        for slot, candidate in enumerate(self._in_slot):
            assert candidate is not None
            candidate.slot = slot  # those that were locked take part again
            base, slope = self._line(candidate, self.around.lower_bound(candidate))
            tournament.enter(slot, base, slope, candidate.last_access)
        tournament.build(len(self._in_slot), now)
        return tournament

    def _compact(self) -> None:
        """Close the gaps; the tournament must be built again. O(n), after as many changes."""
        slot = 0
        kept: list[Candidate | None] = []
        for candidate in self._in_slot:
            if candidate is not None:
                candidate.slot = slot
                kept.append(candidate)
                slot += 1
        self._in_slot, self._gaps = kept, 0
        self.rest()


def candidates(search: Search, policy: Policy, around: Around) -> Candidates:
    """An empty set of candidates that is searched this way. Runs no code of the user's."""
    if isinstance(policy, Nothing):
        return Never(policy, around)
    if isinstance(search, Sample):
        return Sampled(policy, around, search.seed)
    if isinstance(search, IgnoreSmall):
        return LargeOnly(policy, around, search.share)
    if isinstance(search, Batch):
        return Batched(policy, around, search.factor)
    return (Tournaments if is_compiled(search, policy) else Scan)(policy, around)


def is_compiled(search: Search, policy: Policy) -> bool:
    """Whether victims are searched exactly, among scores that are lines in staleness: by compiled code alone."""
    return isinstance(search, Exact) and not policy.foreign and policy.line(1.0, 1.0, 1) is not None
