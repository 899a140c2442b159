"""Measures what it costs to find the cheapest value and to evict it, by the number of live candidates.

The default policy with exact search (a kinetic tournament) is compared with a scan of every candidate by the same
score. First comes the real cache with a full budget, where each further operation evicts one value. The difference from
the same operation with room to spare is the price of searching, evicting and inserting the new candidate. Then comes
the search structure by itself, where choosing, removing and inserting are timed separately. The first search, which
builds the tournament once in O(n), is listed separately. Costs come from a clock that the benchmark moves, so "equal"
is exact.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from time import perf_counter
from typing import Any, Final

from _common import Report, Target, main, row, say

import recompute as rc
from recompute._engine.graph import Reference, Storage, Value
from recompute._engine.needed import NEIGHBOURHOODS
from recompute._engine.pool import Pool
from recompute._engine.states import RESIDENT
from recompute._policy.formulas import DEFAULT, Score, policy_of
from recompute._policy.search import candidates, search_of
from recompute.testing import ManualClock

SIZE: Final = 1_000  # bytes of each value, as declared
SHAPES: Final = ("equal cost", "unequal cost", "chains of ten, unequal cost")


@dataclass(frozen=True)
class Victims:
    """Seconds of: the first search, an operation that evicts, one that has room, one eviction on request."""

    first: float
    evicting: float
    roomy: float
    requested: float


def by_scan(cost: float, neighbours: float, size: int, staleness: float) -> float:
    """The default policy's score with memory to spare, as a user's function, which is searched by a scan."""
    return (cost + neighbours) / (size * staleness) if staleness else float("inf")


def costs(shape: str) -> Iterator[float]:
    """Seconds of each operation: all one millisecond, or spread over three decades."""
    if shape == "equal cost":
        return repeat(1e-3)
    draw = random.Random(0)
    return (10 ** draw.uniform(-4, -1) for _ in repeat(None))


def in_cache(count: int, shape: str, policy: str | Score, steps: int) -> Victims:
    """`count` live values fill the budget, then `steps` more push out as many."""
    clock = ManualClock()
    upcoming = costs(shape)

    def work(_: Any) -> int:
        clock.advance(next(upcoming))
        return 0

    with rc.Cache(SIZE * (count + 1), policy=policy, clock=clock) as cache:
        sources = [rc.pure(None)]
        values: list[Any] = []

        def go(number: int) -> float:
            """One more operation on a source, or on the value before it, nine times out of ten."""
            linked = shape.startswith("chains") and values and len(values) % 10
            argument = values[-1] if linked else sources[0]
            began = perf_counter()
            value = rc.ap(work, argument, nbytes=SIZE)
            seconds = perf_counter() - began
            values.append(value)
            return seconds

        roomy = [go(number) for number in range(count)][-min(count, steps) :]
        cache.budget = SIZE * count
        gc.collect()
        first = go(0)
        gc.collect()
        evicting = [go(number) for number in range(steps)]
        few = min(steps, count // 2)
        began = perf_counter()
        for _ in range(few):
            cache.release_memory(SIZE)
        requested = (perf_counter() - began) / few
        assert cache.stats().evictions >= steps + few
        return Victims(first, sum(evicting) / steps, median(roomy), requested)


@dataclass(frozen=True)
class Bare:
    """Seconds of: the first choice, one choice, taking out, putting in."""

    first: float
    choose: float
    remove: float
    add: float


def alone(count: int, shape: str, steps: int) -> Bare:
    """The search structure of the default policy by itself: no cache, no neighbours, the same lines."""
    policy = policy_of(DEFAULT)
    search = candidates(search_of("exact"), policy, NEIGHBOURHOODS[policy.neighbourhood](lambda _: None))
    pool = Pool("cpu", search, None)
    upcoming = costs(shape)
    now = 0.0
    outside = Reference(alone)  # refers to each of them, so that all are needed

    def fresh(number: int) -> Storage:
        nonlocal now
        storage, value = Storage(number), Value()
        storage.size, storage.pool = SIZE, pool
        storage.cost = next(upcoming)
        now += storage.cost
        storage.last_access = now
        value.storage, value.references = storage, outside
        storage.values = (value,)
        storage.state, storage.resident = RESIDENT, True
        return storage

    for number in range(count):
        search.add(fresh(number))
    gc.collect()
    began = perf_counter()
    search.choose(now)
    first = perf_counter() - began
    choosing = removing = adding = 0.0
    for number in range(count, count + steps):
        storage = fresh(number)
        began = perf_counter()
        victim = search.choose(now)[0]
        chosen = perf_counter()
        search.remove(victim)
        removed = perf_counter()
        search.add(storage)
        adding += perf_counter() - removed
        choosing += chosen - began
        removing += removed - chosen
    return Bare(first, choosing / steps, removing / steps, adding / steps)


def measure(quick: bool) -> list[Report]:
    cache = Report(
        "A victim in a full cache",
        "Microseconds to find the cheapest of n live values, evict it, and insert the new value into the search "
        "structure: the time of an operation that evicts minus that of the same operation with room to spare.",
    )
    bare = Report(
        "The search alone",
        "Microseconds of the search structure without the cache. Insertions and removals are only noted; the next "
        "choice processes them.",
    )
    sizes = (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000, 1_000_000)
    repetitions = 2 if quick else 3
    for count in sizes:
        say(f"{count:,} candidates")
        for shape in SHAPES:
            few = repetitions if count < 1_000_000 else 1 if shape == SHAPES[-1] else 2
            steps = min(10_000, max(1_000, count)) if not quick else 1_000
            _note(cache, count, shape, [in_cache(count, shape, DEFAULT, steps) for _ in range(few)])
            if shape == SHAPES[-1]:
                continue
            _note_bare(bare, count, shape, [alone(count, shape, steps) for _ in range(few)])
        if count <= 100_000 or not quick:
            steps = max(2, 200_000 // count) if count > 1_000 else 200
            few = 1 if count >= 100_000 else repetitions
            scans = [in_cache(count, "equal cost", by_scan, steps) for _ in range(few)]
            cache.rows.append(row(f"scan, {count:,}, equal cost", [scan.evicting - scan.roomy for scan in scans]))
    _judge(cache, bare, sizes)
    return [cache, bare]


def _judge(cache: Report, bare: Report, sizes: Sequence[int]) -> None:
    """The ratios and the targets of both pages."""
    for count in sizes:
        cache.ratio(
            f"scan / exact search, {count:,}, equal cost",
            f"scan, {count:,}, equal cost",
            f"search, evict, insert, {count:,}, equal cost",
        )
    most = sizes[-1]
    for shape in SHAPES:
        cache.ratio(
            f"{most:,} / 1,000 candidates, {shape}",
            f"search, evict, insert, {most:,}, {shape}",
            f"search, evict, insert, 1,000, {shape}",
        )
    for shape in SHAPES[:2]:
        bare.ratio(f"{most:,} / 1,000 candidates, {shape}", f"choose, {most:,}, {shape}", f"choose, 1,000, {shape}")
    grown = dict(cache.ratios)
    for shape in SHAPES:
        found = cache.row(f"search, evict, insert, {most:,}, {shape}").known
        rebuilding = cache.row(f"first search, {most:,}, {shape}").known / most
        cache.targets.append(
            Target(
                f"a victim among {most:,}, {shape}",
                60.0,
                found + rebuilding,
                "us",
                f"Searching, evicting and inserting the new candidate: {found:.1f} us; and {rebuilding:.1f} us, its "
                "share of rebuilding the tournament, which happens once in about as many evictions as there are "
                f"candidates, and then takes {rebuilding * most / 1e6:.2f} s at once.",
            )
        )
        cache.targets.append(
            Target(
                f"a victim among {most:,}, {shape}, compared with 1,000",
                4.0,
                grown[f"{most:,} / 1,000 candidates, {shape}"],
                "times",
                "Without the share of rebuilding. The tree is deeper, and too large for the processor's caches.",
            )
        )


def _note(report: Report, count: int, shape: str, runs: list[Victims]) -> None:
    about = f"{count:,}, {shape}"
    extra = [run.evicting - run.roomy for run in runs]
    report.rows.append(row(f"search, evict, insert, {about}", extra))
    report.rows.append(row(f"search and evict on request, {about}", [run.requested for run in runs]))
    report.rows.append(row(f"operation with room, {about}", [run.roomy for run in runs], "its median"))
    report.rows.append(
        row(f"first search, {about}", [run.first - run.roomy for run in runs], "builds the structure once, O(n)")
    )


def _note_bare(report: Report, count: int, shape: str, runs: list[Bare]) -> None:
    about = f"{count:,}, {shape}"
    parts: tuple[tuple[str, Callable[[Bare], float], str], ...] = (
        ("choose", lambda run: run.choose, "processes what was noted since the last choice"),
        ("remove", lambda run: run.remove, ""),
        ("insert", lambda run: run.add, ""),
        ("first choice", lambda run: run.first, "builds the structure once, O(n)"),
    )
    for name, part, note in parts:
        report.rows.append(row(f"{name}, {about}", [part(run) for run in runs], note))


if __name__ == "__main__":
    main(measure, __doc__)
