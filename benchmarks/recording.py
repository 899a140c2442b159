"""Measures what a trace costs: microseconds per operation with and without one, and bytes per event in the file.

The function adds 1 to a number, so nearly all the time is the machinery. Each step makes one value and releases the one
before it, which is evicted: three events. Also measured: the same with a listener that does nothing, which is the cost
of the events themselves, and writing events that exist already.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from _common import MICRO, Measure, Report, in_turns, main, say
from _operations import get_resident, last_kept

import recompute as rc
from recompute._traces.write import Recorder
from recompute.events import Evicted, Performed, Released
from recompute.traces import read

ROOM = "10 GB"


def heard(count: int) -> float:
    """A chain with a listener that does nothing."""
    cache = rc.Cache(ROOM)
    cache.subscribe(lambda event: None)
    return last_kept(count, cache)


def writing(count: int, path: Path) -> float:
    """Seconds an event, of those of a chain."""
    recorder = Recorder(path, {})
    events: list[Any] = []
    for number in range(1, count // 3):
        made = (number + 1,)
        before = (number,)
        events += (
            Performed(number * 1e-6, 32, "trivial", 1e-6, False, made, (32,), before, made, made, before, "cpu", 32),
            Released(number * 1e-6, 32, number),
            Evicted(number * 1e-6, 32, number, 32, "release"),
        )
    began = perf_counter()
    for event in events:
        recorder(event)
    recorder.close()
    return (perf_counter() - began) / len(events)


def reading(path: Path) -> float:
    began = perf_counter()
    program = read(path)
    return (perf_counter() - began) / len(program.calls)


def measure(quick: bool) -> Report:
    report = Report(
        "Recording",
        "Microseconds an operation of a chain (three events each), of a `get`, or of an event, as the line says.",
    )
    count = 5_000 if quick else 50_000
    say(f"chains of {count:,} operations, with and without a trace")
    with TemporaryDirectory() as folder:
        plain, zipped = Path(folder) / "run.jsonl", Path(folder) / "run.jsonl.gz"
        measures: dict[str, Measure] = {
            "operation, no trace": lambda: last_kept(count, rc.Cache(ROOM)),
            "operation, a listener that does nothing": lambda: heard(count),
            "operation, plain trace": lambda: last_kept(count, rc.Cache(ROOM, trace=plain)),
            "operation, compressed trace": lambda: last_kept(count, rc.Cache(ROOM, trace=zipped)),
            "read an operation, plain": lambda: reading(plain),
            "read an operation, compressed": lambda: reading(zipped),
            "get, no trace": lambda: get_resident(count),
            "get, compressed trace": lambda: get_resident(count, Path(folder) / "gets.jsonl.gz"),
            "write an event, plain": lambda: writing(count, Path(folder) / "events.jsonl"),
            "write an event, compressed": lambda: writing(count, Path(folder) / "events.jsonl.gz"),
        }
        found = in_turns(measures, 2 if quick else 7)
        for name, seconds in found.items():
            report.row(name, [taken / MICRO for taken in seconds])
        for name, path in (("plain", plain), ("compressed", zipped)):
            report.row(f"size of an event, {name}", [os.path.getsize(path) / (3 * count)], "bytes")
    for name in ("plain trace", "compressed trace"):
        ratio = min(found[f"operation, {name}"]) / min(found["operation, no trace"])
        report.row(f"operation: {name} / none", [ratio], "times")
    return report


if __name__ == "__main__":
    main(measure, __doc__)
