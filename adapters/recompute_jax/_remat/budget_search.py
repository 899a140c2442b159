"""Which budget the planner gets next, so that what XLA makes of its plan is just within the budget."""

from __future__ import annotations

from typing import Final

from recompute_jax._emit.regions import LENGTH

_FIRST: Final = 0.99  # of the budget, for the first plan: small values are not counted exactly
_NEAR: Final = 0.85  # of the budget: not worth another compilation
_ALMOST: Final = 1.05  # times the budget: a plan for hardly less will fit
_LEAP: Final = 1.6  # times the last budget at most; XLA has temporaries in the memory of results that are not there yet
_LITTLE: Final = 1.02  # overhead not worth another compilation
_GAIN: Final = 0.01  # of the overhead, for which the planner would have to get more once again
_SAVED: Final = 0.99  # times the bytes in longer regions: more is not worth the order that XLA cannot choose
_STEP: Final = 0.02  # of the budget: plans for budgets that differ by less are alike
_MORE: Final = 1.25  # times what has no plan: the planner may count more than XLA needs
_MOST: Final = 2.5  # times the budget, for that
_IMPROVING: Final = 5  # compilations at most, when one fits


class BudgetSearch:
    """A search for the most that the planner can get: between what has fitted and what has not.

    What does not fit is tried in shorter regions, which leave XLA less to order, then for less. If shorter regions
    need hardly less, it stays with the longer ones.
    """

    def __init__(self, budget: int, compilations: int) -> None:
        self.given: int | None = int(_FIRST * budget)
        """What the planner gets; None: the search has ended."""
        self.length = LENGTH
        """Segments in a region."""
        self.anew = True
        """Whether a new plan is wanted, not the last one in shorter regions."""
        self._budget = budget
        self._left = compilations
        self._improving = _IMPROVING
        self._fitted = 0  # the most that did
        self._exceeded = 0  # the least that did not
        self._none = 0  # the most that has no plan
        self._overhead: float | None = None  # of the last that fitted
        self._longer: tuple[int, int] | None = None  # bytes in longer regions, and their length
        self._shortens = True

    @property
    def is_last(self) -> bool:
        """Whether there is no compilation after the next."""
        return self._left <= 1

    def no_plan(self) -> None:
        """For what was given the planner has found nothing."""
        given = self._spent()
        self._improving += 1  # nothing was compiled
        self._none = max(self._none, given)
        if not self._fitted and not self._exceeded:
            more = int(_MORE * given)
            self.given = more if more <= _MOST * self._budget and self._left > 0 else None
        elif self._fitted or self._exceeded - self._none < _STEP * self._budget:
            self.given = None
        else:
            self._go_to((self._none + self._exceeded) // 2)

    def fitted(self, compiled: int, overhead: float) -> None:
        """The plan needs `compiled` bytes, which are within the budget."""
        given = self._spent()
        self._left = min(self._left, self._improving)
        gained = self._overhead is None or self._overhead - overhead >= _GAIN
        if overhead <= _LITTLE or compiled >= _NEAR * self._budget or not gained:
            self.given = None
            return
        self._fitted = max(self._fitted, given)
        self._overhead = overhead
        self._between(min(int(_LEAP * given), given + int(0.97 * self._budget) - compiled))

    def exceeded(self, compiled: int, peak: int, shorter: int) -> None:
        """The plan needs `compiled` bytes, too many, `peak` by its own count; regions could be `shorter` (0: not)."""
        given = self._spent()
        if self._longer is not None and compiled > _SAVED * self._longer[0]:
            compiled, self.length = self._longer
            self._shortens = False
        if shorter and self._shortens:
            self._longer = compiled, self.length
            self.length = shorter
            self.anew = False
            return
        self._exceeded = min(self._exceeded or given, given, peak)
        margin = 0.97 if compiled > _ALMOST * self._budget else 0.99
        self._between(max(given // 2, given + int(margin * self._budget) - compiled))

    def _spent(self) -> int:
        assert self.given is not None, "the search has ended"
        self._left -= 1
        self._improving -= 1
        given = self.given
        if not self._left:
            self.given = None
        return given

    def _between(self, wish: int) -> None:
        """On with about so much, or the middle of what is left to try."""
        below = max(self._fitted, self._none)
        if self._exceeded and not below < wish < self._exceeded:
            wish = (below + self._exceeded) // 2
            if wish - below < _STEP * self._budget:
                self.given = None
                return
        self._go_to(wish)

    def _go_to(self, given: int) -> None:
        if self._left > 0:
            self.given = given
            self.anew = True
            self._longer = None
