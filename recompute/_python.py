"""Size, signature and fingerprint of plain Python objects."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from hashlib import blake2b
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

_SAMPLE: Final = 1_000  # elements of a container that are looked at; larger ones are extrapolated


def _shared(value: Any) -> int:
    """None, True, a function or a class belongs to everybody: dropping it frees nothing."""
    return 0


ATOMIC: Final[dict[type, Callable[[Any], int]]] = {
    **dict.fromkeys((int, float, complex, str, bytes, range, slice), sys.getsizeof),
    **dict.fromkeys((type(None), bool, type(...), type(NotImplemented), type, ModuleType), _shared),
    **dict.fromkeys((FunctionType, BuiltinFunctionType, MethodType), _shared),
}
"""Types without parts; equal ones may be one object by accident, so identity means nothing. Type -> size in bytes."""


def sizeof(value: Any, foreign: Callable[[type], Callable[[Any], int] | None]) -> int:
    """Bytes of an object and of what it contains, each part once; a container of more than 1,000 elements is sampled.

    `foreign` knows how to measure the types of a part that an adapter serves.
    """
    total = 0.0
    seen: set[int] = set()
    stack: list[tuple[Any, float]] = [(value, 1.0)]
    while stack:
        part, weight = stack.pop()
        measure = ATOMIC.get(type(part))
        if measure is not None:
            total += weight * measure(part)
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        measure = foreign(type(part))
        if measure is not None:
            total += weight * measure(part)
            continue
        total += weight * sys.getsizeof(part, 0)
        count, elements = _parts(part)
        if count > _SAMPLE:
            elements, weight = islice(elements, 0, None, count // 100), weight * count / -(-count // (count // 100))
        stack.extend((element, weight) for element in elements)
    return round(total)


def _parts(value: Any) -> tuple[int, Iterable[Any]]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value), value
    if isinstance(value, dict):
        return 2 * len(value), (part for item in value.items() for part in item)
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and attributes:
        return len(attributes), attributes.values()
    return 0, ()


def signature(value: Any) -> Hashable:
    """What decides the size of a result: the value itself if small and atomic, else the type and the length."""
    cls: type = type(value)
    if cls in BY_VALUE:
        return value  # type: ignore[no-any-return]  # an int, a float, ...
    return (cls, len(value)) if cls in _SIZED else cls


_SIZED: Final = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset, deque, range})


BY_VALUE: Final = frozenset({int, bool, float, type(None)})
"""Types whose value, not their size, decides the size of a result."""


def fingerprint(value: Any, part: Callable[[Any], bytes | None]) -> bytes | None:
    """A digest of builtin values and containers of them, of plain instances, and of what can be pickled; else None.

    `part` digests what a container holds.
    """
    cls = type(value)
    if cls in (type(None), bool, int, float, complex, str, bytes, range, type(...)):
        return _digest(cls, [repr(value).encode() if cls is not bytes else value])
    if cls is bytearray:
        return _digest(cls, [bytes(value)])
    try:
        if isinstance(value, (list, tuple, deque)):
            return _digest(cls, map(part, value))
        if isinstance(value, (set, frozenset)):
            parts = list(map(part, value))
            return None if None in parts else _digest(cls, sorted(filter(None, parts)))
        if isinstance(value, dict):
            return _digest(cls, (digest for item in value.items() for digest in map(part, item)))
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes:
            return _digest(cls, [part(attributes)])
        import pickle

        return _digest(cls, [pickle.dumps(value, protocol=5)])
    except Exception:  # pickling runs foreign code, and a container may hold itself: then there is nothing to compare
        return None


def _digest(cls: type, parts: Iterable[bytes | None]) -> bytes | None:
    digest = blake2b(f"{cls.__module__}.{cls.__qualname__}".encode(), digest_size=16)
    for part in parts:
        if part is None:
            return None
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
