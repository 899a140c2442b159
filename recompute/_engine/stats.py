"""A snapshot of what a cache did and holds."""

from __future__ import annotations

from dataclasses import dataclass

from recompute._budget import format_bytes
from recompute._tables import List, Table, seconds

MOST = 5
"""Functions in a table."""

TIER_COLUMNS = ("tier", "used", "moved", "fetched", "bandwidth")


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
class TierStats:
    """One tier. Bytes, but for `limit`: None if unlimited."""

    tier: str
    device: str | None
    """Below the memory of which device; None: of all."""
    limit: int | None
    used: int
    moves: int
    """Values written."""
    fetches: int
    """Values read back."""
    written: int
    read: int
    writing_time: float
    """Seconds."""
    reading_time: float
    write_bandwidth: float
    """Bytes a second, as found."""
    read_bandwidth: float

    @property
    def row(self) -> tuple[str, ...]:
        """The figures for people, by `TIER_COLUMNS`."""
        return (
            self.tier if self.device is None else f"{self.tier} below {self.device}",
            format_bytes(self.used) + ("" if self.limit is None else f" of {format_bytes(self.limit)}"),
            f"{self.moves:,}, {format_bytes(self.written)}",
            f"{self.fetches:,}, {format_bytes(self.read)}",
            f"{format_bytes(self.write_bandwidth)}/s, {format_bytes(self.read_bandwidth)}/s",
        )


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
    tiers: tuple[TierStats, ...] = ()
    """What lies below memory, and what moved there and back."""
    moving_time: float = 0.0
    """Seconds in which bytes were moved to tiers and back."""
    foresight: str = ""
    """What is done about a program that repeats: "recording", "planning", "following" or "lost", and why."""
    coercions: int = 0
    """How often a wrapped array was given as a plain one or as a number: `get`, `np.asarray`, `float`, `print`, ..."""

    @property
    def overhead(self) -> float:
        """All compute, and the moving of bytes, divided by the compute without eviction; 1.0 if there was none."""
        return 1 + (self.remat_time + self.moving_time) / self.model_time if self.model_time else 1.0

    @property
    def budget(self) -> int | None:
        """Bytes, over all devices; None if one is unlimited, or nothing has been made yet."""
        budgets = [pool.budget for pool in self.pools]
        return None if None in budgets or not budgets else sum(filter(None, budgets))

    def __str__(self) -> str:
        return str(table(self))

    def _repr_html_(self) -> str:
        return table(self).html()


def table(stats: Stats, title: str = "recompute") -> Table:
    """The figures for people."""
    of = "" if stats.budget is None else f" of {format_bytes(stats.budget)}"
    kinds = {
        "sources": sum(pool.sources for pool in stats.pools),
        "pinned": sum(pool.pinned for pool in stats.pools),
        "held outside": stats.held,
    }
    kept = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in kinds.items() if size)
    over = f", overshoot {format_bytes(stats.overshoot)}" if stats.overshoot else ""
    again = f", {seconds(stats.remat_time)} of it repeated" if stats.remat_time else ""
    pairs = [
        ("used", format_bytes(stats.used) + of + (f" ({kept})" if kept else "")),
        ("peak", format_bytes(stats.peak) + over),
        ("operations", f"{stats.operations:,}, {stats.rematerializations:,} repeated"),
        ("evictions", f"{stats.evictions:,}"),
        ("compute", seconds(stats.model_time + stats.remat_time) + again),
        ("overhead", f"{stats.overhead:.2f}"),
    ]
    if stats.tiers:
        pairs.insert(-1, ("moving", seconds(stats.moving_time)))
    return Table(title, pairs, [*_devices(stats), *_tiers(stats), *_repeated(stats)])


def _devices(stats: Stats) -> list[List]:
    rows = [
        (
            pool.device,
            format_bytes(pool.used),
            "none" if pool.budget is None else format_bytes(pool.budget),
            format_bytes(pool.peak),
        )
        for pool in stats.pools
    ]
    return [List(["device", "used", "budget", "peak"], rows, "<>>>")] if len(rows) > 1 else []


def _tiers(stats: Stats) -> list[List]:
    return [List(TIER_COLUMNS, [tier.row for tier in stats.tiers], "<>>>>")] if stats.tiers else []


def _repeated(stats: Stats) -> list[List]:
    rows = [(found.function, f"{found.times:,}", seconds(found.seconds)) for found in stats.recomputed[:MOST]]
    return [List(["repeated most", "times", "time"], rows, "<>>")] if rows else []
