"""Arguments of an operation: finding the values in them, and filling their payloads in again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recompute._adapters.adapter import kinds
from recompute._engine.graph import Node


class Outputs(tuple[Any, ...]):
    """What a function returned that was not asked how many outputs it would have."""

    __slots__ = ()


class Container:
    """A tuple, list or dict among the arguments, as it was: each run gets a fresh one with the payloads filled in."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.build = build
        self.parts = parts

    def fill(self) -> Any:
        return self.build(fill(self.parts))


def fill(parts: Any) -> list[Any]:
    """The arguments with the payload in the place of each value."""
    return [part.payload if type(part) is Node else part.fill() if type(part) is Container else part for part in parts]


def pack(argument: Any, keep: list[Any], found: list[Node]) -> Any:
    """`argument` with its Recomputables replaced by their values; these are added to `found`, the former to `keep`.

    Tuples (named ones too), lists and dicts are copied, so what the caller does to them later does not matter.
    """
    try:
        return _pack(argument, keep, found)
    except RecursionError:
        raise ValueError(
            "an argument is nested too deeply, or contains itself; pass it as a value of its own"
        ) from None


def _pack(argument: Any, keep: list[Any], found: list[Node]) -> Any:
    cls = type(argument)
    kind = kinds[cls]
    if kind.plain:
        return argument
    if kind.handle:
        keep.append(argument)
        node: Node = argument.node
        found.append(node)
        return node
    if cls is list:
        return Container(_same, [_pack(part, keep, found) for part in argument])
    if cls is dict:
        keys = tuple(argument)
        return Container(
            lambda parts: dict(zip(keys, parts, strict=True)),
            [_pack(part, keep, found) for part in argument.values()],
        )
    if isinstance(argument, tuple):
        before = len(found)
        parts = [_pack(part, keep, found) for part in argument]
        if len(found) == before and not any(type(part) is Container for part in parts):
            return argument  # nothing in it can change
        return Container(cls._make if hasattr(cls, "_make") else cls, parts)
    if kind.readonce:
        raise TypeError(
            f"an argument is a {cls.__name__}, which can be read only once, but an operation may run again; "
            "pass a list or a tuple instead"
        )
    return argument


def _same(parts: list[Any]) -> list[Any]:
    return parts
