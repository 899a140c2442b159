"""A snapshot of what a cache did and holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recomputed:
    """How often one function was run again, and the compute that took (seconds)."""

    function: str
    times: int
    seconds: float


@dataclass(frozen=True)
class PoolStats:
    """One device. Bytes, but for `budget`: None if unlimited."""

    device: str
    budget: int | None
    used: int
    peak: int
    overshoot: int
    pinned: int
    sources: int
    held: int
    candidates: int


@dataclass(frozen=True)
class Stats:
    """Bytes are summed over the devices; `pools` has each. Times are compute in seconds, by the cache's clock.

    On each device `peak <= budget + overshoot`, always. If the budget changes, both figures remember what was before:
    then `peak` is at most the largest budget there was, and `overshoot`.
    """

    used: int
    """Bytes counted now: resident, reserved by operations in flight, and held outside after eviction."""
    peak: int
    """The most that was ever used, on each device."""
    overshoot: int
    """The most by which the budget was exceeded: for a moment, by an output of unknown size.

    Also by what had to be given back when there was no room for it: see `recompute_torch.budget`.
    """
    held: int
    """Bytes of `used` that were evicted but that somebody outside still holds."""
    operations: int
    """Operations performed for the first time."""
    evictions: int
    """Storages dropped to make room or on request; releases are not counted."""
    releases: int
    """Storages dropped because their last outside reference went."""
    rematerializations: int
    """Operations performed again."""
    recoveries: int
    """Evicted storages that were taken back from whoever still held them."""
    model_time: float
    """Compute of the first runs: what the program costs without eviction."""
    remat_time: float
    """Compute of the repeated runs: what the budget costs."""
    scored: int
    """Scores computed in search of candidates."""
    recomputed: tuple[Recomputed, ...]
    """Functions that ran again, most compute first."""
    pools: tuple[PoolStats, ...]
    coercions: int = 0
    """How often a wrapped array was given as a plain one or as a number: `get`, `np.asarray`, `float`, `print`, ..."""

    @property
    def overhead(self) -> float:
        """All compute divided by the compute without eviction; 1.0 if nothing was computed."""
        return 1 + self.remat_time / self.model_time if self.model_time else 1.0
