"""Snapshots of a cache: what it did and holds, and where the memory is, by the function and line that made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from recompute._budget import format_bytes
from recompute._engine.functions import place_of
from recompute._engine.graph import EVICTED, Held, Storage
from recompute._engine.states import HELD
from recompute.text import List, Table, name_at_rest, seconds

MOST = 5
"""Functions in a table."""

_MANY = 1_000
"""Operations, of which it can be said that they are small."""

_SMALL = 20e-6
"""Seconds: to remember an operation takes about a third of that."""

_DEAR = 0.25
"""Of the computing: what the library itself may take before something is said."""

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
    """Bytes of `used` that were evicted but that the program still holds."""
    operations: int
    """Operations performed for the first time."""
    evictions: int
    """Storages dropped to make room or on request; releases are not counted."""
    releases: int
    """Storages dropped because their last outside reference went."""
    rematerializations: int
    """Operations performed again."""
    recoveries: int
    """Evicted storages that were taken back from the program, which still held them."""
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
    library_time: float = 0.0
    """Seconds of the library itself, estimated from one run of an operation in 64 (of the first 64 all but eight).

    To find victims, to bring values back, to count and to free them; with waits for other threads, and what destructors
    and listeners take. Not with what precedes: looking through the arguments of `ap`.
    """

    @property
    def overhead(self) -> float:
        """All compute, and the moving of bytes, divided by the compute without eviction; 1.0 if there was none."""
        return 1 + (self.remat_time + self.moving_time) / self.model_time if self.model_time else 1.0

    @property
    def budget(self) -> int | None:
        """Bytes, over all devices; None if one is unlimited, or nothing has been made yet."""
        budgets = [pool.budget for pool in self.pools]
        return None if None in budgets or not budgets else sum(filter(None, budgets))

    @property
    def spent(self) -> list[tuple[str, str]]:
        """What time went where, for people: labels and durations."""
        pairs = [("functions", seconds(self.model_time))]
        if self.remat_time:
            pairs.append(("recomputation", seconds(self.remat_time)))
        if self.tiers:
            pairs.append(("moving", seconds(self.moving_time)))
        return [*pairs, ("library", f"about {seconds(self.library_time)}")]

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
    pairs = [
        ("used", format_bytes(stats.used) + of + (f" ({kept})" if kept else "")),
        ("peak", format_bytes(stats.peak) + over),
        ("operations", f"{stats.operations:,}, {stats.rematerializations:,} repeated"),
        ("evictions", f"{stats.evictions:,}"),
        *stats.spent,
        ("overhead", f"{stats.overhead:.2f}"),
    ]
    if hint(stats):
        pairs.append(("hint", hint(stats)))
    return Table(title, pairs, [*_devices(stats), *_tiers(stats), *_repeated(stats)])


def hint(stats: Stats) -> str:
    """What to do if the operations are too small for the library; empty if they are not."""
    average = stats.model_time / max(1, stats.operations)
    small = average < _SMALL or stats.library_time > _DEAR * (stats.model_time + stats.remat_time)
    if stats.operations < _MANY or not small:
        return ""
    share = stats.library_time / (stats.operations + stats.rematerializations)
    return f"an operation takes {seconds(average)} on average, and the library {seconds(share)}: make operations larger"


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


_MOST: Final = 10
"""Rows that are shown."""


@dataclass(frozen=True)
class Holding:
    """What one function made at one place. Bytes."""

    function: str
    """"source (ndarray)" for sources of a type, "held outside" for memory that is no value of the cache."""
    place: str
    """`file:line`; empty if it is not known."""
    nbytes: int
    """In memory, or evicted and held outside: so many bytes are counted as used."""
    evicted: int
    """Evicted, and not held."""
    values: int
    """Storages in memory."""


class Holdings(list[Holding]):
    """The most bytes first. Prints as a table, of the first ten."""

    def _table(self) -> Table:
        rows = [
            (one.function, format_bytes(one.nbytes), f"{one.values:,}", format_bytes(one.evicted), one.place)
            for one in self[:_MOST]
        ]
        pairs = [("in memory", format_bytes(sum(one.nbytes for one in self)))]
        if len(self) > _MOST:
            pairs.append(("not shown", f"{format_bytes(sum(one.nbytes for one in self[_MOST:]))} of other functions"))
        return Table("memory", pairs, [List(["made by", "in memory", "values", "evicted", "line"], rows, "<>>><")])

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()


def holdings(storages: Iterable[Storage], held: Iterable[Held]) -> list[Holding]:
    """Of these storages, and of what is held without being a value. Under the lock."""
    sums: dict[tuple[str, str], list[int]] = {}
    for storage in storages:
        there = storage.resident or storage.state == HELD
        count = sums.setdefault(_maker(storage), [0, 0, 0])
        count[0 if there else 1] += storage.size
        count[2] += there
    for one in held:
        if one.storage is None:
            count = sums.setdefault(("held outside", ""), [0, 0, 0])
            count[0] += one.size
            count[2] += 1
    rows = [Holding(*maker, *count) for maker, count in sums.items() if count[0] or count[1]]
    return sorted(rows, key=lambda one: (-one.nbytes, -one.evicted, one.function, one.place))


def _maker(storage: Storage) -> tuple[str, str]:
    """The function that made the first value on it, and the line; sources have a type."""
    value = next(iter(storage.values))
    operation = value.operation
    if operation is not None:
        return name_at_rest(operation.function), place_of(operation.code, operation.instruction)
    payload = value.payload
    return "source" if payload is EVICTED else f"source ({type(payload).__name__})", ""
