"""Export for speedscope: compute by stacks of operations, each above the one that needed it.

A frame is an operation, with its line; what it had to have computed again lies inside, and is marked. Format:
https://www.speedscope.app/file-format-schema.json, profiles of the type "evented".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from recompute._sight.nest import trees, walk
from recompute._sight.recording import RecordedRun
from recompute._traces.program import file_and_line
from recompute.events import Performed


def speedscope(recording: RecordedRun) -> Iterator[str]:
    """The document, in pieces: a profile for each thread. O(events)."""
    unit = recording.program.unit
    frames: dict[tuple[str, str, int], int] = {}

    def number(event: Performed) -> int:
        name = f"{event.function} (again)" if event.again else event.function
        return frames.setdefault((name, *file_and_line(event.place)), len(frames))

    profiles: list[dict[str, Any]] = []
    by_thread = trees(recording.events)
    for thread, roots in enumerate(by_thread.values(), start=1):
        events = [
            {
                "type": "C" if ready else "O",
                "frame": number(run.event),
                "at": (run.event.time if ready else run.start) * unit,
            }
            for run, ready in walk(roots)
        ]
        profiles.append(
            {
                "type": "evented",
                "name": recording.program.name if len(by_thread) == 1 else f"{recording.program.name}, thread {thread}",
                "unit": "seconds",
                "startValue": 0,
                "endValue": events[-1]["at"] if events else 0,
                "events": events,
            }
        )
    yield json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "name": recording.program.name,
            "exporter": "recompute",
            "shared": {
                "frames": [
                    {"name": name, **({"file": file, "line": line} if file else {})} for name, file, line in frames
                ]
            },
            "profiles": profiles,
        },
        separators=(",", ":"),
    )
    yield "\n"
