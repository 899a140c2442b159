"""The formats that a run can be exported to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from recompute._sight.memory_viz import memory_viz
from recompute._sight.perfetto import perfetto
from recompute._sight.recording import Recording
from recompute._sight.rows import arrow, comma_separated
from recompute._sight.speedscope import speedscope

_TEXTS: Final[dict[str, Callable[[Recording], Iterator[str]]]] = {
    "perfetto": perfetto,
    "speedscope": speedscope,
    "memory_viz": memory_viz,
    "csv": comma_separated,
}

FORMATS: Final = (*_TEXTS, "arrow")


def export(recording: Recording, to: str) -> Iterator[bytes]:
    """The run in one of `FORMATS`, as the pieces of a file. Raises ImportError, with the cure, if a library lacks."""
    if to == "arrow":
        return iter([arrow(recording)])
    return (piece.encode() for piece in _TEXTS[to](recording))
