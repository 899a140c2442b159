"""What tasks are given, what they return, and what leaves: arrays are read-only inside, and writable outside."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any, Final

_CONTAINERS: Final = frozenset({list, dict, set})


def given(payload: Any) -> Any:
    """A value as a task gets it: containers and frames as shallow copies, since a task may change them in place."""
    if type(payload) in _CONTAINERS:
        return copy(payload)
    if _is_frame(payload):
        return payload.copy(deep=False)
    return payload


def is_writable_array(value: Any) -> bool:
    """Whether it is an array that somebody could write to."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and bool(value.flags.writeable)


def protected(array: Any) -> Any:
    """A read-only view of an array that is the user's, and stays as it is."""
    view = array.view()
    view.flags.writeable = False
    return view


def copied(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Values that a task may write into: writable copies, which share what the values share. Not of an iterator."""
    seen: dict[int, Any] = {}
    return {name: _copied(value, seen) for name, value in values.items()}


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    try:
        return deepcopy(value, seen)
    except Exception:  # it cannot be copied: by whatever its own methods raise
        return value


def refuses_writes(message: str) -> bool:
    """Whether an error says that a task wrote into a value that is read-only."""
    text = message.lower()
    return any(word in text for word in ("read-only", "readonly", "writeable"))


def returned(result: Any) -> tuple[Any, bool]:
    """What the cache may have of a result, and whether it could be written to.

    Of an array it has a view, so that an array of somebody else's, which the task returned, does not become read-only.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(result, numpy.ndarray) or result is numpy.ma.masked:
        return result, False
    return result.view(), bool(result.flags.writeable)


def leaving(value: Any, writable: bool) -> Any:
    """A value for the caller; an array that could be written to can be again. Copied only if there is no other way."""
    numpy = sys.modules.get("numpy")
    if not writable or numpy is None or not isinstance(value, numpy.ndarray):
        return value
    if value.flags.writeable or 0 in value.strides:  # the latter: what is made by `broadcast_to` is read-only
        return value
    chain = [value]
    while isinstance(chain[-1].base, numpy.ndarray):
        chain.append(chain[-1].base)
    try:
        for array in reversed(chain):
            if not array.flags.writeable:
                array.flags.writeable = True
    except ValueError:  # the memory is that of a value which nobody may write to
        return value.copy(order="K")
    if len(chain) == 2 and _is_same(value, chain[1]):
        return chain[1]  # the array that the task made, of which the cache had a view
    return value


def sendable(value: Any, writable: bool) -> Any:
    """A value for another process, where an array has to be writable again: the same memory, which nobody writes to."""
    numpy = sys.modules.get("numpy")
    if not writable or numpy is None or type(value) is not numpy.ndarray or value.dtype.kind not in "biufcmM":
        return value
    return value if value.flags.writeable or 0 in value.strides else numpy.asarray(_Unlocked(value))


class _Unlocked:
    """The memory of an array as writable memory."""

    def __init__(self, array: Any) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _is_same(view: Any, array: Any) -> bool:
    return type(view) is type(array) and (
        (view.__array_interface__["data"][0], view.shape, view.strides, view.dtype)
        == (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
    )


def _is_frame(payload: Any) -> bool:
    """One of pandas'."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(payload, (pandas.DataFrame, pandas.Series, pandas.Index))
