"""What the next tasks take is evicted last.

Tasks that go through many values in the order in which these were made, say, need what is stalest first: of values that
do not all fit, staleness alone would evict each shortly before it is needed. Dask knows better which tasks are next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import recompute as rc
from recompute import extend
from recompute_dask._recipe import Held

_FULL: Final = 1 / 2
"""Of the budget: with less in memory it does not matter what is needed soon."""
_ROOM: Final = 3 / 4
"""Of the budget: so much of what is in memory, and needed soon, stays."""
_FAR: Final = 128
"""Tasks that are looked at, at most."""
_FEW: Final = 32
"""Tasks that are looked at for each that runs, about: after n of them, the next look is n / 32 tasks later."""

Following = Callable[[int], Iterable[Iterable[Held]]]
"""A function from a number n: what each of the next n tasks takes, the first task first."""


class Soon:
    """What is needed soon of a cache."""

    def __init__(self, cache: rc.Cache) -> None:
        self._cache = cache
        self._pause = 0

    def look(self, following: Following) -> None:
        """Before each task: have what the next ones take, as far as it is in memory and fits, count as just used."""
        if self._pause:
            self._pause -= 1
            return
        pool = self._cache.extend.fullest()
        if pool is None or pool.used < _FULL * pool.limit:
            return
        room = _ROOM * pool.limit
        looked, seen = 0, set()
        for taken in following(_FAR):
            looked += 1
            for held in taken:
                node = held.node
                size = node.storage.size
                if size <= room and node not in seen and held.cache.extend.look(held) is not extend.EVICTED:
                    seen.add(node)
                    room -= size
            if room <= 0:
                break
        self._pause = looked // _FEW
