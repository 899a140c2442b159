"""Functions among the leaves of arguments, as modules of equinox have: held, they are structure, and are not traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from jax import tree_util


@tree_util.register_static
class Held:
    """A function instead of an array."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __hash__(self) -> int:
        return hash(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and bool(self.function == other.function)


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
            lambda each: each.function if isinstance(each, Held) else each,
            (args, kwargs),
            is_leaf=lambda each: isinstance(each, Held),
        )
        return fn(*args, **kwargs)

    update_wrapper(run, fn, updated=())
    return run
