"""Warnings: shown as Python shows them, and told to `logging` under the name "recompute", if the program uses it."""

from __future__ import annotations

import sys
import warnings


def warn(message: str, category: type[Warning], stacklevel: int = 1) -> None:
    """`warnings.warn`, and a record at the level WARNING."""
    logging = sys.modules.get("logging")
    if logging is not None:
        logger = logging.getLogger("recompute")
        if not logger.handlers:  # else `logging` would print what Python prints anyway
            logger.addHandler(logging.NullHandler())
        logger.warning("%s", message, stacklevel=stacklevel + 1)
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def outside(package: str = "recompute") -> int:
    """The `stacklevel` of the program's own call, for a `warn` in the function that asks.

    That is outside of `package`, too, and of what stands between them in a block that a generator makes.
    """
    inside = ("recompute", "contextlib", package)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
