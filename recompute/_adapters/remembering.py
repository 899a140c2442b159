"""Plain arguments that may change after the first run of an operation: what later runs get, and how that is noticed.

What is small, or cheap to copy, is copied. Of the rest samples are remembered: a change that they do not show goes
unnoticed, unless `Cache(verify=True)` looks at all of it.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from copy import copy, deepcopy
from copyreg import dispatch_table
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import islice
from struct import Struct
from types import ModuleType
from typing import Any, Final, TypeAlias

from recompute._adapters.sizes import ATOMIC, Layout, layouts
from recompute._errors import ImpureError
from recompute._interrupts import is_interrupt

Again = Callable[[], Any]
"""What gives later runs an argument as it was; raises ImpureError if that is not possible any more."""

Foreign: TypeAlias = "Callable[[type], Callable[[Any], Hashable] | None]"

SMALL: Final = 16_384
"""Bytes: what is smaller is copied."""

_SAMPLES: Final = 64
"""Elements or attributes that are looked at."""

_FEW: Final = 8
"""The same of what is inside of another container."""

_PARTS: Final = 1_024
"""That are looked at in all, and more or less."""

_DEEP: Final = 4
"""Containers or instances within each other."""

_WORD: Final = (1 << 64) - 1

_OF_A_PROGRAM: Final = 1 << 9
"""A flag of types that are made at run time, by class statements mostly; those of C libraries have no attributes."""

_COPIED: Final = (list, dict, set, deque, random.Random)
_BYTES: Final = (bytearray, array, memoryview)
PLAIN: Final = (list, dict, set, deque, *_BYTES)
"""Mutable types of Python itself, but for generators of random numbers."""


def may_change(cls: type) -> bool:
    """Whether instances of a class can be remembered; else nothing needs to be looked at."""
    return not issubclass(cls, (Enum, frozenset, tuple, type, ModuleType)) and (
        (bool(cls.__dictoffset__) and bool(cls.__flags__ & _OF_A_PROGRAM))
        or issubclass(cls, _COPIED + _BYTES)
        or cls.__module__.startswith("numpy.random")
        or any("__slots__" in base.__dict__ for base in cls.__mro__[:-1])
    )


def remember(value: Any) -> Again | None:
    """What gives later runs `value` as it is now; None: it cannot change, or that could not be seen."""
    try:
        return _remembered(value)
    except Exception as error:  # a class of the program's may refuse to be copied, or to be looked into
        if is_interrupt(error):
            raise
        return None


def _remembered(value: Any) -> Again | None:
    cls = type(value)
    if isinstance(value, _COPIED):
        return partial(copy, copy(value))
    if isinstance(value, (bytearray, array)) and len(value) <= SMALL:
        return partial(copy, copy(value))
    if cls.__module__.startswith("numpy.random"):  # a generator of random numbers, or what it draws from
        return partial(deepcopy, deepcopy(value))
    attributes = _attributes(value)
    if attributes is not None:
        return partial(_as_it_was, value, attributes)
    return unchanged(value, _sample_of_bytes) if isinstance(value, _BYTES) else None


def unchanged(value: Any, sample: Callable[[Any], Hashable]) -> Again | None:
    """The value itself, as long as samples of it are what they are now; None: there is nothing to compare."""
    before = sample(value)

    def again() -> Any:
        if sample(value) != before:
            raise ImpureError(changed(value))
        return value

    return None if before is None else again


def changed(value: Any) -> str:
    """What to do about it, after the name of the argument."""
    return (
        f"is a {type(value).__name__} that was changed in place after the first run; pass a copy, or one that nothing "
        "changes"
    )


def sample(value: Any, foreign: Foreign) -> Hashable:
    """Something that most changes of a plain object change; None: nothing can be said. O(1) but for iteration.

    It is by content: what comes back from a tier is as it was, and made of other objects. `foreign` gives that of a
    part that an adapter serves.
    """
    if isinstance(value, _BYTES):
        return _sample_of_bytes(value)
    return _Look(foreign).at(value, 0) if isinstance(value, (list, dict, set, deque)) else None


def _sample_of_bytes(value: Any) -> Hashable:
    part = memoryview(value)
    if not part.c_contiguous or not part.nbytes or (isinstance(value, memoryview) and type(value.obj) is bytes):
        return None
    part = part.cast("B")
    return len(part), part[:: max(1, len(part) // (8 * _SAMPLES))].tobytes(), part[-1]


class _Look:
    """One look at a container and at what is in it, with an end."""

    def __init__(self, foreign: Foreign) -> None:
        self._foreign = foreign
        self._left = _PARTS

    def at(self, part: Any, depth: int) -> Hashable:
        cls: type = type(part)
        look = _LOOKS.get(cls)
        if look is not None:
            return look(part)
        self._left -= 1
        layout = layouts[cls]
        own = self._foreign(cls)
        if own is not None:
            return cls, own(part)
        if isinstance(part, Enum):
            return cls, part.name
        if isinstance(part, _BYTES):
            return cls, _sample_of_bytes(part)
        if layout.container is not None:
            return cls, *self._some(part, layout, _FEW if depth else _SAMPLES, depth + 1)
        if depth < _DEEP and self._left > 0 and _is_plain(cls):
            state = layout.state(part)
            names = [name for name in sorted(state) if not _is_private(cls, name)]
            return cls, *[(name, self.at(state[name], depth + 1)) for name in names[:_FEW]]
        return (cls,)

    def _some(self, value: Any, layout: Layout, most: int, depth: int) -> Iterator[Hashable]:
        """How many parts there are, and some of them; of a large set none, since it may come back in another order."""
        base: Any = layout.container
        count = base.__len__(value)
        yield count
        if depth > _DEEP or self._left <= 0:
            return
        if base in (set, frozenset):
            yield frozenset([self.at(part, depth) for part in base.__iter__(value)] if count <= most else ())
            return
        parts = base.items(value) if base is dict else base.__iter__(value)
        for part in islice(parts, 0, None, max(1, -(-count // most))):
            yield tuple([self.at(inner, depth) for inner in part]) if base is dict else self.at(part, depth)


def _look_at_text(value: str | bytes) -> Hashable:
    few = value if len(value) <= _SAMPLES else (value[:: len(value) // _SAMPLES], value[-1:])
    return type(value), len(value), few


def _look_at_int(value: int) -> Hashable:
    return int, value if value.bit_length() <= _SAMPLES else (value.bit_length(), value & _WORD)


def _look_by_repr(value: Any) -> Hashable:
    return repr(value)  # by ==, one NaN is unlike another, and 0.0 like -0.0


def _look_by_name(value: Any) -> Hashable:
    return type(value), getattr(value, "__qualname__", None) or getattr(value, "__name__", None)


_LOOKS: Final[dict[type, Callable[[Any], Hashable]]] = {
    **dict.fromkeys(ATOMIC, _look_by_name),
    **dict.fromkeys((complex, bool, range), _look_by_repr),
    float: Struct("d").pack,
    **dict.fromkeys((str, bytes), _look_at_text),
    int: _look_at_int,
}


@lru_cache(1024)
def _is_plain(cls: type) -> bool:
    """Whether instances come back from a tier with all their attributes."""
    plain = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__", "__getstate__"))
    return plain and not hasattr(cls, "__setstate__") and cls not in dispatch_table


@lru_cache(1024)
def _is_private(cls: type, name: str) -> bool:
    """Whether an attribute, or a slot, may be there for a cache, or to count: it says nothing of the content."""
    name = name.rpartition(".")[2]
    return name.startswith("_") or isinstance(getattr(cls, name, None), cached_property)


def _attributes(value: Any) -> dict[str, Any] | None:
    """What the attributes of an instance are bound to; None if it has none, or too many."""
    own = getattr(value, "__dict__", None)
    found = dict(own) if type(own) is dict else {}
    for cls in type(value).__mro__[:-1]:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__"):
                try:
                    found[name] = getattr(value, name)
                except AttributeError:  # not set
                    continue
    return found if 0 < len(found) <= _SAMPLES else None


def _as_it_was(value: Any, before: dict[str, Any]) -> Any:
    """The instance itself if its attributes are bound to what they were bound to, else another one that is so."""
    now = _attributes(value) or {}
    if len(now) == len(before) and all(now.get(name, before) is part for name, part in before.items()):
        return value
    cls = type(value)
    if any(hasattr(cls, name) for name in ("__copy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")):
        raise ImpureError(changed(value))
    try:
        made = object.__new__(cls)
        for name, part in before.items():
            object.__setattr__(made, name, part)
    except (TypeError, AttributeError):
        raise ImpureError(changed(value)) from None
    return made
