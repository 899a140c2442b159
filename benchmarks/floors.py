"""Measures the machinery in floors: multiples of what a minimal node in pure Python costs, all in one run.

The floor is the time to make a slotted object with a function, its arguments and its value, minus that of the bare call
of the function. Ratios to it carry over to other and to busy machines; microseconds do not. The rows are those for
which the design has goals.
"""

from __future__ import annotations

import gc

import _operations as operations
from _common import Measure, Report, in_turns, main, say

import recompute as rc
from recompute import _form

ROOM = "10 GB"
KEPT = "bookkeeping, value kept"

GOALS = {
    "tracked, kept, budget never reached": (4, 20),
    "get of a resident value": (0.12, 0.30),
    "rematerialize, one operation of a chain": (4, 20),
    "evict": (2, 9),
    "an operation that evicts, 1,000 candidates": (40, 350),
    "an operation that evicts, 100,000 candidates": (60, 450),
    KEPT: (400, 600),
}
"""What the compiled and the plain form should take at most."""


def measure(quick: bool) -> Report:
    count, repetitions = (5_000, 2) if quick else (50_000, 7)
    form = _form.name()
    report = Report(
        "The machinery, relative to a minimal node",
        f"Multiples of the time that a minimal node in pure Python takes, in one run. The core is {form}.",
    )
    measures: dict[str, Measure] = {
        "bare": lambda: operations.bare(operations.trivial, 0, count),
        "floor": lambda: operations.floor(count),
        "tracked, kept, no budget": lambda: operations.kept(count),
        "tracked, kept, budget never reached": lambda: operations.kept(count, ROOM),
        "tracked, only the last kept, budget never reached": lambda: operations.last_kept(count, rc.Cache(ROOM)),
        "the same, a closure": lambda: operations.kept(count, ROOM, operations.closure()),
        "the same, a method of an object": lambda: operations.kept(count, ROOM, operations.Adder().add),
        "get of a resident value": lambda: operations.get_resident(10 * count),
    }
    size = operations.bookkeeping(2_000 if quick else 20_000)  # first: nothing plans in the background yet
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
    for candidates in (1_000,) if quick else (1_000, 100_000):
        say(f"{candidates:,} candidates")
        runs = [operations.evicting(candidates, 200 if quick else 2_000) for _ in range(2)]
        found[f"an operation that evicts, {candidates:,} candidates"] = min(runs)
    steps = 200 if quick else 1_500
    found["an operation that copies and evicts an array"] = min(operations.evicting_arrays(steps) for _ in range(5))
    for name, taken in found.items():
        report.row(name, [taken / floor], "floors", f"{1e6 * taken:.3g} us")
    report.row(KEPT, [size], "bytes", "by tracemalloc, without the value")
    for name, (compiled, plain) in GOALS.items():
        if name in found or name == KEPT:
            value = found.get(name, size * floor) / floor
            most = compiled if form == "compiled" else plain
            report.target(name, most, value, "bytes" if name == KEPT else "floors")
    report.row("a minimal node", [1.0], "floors", f"{1e6 * floor:.3g} us")
    return report


if __name__ == "__main__":
    main(measure, __doc__)
