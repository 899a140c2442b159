# cython: boundscheck=False, wraparound=False, overflowcheck=False
"""A kinetic tournament: which of many lines is highest, as time moves on, in O(log n) amortised.

A binary tree over slots; every node knows the winner among its leaves and when that may next change. Two lines cross
at most once, so each node changes hands rarely (Basch, Guibas and Hershberger, Data structures for mobile data, 1999).
"""

from __future__ import annotations

from array import array
from math import inf

_PAGE = 64
_NOUGHT, _NONE, _EVER = array("d", [0.0] * _PAGE), array("q", [-1] * _PAGE), array("d", [inf] * _PAGE)
"""Arrays are made of these: to repeat many numbers at once takes a tenth of the time."""

_EARLY = 1 - 1e-9  # look again a little before the computed crossing, so that rounding never hides one


class Tournament:
    """Lines base + slope * (time - origin) in numbered slots. Of equal heights the later slot wins.

    Time must not run backwards. Arrays of floats and ints, no object a line: this is the hot path of a full cache.
    Compiled, they are indexed without a check, but for the slots that are set and cleared.
    """

    __slots__ = ("_base", "_expiry", "_origin", "_slope", "_winner", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = 1 << max(1, capacity - 1).bit_length()
        pages = self.capacity // _PAGE + 1
        self._base = _NOUGHT * pages
        self._slope = _NOUGHT * pages
        self._origin = _NOUGHT * pages
        self._winner = _NONE * (2 * pages)  # node -> slot; node i has children 2 i and 2 i + 1
        self._expiry = _EVER * (2 * pages)  # node -> until when every winner below is right

    def line(self, slot: int) -> tuple[float, float, float]:
        """(base, slope, origin) as last set."""
        return self._base[slot], self._slope[slot], self._origin[slot]

    def enter(self, slot: int, base: float, slope: float, origin: float) -> None:
        """Set a line, but play no games: call `build` when the first ones are all in."""
        leaf = self._leaf(slot)
        self._base[slot], self._slope[slot], self._origin[slot] = base, slope, origin
        self._winner[leaf] = slot

    def build(self, slots: int, now: float) -> None:
        """Play every game among the first slots: O(n)."""
        first, last = self.capacity, self.capacity + max(1, slots) - 1
        while first > 1:
            first, last = first >> 1, last >> 1
            for node in range(first, last + 1):
                self._play(node, now)

    def set(self, slot: int, base: float, slope: float, origin: float, now: float) -> None:
        """Set or change a line: O(log n), mostly less."""
        self.enter(slot, base, slope, origin)
        self._climb(slot, now)

    def clear(self, slot: int, now: float) -> None:
        """Take a line out: O(log n)."""
        self._winner[self._leaf(slot)] = -1
        self._climb(slot, now)

    def highest(self, now: float) -> int:
        """The slot of the highest line; -1 if there is none."""
        if self._expiry[1] < now:
            late = [1]
            for node in late:  # grows: parents before children
                child = 2 * node
                if child < self.capacity:
                    if self._expiry[child] < now:
                        late.append(child)
                    if self._expiry[child + 1] < now:
                        late.append(child + 1)
            for node in reversed(late):
                self._play(node, now)
        return self._winner[1]

    def _leaf(self, slot: int) -> int:
        if not 0 <= slot < self.capacity:
            raise IndexError(f"there is no slot {slot} among {self.capacity}")
        return self.capacity + slot

    def _climb(self, slot: int, now: float) -> None:
        """Play the games that a line takes part in, from its leaf up, as far as they make a difference."""
        node = (self.capacity + slot) >> 1
        while node and self._play(node, now, slot):
            node >>= 1

    def _play(self, node: int, now: float, changed: int = -1) -> bool:
        """Let the winners of both children meet; False if nothing above can tell the difference.

        `changed`: the slot whose line has changed, so that its winning again is news.
        """
        child = 2 * node
        high, low = self._winner[child], self._winner[child + 1]
        until, other = self._expiry[child], self._expiry[child + 1]
        if other < until:
            until = other
        if high < 0:
            high = low
        elif low >= 0:
            fast, slow = self._slope[low], self._slope[high]  # the lower line may be about to overtake
            gap = self._base[high] + slow * (now - self._origin[high])
            gap = gap - self._base[low] - fast * (now - self._origin[low])
            if gap < 0 or (gap == 0 and low > high):
                high, gap, fast, slow = low, -gap, slow, fast
            if fast > slow:
                crossing = now + gap / (fast - slow) * _EARLY
                if crossing < until:
                    until = crossing
        known, other = self._winner[node], self._expiry[node]
        if 0 <= changed != high == known and other <= until:
            return False  # at worst it is looked at again too early
        self._winner[node] = high
        self._expiry[node] = until
        return True
