"""The cache that people make: its settings, its budget, what it tells about itself."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_args

from recompute import _context
from recompute._budget import Budget, Limits, format_bytes, parse_bytes
from recompute._engine.at_once import AtOnce
from recompute._engine.events import Listener
from recompute._engine.frames import ON_THE_GROUND
from recompute._engine.graph import ReleaseMode, qualified
from recompute._engine.stats import PoolStats, Recomputed, Stats
from recompute._errors import BudgetError
from recompute._policy.formulas import DEFAULT, Policy, Score, policy_of
from recompute._policy.search import Search, search_of

if TYPE_CHECKING:
    from recompute._traces.write import Recorder


class Cache(AtOnce):
    """Values that can be recomputed, within a memory budget.

    `with cache:` makes it the current cache, in which `pure` and `ap` work, for this thread or task.

    Parameters
    ----------
    budget
        Bytes, text ("512MB", "1.5 GiB"), a function from bytes used to bytes allowed (`available`), or None for
        unlimited: for every device; or a mapping from device to one of these.
    policy
        Which value is cheapest to lose: a name, a `Policy`, or a function (cost, neighbours, size, staleness) -> score.
    search
        How to look for it: "exact", "sample", "ignore small", "batch", or a `Search`.
    release
        What happens when the last outside reference to a value goes: "eager" evicts it, "ignore" does nothing,
        "banish" also forgets how it was made as soon as nothing evicted needs it (the three modes of Kirisame et al.).
    clock
        Seconds; operations are costed by it.
    verify
        Compare digests of results: `ImpureError` if a second run differs or a value was changed in place. Slow.
    trace
        A file that every event is written to, for `recompute.traces.read`: JSON lines, compressed if it ends in ".gz".
        Complete whenever the outermost `with cache:` ends, and when the cache goes. Raises OSError if it cannot be
        opened; an error while writing is a warning. Cost: some microseconds an event.
    """

    def __init__(
        self,
        budget: Budget | Mapping[str, Budget] = None,
        *,
        policy: str | Policy | type[Policy] | Score = DEFAULT,
        search: str | Search | type[Search] = "exact",
        release: ReleaseMode = "eager",
        clock: Callable[[], float] = perf_counter,
        verify: bool = False,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if release not in get_args(ReleaseMode):
            raise ValueError(f"unknown release mode {release!r}; choose from {', '.join(get_args(ReleaseMode))}")
        if not callable(clock):
            raise TypeError(f"clock must be a function that returns seconds, not {clock!r}")
        super().__init__(Limits(budget), policy_of(policy), search_of(search), release, clock, verify)
        self._record = None if trace is None else self._start_recording(trace)

    @property
    def budget(self) -> Any:
        """Bytes, a function, a mapping from device to these, or None; see `Cache`. Setting it evicts at once.

        Raises BudgetError, and changes nothing, if sources, pins, operations in flight and what callers hold exceed it.
        """
        return self._limits.given

    @budget.setter
    def budget(self, budget: Budget | Mapping[str, Budget]) -> None:
        limits = Limits(budget)
        before = self._limits
        with self._settling, self._lock:
            try:
                self._limits = limits
                self._unlimited = budget is None
                for pool in self._pools.values():
                    pool.set_budget(limits.of(pool.device))
                    try:
                        self._allocate(pool, 0, ON_THE_GROUND, None)
                    except BudgetError as error:
                        raise BudgetError(f"the new budget is too small: {error}") from None
            except BaseException:
                self._limits = before
                self._unlimited = before.given is None
                for pool in self._pools.values():
                    pool.set_budget(before.of(pool.device))
                raise

    def release_memory(self, nbytes: int | str | None = None, device: str = "cpu") -> int:
        """Evict until `nbytes` are free that were not before, or all that can be (None); the bytes freed.

        For an allocator or a host application that runs short itself. Safe to call from inside an operation.
        """
        wanted = None if nbytes is None else parse_bytes(nbytes, "nbytes")
        with self._noting, self._lock:
            pool = self._pool(device)
            before = pool.used
            if wanted is None and self.policy.name != "none":
                for storage in [each for each in pool.candidates if not each.locks]:
                    self._evict(storage, "request")
            while wanted is not None and before - pool.used < wanted:
                victims = pool.candidates.choose(self.now)
                if not victims:
                    break
                for victim in victims:
                    self._evict(victim, "request")
            freed = before - pool.used
        self._settle()
        return freed

    def stats(self) -> Stats:
        """What the cache did and holds, as of now. O(devices)."""
        self._settle()
        with self._lock:
            self._learn_costs()
            pools = tuple(
                PoolStats(
                    each.device,
                    None if each.budget is None else int(each.refresh()),
                    each.used,
                    each.peak,
                    each.overshoot,
                    each.pinned,
                    each.sources,
                    each.held,
                    sum(not storage.locks for storage in each.candidates),
                )
                for each in self._pools.values()
            )
            again = [
                Recomputed(each if isinstance(each, str) else qualified(each.co_qualname), int(times), seconds)
                for each, (times, seconds) in self._again.items()
            ]
            return Stats(
                used=sum(each.used for each in pools),
                peak=sum(each.peak for each in pools),
                overshoot=max((each.overshoot for each in pools), default=0),
                held=sum(each.held for each in pools),
                operations=self._operations,
                evictions=self._evictions,
                releases=self._releases,
                rematerializations=self._rematerializations,
                recoveries=self._recoveries,
                model_time=self.now - self._remat_time,
                remat_time=self._remat_time,
                scored=sum(each.candidates.scored for each in self._pools.values()),
                recomputed=tuple(sorted(again, key=lambda each: (-each.seconds, -each.times, each.function))),
                pools=pools,
                coercions=self._coercions,
            )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` for every event from now on; returns a function that stops it."""
        self._listeners.append(listener)
        self._attentive = True
        return lambda: self._unsubscribe(listener)

    def __enter__(self) -> Cache:
        _context.enter(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _context.leave()
        if self._record is not None and not _context.is_entered(self):
            self._flush_trace()

    def _start_recording(self, trace: str | os.PathLike[str]) -> Recorder:
        from recompute._traces.write import Recorder

        recorder = Recorder(
            trace,
            {
                "policy": self.policy.name,
                "search": self.search.name,
                "release": self.release,
                "budget": self._limits.given,
            },
        )
        self.subscribe(recorder)
        weakref.finalize(self, recorder.close)  # also when the interpreter ends
        return recorder

    def _flush_trace(self) -> None:
        """The trace, if there is one, is a complete file from here on."""
        if self._record is not None:
            self._settle()
            self._record.flush()

    def __repr__(self) -> str:
        used = sum(pool.used for pool in self._pools.values())
        return f"<Cache {self.policy.name}: {format_bytes(used)} used of {self._limits}, {self._evictions} evictions>"
