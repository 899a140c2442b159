"""The events of a recorded run, as a cache told them: what `recompute.traces.read` leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from recompute import events
from recompute._traces.program import TraceError
from recompute._traces.read import lines, short
from recompute._traces.recorded import HEADER

_TYPES: Final = {
    name: (kind, [field.name for field in fields(kind)])
    for name, kind in vars(events).items()
    if isinstance(kind, type) and issubclass(kind, events.Event)
}


def recorded_events(path: str | Path) -> Iterator[events.Event]:
    """What a cache told while the trace was written, in order, with the numbers and the clock (seconds) of that run.

    Raises TraceError, with file and line, for a file that is wrong, or in the published format: that has no events,
    only a program. O(lines).
    """
    path, number = Path(path), 0
    try:
        for number, text in lines(path):  # noqa: B007  # for the error
            line = json.loads(text)
            if HEADER in line:
                continue
            known = _TYPES.get(line["event"])
            if known is not None:
                yield _event(line, *known)
            elif line["event"] != "End":
                raise ValueError(f"unknown event {line['event']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}:{max(1, number)}: this line is no event: {short(error)}") from None


def _event(line: dict[str, Any], kind: type[events.Event], names: list[str]) -> events.Event:
    given: dict[str, Any] = {}
    for name in names:
        if name in line:
            given[name] = tuple(line[name]) if isinstance(line[name], list) else line[name]
    return kind(**given)
