"""What hangs on an array and is an object of its own: its methods, `x.flat`, `x.at`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from recompute._arrays.dispatch import (
    MUTATING_METHODS,
    ONE_ARRAY,
    TO_PYTHON,
    WRITERS,
    array_function,
)
from recompute._arrays.operate import CONSTANTS, call, operate
from recompute._arrays.writes import change, library_writes, shares

if TYPE_CHECKING:
    from recompute._arrays.array import RecomputableArray


class At:
    """`array.at[key]`, whose methods are operations on the array, the key and what else they take."""

    __slots__ = ("_array", "_keys")

    def __init__(self, array: RecomputableArray, *keys: Any) -> None:
        self._array = array
        self._keys = keys

    def __getitem__(self, key: Any) -> At:
        return At(self._array, *self._keys, key)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **keywords: Any) -> Any:
            array, keys = self._array, self._keys
            return call(type(array), array.cache, _at, (array, keys, name, *args), keywords, sys._getframe(1))

        return method


def _at(array: Any, keys: tuple[Any, ...], name: str, *args: Any, **keywords: Any) -> Any:
    place = array.at
    for key in keys:
        place = place[key]
    return getattr(place, name)(*args, **keywords)


class Method:
    """A method of the wrapped array, to be called."""

    __slots__ = ("_array", "_function", "_name")

    def __init__(self, array: RecomputableArray, name: str, function: Callable[..., Any]) -> None:
        self._array = array
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        array, name, caller = self._array, self._name, sys._getframe(1)
        if name in ONE_ARRAY and not keywords and all(type(argument) in CONSTANTS for argument in args):
            value = array._node
            return operate(type(array), array.cache, self._function, (value, *args), (value,), caller, 1, (array,))
        if name in WRITERS or name in TO_PYTHON:
            return getattr(array.get(), name)(*args, **keywords)
        if name == "setflags":
            raise TypeError("a cached array stays as it is; change a copy: np.array(x)")
        changes = name in MUTATING_METHODS or (name == "byteswap" and (keywords.get("inplace") or any(args)))
        if changes and library_writes(array._type, array.dtype):
            if name == "resize" and shares(array) is not None:
                raise ValueError("cannot resize an array that shares its memory with another one; use np.resize")
            change(array, self._function, args, keywords, caller)
            return array if name == "byteswap" else None
        function: Callable[..., Any] = self._function
        if len(args) > 1 or keywords.get("out") is not None:  # `out` may be among the arguments without a name
            return array_function(array, function, (array, *args), keywords, caller)
        return call(type(array), array.cache, function, (array, *args), keywords, caller)

    @property
    def __name__(self) -> str:
        return self._name

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # that of the method
        return self._function.__doc__

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._array!r}>"


class Flat:
    """The elements of an array in C order: what `x.flat` is."""

    __slots__ = ("_array",)

    def __init__(self, array: RecomputableArray) -> None:
        self._array = array

    def __getitem__(self, key: Any) -> Any:
        array = self._array
        return call(type(array), array.cache, _get_flat, (array, key), {}, sys._getframe(1))

    def __setitem__(self, key: Any, content: Any) -> None:
        array = self._array
        change(array, _set_flat, (key, content), {}, sys._getframe(1))

    def __len__(self) -> int:
        return self._array.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.reshape(-1))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._array.reshape(-1).__array__(dtype, copy)


def _get_flat(array: Any, key: Any) -> Any:
    return array.flat[key]


def _set_flat(array: Any, key: Any, content: Any) -> None:
    array.flat[key] = content
