"""Traces of caches with tiers: what moved is in the file, and the program is as it would be without them."""

from __future__ import annotations

import json
from pathlib import Path

import recompute as rc
from recompute.events import Evicted, Fetched, Moved
from recompute.simulator import simulate
from recompute.testing import EventLog
from recompute.traces import read


def made(number: int) -> bytes:
    return bytes([number]) * 100_000


def record(trace: Path, disk: Path) -> EventLog:
    """Six results and a source within the room of three, all of them got twice, one evicted on request in between."""
    with rc.Cache("350kB", trace=trace, tiers=[rc.Disk(folder=disk, always=True)]) as cache, EventLog(cache) as log:
        values = [rc.pure(made(9)), *(rc.ap(made, number) for number in range(6))]
        for _ in range(2):
            for value in values:
                value.get()
            values[-1].evict()
    return log


def test_what_is_in_the_file(tmp_path: Path) -> None:
    """Each event with all of its fields, in order."""
    log = record(tmp_path / "trace.jsonl", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    for kind in (Moved, Fetched, Evicted):
        written = [line for line in lines if line.get("event") == kind.__name__]
        told = log.of(kind)
        assert [line["storage"] for line in written] == [event.storage for event in told]
        assert [line.get("tier", "") for line in written] == [event.tier for event in told]
    assert log.of(Fetched)


def test_the_program_is_what_its_user_did(tmp_path: Path) -> None:
    """It can be replayed, with a tier or without one; what was fetched is no step of it."""
    record(tmp_path / "trace.jsonl", tmp_path)
    program = read(tmp_path / "trace.jsonl")
    assert len(program.calls) == 6
    assert [kind for kind, _ in program.steps].count("get") == 14
    assert [kind for kind, _ in program.steps].count("evict") == 2
    again, both = simulate(program, "350kB"), simulate(program, "350kB", tier="1GB/s,always")
    assert again.rematerializations > 0
    assert both.fetched_bytes > 0
    assert both.rematerializations < again.rematerializations
