"""A pool: the memory of one device, its budget, and the candidates for eviction in it."""

from __future__ import annotations

from math import inf
from weakref import ReferenceType

from recompute._budget import Limit, format_bytes
from recompute._engine.graph import Operation, Storage
from recompute._errors import BudgetError
from recompute._policy.search import Candidates


class Pool:
    """Bytes of one device. `used` = resident storages + room reserved by operations in flight + held outside."""

    __slots__ = (
        "adaptive",
        "candidates",
        "device",
        "fixed",
        "held",
        "limit",
        "overshoot",
        "peak",
        "pinned",
        "sources",
        "used",
    )

    def __init__(self, device: str, candidates: Candidates, budget: Limit | None) -> None:
        self.device = device
        self.candidates = candidates
        candidates.pool = self
        self.used = 0
        self.peak = 0
        self.fixed = 0  # of used: what no eviction frees now: locked storages and reserved room
        self.held = 0  # of used: evicted, but somebody outside still holds it
        self.sources = 0  # of fixed, for reports
        self.pinned = 0  # of fixed, for reports
        self.overshoot = 0  # the most by which an output of unknown size has exceeded the limit
        self.set_budget(budget)

    @property
    def budget(self) -> Limit | None:
        """What the user gave: bytes, or a function that is asked again and again; None: unlimited."""
        return self.adaptive or (None if self.limit == inf else int(self.limit))

    def set_budget(self, budget: Limit | None) -> None:
        self.adaptive = budget if callable(budget) else None
        self.limit: float = inf if budget is None else budget(self.used) if callable(budget) else budget

    def refresh(self) -> float:
        """The limit as it is now."""
        if self.adaptive is not None:
            self.limit = self.adaptive(self.used)
        return self.limit

    def take(self, size: int) -> None:
        """Count `size` bytes more."""
        self.used += size
        if self.used > self.peak:
            self.peak = self.used

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
            self.admit(storage)

    def admit(self, storage: Storage) -> None:
        """A resident, unlocked storage is a candidate from now on, if anything is gained by its eviction."""
        if storage.slot < 0 and storage.size:
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
        """The error that `what` (None: a source) cannot have `size` more bytes: what takes the room, and what to do."""
        locked = max(0, self.fixed - self.sources - self.pinned)
        impossible = self.fixed + self.held + size > self.limit
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
        need = f"{who} needs {format_bytes(size)} more on {self.device}, but the" if size else "the"
        return BudgetError(
            f"{need} budget of {format_bytes(self.limit)} is "
            f"{format_bytes(short)} ({short} bytes) short"
            + (f", with {taken}" if taken else "")
            + "; raise the budget, "
            "unpin, or let go of what get() returned"
        )

    def __repr__(self) -> str:
        return f"<pool {self.device}: {self.used} of {self.limit} bytes used>"


class Held:
    """Bytes that were evicted while somebody outside kept the buffer: counted as used until they are let go."""

    __slots__ = ("number", "pool", "reference", "size")

    def __init__(self, pool: Pool, size: int, number: int) -> None:
        self.number = number  # of the storage
        self.pool = pool
        self.size = size
        self.reference: ReferenceType[object] | None = None
