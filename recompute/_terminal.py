"""Terminals: whether a stream is one, in colour, and what others write to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Whether this stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def paint(text: str, code: str, stream: Any) -> str:
    """`text` in the colour that an ANSI code stands for, where that can be seen and is wanted."""
    plain = not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or os.name == "nt" else f"\x1b[{code}m{text}\x1b[0m"


def columns(stream: Any) -> int:
    """How many characters fit into a line; 80 where that is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


@contextmanager
def hooked(stream: Any, hook: Callable[[str, Callable[[str], object]], object]) -> Iterator[None]:
    """Inside the block, `stream.write(text)` is `hook(text, write)`. The stream stays the object it is."""
    before = vars(stream).get("write") if hasattr(stream, "__dict__") else None
    try:
        write = stream.write
        stream.write = lambda text: hook(text, write)
    except AttributeError:  # there is none, or it does not allow it
        yield
        return
    try:
        yield
    finally:
        if before is None:
            del stream.write
        else:
            stream.write = before
