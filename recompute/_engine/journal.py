"""The journal: what has happened, as counters and as events for those who listen."""

from __future__ import annotations

from collections import deque

from recompute._engine.events import Event, Listener
from recompute._warned import warn


class Journal:
    """Counts, and keeps events until they can be delivered without the lock."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.events: deque[Event] = deque()
        self.operations = 0
        self.evictions = 0
        self.releases = 0
        self.rematerializations = 0
        self.recoveries = 0
        self.coercions = 0

    def subscribe(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)

    def deliver(self) -> None:
        """Tell the listeners, in order. Without the lock: a listener may ask the cache anything."""
        while self.events:
            try:
                event = self.events.popleft()
            except IndexError:  # another thread was faster
                return
            for listener in tuple(self.listeners):
                try:
                    listener(event)
                except Exception as error:
                    self.unsubscribe(listener)
                    warn(f"{listener!r} raised {error!r} and will hear no more events", RuntimeWarning, stacklevel=2)
