"""Thrashing: when most of the computing is repeated computing, the user is told, once."""

from __future__ import annotations

from math import inf
from time import process_time
from typing import TYPE_CHECKING, Final

from recompute._budget import format_bytes
from recompute._engine.advice import Wall, say, shown
from recompute._engine.options import Settings
from recompute._errors import ThrashWarning
from recompute.text import outside, qualified, seconds, warn

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

_OFTEN: Final = 10
"""Repeated runs between two looks."""

_MANY, _LONG = 1_000, 30.0
"""Repeated runs, or seconds of them, before anything is judged."""

_TIMES: Final = 4.0
"""Repeated runs for each operation, or repeated computing for each second of it: a chain that is read backwards in a
tenth of its memory takes less, even if every choice is the best."""

_LOST: Final = 1.0
"""Seconds: a smaller loss does not matter."""

_PART: Final = 0.05
"""Of the budget: what takes less of it is no remedy."""

_NAMED: Final = 3
"""Functions in the message."""


class Thrashing:
    """Looks at a program now and then: at how often an operation was repeated, and at the real time that this took."""

    def __init__(self, settings: Settings) -> None:
        self.next: float = _OFTEN
        """How many repeated runs there will have been at the next look."""
        self._settings = settings
        self._wall = Wall(self._end)
        self._since: float | None = None
        """Processor time at the first look."""

    def look(self, engine: Engine) -> None:
        """Warn if most has been repeated several times since the start. Without the lock, outside of functions."""
        meter, journal = engine.meter, engine.journal
        runs, operations = journal.rematerializations, journal.operations
        repeated, once = meter.remat_time, meter.now - meter.remat_time
        self.next = runs + _OFTEN
        if self._since is None:
            self._since = process_time()
        if (runs < _MANY and repeated < _LONG) or (runs <= _TIMES * operations and repeated <= _TIMES * once):
            return
        lost = max(repeated, (process_time() - self._since) * runs / (runs + operations))
        if lost >= _LOST and any(pool.limit < inf for pool in list(engine.memory.pools.values())):
            self.next = inf
            message = ""
            with self._wall:
                message = _message(engine, runs, operations, lost, self._settings.cure)
            if message:
                warn(message, ThrashWarning, stacklevel=outside(self._settings.package))

    def _end(self, error: Exception) -> None:
        self.next = inf
        say(f"the cache repeats much, but what could not be found out: {shown(error)}")


def _message(engine: Engine, runs: int, operations: int, lost: float, cure: str) -> str:
    stats = engine.cache.stats()
    total = sum(found.seconds for found in stats.recomputed) or 1.0
    functions = ", ".join(
        f"{qualified(found.function)} ({found.times:,} times, {found.seconds / total:.0%})"
        for found in stats.recomputed[:_NAMED]
    )
    limits = [pool for pool in stats.pools if pool.budget is not None]
    kept = [
        (sum(pool.pinned for pool in limits), "pinned", "unpin()"),
        (sum(pool.sources for pool in limits), "in sources", "drop sources"),
        (sum(pool.held for pool in limits), "evicted but held by the caller", "drop what get() returned"),
    ]
    whole = sum(pool.budget or 0 for pool in limits)
    kept = [(size, what, remedy) for size, what, remedy in kept if size and size >= _PART * whole]
    taken = "".join(f", {format_bytes(size)} {what}" for size, what, _ in kept)
    remedies = "".join(f", {remedy}" for *_, remedy in kept)
    cure = cure or (
        f"Raise the budget{remedies}, or detach() what is costly to make again; print(cache.stats()) shows more."
    )
    return (
        f"{operations:,} operations were repeated {runs:,} times, which took {seconds(lost)}, because the budget of "
        f"{format_bytes(whole)} is short{taken}. Repeated most: {functions}. {cure} This is said once for each cache."
    )
