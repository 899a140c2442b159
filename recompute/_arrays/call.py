"""A call of an array function as it can be repeated: the arrays taken out of it, the rest kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

from recompute._errors import ImpureError
from recompute.extend import Outputs, constant, identity


class _Hole:
    """Stands where an array stood among the arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<array>"


HOLE: Final = _Hole()


class Fresh:
    """Stands for an argument that is made anew for each run: the memory of `out=`, or what might change meanwhile."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class Call:
    """`function` with arguments in which arrays are missing; called with the arrays, in their order.

    What it returns may be nested: then it is given as `Outputs` outputs, and `rebuild` has the nest again.
    """

    __slots__ = ("args", "func", "keywords", "simple", "structure")

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], *, simple: bool
    ) -> None:
        self.func = func  # named as in functools.partial, so that it is known by the function's name
        self.args = args  # with holes; none if it is simple
        self.keywords = keywords
        self.simple = simple  # it is called with all of its positional arguments
        self.structure: Any = None

    def __call__(self, *arrays: Any) -> Any:
        if self.simple:
            result = self.func(*arrays, **self.keywords)
        else:
            left = iter(arrays)
            result = self.func(
                *[_fill(argument, left) for argument in self.args],
                **{name: _fill(argument, left) for name, argument in self.keywords.items()},
            )
        if not isinstance(result, (tuple, list, dict)):
            return result
        leaves: list[Any] = []
        self.structure = _flatten(result, leaves)
        return Outputs(leaves) if len(leaves) > 1 else leaves[0] if leaves else None

    def size_key(self) -> Hashable:
        """By what the sizes of its results are known, besides the shapes of the arrays."""
        key = identity(self.func)
        if not self.simple:
            key = (key, *map(constant, self.args))
        if self.keywords:
            key = (key, *[(name, constant(argument)) for name, argument in self.keywords.items()])
        return key

    def rebuild(self, leaves: list[Any]) -> Any:
        """The nest that the function returned, with other leaves."""
        return leaves[0] if self.structure is None else _build(self.structure, iter(leaves))


def _fill(part: Any, left: Iterator[Any]) -> Any:
    cls = type(part)
    if cls is _Hole:
        return next(left)
    if cls is list:
        return [_fill(inner, left) for inner in part]
    if cls is dict:
        return {name: _fill(inner, left) for name, inner in part.items()}
    if cls is slice:
        return slice(_fill(part.start, left), _fill(part.stop, left), _fill(part.step, left))
    if isinstance(part, tuple):
        return rebuilt(part, [_fill(inner, left) for inner in part])
    return _made(part) if cls is Fresh else part


def _made(part: Fresh) -> Any:
    try:
        return part.make()
    except ImpureError as error:
        raise ImpureError(f"an argument {error}") from None


def rebuilt(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """A tuple of the same type, named ones too."""
    cls = type(like)
    return cls._make(parts) if hasattr(cls, "_make") else cls(parts)


_LEAF: Final = object()


def _flatten(result: Any, leaves: list[Any]) -> Any:
    """The leaves of a nest in order; returns the nest without them."""
    if isinstance(result, tuple):
        return rebuilt(result, [_flatten(part, leaves) for part in result])
    if type(result) is list:
        return [_flatten(part, leaves) for part in result]
    if type(result) is dict:
        return {name: _flatten(part, leaves) for name, part in result.items()}
    leaves.append(result)
    return _LEAF


def _build(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is _LEAF:
        return next(leaves)
    if isinstance(structure, tuple):
        return rebuilt(structure, [_build(part, leaves) for part in structure])
    if type(structure) is list:
        return [_build(part, leaves) for part in structure]
    return {name: _build(part, leaves) for name, part in structure.items()}
