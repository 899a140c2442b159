"""Thrashing: when most of the computing is repeated computing, the user is told, once."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from recompute._budget import format_bytes
from recompute._engine.graph import qualified
from recompute._errors import ThrashWarning
from recompute._warned import outside, warn

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

_OFTEN: Final = 10
"""Repeated runs between two looks."""

_MANY, _LONG, _SHORT = 1_000, 30.0, 0.05
"""Repeated runs, or seconds of them, that make a stretch long enough to be judged; seconds that make none."""

_SHARE: Final = 0.5
"""Of the computing of a stretch: with more than this repeated, the cache thrashes."""

_NAMED: Final = 3
"""Functions in the message."""


class Thrashing:
    """Looks at one stretch of a program after the other, each of a thousand repeated runs or half a minute of them."""

    def __init__(self) -> None:
        self.next: float = _OFTEN
        """How many repeated runs there will have been at the next look."""
        self.cure = ""
        """What to do, if it is known better than here."""
        self.inside = "recompute"
        """The package that the warning does not point to, beside this one."""
        self._runs = 0
        self._now = self._repeated = 0.0

    def look(self, engine: Engine) -> None:
        """Warn if the stretch that ends here was mostly repeated computing. Without the lock, outside of functions."""
        meter = engine.meter
        runs = engine.journal.rematerializations
        repeated, computed = meter.remat_time - self._repeated, meter.now - self._now
        self.next = runs + _OFTEN
        if repeated < (_SHORT if runs - self._runs >= _MANY else _LONG):
            return
        many = runs - self._runs
        self._runs, self._now, self._repeated = runs, meter.now, meter.remat_time
        limited = any(pool.limit < inf for pool in engine.memory.pools.values())
        if limited and repeated > _SHARE * computed:
            self.next = inf
            message = _message(engine, repeated / computed, many, computed, self.cure)
            warn(message, ThrashWarning, stacklevel=outside(self.inside))


def _message(engine: Engine, share: float, runs: int, seconds: float, cure: str) -> str:
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
        (sum(pool.held for pool in limits), "evicted but held by the caller", "let go of what get() returned"),
    ]
    taken = "".join(f", {format_bytes(size)} {what}" for size, what, _ in kept if size)
    remedies = "".join(f", {remedy}" for size, _, remedy in kept if size)
    cure = cure or (
        f"Raise the budget{remedies}, or detach() what is costly to make again; print(cache.stats()) shows more."
    )
    budget = format_bytes(sum(pool.budget or 0 for pool in limits))
    return (
        f"{share:.0%} of the last {seconds:.3g} s of computing was repeated: {runs:,} operations ran again because the "
        f"budget of {budget} is short{taken}. Repeated most: {functions}. {cure} This is said once for each cache."
    )
