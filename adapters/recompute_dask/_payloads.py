"""What tasks are given, what they return, and what leaves: arrays are read-only inside, and writable outside."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from copy import copy, deepcopy
from copyreg import dispatch_table
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from uuid import UUID

from recompute import extend

CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_FIXED: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)),
        *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
        *(date, datetime, time, timedelta, Decimal, Fraction, UUID),
    }
)
"""Types of what a task cannot change, or what belongs to the program."""


def given(payload: Any) -> Any:
    """A value as a task gets it, which may change that in place: the value itself stays as it is.

    Arrays are read-only, and shared. Frames are shallow copies. Of anything else the task gets the structure as its
    own: containers and instances with all their parts, but what cannot be copied (a lock, an open file) is shared.
    """
    if is_shared(payload):
        return payload
    if _is_frame(payload):
        return payload.copy(deep=False)
    if type(payload) in CONTAINERS:
        parts = chain(payload, payload.values()) if type(payload) is dict else payload
        if set(map(type, parts)) <= _FIXED:  # nothing in it can be changed: no pickle is needed
            return copy(payload)
    try:
        return own_structure(payload)
    except Exception as error:  # of a user's `__reduce__`, or `__setstate__`
        if extend.is_interrupt(error):
            raise
        return copy(payload) if type(payload) in CONTAINERS else payload


def is_given_whole(payload: Any) -> bool:
    """Whether a task is given a value without a copy of what may have many parts."""
    return is_shared(payload) or _is_frame(payload)


def is_fixed(payload: Any) -> bool:
    """Whether neither a container nor what is in it can be changed."""
    seen: dict[int, Any] = {}  # by identity, with the part: it must not die meanwhile
    stack = [payload]
    while stack:
        part = stack.pop()
        if type(part) not in (tuple, frozenset):
            return False
        if id(part) not in seen:
            seen[id(part)] = part
            stack += [inner for inner in part if type(inner) not in _FIXED]
    return True


def is_shared(payload: Any) -> bool:
    """Whether tasks are given the value itself: they cannot change it, or what made it takes care of that."""
    if type(payload) in _FIXED or isinstance(payload, type):
        return True
    if extend.is_array(payload):
        return not getattr(payload.dtype, "hasobject", False)
    return False


def own_structure(payload: Any, kinds: type | tuple[type, ...] = object) -> Any:
    """A copy of containers, and of instances of some classes, with all their parts; but for what cannot be copied.

    Arrays in it are read-only views. Raises whatever a class does that cannot be copied after all.
    """
    file = BytesIO()
    pickler = _Pickler(file, kinds)
    pickler.dump(payload)
    file.seek(0)
    buffers = [buffer.raw().toreadonly() for buffer in pickler.buffers]
    return _Unpickler(file, buffers, pickler.shared).load()


def is_plain(payload: Any) -> bool:
    """Whether an instance is nothing but its attributes: its class says nothing of copies, and all can be copied."""
    cls = type(payload)
    if any(getattr(cls, name) is not getattr(object, name) for name in _OF_COPIES):
        return False
    pickler = _Pickler(BytesIO(), object)
    try:
        pickler.dump(payload)
    except Exception as error:  # of a part of it
        if extend.is_interrupt(error):
            raise
        return False
    return not pickler.refused


_OF_COPIES: Final = ("__reduce__", "__reduce_ex__", "__getstate__")


class _Pickler(pickle.Pickler):
    """Leaves out what is shared."""

    def __init__(self, file: BytesIO, kinds: Any) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.shared: list[Any] = []
        self.refused = False
        """Whether there was something that cannot be copied."""
        self._kinds = kinds
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=self.buffers.append)

    def reducer_override(self, part: Any) -> Any:  # not called for numbers, strings and containers
        if part is part_of:
            return NotImplemented
        if _is_frame(part):
            return self._share(part.copy(deep=False))
        if is_shared(part) or not isinstance(part, self._kinds):
            return self._share(protected(part) if is_writable_array(part) else part)
        if type(part) in dispatch_table:
            return NotImplemented
        try:
            return part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # by whatever its own methods raise
            if extend.is_interrupt(error):
                raise
            self.refused = True
            return self._share(part)

    def _share(self, part: Any) -> Any:
        self.shared.append(part)
        return part_of, (len(self.shared) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, buffers: list[memoryview], shared: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._shared = shared

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, part_of.__name__):
            return self._shared.__getitem__
        return super().find_class(module, name)


def part_of(number: int) -> Any:
    """Stands in a stream for what gives a shared part by its number."""
    raise NotImplementedError


def is_writable_array(value: Any) -> bool:
    """Whether it is an array that could be written to."""
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
    before = set(seen)
    try:
        return deepcopy(value, seen)
    except Exception as error:  # it cannot be copied: by whatever its own methods raise
        if extend.is_interrupt(error):
            raise
        for number in seen.keys() - before:  # by identity, of what is gone now, and half a copy
            del seen[number]
        return value


def refuses_writes(message: str) -> bool:
    """Whether an error says that a task wrote into a value that is read-only."""
    text = message.lower()
    return any(word in text for word in ("read-only", "readonly", "writeable"))


def returned(result: Any) -> tuple[Any, bool]:
    """What the cache may have of a result, and whether it could be written to.

    Of an array it has a view, so that an array that is not the task's own does not become read-only.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(result, numpy.ndarray) or result is numpy.ma.masked:
        return result, False
    return protected(result), bool(result.flags.writeable)


def leaving(value: Any, *, writable: bool) -> Any:
    """A value for the caller; an array that could be written to can be again. Copied only if there is no other way."""
    numpy = sys.modules.get("numpy")
    if not writable or numpy is None or not isinstance(value, numpy.ndarray):
        return value
    if value.flags.writeable or _repeats(value):
        return value
    bases = [value]
    while isinstance(bases[-1].base, numpy.ndarray):
        bases.append(bases[-1].base)
    try:
        for array in reversed(bases):
            if not array.flags.writeable:
                array.flags.writeable = True
    except ValueError:  # the memory is that of a value that must not be written to
        return value.copy(order="K")
    if len(bases) == 2 and _is_same(value, bases[1]):
        return bases[1]  # the array that the task made, of which the cache had a view
    return value


def sendable(value: Any, *, writable: bool) -> Any:
    """A value for another process, where an array has to be writable again: the same memory, never written to."""
    numpy = sys.modules.get("numpy")
    if not writable or numpy is None or type(value) is not numpy.ndarray or value.dtype.kind not in "biufcmM":
        return value
    return value if value.flags.writeable or _repeats(value) else numpy.asarray(_Unlocked(value))


def _repeats(array: Any) -> bool:
    """Whether elements share memory, as what is made by `broadcast_to`, which is read-only anywhere."""
    axes = zip(array.strides, array.shape, strict=True)
    return array.size > 0 and any(stride == 0 and length > 1 for stride, length in axes)


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
