"""Arguments of an operation: finding the values in them, and filling their payloads in again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any, Final

from recompute._adapters.adapter import FUNCTIONS, kinds
from recompute._engine.bindings import bound
from recompute._engine.graph import Operation, Value
from recompute._errors import ImpureError


class Outputs(tuple[Any, ...]):
    """What a function returned that was not asked how many outputs it would have."""

    __slots__ = ()


class Container:
    """A tuple, list or dict among the arguments, as it was: each run gets a fresh one with the payloads filled in."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.build = build
        self.parts = parts

    def fill(self, again: bool) -> Any:
        return self.build(fill(self.parts, again))


class Changeable:
    """A plain argument that may change: the first run gets it, and later ones what it was then."""

    __slots__ = ("again", "digest", "value")

    def __init__(self, value: Any, again: Callable[[], Any]) -> None:
        self.value = value
        self.again = again
        self.digest: bytes | None = None  # of all of it, if the cache verifies

    def fill(self, again: bool) -> Any:
        return self.again() if again else self.value


def fill(parts: Iterable[Any], again: bool = False) -> list[Any]:
    """The arguments with the payload instead of each value; `again`: as they were at the first run."""
    filled: list[Any] = []
    for part in parts:
        cls = type(part)
        filled.append(part.payload if cls is Value else part.fill(again) if cls in _FILLED else part)
    return filled


_FILLED: Final = frozenset({Container, Changeable})


def keywords_of(operation: Operation, again: bool = False) -> dict[str, Any]:
    """The arguments by name, with payloads filled in."""
    keywords = operation.keywords
    return {} if keywords is None else dict(zip(keywords, fill(keywords.values(), again), strict=True))


def changeable(operation: Operation) -> Iterator[tuple[str, Changeable]]:
    """The plain arguments that may change, with what they are called in an error."""
    named = [(f"argument {number}", part) for number, part in enumerate(operation.positional, 1)]
    named += [(f"argument {name!r}", part) for name, part in (operation.keywords or {}).items()]
    while named:
        name, part = named.pop(0)
        if type(part) is Container:
            named += [(f"a part of {name.removeprefix('a part of ')}", inner) for inner in part.parts]
        elif type(part) is Changeable:
            yield name, part


def as_they_were(operation: Operation) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a repeated run. Raises ImpureError, and names the argument, if one has changed."""
    try:
        return fill(operation.positional, True), keywords_of(operation, True)
    except ImpureError:
        for name, part in changeable(operation):
            try:
                part.again()
            except ImpureError as error:
                raise ImpureError(f"{name} of {operation.name} (created at {operation.created}) {error}") from None
        raise


_DEEPEST: Final = 500
"""Containers within each other."""


def pack(argument: Any, keep: list[Any], found: list[Value]) -> Any:
    """`argument` with its Recomputables replaced by their values; these are added to `found`, the former to `keep`.

    Tuples (named ones too), lists and dicts are copied, so what the caller does to them later does not matter.
    """
    try:
        return _pack(argument, keep, found, _DEEPEST)
    except RecursionError:
        raise ValueError(
            "an argument is nested too deeply, or contains itself; pass it as a value of its own"
        ) from None


def _pack(argument: Any, keep: list[Any], found: list[Value], depth: int) -> Any:
    if not depth:  # compiled code has no limit of its own
        raise RecursionError
    cls = type(argument)
    kind = kinds.of(cls)
    if kind.plain:
        return argument
    if kind.handle:
        keep.append(argument)
        value: Value = argument.node
        found.append(value)
        return value
    if cls is list:
        return Container(_same, [_pack(part, keep, found, depth - 1) for part in argument])
    if cls is dict:
        return Container(
            partial(_dict_of, tuple(argument)),
            [_pack(part, keep, found, depth - 1) for part in argument.values()],
        )
    if isinstance(argument, tuple):
        parts = [_pack(part, keep, found, depth - 1) for part in argument]
        if all(map(is_, parts, argument)):
            return argument  # nothing in it can change
        return Container(cls._make if hasattr(cls, "_make") else cls, parts)
    if kind.readonce:
        raise TypeError(
            f"an argument is a {cls.__name__}, which can be read only once, but an operation may run again; "
            "pass a list or a tuple instead"
        )
    if cls in FUNCTIONS:
        return bound(argument)
    again = None if kind.remember is None else kind.remember(argument)
    return argument if again is None else Changeable(argument, again)


def _same(parts: list[Any]) -> list[Any]:
    return parts


def _dict_of(keys: tuple[Any, ...], parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, parts, strict=True))
