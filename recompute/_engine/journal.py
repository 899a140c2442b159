"""The journal: counters, and events for listeners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from recompute._engine.advice import Wall
from recompute._engine.events import Event, Listener
from recompute._locks import RLock, do_if_free, gate_if_free


class Journal:
    """Counts, and keeps events until they can be delivered without the lock."""

    __slots__ = (
        "_teller",
        "_telling",
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
        self._teller: Any = None
        """An RLock, from the first listener on: who tells has it."""
        self._telling: Any = None
        """Its gate."""

    def _renew(self) -> None:
        self._teller = RLock()
        self._telling = gate_if_free(self._teller)

    def subscribe(self, listener: Listener, wall: Wall) -> None:
        if self._telling is None:
            self._renew()
        self.listeners.append((listener, wall))

    def unsubscribe(self, listener: Listener) -> None:
        found = next((entry for entry in self.listeners if entry[0] == listener), None)
        if found is not None:
            self.listeners.remove(found)

    def deliver(self) -> None:
        """Tell the listeners, in order, one thread at a time: if one is just at it, it tells of all that there is.

        Without the lock: a listener may ask the cache anything.
        """
        while self.events:
            if self._telling is None:
                self._tell()
            elif not do_if_free(self._telling, self._tell):
                return

    def _tell(self) -> None:
        """Tell of the next event."""
        try:
            event = self.events.popleft()
        except IndexError:  # another thread was faster
            return
        if not isinstance(event, Event):
            event()
            return
        self._tell_of(event, tuple(self.listeners))

    def _tell_of(self, event: Event, listeners: tuple[tuple[Listener, Wall], ...]) -> None:
        """An interrupt in one of the listeners keeps the event from no other one."""
        told = 0
        try:
            for listener, wall in listeners:
                told += 1
                try:
                    listener(event)
                except BaseException as error:
                    if not wall.stops(error):
                        raise
        except BaseException:
            if told < len(listeners):
                self.events.appendleft(partial(self._tell_of, event, listeners[told:]))
            raise

    def is_told(self) -> bool:
        """Whether no other thread is just telling listeners of an event."""
        return self._telling is None or do_if_free(self._telling, _nothing)

    def after_fork(self) -> None:
        """In a child process: the thread that was telling is not here, unless it is this one."""
        if self._teller is not None and not self._teller._is_owned():
            self._renew()


def _nothing() -> None:
    """Nothing is done."""
