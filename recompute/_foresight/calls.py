"""By what an operation of one round is known again in the next: its function, and what of the round it takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from recompute.extend import Node

Call = tuple[Hashable, ...]
"""(function, for each argument the place of the operation of this round that made it; -1: it comes from elsewhere)."""


def call_of(operation: Node, places: Mapping[Node | None, int]) -> Call:
    """How an operation is known. `places`: of the operations of this round."""
    arguments = operation.arguments
    if len(arguments) == 1:  # nearly always, and quicker
        return _name(operation.function), places.get(arguments[0].operation, -1)
    return (_name(operation.function), *[places.get(argument.operation, -1) for argument in arguments])


def _name(function: Any) -> Hashable:
    """The same for functions that are made anew each time, whatever they have bound."""
    for _ in range(4):  # a partial of a partial of ...
        code = getattr(function, "__code__", None)
        if code is not None:
            return code  # type: ignore[no-any-return]  # hashable
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return type(function), getattr(function, "__name__", None)
