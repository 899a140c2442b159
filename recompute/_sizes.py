"""Output sizes learnt per function and argument shapes, so that room is made before the second run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from recompute._adapter import kinds
from recompute._arguments import Nest
from recompute._graph import Operation, Value

_MOST: Final = 4096  # entries; all are forgotten when there are more

Sizes = tuple[tuple[str, int], ...]
"""(device, bytes) of each output; an alias of an argument takes 0."""


class LearntSizes:
    """(function, shapes of its arguments) -> sizes of its outputs."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, Sizes] = {}

    def key(self, operation: Operation) -> Hashable:
        """Under which the sizes are filed; None if the arguments have no signature. All arguments are resident."""
        parts: list[Any] = [_identity(operation.function), operation.nout]
        for each in operation.positional:
            if type(each) is Value:
                each = each.payload
            elif type(each) is Nest:
                each = each.fill()
            parts.append(kinds[type(each)].signature(each))
        if operation.keywords:
            for name, each in operation.keywords.items():
                each = each.payload if type(each) is Value else each.fill() if type(each) is Nest else each
                parts.append((name, kinds[type(each)].signature(each)))
        return tuple(parts)

    def get(self, key: Hashable) -> Sizes | None:
        try:
            return self._sizes.get(key)
        except TypeError:  # a signature that cannot be hashed
            return None

    def learn(self, key: Hashable, sizes: Sizes) -> None:
        try:
            self._sizes[key] = sizes
        except TypeError:
            return
        if len(self._sizes) > _MOST:
            self._sizes.clear()


def _identity(function: Any) -> Hashable:
    """What stays the same when the same function is made again; never the function's own data, which must not leak."""
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = getattr(function, "__closure__", None)
        return (code, *map(_cell, cells)) if cells else code  # type: ignore[no-any-return]  # a code object
    if hasattr(function, "func"):  # functools.partial
        return _identity(function.func), *map(_constant, function.args), *map(_constant, function.keywords.values())
    return type(function), type(getattr(function, "__self__", None)), getattr(function, "__name__", None)


def _cell(cell: Any) -> Hashable:
    try:
        return _constant(cell.cell_contents)
    except ValueError:  # not filled yet
        return None


def _constant(value: Any) -> Hashable:
    cls = type(value)
    return value if cls in (int, bool, float, str, type(None)) else cls
