"""A forgotten `get`: what works on a value raises an error on the `Recomputable` that holds it, and the error says so.

Equality and hash are those of an object. `RecomputableArray` has all of these methods of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_NEEDS: Final = {
    "+": "add radd pos",
    "-": "sub rsub neg",
    "*": "mul rmul",
    "@": "matmul rmatmul",
    "/": "truediv rtruediv",
    "//": "floordiv rfloordiv",
    "%": "mod rmod",
    "divmod()": "divmod rdivmod",
    "**": "pow rpow",
    "<<": "lshift rlshift",
    ">>": "rshift rrshift",
    "&": "and rand",
    "^": "xor rxor",
    "|": "or ror",
    "~": "invert",
    "abs()": "abs",
    "round()": "round",
    "a comparison by order": "lt le gt ge",
    "a condition": "bool",
    "int()": "int",
    "float()": "float",
    "complex()": "complex",
    "bytes()": "bytes",
    "an index": "index",
    "len()": "len",
    "iteration": "iter",
    "in": "contains",
    "[...]": "getitem setitem delitem",
    "a function of NumPy": "array array_ufunc array_function",
}
METHODS: Final = {f"__{name}__": what for what, names in _NEEDS.items() for name in names.split()}
"""What raises TypeError -> what the program meant to do."""


class Forgotten:
    """Operators and methods of values, which a Recomputable does not have: each raises an error that names the cure.

    A type checker sees none of the methods, so that it finds the same mistakes before the program runs.
    """

    __slots__ = ()

    def __format__(self, specification: str) -> str:
        if specification:
            raise TypeError(_message(f"the format {specification!r}", self))
        return str(self)


def _message(what: str, handle: object) -> str:
    return (
        f"{what} needs the value that {handle!r} holds: call .get() for it, or rc.ap(function, ...) for an operation "
        "on it; array code runs unchanged on what rc.array(...) wraps"
    )


def _refusal(name: str, what: str) -> Callable[..., Any]:
    def refuse(self: object, *operands: object, **keywords: object) -> Any:
        raise TypeError(_message(what, self))

    refuse.__name__ = name
    refuse.__qualname__ = f"Forgotten.{name}"
    return refuse


def _no_attribute(self: object, name: str) -> Any:
    """Called for attributes that were not found."""
    if name.startswith("__"):  # a protocol that is looked for: the text is not read
        raise AttributeError(name)
    raise AttributeError(
        f"{type(self).__name__!r} object has no attribute {name!r}; that of its value is .get().{name}; array code "
        "runs unchanged on what rc.array(...) wraps"
    )


for _name, _what in METHODS.items():
    setattr(Forgotten, _name, _refusal(_name, _what))
Forgotten.__getattr__ = _no_attribute  # type: ignore[attr-defined]  # to a checker it would have every attribute
