"""Signature and fingerprint of plain Python objects."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from recompute._adapters.layouts import layouts


def _shared(value: Any) -> int:
    """None, True, a function or a class belongs to everybody: dropping it frees nothing."""
    return 0


ATOMIC: Final[dict[type, Callable[[Any], int]]] = {
    **dict.fromkeys((int, float, complex, str, bytes, range, slice), sys.getsizeof),
    **dict.fromkeys((type(None), bool, type(...), type(NotImplemented), type, ModuleType), _shared),
    **dict.fromkeys((FunctionType, BuiltinFunctionType, MethodType), _shared),
}
"""Types without parts; equal ones may be one object by accident, so identity means nothing. Type -> size in bytes."""


def signature(value: Any) -> Hashable:
    """What decides the size of a result: the value itself if small and atomic, else the type and the length."""
    cls: type = type(value)
    if cls in BY_VALUE:
        return value  # type: ignore[no-any-return]  # an int, a float, ...
    if cls is str and len(value) <= 64:
        return str(value)  # the name of a mode, a dtype or a device
    return (cls, len(value)) if cls in _SIZED else cls


_SIZED: Final = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset, deque, range})


BY_VALUE: Final = frozenset({int, bool, float, type(None)})
"""Types whose value, not their size, decides the size of a result."""


def fingerprint(value: Any, foreign: Callable[[type], Callable[[Any], bytes | None] | None]) -> bytes | None:
    """A digest of builtin values, of containers and plain instances of them, and of what can be pickled; else None.

    `foreign` knows how to digest the types of a part that an adapter serves.
    """
    try:
        walk = _Fingerprint(foreign)
        return walk.of(value) if type(value) in ATOMIC else walk.compound(value)
    except Exception:  # repr and pickle run foreign code, and nesting may be too deep: then there is nothing to compare
        return None


class _Fingerprint:
    """One walk over an object: shared parts once, and an end to what contains itself."""

    def __init__(self, foreign: Callable[[type], Callable[[Any], bytes | None] | None]) -> None:
        self._foreign = foreign
        self._done: dict[int, bytes | None] = {}  # by identity

    def of(self, part: Any) -> bytes | None:
        cls = type(part)
        if cls is FunctionType or cls is MethodType:
            return None  # what it closes over cannot be compared
        if cls in ATOMIC:
            return _digest(cls, [part if cls is bytes else _name(part).encode()])
        if id(part) not in self._done:
            own = self._foreign(cls)
            self._done[id(part)] = own(part) if own is not None else self.compound(part)
        return self._done[id(part)]

    def compound(self, value: Any) -> bytes | None:
        self._done[id(value)] = b"contains itself"
        cls = type(value)
        if cls is bytearray:
            return _digest(cls, [bytes(value)])
        state = layouts[cls].state(value)
        attributes = [self.of(state)] if state else []
        if isinstance(value, (list, tuple, deque)):
            return _digest(cls, [*map(self.of, value), *attributes])
        if isinstance(value, (set, frozenset)):
            parts = [*map(self.of, value), *attributes]
            return None if None in parts else _digest(cls, sorted(filter(None, parts)))
        if isinstance(value, dict):
            return _digest(cls, [*(each for item in value.items() for each in map(self.of, item)), *attributes])
        if state:
            return _digest(cls, attributes)
        import pickle

        return _digest(cls, [pickle.dumps(value, protocol=5)])


def _name(value: Any) -> str:
    """Classes and modules by name, other atoms by repr."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else repr(value)


def _digest(cls: type, parts: Iterable[bytes | None]) -> bytes | None:
    digest = blake2b(f"{cls.__module__}.{cls.__qualname__}".encode(), digest_size=16)
    for part in parts:
        if part is None:
            return None
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
