"""The journal: what has happened, as counters and as events for those who listen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from recompute._engine.events import Event, Listener
from recompute._engine.wall import Wall


class Journal:
    """Counts, and keeps events until they can be delivered without the lock."""

    __slots__ = (
        "coercions",
        "events",
        "evictions",
        "listeners",
        "operations",
        "recoveries",
        "releases",
        "rematerializations",
    )

    def __init__(self) -> None:
        self.listeners: list[tuple[Listener, Wall]] = []
        self.events: deque[Event | Callable[[], None]] = deque()
        """What is no event is called when its turn comes: something to be done, or said, without the lock."""
        self.operations = 0
        self.evictions = 0
        self.releases = 0
        self.rematerializations = 0
        self.recoveries = 0
        self.coercions = 0

    def subscribe(self, listener: Listener, wall: Wall) -> None:
        self.listeners.append((listener, wall))

    def unsubscribe(self, listener: Listener) -> None:
        found = next((each for each in self.listeners if each[0] == listener), None)
        if found is not None:
            self.listeners.remove(found)

    def deliver(self) -> None:
        """Tell the listeners, in order. Without the lock: a listener may ask the cache anything."""
        while self.events:
            try:
                event = self.events.popleft()
            except IndexError:  # another thread was faster
                return
            if not isinstance(event, Event):
                event()
                continue
            for listener, wall in tuple(self.listeners):
                with wall:
                    listener(event)
