"""The least budget that works, by bisection."""

from __future__ import annotations

from collections.abc import Callable


def smallest(fits: Callable[[int], bool], low: int, high: int, *, within: float = 1, tries: int | None = None) -> int:
    """About the least number that fits, above `low`, which does not, up to `high`, which does; neither is tried.

    It is found to `within` so many, or in so many `tries` at most. Where some number does not fit although a lower one
    does, the result fits, too, and need not be the least. O(log((high - low) / within)) calls of `fits`.
    """
    while high - low > max(1, within) and tries != 0:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
        tries = None if tries is None else tries - 1
    return high
