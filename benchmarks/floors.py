"""Measures the machinery in floors: how many times what a minimal node in pure Python costs, all in one run.

The floor is a slotted object with a function, its arguments and its value, less the bare call of the function. Ratios
to it carry over to other machines and busy ones; microseconds do not. The rows are what the design asks for.
"""

from __future__ import annotations

import gc

import operations
from _common import Measure, Report, Row, in_turns, main, say
from victims import SHAPES, in_cache

from recompute._policy.formulas import DEFAULT

ROOM = "10 GB"


def measure(quick: bool) -> list[Report]:
    count, repetitions = (5_000, 2) if quick else (50_000, 7)
    report = Report("The machinery in floors", "Times divided by that of a minimal node in pure Python, in one run.")
    measures: dict[str, Measure] = {
        "bare": lambda: operations.bare(operations.trivial, 0, count),
        "floor": lambda: operations.floor(count),
        "tracked, kept, no budget": lambda: operations.kept(count),
        "tracked, kept, budget never reached": lambda: operations.kept(count, ROOM),
        "tracked, only the last kept, budget never reached": lambda: operations.last_kept(
            operations.trivial, 0, count, ROOM
        ),
        "get of a resident value": lambda: operations.get_resident(10 * count),
    }
    say(f"chains of {count:,} operations")
    seconds = {name: min(times) for name, times in in_turns(measures, repetitions).items()}
    bare = seconds.pop("bare")
    floor = seconds.pop("floor") - bare
    found = {name: taken - (0 if name.startswith("get") else bare) for name, taken in seconds.items()}
    chains = []
    for _ in range(repetitions):
        gc.collect()
        chains.append(operations.away_and_back(count))
    for number, name in enumerate(("evict", "rematerialize, one operation of a chain", "drop")):
        found[name] = min(times[number] for times in chains)
    candidates = 1_000 if quick else 100_000
    say(f"{candidates:,} candidates")
    runs = [in_cache(candidates, SHAPES[1], DEFAULT, 200 if quick else 2_000) for _ in range(2)]
    found[f"search, evict and enter among {candidates:,}"] = min(run.evicting - run.roomy for run in runs)
    for name, taken in found.items():
        report.rows.append(Row(name, taken / floor, taken / floor, "floors", f"{1e6 * taken:.3g} us"))
    size = operations.bookkeeping(2_000 if quick else 20_000, keep=True)
    report.rows.append(Row("bookkeeping, value kept", size, size, "bytes", "by tracemalloc, without the value"))
    report.rows.append(Row("the floor", 1.0, 1.0, "floors", f"{1e6 * floor:.3g} us"))
    return [report]


if __name__ == "__main__":
    main(measure, __doc__)
