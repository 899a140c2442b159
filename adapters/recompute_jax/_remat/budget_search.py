"""Which of a series of plans is compiled next, and taken in the end: the cheapest that fits, in few compilations.

The series is the same for every budget, by rising cost. What the search takes for a budget is never dearer than what it
takes for a smaller one, whatever the compiler makes of each plan: `start` does not rise with the budget, steps lead
from one fixed place to the next, and each answer of `fits` can only turn from no to yes.
"""

from __future__ import annotations

from collections.abc import Callable

from recompute.planners import smallest


def cheapest(count: int, start: int, fits: Callable[[int], bool], stride: int = 3) -> int | None:
    """The number of a plan that fits, of `count` by rising cost, where cheaper ones seen do not; None: there is none.

    The search begins near `start` and goes `stride` plans at once, then between the last two places.
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
