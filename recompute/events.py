"""The types of events that `Cache.subscribe` delivers."""

from recompute._events import Added, Event, Evicted, Forgotten, Listener, Performed, TakenBack

__all__ = ["Added", "Event", "Evicted", "Forgotten", "Listener", "Performed", "TakenBack"]
