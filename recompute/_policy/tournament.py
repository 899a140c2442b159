"""A kinetic tournament: which of many lines is highest, as time moves on, in O(log n) amortised.

A binary tree over slots; every node knows the winner among its leaves and when that may next change. Two lines cross
at most once, so each node changes hands rarely (Basch, Guibas and Hershberger, Data structures for mobile data, 1999).
"""

from __future__ import annotations

from math import inf

_EARLY = 1 - 1e-9  # look again a little before the computed crossing, so that rounding never hides one


class Tournament:
    """Lines base + slope * (time - origin) in numbered slots. Of equal heights the later slot wins.

    Time must not run backwards. Arrays of floats and ints, no object a line: this is the hot path of a full cache.
    """

    __slots__ = ("_base", "_expiry", "_origin", "_slope", "_winner", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = 1 << max(1, capacity - 1).bit_length()
        self._base = [0.0] * self.capacity
        self._slope = [0.0] * self.capacity
        self._origin = [0.0] * self.capacity
        self._winner = [-1] * (2 * self.capacity)  # node -> slot; node i has children 2 i and 2 i + 1
        self._expiry = [inf] * (2 * self.capacity)  # node -> until when every winner below is right

    def line(self, slot: int) -> tuple[float, float, float]:
        """(base, slope, origin) as last set."""
        return self._base[slot], self._slope[slot], self._origin[slot]

    def enter(self, slot: int, base: float, slope: float, origin: float) -> None:
        """Set a line, but play no games: call `build` when all are in."""
        self._base[slot], self._slope[slot], self._origin[slot] = base, slope, origin
        self._winner[self.capacity + slot] = slot

    def build(self, now: float) -> None:
        """Play every game: O(n)."""
        for node in range(self.capacity - 1, 0, -1):
            self._play(node, now)

    def set(self, slot: int, base: float, slope: float, origin: float, now: float) -> None:
        """Set or change a line: O(log n), mostly less."""
        self.enter(slot, base, slope, origin)
        self._climb(slot, now)

    def clear(self, slot: int, now: float) -> None:
        """Take a line out: O(log n)."""
        self._winner[self.capacity + slot] = -1
        self._climb(slot, now)

    def highest(self, now: float) -> int:
        """The slot of the highest line; -1 if there is none."""
        expiry = self._expiry
        if expiry[1] < now:
            late = [1]
            for node in late:  # grows: parents before children
                child = 2 * node
                if child < self.capacity:
                    if expiry[child] < now:
                        late.append(child)
                    if expiry[child + 1] < now:
                        late.append(child + 1)
            for node in reversed(late):
                self._play(node, now)
        return self._winner[1]

    def _climb(self, slot: int, now: float) -> None:
        """Play the games that a line takes part in, from its leaf up, as far as they make a difference."""
        node = (self.capacity + slot) >> 1
        while node and self._play(node, now, slot):
            node >>= 1

    def _play(self, node: int, now: float, changed: int = -1) -> bool:
        """Let the winners of both children meet; False if nothing above can tell the difference.

        `changed`: the slot whose line has changed, so that its winning again is news.
        """
        winner, expiry = self._winner, self._expiry
        child = 2 * node
        high, low = winner[child], winner[child + 1]
        until = expiry[child]
        if expiry[child + 1] < until:
            until = expiry[child + 1]
        if high < 0:
            high = low
        elif low >= 0:
            base, slope, origin = self._base, self._slope, self._origin
            fast, slow = slope[low], slope[high]  # the lower line may be about to overtake
            gap = base[high] + slow * (now - origin[high]) - base[low] - fast * (now - origin[low])
            if gap < 0 or (gap == 0 and low > high):
                high, gap, fast, slow = low, -gap, slow, fast
            if fast > slow:
                crossing = now + gap / (fast - slow) * _EARLY
                if crossing < until:
                    until = crossing
        if 0 <= changed != high == winner[node] and expiry[node] <= until:
            return False  # at worst it is looked at again too early
        winner[node] = high
        expiry[node] = until
        return True
