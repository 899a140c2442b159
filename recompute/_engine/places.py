"""Where operations were created, as file and line, for events and traces: each place is looked up once."""

from __future__ import annotations

import os
import re
from types import CodeType
from typing import Final

_MOST: Final = 4096
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ADAPTER: Final = re.compile(r"[/\\]recompute_[a-z]+[/\\]")

_known: Final[dict[tuple[int, int], tuple[CodeType, str]]] = {}  # the code is kept, so that its identity stays its own


def line_of(code: CodeType, instruction: int) -> int:
    """The line that an instruction belongs to."""
    lines = [line for start, _, line in code.co_lines() if line is not None and start <= instruction]
    return lines[-1] if lines else code.co_firstlineno


def place_of(code: CodeType | None, instruction: int) -> str:
    """`file:line`; empty if it is not known, or in this library or an adapter: the user has no such line."""
    if code is None:
        return ""
    key = id(code), instruction
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        name = code.co_filename
        ours = name.startswith(_OURS) or _ADAPTER.search(name) is not None
        known = _known[key] = code, "" if ours or name == "<trace>" else f"{name}:{line_of(code, instruction)}"
    return known[1]
