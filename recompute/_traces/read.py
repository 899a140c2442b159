"""Reading a trace, plain or gzip, line by line: its program, in any of the known formats, or the events of its run."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol

from recompute import events
from recompute._traces.program import Program, TraceError
from recompute._traces.published import Published
from recompute._traces.recorded import HEADER, Recorded

_LONGEST: Final = 300
"""Characters of an error's text."""

_GZIP: Final = b"\x1f\x8b"
_DAMAGES: Final = (EOFError, zlib.error, gzip.BadGzipFile)

_WHOLE: Final = lambda value: type(value) is int
_FITTING: Final[dict[str, Callable[[Any], bool]]] = {
    "float": lambda value: type(value) in (int, float) and isfinite(value),
    "int": _WHOLE,
    "int | None": lambda value: value is None or type(value) is int,
    "bool": lambda value: type(value) is bool,
    "tuple[int, ...]": lambda value: type(value) is list and all(map(_WHOLE, value)),
}
"""Type of a field of an event -> whether a value of JSON is of it; all others are texts."""

_TYPES: Final = {
    name: (kind, {field.name: field.type for field in fields(kind)})
    for name, kind in vars(events).items()
    if isinstance(kind, type) and issubclass(kind, events.Event)
}


class Format(Protocol):
    """Builds a program from the lines of a trace. Raises ValueError, which says what is wrong with the line."""

    def add(self, line: dict[str, Any]) -> None: ...
    def finish(self) -> Program: ...


def read(path: str | Path) -> Program:
    """The program that a trace tells of: one of `Cache(trace=...)`, or one of the DTR authors' simulator.

    Streams, so the file may be larger than memory; the program takes some hundred bytes an operation. O(lines).
    Raises TraceError, with file and line, where the trace is wrong or ends too early; OSError if there is none.
    """
    path = Path(path)
    number = 0
    builder: Format | None = None
    fault: TraceError | None = None
    started = False
    try:
        for number, text in _lines(path):
            if fault is not None and (started or isinstance(builder, Recorded)):
                break
            if fault is not None and '"START"' not in text:
                continue
            try:
                line = _object(text)
                if line.get("INSTRUCTION") == "ANNOTATE" and line.get("ANNOTATION") == "START" and not started:
                    builder, fault, started = Published(path.name), None, True  # what came before does not count
                elif fault is not None:
                    continue
                elif builder is None:
                    builder = _builder(line, path.name)
                builder.add(line)
            except ValueError as error:
                fault = fault or TraceError(f"{path}:{number}: {_short(error)}")
        if fault is not None:
            raise fault
        if builder is None:
            raise ValueError("the trace is empty")
        return builder.finish()
    except TraceError:
        raise
    except _DAMAGES as error:
        raise _damage(path, number, error) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{max(1, number)}: {_short(error)}") from None


def recorded_events(path: str | Path) -> Iterator[events.Event]:
    """The events of the recorded run, in order, with its numbers and its clock (seconds).

    Raises TraceError, with file and line, for a file that is wrong, or in the published format: that has no events,
    only a program. O(lines).
    """
    path, number = Path(path), 0
    try:
        for number, text in _lines(path):  # noqa: B007  # for the error
            line = json.loads(text)
            if HEADER in line:
                continue
            known = _TYPES.get(line["event"])
            if known is not None:
                yield _event(line, *known)
            elif line["event"] != "End":
                raise ValueError(f"unknown event {line['event']!r}")
    except _DAMAGES as error:
        raise _damage(path, number, error) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{path}:{max(1, number)}: this line is no event: {_short(error)}") from None


def _damage(path: Path, number: int, error: Exception) -> TraceError:
    """A compressed file that is not whole, behind the line of this number."""
    return TraceError(f"{path}:{number + 1}: the file is truncated or damaged: {error}")


def _event(line: dict[str, Any], kind: type[events.Event], types: dict[str, Any]) -> events.Event:
    given: dict[str, Any] = {}
    for name, of in types.items():
        if name in line:
            value = line[name]
            if not _FITTING.get(of, lambda value: type(value) is str)(value):
                raise ValueError(f"{name} is {value!r}")
            given[name] = tuple(value) if type(value) is list else value
    return kind(**given)


def _builder(first: dict[str, Any], name: str) -> Format:
    if HEADER not in first and "INSTRUCTION" not in first:
        raise ValueError(
            f"this is no trace: its first line has neither {HEADER!r} nor 'INSTRUCTION'; `recompute run --record` and "
            "Cache(trace=...) write one"
        )
    return Recorded(name) if HEADER in first else Published(name)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, numbered from one."""
    with open(path, "rb") as raw, gzip.open(raw) if raw.peek(2)[:2] == _GZIP else raw as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.decode("utf-8", "replace")


def _object(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(line, dict):
        raise ValueError(f"a line must be a JSON object, not {text.strip()[:40]}")
    return line


def _short(error: Exception) -> str:
    """Its text, without the middle of what is long in it: a trace may have anything as a name."""
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
