"""The types of events that `Cache.subscribe` delivers."""

from recompute._engine.events import (
    Accessed,
    Added,
    Detached,
    Event,
    Evicted,
    Fetched,
    Foresaw,
    Forgotten,
    LetGo,
    Listener,
    Moved,
    Performed,
    Pinned,
    Released,
    TakenBack,
    Unpinned,
)

__all__ = [
    "Accessed",
    "Added",
    "Detached",
    "Event",
    "Evicted",
    "Fetched",
    "Foresaw",
    "Forgotten",
    "LetGo",
    "Listener",
    "Moved",
    "Performed",
    "Pinned",
    "Released",
    "TakenBack",
    "Unpinned",
]
