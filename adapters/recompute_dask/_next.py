"""Which tasks are next in a graph that Dask's threaded scheduler runs: those that follow in Dask's order of tasks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from dask.order import order

from recompute_dask._recipe import Held
from recompute_dask._soon import Soon


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
