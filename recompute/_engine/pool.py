"""A pool: the bytes of one device, what may be evicted from it, and what to say when there are too few.

Under the engine's lock, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from recompute._budget import Limit, format_bytes
from recompute._engine.changes import Call
from recompute._errors import BudgetError
from recompute._policy.search import Candidates

if TYPE_CHECKING:
    from recompute._engine.device_tiers import DeviceTiers
    from recompute._engine.graph import Operation

_MOST_ASKING: Final = 64
"""Threads that ask a budget function which has never answered."""

_MOST: Final = 1e300
"""Bytes: as good as no limit."""


class Pool:
    """Bytes of one device.

    `used` = resident storages + room reserved by operations in flight + storages on their way out + held outside. The
    machine counts them.
    """

    __slots__ = (
        "adaptive",
        "asking",
        "beside",
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
        self.held = 0  # of used: evicted, but the program still holds it; with what is beside the values
        self.beside = 0  # of held: memory that was never a value's, such as the state of a random generator
        self.departing = 0  # of used: evicted, and destroyed once the lock is free
        self.sources = 0  # of fixed, for reports: those that cannot move
        self.movable = 0  # of used: sources that can move
        self.tiers: DeviceTiers | None = None  # where evicted bytes may go; None: nowhere
        self.pinned = 0  # of fixed, for reports
        self.overshoot = 0  # the most by which what was there already has exceeded the limit
        self.limit: float = inf
        self.adaptive: Callable[[int], int] | None = None
        self.asking: dict[int, ref[Call]] = {}  # threads in which that is being called
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

    def ask_limit(self, needed: bool = True) -> None:
        """Let the limit be what the user's function says now. Without the lock.

        While it is being asked its last answer holds: it may use the cache, also in a thread for which it waits. Where
        it has not answered yet other threads ask, too, if that is `needed`.
        """
        adaptive, thread = self.adaptive, get_ident()
        if adaptive is None:
            return
        asking = {other for other, asks in list(self.asking.items()) if asks() is not None}
        if thread not in asking and (not asking or (needed and self.limit == inf)):
            if len(asking) > _MOST_ASKING:
                raise RuntimeError(
                    f"the budget function {adaptive!r} waits for threads that need room in its cache, before it has "
                    "answered for the first time; let it answer before it lets others use the cache"
                )
            call = Call()
            try:
                self.asking[thread] = ref(call)
                limit: Any = adaptive(self.used)
            finally:
                self.asking.pop(thread, None)
            if getattr(limit, "ndim", None) == 0:  # a number of an array library
                limit = limit.item()
            if not isinstance(limit, (int, float)) or isinstance(limit, bool) or limit != limit:
                raise TypeError(f"the budget function {adaptive!r} returned {limit!r}, which is no number of bytes")
            if self.adaptive is adaptive:  # no other budget was set meanwhile
                self.limit = min(max(limit, 0), _MOST)

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
        error = BudgetError(said(self, size, what, impossible=impossible))
        error.device, error.operation = self.device, None if what is None else what.name
        error.needed = (self.fixed + self.held if impossible else self.used) + size
        return error

    def __repr__(self) -> str:
        return f"<pool {self.device}: {self.used} of {self.limit} bytes used>"


def said(pool: Pool, size: int, what: Operation | None, *, impossible: bool) -> str:
    """That `what` (None: a source) cannot have `size` more bytes. `impossible`: not even if all is evicted that can be.

    Without the lock: it names a function of the user's.
    """
    locked = max(0, pool.fixed - pool.sources - pool.pinned)
    parts = [
        (pool.sources, "in sources"),
        (pool.pinned, "pinned"),
        (locked, "locked by operations in flight"),
        (pool.held - pool.beside, "evicted but held by the caller"),
        (pool.beside, "beside the values, such as states of random generators"),
        (0 if impossible else pool.departing, "leaving memory, of which adapters are being told"),
        (0 if impossible else pool.used - pool.fixed - pool.held - pool.departing, "that the policy does not evict"),
    ]
    short = (pool.fixed + pool.held if impossible else pool.used) + size - int(pool.limit)
    taken = ", ".join(f"{format_bytes(part)} {label}" for part, label in parts if part > 0)
    who = _who(what)
    limit = format_bytes(pool.limit)
    if size > pool.limit:
        whose = f"a source of {format_bytes(size)}" if what is None else f"{who} gives a result of {format_bytes(size)}"
        cure = (
            "let the cache make it, with rc.ap instead of rc.pure, in parts that fit"
            if what is None
            else "compute it in parts, each of them a value of its own"
        )
        verb = " is" if what is None else ", which is"
        return (
            f"{whose}{verb} larger than the whole budget of {limit} on {pool.device}: that is {format_bytes(short)} "
            f"({short} bytes) short" + (f", with {taken}" if taken else "") + f"; raise the budget, or {cure}"
        )
    need = f"{who} needs {format_bytes(size)} more on {pool.device}, but the" if size else "the"
    return (
        f"{need} budget of {limit} is {format_bytes(short)} ({short} bytes) short"
        + (f", with {taken}" if taken else "")
        + "; "
        + _listed(["raise the budget", *_cures(pool, locked, source=what is None)])
    )


def _who(what: Operation | None) -> str:
    """What needs room. Without the lock."""
    if what is None:
        return "a source"
    value = next((output for output in what.outputs if output is not None), None)
    if value is None or value.operation is what:
        return f"{what.name} (created at {what.created})"
    return f"the fetch of {'a source' if value.operation is None else f'a result of {_who(value.operation)}'}"


def _cures(pool: Pool, locked: int, *, source: bool) -> list[str]:
    """What would make room, the most bytes first."""
    sources = (
        "load sources inside of an operation, rc.ap(load, path) instead of rc.pure(load(path)), wrap a plain array "
        "that is used again and again once, with rc.array, or give the cache a tier, which sources may move to"
    )
    cures = [
        (pool.sources, sources),
        (pool.pinned, "unpin() values"),
        (pool.held - pool.beside, "drop what get() returned"),
        (pool.beside, "draw random numbers in fewer operations, or use less memory beside the values"),
        (locked, "let operations take and return less at a time"),
    ]
    if source and not pool.sources:
        cures.append((1, sources.partition(", wrap")[0]))
    return [cure for size, cure in sorted(cures, key=lambda one: -one[0]) if size > 0]


def _listed(cures: list[str]) -> str:
    return cures[0] if len(cures) == 1 else f"{'; '.join(cures[:-1])}; or {cures[-1]}"
