"""How a function is called: static arguments, functions among the leaves, devices, inside of what JAX transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import jax
from jax import tree_util
from jax._src.core import trace_state_clean  # there is no public way to ask


class Chosen:
    """Arguments that are chosen by number or name, each known from the other as `jax.jit` does: such as static ones."""

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
        for number, parameter in enumerate(parameters):
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                if number in self._numbers:
                    self._names.add(parameter.name)
                elif parameter.name in self._names:
                    self._numbers.add(number)

    def has(self, place: int | str, count: int) -> bool:
        """Whether an argument is one of them, by its name or by its number among so many."""
        return place in self._names or (isinstance(place, int) and bool({place, place - count} & self._numbers))

    def without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The other arguments."""
        return (
            [arg for number, arg in enumerate(args) if not self.has(number, len(args))],
            {name: arg for name, arg in kwargs.items() if not self.has(name, len(args))},
        )

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], others: tuple[list[Any], dict[str, Any]]
    ) -> tuple[list[Any], dict[str, Any]]:
        """All arguments, with these instead of those that `without` gives."""
        rest = iter(others[0])
        positional = [arg if self.has(number, len(args)) else next(rest) for number, arg in enumerate(args)]
        return positional, {**kwargs, **others[1]}


@tree_util.register_static
@dataclass(frozen=True)
class Held:
    """A function instead of an array."""

    function: Any


def is_function(leaf: Any) -> bool:
    """Whether it is no array but a function."""
    return callable(leaf) and not hasattr(leaf, "dtype") and not hasattr(leaf, "__jax_array__")


def held(leaf: Any) -> Any:
    """The leaf, or what holds it if it is a function."""
    return Held(leaf) if is_function(leaf) else leaf


def released(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arguments in which functions are held."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_util.tree_map(
            lambda leaf: leaf.function if isinstance(leaf, Held) else leaf,
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, Held),
        )
        return fn(*args, **kwargs)

    update_wrapper(run, fn, updated=())
    return run


Shardings = tuple[tuple[int, Any], ...]
"""Of the leaves that are on several devices, by number."""


def is_inside(leaves: Sequence[Any]) -> bool:
    """Whether JAX transforms or compiles what calls this."""
    return not trace_state_clean() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def shardings_of(leaves: Sequence[Any]) -> Shardings:
    """Of the leaves that are on several devices, by number; of those being differentiated, too."""
    shardings: list[tuple[int, Any]] = []
    for at, leaf in enumerate(leaves):
        while isinstance(leaf, jax.core.Tracer):
            leaf = getattr(leaf, "primal", None)
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1:
            shardings.append((at, sharding))
    return tuple(shardings)


def looks_for_nans(args: Any, kwargs: Any) -> bool:
    """Whether JAX runs a function with values instead of tracers, to find the operation that made a NaN."""
    if not (jax.config.values["jax_debug_nans"] or jax.config.values["jax_debug_infs"]):
        return bool(trace_state_clean())
    leaves = tree_util.tree_leaves((args, kwargs))
    return any(isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) for leaf in leaves)
