"""The types of events that `Cache.subscribe` delivers."""

from recompute._engine.events import (
    Accessed,
    Added,
    Detached,
    Event,
    Evicted,
    Foresaw,
    Forgotten,
    LetGo,
    Listener,
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
    "Foresaw",
    "Forgotten",
    "LetGo",
    "Listener",
    "Performed",
    "Pinned",
    "Released",
    "TakenBack",
    "Unpinned",
]
