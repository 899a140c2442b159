"""Which arguments of a function are static."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Signature:
    """Which arguments are static: numbers and names, each found from the other, as `jax.jit` does."""

    def __init__(
        self, fn: Callable[..., Any], numbers: int | Sequence[int] | None, names: str | Iterable[str] | None
    ) -> None:
        self._numbers = {numbers} if isinstance(numbers, int) else set(numbers or ())
        self._names = {names} if isinstance(names, str) else set(names or ())
        if (numbers is None) == (names is None):
            return  # none, or the caller has said both
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            return
        for number, each in enumerate(parameters):
            if each.kind is each.POSITIONAL_OR_KEYWORD:
                if number in self._numbers:
                    self._names.add(each.name)
                elif each.name in self._names:
                    self._numbers.add(number)

    def without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The dynamic arguments."""
        return (
            [each for number, each in enumerate(args) if not self._static(number, len(args))],
            {name: each for name, each in kwargs.items() if name not in self._names},
        )

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: tuple[list[Any], dict[str, Any]]
    ) -> tuple[list[Any], dict[str, Any]]:
        """All arguments, with others instead of the dynamic ones."""
        rest = iter(dynamic[0])
        positional = [each if self._static(number, len(args)) else next(rest) for number, each in enumerate(args)]
        return positional, {**kwargs, **dynamic[1]}

    def _static(self, number: int, count: int) -> bool:
        return bool({number, number - count} & self._numbers)
