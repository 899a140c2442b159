"""Where a planned function is called: inside of what JAX transforms, on which devices, in which configuration."""

from __future__ import annotations

from typing import Any

import jax
from jax import tree_util

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
