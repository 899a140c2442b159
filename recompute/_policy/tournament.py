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

    __slots__ = ("_base", "_capacity", "_expiry", "_origin", "_slope", "_winner")

    def __init__(self, capacity: int) -> None:
        self._capacity = 1 << max(1, capacity - 1).bit_length()
        self._base = [0.0] * self._capacity
        self._slope = [0.0] * self._capacity
        self._origin = [0.0] * self._capacity
        self._winner = [-1] * (2 * self._capacity)  # node -> slot; node i has children 2 i and 2 i + 1
        self._expiry = [inf] * (2 * self._capacity)  # until when every winner below is right

    @property
    def capacity(self) -> int:
        return self._capacity

    def line(self, slot: int) -> tuple[float, float, float]:
        """(base, slope, origin) as last set."""
        return self._base[slot], self._slope[slot], self._origin[slot]

    def enter(self, slot: int, base: float, slope: float, origin: float) -> None:
        """Set a line without telling the tree: call `build` when all are in."""
        self._base[slot], self._slope[slot], self._origin[slot] = base, slope, origin
        self._winner[self._capacity + slot] = slot

    def build(self, now: float) -> None:
        """Play every game: O(n)."""
        for node in range(self._capacity - 1, 0, -1):
            self._play(node, now)

    def set(self, slot: int, base: float, slope: float, origin: float, now: float) -> None:
        """Set or change a line: O(log n), mostly less."""
        self.enter(slot, base, slope, origin)
        self._climb(slot, now)

    def clear(self, slot: int, now: float) -> None:
        """Take a line out: O(log n)."""
        self._winner[self._capacity + slot] = -1
        self._climb(slot, now)

    def highest(self, now: float) -> int:
        """The slot of the highest line; -1 if there is none."""
        expiry = self._expiry
        if expiry[1] < now:
            capacity = self._capacity
            late = [1]
            for node in late:  # grows while it is walked: parents before children
                child = 2 * node
                if child < capacity:
                    if expiry[child] < now:
                        late.append(child)
                    if expiry[child + 1] < now:
                        late.append(child + 1)
            for node in reversed(late):
                self._play(node, now)
        return self._winner[1]

    def _climb(self, slot: int, now: float) -> None:
        """Play from a leaf upwards: `_play` written out, because this is most of what an eviction costs."""
        winner, expiry, slope, origin, base = self._winner, self._expiry, self._slope, self._origin, self._base
        node = (self._capacity + slot) >> 1
        while node:
            child = 2 * node
            left, right = winner[child], winner[child + 1]
            until = expiry[child]
            if expiry[child + 1] < until:
                until = expiry[child + 1]
            if left < 0:
                left = right
            elif right >= 0:
                mine, other = slope[left], slope[right]
                gap = base[left] + mine * (now - origin[left]) - base[right] - other * (now - origin[right])
                if gap < 0 or (gap == 0 and right > left):
                    left, gap, mine, other = right, -gap, other, mine
                if other > mine:
                    crossing = now + gap / (other - mine) * _EARLY
                    if crossing < until:
                        until = crossing
            if winner[node] == left != slot and expiry[node] <= until:
                return  # nothing above can tell the difference; at worst it looks again too early
            winner[node] = left
            expiry[node] = until
            node >>= 1

    def _play(self, node: int, now: float) -> None:
        winner, expiry = self._winner, self._expiry
        left, right = winner[2 * node], winner[2 * node + 1]
        until = expiry[2 * node]
        if expiry[2 * node + 1] < until:
            until = expiry[2 * node + 1]
        if left < 0 or right < 0:
            winner[node] = left if right < 0 else right
            expiry[node] = until
            return
        slope, origin, base = self._slope, self._origin, self._base
        gap = base[left] + slope[left] * (now - origin[left]) - base[right] - slope[right] * (now - origin[right])
        catching_up = slope[right] - slope[left]
        if gap < 0 or (gap == 0 and right > left):
            left, gap, catching_up = right, -gap, -catching_up
        winner[node] = left
        if catching_up > 0:
            crossing = now + gap / catching_up * _EARLY
            if crossing < until:
                until = crossing
        expiry[node] = until
