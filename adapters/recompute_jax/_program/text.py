"""Words for types and for the lines of a program, in reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import jax

_HIDDEN: Final = tuple([f"{each}{os.sep}" for each in (Path(jax.__file__).parent, Path(__file__).parents[1])])


def where(eqn: Any) -> str:
    """The line outside of JAX that made an equation."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*_HIDDEN, "<")):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name})"
    return ""


def short(aval: Any) -> str:
    """A type as "float32[8,128]"."""
    return str(aval.str_short())
