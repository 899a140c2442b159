"""The rest of the applicative, by `ap`: functions of values as functions of Recomputables, and collections of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from recompute._handle import apply_at
from recompute._recomputable import Recomputable

K = TypeVar("K")
P = ParamSpec("P")
R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class Lifted(Protocol[P, R_co]):
    """A function of values as a function of Recomputables: with its own parameters, each of them plain or not."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...


@overload
def lift(  # type: ignore[overload-overlap]  # 1 is an int, too
    function: Callable[P, R], /, *, nout: Literal[1] = 1, nbytes: int | Sequence[int] | None = None
) -> Lifted[P, Recomputable[R]]: ...
@overload
def lift(
    function: Callable[P, tuple[R1, R2]], /, *, nout: Literal[2], nbytes: int | Sequence[int] | None = None
) -> Lifted[P, tuple[Recomputable[R1], Recomputable[R2]]]: ...
@overload
def lift(
    function: Callable[P, Any], /, *, nout: int, nbytes: int | Sequence[int] | None = None
) -> Lifted[P, tuple[Recomputable[Any], ...]]: ...
@overload
def lift(  # type: ignore[overload-overlap]  # 1 is an int, too
    *, nout: Literal[1] = 1, nbytes: int | Sequence[int] | None = None
) -> Callable[[Callable[P, R]], Lifted[P, Recomputable[R]]]: ...
@overload
def lift(
    *, nout: Literal[2], nbytes: int | Sequence[int] | None = None
) -> Callable[[Callable[P, tuple[R1, R2]]], Lifted[P, tuple[Recomputable[R1], Recomputable[R2]]]]: ...
@overload
def lift(
    *, nout: int, nbytes: int | Sequence[int] | None = None
) -> Callable[[Callable[P, Any]], Lifted[P, tuple[Recomputable[Any], ...]]]: ...
def lift(
    function: Callable[..., Any] | None = None, /, *, nout: int = 1, nbytes: int | Sequence[int] | None = None
) -> Any:
    """A function of values as a function of Recomputables: `lift(f)(x)` is `ap(f, x)`. Also a decorator."""
    if function is None:
        return lambda function: _lifted(function, nout, nbytes)
    return _lifted(function, nout, nbytes)


def _lifted(function: Callable[..., Any], nout: int, nbytes: int | Sequence[int] | None) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"lift takes a function, not {function!r}")

    @wraps(function)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        return apply_at(function, args, kwargs, nout, nbytes, sys._getframe(1), Recomputable)

    return lifted


@overload
def sequence(  # type: ignore[overload-overlap]  # tuples and dicts are iterables, too
    values: tuple[Recomputable[R1], Recomputable[R2]],
) -> Recomputable[tuple[R1, R2]]: ...
@overload
def sequence(  # type: ignore[overload-overlap]
    values: tuple[Recomputable[R], ...],
) -> Recomputable[tuple[R, ...]]: ...
@overload
def sequence(  # type: ignore[overload-overlap]
    values: dict[K, Recomputable[R]],
) -> Recomputable[dict[K, R]]: ...
@overload
def sequence(  # type: ignore[overload-overlap]
    values: dict[K, Any],
) -> Recomputable[dict[K, Any]]: ...
@overload
def sequence(values: Iterable[Recomputable[R]]) -> Recomputable[list[R]]: ...
def sequence(values: Any) -> Recomputable[Any]:
    """A tuple, list or dict of Recomputables as a Recomputable of a tuple, list or dict; another iterable as a list."""
    if not isinstance(values, (tuple, list, dict)):
        values = list(values)
    return apply_at(_same, (values,), {}, 1, None, sys._getframe(1), Recomputable)  # type: ignore[no-any-return]


def traverse(function: Callable[[T], Recomputable[R]], values: Iterable[T]) -> Recomputable[list[R]]:
    """`sequence` of `function` of each value: a list in, a Recomputable of a list out."""
    results = [function(value) for value in values]
    return apply_at(_same, (results,), {}, 1, None, sys._getframe(1), Recomputable)  # type: ignore[no-any-return]


def _same(value: T) -> T:
    return value
