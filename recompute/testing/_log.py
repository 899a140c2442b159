"""A log of the events of a cache, to assert on."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

from recompute._cache import Cache
from recompute.events import Event, Evicted, Performed

E = TypeVar("E", bound=Event)


class EventLog:
    """The events of `cache`, in order, from now until `close` or the end of the `with` block."""

    def __init__(self, cache: Cache) -> None:
        self.events: list[Event] = []
        self._stop = cache.subscribe(self.events.append)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    def performed(self, function: str | None = None, *, again: bool | None = None) -> list[Performed]:
        """Runs: of `function`, or of all; first ones (`again=False`), repeated ones (True) or both (None)."""
        return [
            event for event in self.of(Performed) if function in (None, event.function) and again in (None, event.again)
        ]

    def names(self, *, again: bool | None = None) -> list[str]:
        """The names of the functions that ran, in order."""
        return [event.function for event in self.performed(again=again)]

    @property
    def evicted(self) -> list[Evicted]:
        """The storages that were dropped, for any reason."""
        return self.of(Evicted)

    def victims(self) -> list[int]:
        """The numbers of the storages dropped to make room, in order."""
        return [event.storage for event in self.evicted if event.why == "pressure"]

    def clear(self) -> None:
        self.events.clear()

    def close(self) -> None:
        """Listen no more."""
        self._stop()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<EventLog of {len(self.events)} events>"
