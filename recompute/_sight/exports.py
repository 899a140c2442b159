"""The formats that a run can be exported to, and the plainest of them: a table for pandas and its like.

The table has a row for each first run, each recomputation and each eviction.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from recompute._sight.memory_viz import memory_viz
from recompute._sight.nest import NestedRun, trees, walk
from recompute._sight.perfetto import perfetto
from recompute._sight.recording import RecordedRun
from recompute._sight.speedscope import speedscope
from recompute.events import Evicted, Performed

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

COLUMNS: Final = (
    "kind", "time", "seconds", "function", "line", "bytes", "used", "device", "storage", "for", "depth", "why", "held",
    "tier", "thread",
)  # fmt: skip
"""`kind`: operation, recomputation or eviction. `time`: seconds on the compute clock, at its end; `seconds`: what it
took. `bytes`: of what it made or dropped; `used`: on its device afterwards. `storage`: the first one of its numbers.
`for`, `depth`: which function needed a recomputation, and how many runs deep; "get" if the program did. `why`:
pressure, release or request. `held`: it is still held outside. `tier`: where it went. `thread`: from 1."""


def rows(recording: RecordedRun) -> Iterator[tuple[Any, ...]]:
    """A tuple for each row, as `COLUMNS` says; None where there is nothing to say. In order of time."""
    unit = recording.program.unit
    by_thread = trees(recording.events)
    numbers = {thread: number for number, thread in enumerate(by_thread, start=1)}
    runs: dict[int, NestedRun] = {
        id(run.event): run for roots in by_thread.values() for run, ready in walk(roots) if ready
    }
    places, devices = recording.places, recording.devices
    for event in recording.events:
        if isinstance(event, Performed):
            run = runs[id(event)]
            asked = run.why if run.asked is None else run.asked.event.function
            yield (
                "recomputation" if event.again else "operation", event.time * unit, event.cost * unit, event.function,
                event.place or None, sum(event.nbytes), event.used, event.device,
                event.storages[0] if event.storages else None, asked or None, run.depth, None, None, None,
                numbers[event.thread],
            )  # fmt: skip
        elif isinstance(event, Evicted):
            function, place = places.get(event.storage, ("?", ""))
            yield (
                "eviction", event.time * unit, None, function, place or None, event.nbytes, event.used,
                devices.get(event.storage, "cpu"), event.storage, None, None, event.why, event.held, event.tier or None,
                None,
            )  # fmt: skip


def comma_separated(recording: RecordedRun) -> Iterator[str]:
    """CSV with a line of names, in pieces. O(events)."""
    for row in (COLUMNS, *rows(recording)):
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(["" if cell is None else cell for cell in row])
        yield line.getvalue()


def arrow(recording: RecordedRun) -> bytes:
    """The same as a file of Apache Arrow (Feather). Raises ImportError, with the cure, without pyarrow."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError("--to arrow needs pyarrow: pip install 'recompute-cache[pyarrow]'") from error
    columns = list(zip(*rows(recording), strict=True)) or [()] * len(COLUMNS)
    table = pa.table([pa.array(column, type) for column, type in zip(columns, _types(pa), strict=True)], list(COLUMNS))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _types(pa: Any) -> list[pa.DataType]:
    text, number, whole = pa.string(), pa.float64(), pa.int64()
    return [text, number, number, text, text, whole, whole, text, whole, text, whole, text, pa.bool_(), text, whole]


_TEXTS: Final[dict[str, Callable[[RecordedRun], Iterator[str]]]] = {
    "perfetto": perfetto,
    "speedscope": speedscope,
    "memory_viz": memory_viz,
    "csv": comma_separated,
}

FORMATS: Final = (*_TEXTS, "arrow")


def export(recording: RecordedRun, to: str) -> Iterator[bytes]:
    """The run in one of `FORMATS`, as the pieces of a file. Raises ImportError, with the cure, if a library lacks."""
    if to == "arrow":
        return iter([arrow(recording)])
    return (piece.encode() for piece in _TEXTS[to](recording))
