"""The types of events that `Cache.subscribe` delivers, and of the steps of a `Cache.story`."""

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
from recompute._engine.story import Step, Steps

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
    "Step",
    "Steps",
    "TakenBack",
    "Unpinned",
]
