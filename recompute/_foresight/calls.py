"""By what an operation of one round is known again in the next: its function, and what of the round it takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

from recompute.extend import Operation

Call = tuple[Hashable, *tuple[int, ...]]
"""The function, and for each argument the place of the operation of this round that made it, or as below."""

UNKNOWN: Final = -1
"""The place of an operation of this round that the round before did not have."""

ELSEWHERE: Final = -2
"""Less its size: what was there before the round."""


def call_of(operation: Operation, places: Mapping[Operation | None, int]) -> Call:
    """How an operation is known. `places`: of the operations of this round."""
    arguments = operation.arguments
    if len(arguments) == 1:  # nearly always, and quicker
        (argument,) = arguments
        place = places.get(argument.operation)
        return name_of_call(operation.function), ELSEWHERE - argument.storage.size if place is None else place
    return (
        name_of_call(operation.function),
        *[places.get(argument.operation, ELSEWHERE - argument.storage.size) for argument in arguments],
    )


def name_of_call(function: Any) -> Hashable:
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
