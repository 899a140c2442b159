"""A pool: the bytes of one device, what may be evicted from it, and what to say when there are too few.

Under the engine's lock, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import get_ident

from recompute._budget import Limit, format_bytes
from recompute._engine.copies import moves_source
from recompute._engine.device_tiers import DeviceTiers
from recompute._engine.graph import Operation, Storage
from recompute._errors import BudgetError
from recompute._policy.search import Candidates


class Pool:
    """Bytes of one device.

    `used` = resident storages + room reserved by operations in flight + storages on their way out + held outside.
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

    def take(self, size: int) -> None:
        """Count `size` bytes more."""
        self.used += size
        if self.used > self.peak:
            self.note(self.used)

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

    def reserve(self, size: int) -> None:
        """Set `size` bytes aside for an operation."""
        self.take(size)
        self.fixed += size

    def give_back(self, size: int) -> None:
        """What was reserved is free again."""
        self.used -= size
        self.fixed -= size

    def enter(self, storage: Storage) -> None:
        """Count a storage that has just become resident."""
        self.take(storage.size)
        if self.tiers is not None and moves_source(storage):
            self.movable += storage.size
        if storage.locks:
            self.fixed += storage.size
        else:
            self.admit(storage)

    def lock(self, storage: Storage) -> None:
        """One more reason to keep a resident storage."""
        if not storage.locks:
            self.fixed += storage.size
        storage.locks += 1

    def unlock(self, storage: Storage) -> None:
        """One reason less; with the last one gone it is a candidate again."""
        storage.locks -= 1
        if not storage.locks and storage.resident:
            self.fixed -= storage.size
            if storage.slot < 0:
                self.admit(storage)

    def admit(self, storage: Storage) -> None:
        """A resident, unlocked storage is a candidate from now on, if anything is gained by its eviction."""
        if storage.slot < 0 and storage.size >= self.smallest:
            self.candidates.add(storage)

    def resize(self, storage: Storage, size: int) -> None:
        """A resident storage turned out to have another size."""
        change = size - storage.size
        storage.size = size
        self.take(change)
        if storage.locks:
            self.fixed += change
        elif storage.slot >= 0:
            self.candidates.changed(storage)
        else:
            self.admit(storage)

    def shortage(self, size: int, what: Operation | None) -> BudgetError:
        """The error that `what` (None: a source) cannot have `size` more bytes: what takes the room, and what to do.

        Without the lock: it names a function of the user's.
        """
        impossible = self.fixed + self.held + size > self.limit
        error = BudgetError(self._said(size, what, impossible))
        error.device, error.operation = self.device, None if what is None else what.name
        error.needed = (self.fixed + self.held if impossible else self.used) + size
        return error

    def _said(self, size: int, what: Operation | None, impossible: bool) -> str:
        locked = max(0, self.fixed - self.sources - self.pinned)
        parts = [
            (self.sources, "in sources"),
            (self.pinned, "pinned"),
            (locked, "locked by operations in flight"),
            (self.held, "evicted but held by the caller"),
            (0 if impossible else self.used - self.fixed - self.held, "that the policy does not evict"),
        ]
        short = (self.fixed + self.held if impossible else self.used) + size - int(self.limit)
        taken = ", ".join(f"{format_bytes(part)} {label}" for part, label in parts if part > 0)
        who = "a source" if what is None else f"{what.name} (created at {what.created})"
        if what is None and size > self.limit:
            return (
                f"a source of {format_bytes(size)} is larger than the whole budget of {format_bytes(self.limit)} on "
                f"{self.device}; raise the budget, or let the cache make it, with rc.ap in the place of rc.pure, in "
                "parts that fit"
            )
        need = f"{who} needs {format_bytes(size)} more on {self.device}, but the" if size else "the"
        return (
            f"{need} budget of {format_bytes(self.limit)} is "
            f"{format_bytes(short)} ({short} bytes) short"
            + (f", with {taken}" if taken else "")
            + "; raise the budget, unpin, or let go of what get() returned"
        )

    def __repr__(self) -> str:
        return f"<pool {self.device}: {self.used} of {self.limit} bytes used>"


class ProgramOrderPool(Pool):
    """A storage that was locked is the newest candidate when it is unlocked, even one of no bytes.

    So the published simulator has it.
    """

    __slots__ = ()

    def admit(self, storage: Storage) -> None:
        if storage.slot < 0:
            self.candidates.add(storage)

    def lock(self, storage: Storage) -> None:
        super().lock(storage)
        if storage.slot >= 0:
            self.candidates.remove(storage)
