"""Candidates of a function whose conditionals may keep less for later ones, which then run it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from recompute.planners import PlanError
from recompute_jax._branches.groups import Group, groups_of
from recompute_jax._branches.kept import Kept, kept, nothing
from recompute_jax._branches.rewrite import Choice, joined
from recompute_jax._emit.gates import Gate
from recompute_jax._emit.regions import LENGTH
from recompute_jax._program.jaxpr import Flat
from recompute_jax._program.segments import Segment, nesting
from recompute_jax._remat.candidates import AnyCandidates, Candidate, Candidates

_NOTICED: Final = 0.05  # of the budget: groups that hand on less are left as they are
_SLIGHT: Final = 1.005  # overhead not worth another plan
_SHARES: Final = (1.0, 0.5)  # of what the rest leaves of the budget: what a branch may have


def candidates_of(
    flat: Flat,
    name: str,
    gate: Gate,
    seed: int,
    price: Callable[[Segment], float] | None,
    offload: bool = False,
    depth: int | None = None,
) -> AnyCandidates:
    """What makes candidates of one function.

    `depth`: of the loops in it that may be changed. Loops that changing others made are not changed again.
    """
    depth = nesting(flat.equations) if depth is None else depth
    made = partial(candidates_of, name=name, gate=gate, seed=seed, price=price, depth=max(0, depth - 1))
    alone = Candidates(flat, name, gate, seed, price, made, offload, depth > 0)
    groups = groups_of(flat)
    return JoinedCandidates(alone, groups) if groups else alone


class JoinedCandidates:
    """The better of those of the function as it is, and of the function with such conditionals."""

    def __init__(self, alone: Candidates, groups: list[Group]) -> None:
        self._alone = alone
        self._groups = groups
        self.flat = alone.flat
        self.plain = alone.plain
        self.predicted = alone.predicted
        self.has_loops = alone.has_loops
        self._known: dict[Choice, Candidates] = {}

    def candidate(self, given: int, effort: float, before: Candidate | None = None, length: int = LENGTH) -> Candidate:
        """The best plan that is found for so many bytes. Raises PlanError if there is none."""
        best: Candidate | None = None
        failure: PlanError | None = None
        try:
            best = self._alone.candidate(given, effort / 2, before if before and not before.joined else None, length)
        except PlanError as error:
            failure = error
        choices = self._choices(given, effort / 4) if best is None or best.overhead > _SLIGHT else []
        for choice in choices:
            try:
                start = before if before and before.joined == choice else None
                inner = self._joined(choice).candidate(given, effort / 4 / len(choices), start, length)
            except PlanError:
                continue
            found = self._of(inner, choice)
            if best is None or found.overhead < best.overhead:
                best = found
        if best is None:
            assert failure is not None, "nothing was found"
            raise failure
        return best

    def least(self, effort: float) -> Candidate:
        """About the least budget that a plan exists for."""
        choice = self._nothing()
        found = self._alone.least(effort / 2), self._of(self._joined(choice).least(effort / 2), choice)
        return min(found, key=lambda each: each.plan.peak)

    def leasts(self, effort: float) -> Iterator[Candidate]:
        """Several for little memory."""
        yield from self._alone.leasts(effort / 2)
        choice = self._nothing()
        for each in self._joined(choice).leasts(effort / 2):
            yield self._of(each, choice)

    def uniform(self, effort: float) -> Iterator[Candidate]:
        """With each step of a loop, and each branch, run again by itself."""
        yield from self._alone.uniform(effort / 2)
        choice = self._nothing()
        joined = self._joined(choice)
        for each in (joined.as_it_is(), *joined.uniform(effort / 2)):
            yield self._of(each, choice)

    def _choices(self, given: int, effort: float) -> list[Choice]:
        """Those that differ: of planned branches with some room, and the one that keeps nothing."""
        noticed = [at for at, group in enumerate(self._groups) if group.size > _NOTICED * given]
        if not noticed:
            return []
        total = sum(self._groups[at].size for at in noticed)
        found: dict[Choice, None] = {}
        for share in _SHARES:
            room = max(0, int(share * (given - max(0, self.predicted - total))))
            part = effort / len(noticed) / len(_SHARES)
            found[_choice([(at, self._kept(at, room * self._groups[at].size // total, part)) for at in noticed])] = None
        found[self._nothing()] = None
        return list(found)

    def _kept(self, at: int, room: int, effort: float) -> Kept:
        alone = self._alone
        return kept(self._groups[at], room, effort, alone.seed, alone.price)

    def _nothing(self) -> Choice:
        return _choice([(at, nothing(group)) for at, group in enumerate(self._groups)])

    def _joined(self, choice: Choice) -> Candidates:
        if choice not in self._known:
            alone = self._alone
            flat = joined(self.flat, choice)
            self._known[choice] = Candidates(
                flat, alone.name, alone.gate, alone.seed, alone.price, alone.of_body, alone.offload, alone.loops
            )
        return self._known[choice]

    def _of(self, inner: Candidate, choice: Choice) -> Candidate:
        """A plan of the changed function, for this one."""
        more = self._joined(choice).plain.program.model_time / max(1e-9, self.plain.program.model_time)
        return replace(inner, overhead=inner.overhead * more, joined=choice)


def _choice(found: list[tuple[int, Kept]]) -> Choice:
    return tuple([(at, tuple([tuple(each) for each in branches])) for at, branches in found])
