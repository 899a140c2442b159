"""Export for Perfetto and Chrome (trace event JSON): slices by thread, bytes as counters, evictions, causes.

A run of an operation is a slice of the category "operation", or "recomputation" if it had run before; the durations of
both together are the compute of the run. Where something had to be computed again first, a slice of the category "need"
lies around all of it, and arrows lead from each recomputation to the run that asked for it. Times are on the compute
clock. Format: "Trace Event Format", Google, 2016, https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from recompute._sight.nest import NestedRun, trees, walk
from recompute._sight.recording import RecordedRun, arriving
from recompute.events import Evicted, Forgotten

_DEEPEST: Final = 400
"""Slices inside each other: Perfetto draws about 500."""


def perfetto(recording: RecordedRun) -> Iterator[str]:
    """The document, in pieces. O(events), but for the order of the threads."""
    yield '{"displayTimeUnit":"ns","otherData":{"program":' + json.dumps(recording.program.name) + '},"traceEvents":['
    before = ""
    for line in _lines(recording):
        yield before + json.dumps(line, separators=(",", ":"))
        before = ",\n"
    yield "]}\n"


def _lines(recording: RecordedRun) -> Iterator[dict[str, Any]]:
    unit = recording.program.unit
    at = _Clock(unit)
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": recording.program.name}}
    yield {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "evictions"}}
    by_thread = trees(recording.events)
    numbers = {id(run): number for number, run in enumerate(_recomputed(by_thread), start=1)}
    for tid, roots in enumerate(by_thread.values(), start=1):
        name = "operations" if len(by_thread) == 1 else f"operations of thread {tid}"
        yield {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        depth = 0
        for run, ready in walk(roots):
            around = bool(run.needed)
            if not ready:
                depth += around
                if around and depth <= _DEEPEST:
                    yield _slice(f"for {run.event.function}", "need", at(run.start), at(run.event.time), tid)
                continue
            depth -= around
            yield from _run(run, tid, at, numbers)
    yield from _memory(recording, at)


class _Clock:
    """Times of the program in whole nanoseconds: so ends and beginnings fall together as they should."""

    def __init__(self, unit: float) -> None:
        self._scale = unit * 1e9

    def __call__(self, time: float) -> int:
        return round(time * self._scale)


def _recomputed(by_thread: dict[int, list[NestedRun]]) -> Iterator[NestedRun]:
    for roots in by_thread.values():
        for run, ready in walk(roots):
            if ready and run.asked is not None:
                yield run


def _slice(name: str, category: str, start: int, end: int, tid: int, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "ts": start / 1000, "dur": (end - start) / 1000, "pid": 1, "tid": tid,
        **more,
    }  # fmt: skip


def _run(run: NestedRun, tid: int, at: _Clock, numbers: dict[int, int]) -> Iterator[dict[str, Any]]:
    event = run.event
    details: dict[str, Any] = {"bytes": sum(event.nbytes), "storages": list(event.storages)}
    if event.place:
        details["line"] = event.place
    if run.why:
        details["asked by"] = run.why
    category = "recomputation" if event.again else "operation"
    yield _slice(event.function, category, at(run.own), at(event.time), tid, args=details)
    arrow = {"name": "asked for", "cat": "flow", "pid": 1, "tid": tid}
    if run.asked is not None:
        yield {"ph": "s", "id": numbers[id(run)], "ts": at(run.own) / 1000, **arrow}
    for below in run.needed:
        yield {"ph": "f", "bp": "e", "id": numbers[id(below)], "ts": at(run.own) / 1000, **arrow}


def _memory(recording: RecordedRun, at: _Clock) -> Iterator[dict[str, Any]]:
    """Counters of each device, and evictions."""
    devices, places = recording.devices, recording.places
    sizes: dict[int, int] = {}
    gone: dict[int, str] = {}  # evicted storage -> its device
    evicted: dict[str, int] = {}
    shown: dict[str, tuple[int, int]] = {}
    now = 0

    def counters(device: str, used: int) -> Iterator[dict[str, Any]]:
        values = (used, evicted.get(device, 0))
        if shown.get(device) != values:
            shown[device] = values
            for name, value in zip(("used", "evicted"), values, strict=True):
                yield _counter(f"{name} on {device}", now, value)

    def leave(storage: int) -> None:
        if storage in gone:
            evicted[gone.pop(storage)] -= sizes.get(storage, 0)

    if recording.budget is not None:
        yield _counter("budget", 0, recording.budget)
    for event in recording.events:
        now = at(event.time)
        for storage, size in arriving(event):
            sizes[storage] = size
            leave(storage)
        if isinstance(event, Evicted):
            device = devices.get(event.storage, "cpu")
            if event.storage not in gone:
                gone[event.storage] = device
                evicted[device] = evicted.get(device, 0) + sizes.setdefault(event.storage, event.nbytes)
            function, place = places.get(event.storage, ("?", ""))
            details = {"bytes": event.nbytes, "why": event.why, "storage": event.storage, "line": place}
            details |= {"held outside": True} if event.held else {}
            details |= {"tier": event.tier} if event.tier else {}
            yield {
                "ph": "i", "s": "t", "name": f"evicted {function}", "cat": "eviction", "ts": now / 1000, "pid": 1,
                "tid": 0, "args": details,
            }  # fmt: skip
        elif isinstance(event, Forgotten):
            leave(event.storage)
        on = getattr(event, "device", None) or devices.get(getattr(event, "storage", -1))
        if on is not None:
            yield from counters(on, event.used)
    if recording.budget is not None:
        yield _counter("budget", now, recording.budget)


def _counter(name: str, now: int, value: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "ts": now / 1000, "pid": 1, "args": {"bytes": value}}
