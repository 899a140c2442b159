"""Signature and fingerprint of plain Python objects."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from copyreg import dispatch_table
from functools import cached_property
from hashlib import blake2b
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, TypeAlias

from recompute._adapters.sizes import ATOMIC, layouts
from recompute._interrupts import is_interrupt

Foreign: TypeAlias = "Callable[[type], Callable[[Any], bytes | None] | None]"


def signature(value: Any) -> Hashable:
    """What decides the size of a result: the value itself if small and atomic, else the type and the length."""
    cls: type = type(value)
    if cls in BY_VALUE:
        return value  # type: ignore[no-any-return]  # an int, a float, ...
    if cls is str and len(value) <= 64:
        return str(value)  # the name of a mode, a dtype or a device
    return (cls, len(value)) if cls in _SIZED else cls


_PICKLED_BY: Final = ("__reduce_ex__", "__reduce__", "__getstate__")
_FUNCTIONS: Final = frozenset({FunctionType, BuiltinFunctionType, MethodType})
_SIZED: Final = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset, deque, range})


BY_VALUE: Final = frozenset({int, bool, float, type(None)})
"""Types whose value, not their size, decides the size of a result."""


def fingerprint(value: Any, foreign: Foreign) -> bytes | None:
    """A digest of builtin values, of containers and plain instances of them, and of what can be pickled; else None.

    `foreign` knows how to digest the types of a part that an adapter serves.
    """
    try:
        return _Fingerprint(foreign).of_whole(value)
    except Exception as error:  # of foreign code, or nesting is too deep: then there is nothing to compare
        if is_interrupt(error):
            raise
        return None


class _Fingerprint:
    """One walk over an object: each part once, however often it is there, and an end to what contains itself.

    Equal parts have equal digests, shared or not. A way back to a part that is not complete is told by its length in
    such parts: those that lead back to each other are found as by Tarjan, and have digests that depend on nothing else.
    """

    def __init__(self, foreign: Foreign) -> None:
        self._foreign = foreign
        self._done: dict[int, tuple[Any, bytes | None, bool]] = {}
        """By identity, with the part, which must not die meanwhile, and whether the way to it matters."""
        self._open: dict[int, tuple[Any, int]] = {}
        """By identity, in the order in which they were met: what leads back, or may, and its place."""
        self._place = -1
        """Of the part that is looked at."""
        self._back = 0
        """The first place to which what was seen since then leads back."""
        self._ways_back = 0

    def of_whole(self, value: Any) -> bytes | None:
        """Of the object itself, whose adapter asks."""
        return _of_atom(value) if type(value) in ATOMIC else self._of_compound(value, None)

    def _of(self, part: Any) -> bytes | None:
        if type(part) in ATOMIC:
            return _of_atom(part)
        if id(part) in self._done:
            _, digest, by_way = self._done[id(part)]
            self._ways_back += by_way
            return digest
        if id(part) in self._open:
            _, place = self._open[id(part)]
            self._back = min(self._back, place)
            self._ways_back += 1
            return f"{self._place - place} back".encode()
        return self._of_compound(part, self._foreign(type(part)))

    def _of_compound(self, part: Any, own: Callable[[Any], bytes | None] | None) -> bytes | None:
        outer_place, outer_back = self._place, self._back
        self._place = self._back = place = len(self._open)
        self._open[id(part)] = part, place
        digest = self._of_parts(part) if own is None else own(part)
        back = self._back
        self._place, self._back = outer_place, min(outer_back, back)
        if back == place:  # nothing in it leads further back
            while len(self._open) > place + 1:
                number, (inner, at) = self._open.popitem()
                self._done[number] = inner, _digest("inside", [digest, f"{at - place}".encode()]), True
            self._open.popitem()
            self._done[id(part)] = part, digest, False
        return digest

    def _of_parts(self, value: Any) -> bytes | None:
        cls = type(value)
        if cls is bytearray:
            return _digest(cls, [bytes(value)])
        if cls is PickleBuffer:
            return _digest(cls, [bytes(value.raw())])
        layout = layouts[cls]
        known = layout.state(value).items()
        state = {name: part for name, part in known if not isinstance(getattr(cls, name, None), cached_property)}
        attributes = [self._named(state)] if state else []
        if layout.container is None:
            if not layout.structured or layout.native:
                return _digest(cls, [*attributes, self._reduced(value)])
            # A class that says how it is pickled may have attributes in which it keeps what it has looked up
            return _digest(cls, [self._reduced(value)] if _own_ways(cls) else attributes)
        before, (_, elements) = self._ways_back, layout.elements(value)
        parts: list[bytes | None] = [self._of(part) for part in elements]
        if layout.container in (set, frozenset):
            if None in parts or (len(parts) > 1 and self._ways_back > before):
                return None  # what was met first is different each time
            parts = [*sorted(filter(None, parts))]
        if isinstance(value, defaultdict):
            attributes.append(_name(value.default_factory).encode())
        if isinstance(value, deque):
            attributes.append(repr(value.maxlen).encode())
        return _digest(cls, [_digest("parts", parts), *attributes])

    def _named(self, parts: dict[str, Any]) -> bytes | None:
        return _digest("named", [part for name in sorted(parts) for part in (name.encode(), self._of(parts[name]))])

    def _reduced(self, value: Any) -> bytes | None:
        """Of what pickle would write: not of the bytes, in which equal parts are not written like one part."""
        reduce = dispatch_table.get(type(value))
        found: Any = value.__reduce_ex__(5) if reduce is None else reduce(value)
        if isinstance(found, str):
            return found.encode()
        given: list[Any] = [*found, None, None, None]
        made_by, arguments, state, items, pairs = given[:5]
        parts = [*map(self._of, arguments), self._of(state)]
        for several in (items, pairs):
            parts.append(_digest("several", map(self._of, several or ())))
        return _digest(_name(made_by), parts)


def _own_ways(cls: Any) -> bool:
    """Whether it says itself how its instances are pickled."""
    return any(getattr(cls, name) is not getattr(object, name) for name in _PICKLED_BY)


def _of_atom(value: Any) -> bytes | None:
    """Classes and modules are known by name, as are functions that belong to these; other atoms by repr."""
    cls = type(value)
    if cls in _FUNCTIONS and not _is_global(value):
        return None  # what it closes over, or is bound to, cannot be compared
    if cls is slice and not {type(value.start), type(value.stop), type(value.step)} <= ATOMIC.keys():
        return None
    return _digest(cls, [value if cls is bytes else _name(value).encode()])


def _is_global(function: Any) -> bool:
    """Whether its name leads to it."""
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for name in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is function


def _name(value: Any) -> str:
    """Classes and modules by name, other atoms by repr."""
    if type(value) is int:
        return f"{value:x}"  # of any length
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else repr(value)


def _digest(kind: type | str, parts: Iterable[bytes | None]) -> bytes | None:
    name = kind if isinstance(kind, str) else f"class {kind.__module__}.{kind.__qualname__}"
    digest = blake2b(name.encode(), digest_size=16)
    for part in parts:
        if part is None:
            return None
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
