"""Steps whose number is not known: which checkpoints to keep while the forward goes on.

At each step: store its restart data or not, and which earlier ones to drop for that? Whatever would make the reversal
cheapest if the forward ended a twentieth later, by the binomial formula (Griewank and Walther, ACM TOMS 26, 2000) for
each stretch between checkpoints. The bytes that restart data do not take hold the adjoint dependencies of the latest
steps, so that a short forward runs little twice. Wang, Moin and Iaccarino (SIAM J. Sci. Comput. 31, 2009) and Stumm and
Walther (32, 2010) have rules for the same, in slots; this one takes fewer steps: see the figures in the documentation.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import comb, inf
from typing import Final

from recompute_schedules._costs import Sizes

_AHEAD: Final = 20
"""The forward is taken to end a twentieth later than it is now."""
_WORTH: Final = 50
"""Dependencies are kept as long as the steps so far are at most so many times those that they spare."""
_FINE: Final = 20
"""Restart data are considered every (steps so far) / (20 x checkpoints) steps."""
_MAX_STATES: Final = 4096
"""Restart data, however large the disk is."""


class Online:
    """The steps whose restart data are stored, as the forward goes on. Each decision takes O(checkpoints)."""

    def __init__(self, sizes: Sizes, price: float) -> None:
        """`price`: of restart data that go to the disk and back, in steps."""
        self._sizes = sizes
        self._in_ram = sizes.ram // sizes.state
        self._slots = min(self._in_ram + sizes.disk // sizes.state, _MAX_STATES)
        self._price = price
        self.states = [0]
        self._on_disk = 0 if self._in_ram else 1

    def window(self, count: int, now: int) -> int:
        """Of how many latest steps the dependencies are kept beside so many restart data."""
        room = max(0, self._sizes.ram - min(count, self._in_ram) * self._sizes.state) // self._sizes.deps
        return room if room * _WORTH >= now else 0

    def stride(self, now: int) -> int:
        """After how many steps the next decision is due."""
        return max(1, now // (_FINE * self._slots))

    def decide(self, now: int) -> tuple[bool, int | None]:
        """Whether to store the restart data of this step, and which to drop for that, if any.

        The lowest of all are on the disk, if any.
        """
        states = self.states
        count = len(states)
        window = self.window(count, now)
        end = now + max(1, now // _AHEAD) + window
        stop = end - window
        edges = [*states, now, end]
        kept = [self._time(edges, number, number + 1, number, stop) for number in range(count - 1)]
        below = [0.0, *accumulate(kept)]  # number -> steps for the stretches before that state, if all of them stay
        least = below[-1] + self._time(edges, count - 1, count + 1, count - 1, stop)
        stores, drop = False, None
        if count < self._slots:
            less = end - self.window(count + 1, now)
            time = sum([self._time(edges, number, number + 1, number, less) for number in range(count + 1)])
            time += self._price * (count + 1 - self._in_ram > self._on_disk)
            if time <= least:
                least, stores = time, True
        above = 0.0  # for the stretches after that state, with the bytes of one state more
        for number in range(count - 1, 0, -1):
            above += self._time(edges, number + 1, number + 2, number, stop)
            time = below[number - 1] + self._time(edges, number - 1, number + 1, number - 1, stop) + above
            time += self._price * (number < self._on_disk)
            if time < least:
                least, stores, drop = time, True, states[number]
        if drop is not None:
            states.remove(drop)
        if stores:
            states.append(now)
            self._on_disk = max(0, len(states) - self._in_ram)
        return stores, drop

    def _time(self, edges: list[int], start: int, stop: int, below: int, end: int) -> float:
        """Steps to reverse the stretch between two edges, before the end, on top of so many checkpoints."""
        steps = min(edges[stop], end) - edges[start]
        return _reversal(steps, self._slots - below, self._deps_beside(below)) if steps > 0 else 0.0

    def _deps_beside(self, states: int) -> int:
        """How many dependencies fit beside so many states."""
        return max(0, self._sizes.ram - min(states, self._in_ram) * self._sizes.state) // self._sizes.deps


@lru_cache(1 << 16)
def _reversal(steps: int, slots: int, deps: int) -> float:
    """About as many steps as a stretch takes: the binomial formula, less those whose dependencies are at hand."""
    if slots < 1:
        return float(steps) if steps <= 1 else inf
    rounds, covered = 0, 1
    while covered < steps:
        rounds += 1
        covered = covered * (slots + rounds) // rounds
    return steps + rounds * steps - comb(slots + rounds, slots + 1) - min(steps - 1, deps)
