"""How functions are called in messages."""

from __future__ import annotations

from typing import Any


def name_of(function: Any) -> str:
    """A readable name for any callable."""
    for _ in range(8):  # a partial of a partial of ...
        name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
        if isinstance(name, str):
            return qualified(name)
        function = getattr(function, "func", None) or type(function)
    return "?"


def qualified(name: str) -> str:
    """A qualified name without the noise."""
    return name.replace(".<locals>", "")
