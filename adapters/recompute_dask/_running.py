"""Tasks as they run: what the next ones take is evicted last, and one that does not fit beside others runs alone.

Tasks that go through many values in the order in which these were made, say, need what is stalest first: of values that
do not all fit, staleness alone would evict each shortly before it is needed. Dask knows better which tasks are next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any, Final

from dask.order import order

import recompute as rc
from recompute import extend
from recompute_dask._recipe import Held

_FULL_SHARE: Final = 1 / 2
"""Of the budget: with less in memory it does not matter what is needed soon."""
_KEPT_SHARE: Final = 3 / 4
"""Of the budget: so much of what is in memory, and needed soon, stays."""
_MAX_TASKS_AHEAD: Final = 128
"""Tasks that are looked at, at most."""
_TASKS_PER_LOOK: Final = 32
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
        if pool is None or pool.used < _FULL_SHARE * pool.limit:
            return
        room = _KEPT_SHARE * pool.limit
        looked, seen = 0, set()
        for taken in following(_MAX_TASKS_AHEAD):
            looked += 1
            for held in taken:
                node = extend.node_of(held)
                size = node.storage.size
                if size <= room and node not in seen and held.cache.extend.look(held) is not extend.EVICTED:
                    seen.add(node)
                    room -= size
            if room <= 0:
                break
        self._pause = looked // _TASKS_PER_LOOK


class Next:
    """Callbacks of one run of a graph, which keep what the next tasks take in memory.

    Not only of tasks that are ready: what waits for another one may be needed right after that.
    """

    def __init__(self, soon: Soon) -> None:
        self._soon = soon
        self._order: list[Hashable] = []
        self._places: dict[Hashable, int] = {}

    def start(self, dsk: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
        """Dask is about to run the graph. O(tasks log tasks)."""
        places: Mapping[Any, int] = order(dsk)
        self._order = sorted([key for key in state["dependencies"] if key in places], key=lambda key: places[key])
        self._places = {key: place for place, key in enumerate(self._order)}

    def before(self, key: Hashable, dsk: Mapping[Any, Any], state: Mapping[str, Any]) -> None:
        """Dask is about to run a task."""
        finished, values = state["finished"], state["cache"]
        first = self._places.get(key, len(self._order))

        def following(count: int) -> Iterator[Iterable[Held]]:
            for place in range(first + 1, min(first + 1 + count, len(self._order))):  # its own is locked
                task = self._order[place]
                if task not in finished:
                    taken = [values.get(argument) for argument in state["dependencies"][task]]
                    yield [value for value in taken if isinstance(value, Held)]

        self._soon.look(following)


class Together:
    """Tasks of one computation, in its threads. A task inside of another is a part of that."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._threads: set[int] = set()
        """Those in which a task runs."""
        self._alone: int | None = None
        """The thread whose task runs alone, or is the next to do so."""

    @contextmanager
    def one(self) -> Iterator[bool]:
        """A task may run, inside the block; False: it is inside of another."""
        thread = get_ident()
        if thread in self._threads:
            yield False
            return
        with self._changed:
            self._changed.wait_for(lambda: self._alone is None)
            self._threads.add(thread)
        try:
            yield True
        finally:
            with self._changed:
                self._threads.discard(thread)
                if self._alone == thread:
                    self._alone = None
                self._changed.notify_all()

    def wait_to_be_alone(self) -> None:
        """Inside of `one`: wait until no other task runs; none begins before this one ends."""
        thread = get_ident()
        with self._changed:
            self._threads.discard(thread)  # it does not run meanwhile
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alone is None)
            self._alone = thread
            self._changed.wait_for(lambda: not self._threads)
            self._threads.add(thread)
