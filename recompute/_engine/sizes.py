"""Output sizes learnt per function and argument shapes, so that room is made before the second run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

from recompute._adapters.adapter import kinds
from recompute._engine.graph import Operation

_MOST: Final = 4096  # entries; all are forgotten when there are more

Sizes = Sequence[tuple[str, int]]
"""(device, bytes) of the outputs that have memory of their own."""


class LearntSizes:
    """(function, shapes of its arguments) -> sizes of its outputs."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, Sizes] = {}

    def key(
        self, function: Any, payloads: list[Any], keywords: dict[str, Any] | None = None, nout: int = 1
    ) -> Hashable:
        """Under which the sizes of a call's outputs are filed."""
        parts: list[Any] = [identity(function), nout]
        for payload in payloads:
            signature = kinds[type(payload)].signature
            parts.append(
                payload if signature is None else _nested(payload) if type(payload) in _NESTED else signature(payload)
            )
        if keywords:
            for name, payload in keywords.items():
                parts.append((name, _nested(payload)))
        return tuple(parts)

    def get(self, key: Hashable, operation: Operation) -> Sizes:
        """What was learnt, or what the function itself says (`expect`); empty if there is neither."""
        try:
            known = self._sizes.get(key)
            if known is None:
                expect = getattr(operation.function, "expect", None)
                if expect is None:
                    return ()
                device = operation.arguments[0].storage.pool.device if operation.arguments else "cpu"
                known = self._sizes[key] = expect(device)
            return known
        except TypeError:  # a signature that cannot be hashed
            return ()

    def learn(self, key: Hashable, sizes: Sizes) -> None:
        try:
            self._sizes[key] = sizes
        except TypeError:
            return
        if len(self._sizes) > _MOST:
            self._sizes.clear()


_NESTED: Final = frozenset({list, tuple, dict})
_FEW: Final = 64  # of a longer container the length has to do


def _nested(payload: Any) -> Hashable:
    """What decides the size of a result made from a payload: for a short container that of its parts."""
    cls = type(payload)
    if cls in _NESTED and len(payload) <= _FEW:
        return cls, *map(_nested, payload.items() if cls is dict else payload)
    signature = kinds[cls].signature
    return payload if signature is None else signature(payload)


def identity(function: Any) -> Hashable:
    """What stays the same when the same function is made again; never the function's own data, which must not leak."""
    cls: type = type(function)
    how = _how.get(cls)
    if how is None:
        how = next((name for name in ("size_key", "func", "__code__") if hasattr(cls, name)), "")
        how = _how[cls] = how or ("__wrapped__" if hasattr(function, "__wrapped__") else "")
    if how == "size_key":
        return function.size_key()  # type: ignore[no-any-return]  # it is the library's own
    if how == "func":  # functools.partial
        return identity(function.func), *map(constant, function.args), *map(constant, function.keywords.values())
    if how == "__wrapped__":  # a function that is compiled by a library
        return cls, identity(function.__wrapped__)
    if how == "__code__":
        cells = function.__closure__
        return (function.__code__, *map(_cell, cells)) if cells else function.__code__
    return cls, type(getattr(function, "__self__", None)), getattr(function, "__name__", None)


_how: Final[dict[type, str]] = {}
"""Type of function -> the attribute by which it is known, if it has one."""


def _cell(cell: Any) -> Hashable:
    try:
        return constant(cell.cell_contents)
    except ValueError:  # not filled yet
        return None


def constant(value: Any) -> Hashable:
    """What a constant says about the size of a result: small ones count by value, others by type."""
    cls: type = type(value)
    if cls is tuple:
        return tuple(map(constant, value))
    if cls is slice:
        return constant((value.start, value.stop, value.step))
    return value if cls in (int, bool, float, str, type(None)) else cls
