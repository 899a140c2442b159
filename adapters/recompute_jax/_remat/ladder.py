"""Plans of one function for a series of budgets: the same series whatever is asked for, each cheaper than the last.

A plan for more bytes starts from the one for fewer, so it is no dearer. To these come the loops of the function in
uniform shapes, which are what `jax.checkpoint` makes of a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from math import ceil, log
from typing import Final

from recompute.planners import PlanError, smallest
from recompute_jax._remat.candidates import Candidates
from recompute_jax._remat.recipe import Candidate

_MIDDLE: Final = 0.3  # of the plain function's bytes: plans for less are made only where they are asked for
_STEP: Final = 0.93  # of one budget to the next
_LONG_STEP: Final = 0.82  # where loops can be in many shapes anyway
_UNIFORM: Final = 1.2  # times the bytes of what costs no more: XLA needs less for uniform loops than for others
_SAME: Final = 1e-4  # of the cost of the function: no gain


class Ladder:
    """The series, in two parts: `common` for most budgets, `scarce` for little memory. By rising cost, each."""

    def __init__(self, candidates: Candidates, effort: float) -> None:
        self._candidates = candidates
        self._effort = effort
        self._step = _LONG_STEP if candidates.has_loops else _STEP

    @cached_property
    def common(self) -> list[Candidate]:
        """Plans for about a third of the plain function's bytes and more, and with loops in uniform shapes."""
        most = self._candidates.predicted
        plans = self._climb(int(_MIDDLE * most), most, None)
        return _worth(plans, list(self._candidates.uniform(self._effort / 4)))

    @cached_property
    def scarce(self) -> list[Candidate]:
        """Plans for less. None is cheaper than those for more."""
        dearest = self.common[-1].overhead if self.common else 1.0
        least = self._candidates.least(self._effort / 4)
        plans = self._climb(least.plan.budget, int(_MIDDLE * self._candidates.predicted), least)
        dear = [plan for plan in (least, *plans) if plan.overhead > dearest or not self.common]
        return _worth(dear, [])

    def _climb(self, low: int, high: int, before: Candidate | None) -> list[Candidate]:
        """Of those for each budget, made from the one before and anew, the ones that are cheaper than all before."""
        count = max(1, ceil(log(max(1.0, high / max(1, low))) / -log(self._step)))
        plans: list[Candidate] = []
        for place in range(count, -1, -1):
            given = max(2, int(high * self._step**place))
            for start in (None,) if before is None else (before, None):
                with suppress(PlanError):
                    made = self._candidates.candidate(given, self._effort / (count + 1), start)
                    if before is None or made.overhead < before.overhead - _SAME:
                        before = made
                        plans.append(made)
        return plans


def _worth(plans: list[Candidate], uniform: list[Candidate]) -> list[Candidate]:
    """By rising cost, those that need less than all that cost less, about."""
    worth: list[Candidate] = []
    least = float("inf")
    special = set(map(id, uniform))
    seen: set[tuple[float, int]] = set()
    for candidate in sorted([*plans, *uniform], key=lambda plan: (plan.overhead, plan.peak)):
        needed = candidate.peak
        is_new = (candidate.overhead, needed) not in seen
        seen.add((candidate.overhead, needed))
        if is_new and needed < (_UNIFORM if id(candidate) in special else 1.0) * least:
            worth.append(candidate)
            least = min(least, needed)
    return worth


def cheapest(count: int, start: int, fits: Callable[[int], bool], stride: int = 3) -> int | None:
    """The number of a plan that fits, of `count` by rising cost, where cheaper ones seen do not; None: there is none.

    The series is the same for every budget, `start` does not rise with the budget, and each answer of `fits` can only
    turn from no to yes: so what is found for a budget never costs more than what is found for a smaller one, whatever
    the compiler makes of each plan. The search begins near `start` and goes `stride` plans at once, then between the
    last two places.
    O(count / stride + log(stride)) calls of `fits`, and few if `start` is about right.
    """
    if not count:
        return None
    stops: list[int] = sorted({0, *range(count - 1, -1, -stride)})
    at = next((place for place, stop in enumerate(stops) if stop >= start), len(stops) - 1)
    if fits(stops[at]):
        while at and fits(stops[at - 1]):
            at -= 1
    else:
        at += 1
        while at < len(stops) and not fits(stops[at]):
            at += 1
        if at == len(stops):
            return None
    return smallest(fits, stops[at - 1] if at else -1, stops[at])
