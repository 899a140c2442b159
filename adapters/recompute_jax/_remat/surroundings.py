"""How a planned function is called: inside of what JAX transforms, on which devices, with which functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import jax
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


Shardings = tuple[tuple[int, Any], ...]
"""Of the leaves that are on several devices, by number."""


def is_inside(args: Any, kwargs: Any) -> bool:
    """Whether JAX transforms or compiles what calls this."""
    if any(isinstance(each, jax.core.Tracer) for each in tree_util.tree_leaves((args, kwargs))):
        return True
    return not is_clean()


def shardings_of(args: Any, kwargs: Any) -> Shardings:
    """Of the leaves that are on several devices, by number; of those being differentiated, too."""
    found: list[tuple[int, Any]] = []
    for at, leaf in enumerate(tree_util.tree_leaves((args, kwargs))):
        while isinstance(leaf, jax.core.Tracer):
            leaf = getattr(leaf, "primal", None)
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1:
            found.append((at, sharding))
    return tuple(found)


def looks_for_nans(args: Any, kwargs: Any) -> bool:
    """Whether JAX runs a function with values instead of tracers, to find the operation that made a NaN."""
    if not (jax.config.values["jax_debug_nans"] or jax.config.values["jax_debug_infs"]):
        return is_clean()
    leaves = tree_util.tree_leaves((args, kwargs))
    return any(isinstance(each, jax.Array) and not isinstance(each, jax.core.Tracer) for each in leaves)


def context() -> Any:
    """What jit compiles anew for: precision, kinds of random numbers, x64, meshes and so on."""
    from jax._src.config import trace_context  # there is no public way to ask

    return trace_context()


def is_clean() -> bool:
    """Whether JAX traces nothing."""
    from jax._src.core import trace_state_clean  # there is no public way to ask

    return bool(trace_state_clean())
