"""Wrapping: an array, all arrays in a nest, and an array library, whose functions then return wrapped arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any, Final, overload

from recompute._adapters.adapter import kinds
from recompute._arrays.array import RecomputableArray, again
from recompute._arrays.dispatch import FILLED, OF_DTYPES, array_function, change_first
from recompute._arrays.operate import adapter_of, call, rebuilt
from recompute._context import current_cache
from recompute._recomputable import Recomputable

_EXTENSIONS: Final = ("fft", "linalg")
"""Parts of the array API standard that are namespaces of their own."""

_FROM_OUTSIDE: Final = frozenset(
    "array asarray ascontiguousarray asfortranarray asanyarray from_dlpack frombuffer fromfile fromiter fromregex "
    "fromstring genfromtxt load loadtxt".split()
)
"""Functions that make a source of what they are given, or read."""

_OF_UFUNCS: Final = ("accumulate", "at", "outer", "reduce", "reduceat")

_made: dict[Any, Namespace] = {}

_bare: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Function of a namespace -> that of the library, which is what the library's functions can call."""


def namespace(xp: Any) -> Namespace:
    """The functions of an array library, with wrapped arrays as results.

    `xp`: NumPy, CuPy, jax.numpy, or another module with the functions of the array API standard. A function that
    takes no array, such as `zeros`, is an operation too: its result can be evicted and made again; `asarray` and
    `from_dlpack` make sources. Attributes that are no functions are those of `xp`.
    """
    if isinstance(xp, Namespace):
        return xp
    if not isinstance(xp, ModuleType) and not hasattr(xp, "asarray"):
        raise TypeError(f"namespace takes the module of an array library, such as numpy, not {xp!r}")
    found = _made.get(xp)
    if found is None:
        found = _made[xp] = Namespace(xp)
    return found


class Namespace(ModuleType):
    """See `namespace`."""

    def __init__(self, xp: Any) -> None:
        super().__init__(f"recompute.namespace({xp.__name__})", getattr(xp, "__doc__", None))
        self.__wrapped__ = xp

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.__wrapped__, name)
        if isinstance(attribute, ModuleType):
            attribute = namespace(attribute) if name in _EXTENSIONS else attribute
        elif not name.startswith("_") and (_is_function(attribute) or name in OF_DTYPES):
            attribute = _function(name, attribute, getattr(self.__wrapped__, FILLED.get(name, name)))
        setattr(self, name, attribute)
        return attribute

    def __dir__(self) -> list[str]:
        return dir(self.__wrapped__)

    def __repr__(self) -> str:
        return f"<namespace of recomputable arrays over {self.__wrapped__.__name__}>"


def _is_function(attribute: Any) -> bool:
    return callable(attribute) and not isinstance(attribute, type)


def _function(name: str, shown: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    nin: int | None = getattr(function, "nin", None) if hasattr(function, "nout") else None

    @wraps(shown)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        found = _first([*args, *keywords.values()])
        if name in _FROM_OUTSIDE and found is None:
            return wrapped(function(*args, **keywords), [])
        caller = sys._getframe(1)
        args = tuple(
            [_bare.get(argument, argument) if type(argument) is FunctionType else argument for argument in args]
        )
        if nin is not None and len(args) > nin:  # all that follow are outputs
            keywords["out"] = args[nin:]
            args = args[:nin]
        if found is None and name in OF_DTYPES:
            return function(*args, **keywords)
        if found is None:
            return call(RecomputableArray, current_cache(), function, args, keywords, caller)
        out = keywords.get("out")
        if isinstance(out, tuple) and len(out) == 1:
            keywords["out"] = out[0]
        return (change_first if name == "at" else array_function)(found, function, args, keywords, caller)

    for method in _OF_UFUNCS if nin is not None else ():
        if hasattr(function, method):
            setattr(wrapper, method, _function(method, getattr(function, method), getattr(function, method)))
    _bare[wrapper] = function
    return wrapper


def _first(arguments: Any) -> RecomputableArray | None:
    """The first wrapped array in a nest."""
    for argument in arguments:
        if isinstance(argument, RecomputableArray):
            return argument
        if isinstance(argument, (list, tuple)):
            found = _first(argument)
            if found is not None:
                return found
    return None


@overload
def array(x: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> Any: ...
@overload
def array(x: Any) -> RecomputableArray: ...
def array(x: Any) -> Any:
    """An array as a source of the current cache, on which array code runs unchanged; or all arrays in a nest.

    `x`: an array of NumPy, CuPy, JAX or another library with an array adapter; a Recomputable that holds one, of which
    this makes another reference; or tuples, named ones too, lists and dicts with arrays in them: the same nest with
    these wrapped, while everything else stays. Not copied and not frozen: do not change an array any more. Raises
    TypeError for what is no array, and has none in it, or an array of Python objects; BudgetError if it does not fit.
    Cost: a few microseconds an array.
    """
    if isinstance(x, Recomputable):
        if not isinstance(x, RecomputableArray) and adapter_of(x._node) is None and not kinds[type(x.get())].array:
            raise TypeError(f"rc.array takes an array, or a Recomputable of one, not {x!r}")
        return again(x)
    if isinstance(x, (tuple, list, dict)):
        arrays: list[RecomputableArray] = []
        nest = wrapped(x, arrays)
        if arrays:
            return nest
    adapter = kinds[type(x)].array
    if adapter is None:
        raise TypeError(
            f"rc.array wraps an array that a library has made, not a {type(x).__name__}; make one first, for example "
            "rc.array(numpy.asarray(x)), or use rc.pure for other objects"
        )
    adapter.check(x)
    return current_cache().extend.source(adapter.source(x), RecomputableArray)


def wrapped(tree: Any, arrays: list[RecomputableArray]) -> Any:
    """A nest with its arrays wrapped; these are added to `arrays`. NumPy's scalars are numbers here, and stay."""
    if isinstance(tree, RecomputableArray):
        arrays.append(tree)
    if isinstance(tree, Recomputable):
        return tree
    if isinstance(tree, tuple):
        return rebuilt(tree, [wrapped(branch, arrays) for branch in tree])
    if type(tree) is list:
        return [wrapped(branch, arrays) for branch in tree]
    if isinstance(tree, dict):
        same = copy(tree)  # a defaultdict has more than its items
        same.update((key, wrapped(branch, arrays)) for key, branch in tree.items())
        return same
    adapter = kinds[type(tree)].array
    if adapter is None or adapter.constant(tree):
        return tree
    arrays.append(array(tree))
    return arrays[-1]
