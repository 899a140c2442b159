"""Plain arguments that may change after the first run of an operation: what later runs get, and how that is noticed.

What is small, or cheap to copy, is copied. Of the rest samples are remembered: a change that they do not show goes
unnoticed, unless `Cache(verify=True)` looks at all of it.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sized
from copy import copy, deepcopy
from enum import Enum
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, Final

from recompute._errors import ImpureError

Again = Callable[[], Any]
"""What gives later runs an argument as it was; raises ImpureError if that is not possible any more."""

SMALL: Final = 16_384
"""Bytes: what is smaller is copied."""

_SAMPLES: Final = 64
"""Elements or attributes that are looked at."""

_OF_A_PROGRAM: Final = 1 << 9
"""A flag of types that are made at run time, by class statements mostly; those of C libraries have no attributes."""

_COPIED: Final = (list, dict, set, deque, random.Random)
_BYTES: Final = (bytearray, array, memoryview)
PLAIN: Final = _COPIED + _BYTES
"""Mutable types of Python itself."""


def may_change(cls: type) -> bool:
    """Whether instances of a class can be remembered; else nothing needs to be looked at."""
    return not issubclass(cls, (Enum, frozenset, tuple, type, ModuleType)) and (
        (bool(cls.__dictoffset__) and bool(cls.__flags__ & _OF_A_PROGRAM))
        or issubclass(cls, _COPIED + _BYTES)
        or cls.__module__.startswith("numpy.random")
        or any("__slots__" in base.__dict__ for base in cls.__mro__[:-1])
    )


def remember(value: Any) -> Again | None:
    """What gives later runs `value` as it is now; None: it cannot change, or nobody could tell."""
    try:
        return _remembered(value)
    except Exception:  # a class of the program's may refuse to be copied, or to be looked into
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
    return unchanged(value, sample)


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
        f"is a {type(value).__name__} that was changed in place after the first run; pass a copy, or one that nobody "
        "changes"
    )


def sample(value: Any) -> Hashable:
    """Something that most changes of a plain object change; None: nothing can be said. O(1)."""
    if isinstance(value, _BYTES):
        part = memoryview(value)
        if not part.c_contiguous or not part.nbytes or (isinstance(value, memoryview) and type(value.obj) is bytes):
            return None
        part = part.cast("B")
        return len(part), part[:: max(1, len(part) // (8 * _SAMPLES))].tobytes(), part[-1]
    if isinstance(value, (list, dict, set, deque)):
        return len(value), *map(id, _some(value.values() if isinstance(value, dict) else value))
    return None


def _some(parts: Any) -> Iterable[Any]:
    assert isinstance(parts, Sized)
    return islice(parts, 0, None, max(1, len(parts) // _SAMPLES))  # type: ignore[call-overload,no-any-return]


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
