"""Sizes of what functions return: what cannot be kept is refused, and what an argument has is not counted again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from recompute._adapters import sizes as _sizes
from recompute._adapters.adapter import Adapter, guessed, kinds

MOST_BYTES: Final = 1 << 60
"""Of a value: many of them still have a sum."""


def checked_size(size: Any, value: Any) -> int:
    """What was said to be the size of a value. Raises TypeError or ValueError if it is none, and says whose it is."""
    if type(size) is int and 0 <= size <= MOST_BYTES:
        return size
    name, by = _sizes.name_of(type(value)), kinds[type(value)].adapter
    who = f"{by}, or rc.register_size," if by.name != Adapter.name else "its nbytes, or rc.register_size,"
    try:
        whole = int(size)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"the size of a {name} is {size!r:.60}; {who} must say how many bytes it takes") from None
    if not 0 <= whole <= MOST_BYTES:
        raise ValueError(f"the size of a {name} is {size!r:.60}; {who} must say from 0 to 2**60 bytes")
    return whole


def sizeof_result(value: Any, counted: Collection[int] = (), within: set[int] | None = None) -> int:
    """As `sizeof`, of what a function returned: raises Misfit if there is in it what cannot be kept.

    `counted`: identities of memory that is counted already, as that of arguments; parts which lie there take nothing.
    `within` is given those of which there are parts.
    """
    kind = kinds[type(value)]
    if kind.part_of_result is not None:
        return kind.part_of_result(value)
    if kind.atomic:
        return kind.nbytes(value)
    if not counted:
        return _sizes.sizeof(value, _foreign_in_result, guessed)
    return _sizes.sizeof(value, partial(_foreign_beside, counted, set() if within is None else within), guessed)


def _foreign_in_result(cls: type) -> Callable[[Any], int] | None:
    return kinds[cls].part_of_result


def _foreign_beside(counted: Collection[int], within: set[int], cls: type) -> Callable[[Any], int] | None:
    kind = kinds[cls]
    measure, buffer = kind.part_of_result, kind.buffer
    if measure is None or buffer is None or kind.watch is None:  # nothing would tell when the argument's memory goes
        return measure
    return partial(_measured_beside, counted, within, measure, buffer)


def _measured_beside(
    counted: Collection[int],
    within: set[int],
    measure: Callable[[Any], int],
    buffer: Callable[[Any], object | None],
    part: Any,
) -> int:
    owner = id(buffer(part))
    if owner not in counted:
        return measure(part)
    within.add(owner)
    return 0
