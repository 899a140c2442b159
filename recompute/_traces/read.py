"""Reading a trace: any of the known formats, plain or gzip, line by line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from recompute._traces.program import Program, TraceError
from recompute._traces.published import Published
from recompute._traces.recorded import HEADER, Recorded

_LONGEST: Final = 300
"""Characters of an error's text."""

_GZIP: Final = b"\x1f\x8b"


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
        for number, text in lines(path):
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
                fault = fault or TraceError(f"{path}:{number}: {short(error)}")
        if fault is not None:
            raise fault
        if builder is None:
            raise ValueError("the trace is empty")
        return builder.finish()
    except TraceError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number + 1}: the file is truncated or damaged: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{max(1, number)}: {short(error)}") from None


def _builder(first: dict[str, Any], name: str) -> Format:
    if HEADER not in first and "INSTRUCTION" not in first:
        raise ValueError(
            f"this is no trace: its first line has neither {HEADER!r} nor 'INSTRUCTION'; `recompute run --record` and "
            "Cache(trace=...) write one"
        )
    return Recorded(name) if HEADER in first else Published(name)


def lines(path: Path) -> Iterator[tuple[int, str]]:
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


def short(error: Exception) -> str:
    """Its text, without the middle of what is long in it: a trace may have anything as a name."""
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
