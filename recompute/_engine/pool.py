"""A pool: the bytes of one device, what may be evicted from it, and what to say when there are too few.

Under the engine's lock, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING

from recompute._budget import Limit
from recompute._engine.shortage import said
from recompute._errors import BudgetError
from recompute._policy.search import Candidates

if TYPE_CHECKING:
    from recompute._engine.device_tiers import DeviceTiers
    from recompute._engine.graph import Operation


class Pool:
    """Bytes of one device.

    `used` = resident storages + room reserved by operations in flight + storages on their way out + held outside. The
    machine counts them.
    """

    __slots__ = (
        "adaptive",
        "asking",
        "candidates",
        "departing",
        "device",
        "fixed",
        "held",
        "limit",
        "movable",
        "overshoot",
        "past",
        "peak",
        "pinned",
        "smallest",
        "sources",
        "tiers",
        "used",
    )

    def __init__(self, device: str, candidates: Candidates, budget: Limit | None) -> None:
        self.device = device
        self.candidates = candidates
        candidates.pool = self
        self.used = 0
        self.peak = 0  # since the last lap
        self.past = 0  # the peak of all laps before
        self.smallest = 1  # bytes: what has less is no candidate
        self.fixed = 0  # of used: what no eviction frees now: locked storages and reserved room
        self.held = 0  # of used: evicted, but somebody outside still holds it
        self.departing = 0  # of used: evicted, and destroyed as soon as nobody holds the lock
        self.sources = 0  # of fixed, for reports: those that cannot move
        self.movable = 0  # of used: sources that can move
        self.tiers: DeviceTiers | None = None  # where evicted bytes may go; None: nowhere
        self.pinned = 0  # of fixed, for reports
        self.overshoot = 0  # the most by which what was there already has exceeded the limit
        self.limit: float = inf
        self.adaptive: Callable[[int], int] | None = None
        self.asking: set[int] = set()  # threads in which that is being called
        self.set_budget(budget)

    @property
    def budget(self) -> Limit | None:
        """What the user gave: bytes, or a function that is asked again and again; None: unlimited."""
        return self.adaptive or (None if self.limit == inf else int(self.limit))

    def set_budget(self, budget: Limit | None) -> None:
        """A function is not called here: see `ask_limit`."""
        if callable(budget):
            self.adaptive = budget
        else:
            self.adaptive = None
            self.limit = inf if budget is None else budget

    def ask_limit(self) -> None:
        """Let the limit be what the user's function says now. Without the lock."""
        adaptive, thread = self.adaptive, get_ident()
        if adaptive is not None and thread not in self.asking:  # else the function itself uses the cache
            self.asking.add(thread)
            try:
                limit = adaptive(self.used)
            finally:
                self.asking.discard(thread)
            if not isinstance(limit, (int, float)) or isinstance(limit, bool) or limit != limit:
                raise TypeError(f"the budget function {adaptive!r} returned {limit!r}, which is no number of bytes")
            if self.adaptive is adaptive:  # no other budget was set meanwhile
                self.limit = limit

    def note(self, used: int) -> None:
        """So many bytes are in memory: nothing else raises the peak, so that it is never above limit and overshoot."""
        if used > self.limit:
            self.overshoot = max(self.overshoot, used - int(self.limit))
        self.peak = max(self.peak, used)

    def lap(self) -> int:
        """The peak since this was last asked."""
        self.past = max(self.past, self.peak)
        found, self.peak = self.peak, self.used
        return found

    def shortage(self, size: int, what: Operation | None) -> BudgetError:
        """The error that `what` (None: a source) cannot have `size` more bytes: what takes the room, and what to do.

        Without the lock: it names a function of the user's.
        """
        impossible = self.fixed + self.held + size > self.limit
        error = BudgetError(said(self, size, what, impossible))
        error.device, error.operation = self.device, None if what is None else what.name
        error.needed = (self.fixed + self.held if impossible else self.used) + size
        return error

    def __repr__(self) -> str:
        return f"<pool {self.device}: {self.used} of {self.limit} bytes used>"
