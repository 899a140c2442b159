"""What `remat` returns: a function that is called, traced and lowered as one of `jax.jit` is, and has a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax import tree_util

from recompute_jax._program.signature import Signature
from recompute_jax._remat.checked import is_check
from recompute_jax._remat.options import Requested
from recompute_jax._remat.report import Planned, RematPlan
from recompute_jax._remat.surroundings import (
    Shardings,
    held,
    is_function,
    is_inside,
    looks_for_nans,
    released,
    shardings_of,
)
from recompute_jax._remat.traced import Traces, name_of

P = ParamSpec("P")
R = TypeVar("R")


class Remat(Generic[P, R]):
    """What `remat` returns: call it like the function."""

    def __init__(self, fn: Callable[P, R], requested: Requested, jit_options: dict[str, Any]) -> None:
        update_wrapper(self, fn, updated=())
        self._fn = fn
        self._run = released(fn)
        self._signature = Signature(fn, jit_options["static_argnums"], jit_options["static_argnames"])
        self._requested = requested
        self._jit_options = jit_options
        self._traces = Traces(fn, requested, jit_options)
        self._jits: dict[tuple[bool, Shardings], Any] = {}
        """Part of something that JAX transforms or compiles, or compiled here, for arguments on these devices."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = self._hold(args, kwargs)
        inside = is_inside(args, kwargs)
        return self._jitted(inside, shardings_of(args, kwargs))(*args, **kwargs)  # type: ignore[no-any-return]  # of `jax.jit`, which forgets it

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> RematPlan:
        """What is planned for such arguments (arrays, or `jax.ShapeDtypeStruct`); it prints as a report."""
        found: list[Planned] = []
        args, kwargs = self._hold(args, kwargs)
        inside = is_inside(args, kwargs)
        shardings = shardings_of(args, kwargs)

        def look(*args: Any, **kwargs: Any) -> int:
            found.append(self._traces.plan(self._traces(args, kwargs, inside, shardings)))
            return 0

        update_wrapper(look, self._fn, updated=())
        jax.jit(look, **_static(self._jit_options)).trace(*args, **kwargs)
        return found[0].report

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and trace, as `jax.jit(fn).trace` does."""
        args, kwargs = self._hold(args, kwargs)
        return self._jitted(False, shardings_of(args, kwargs)).trace(*args, **kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The types of the results, as `jax.jit(fn).eval_shape` gives them; nothing is planned."""
        args, kwargs = self._hold(args, kwargs)
        plain: Any = jax.jit(released(self._fn), **_static(self._jit_options))
        return plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and what was compiled, as `jax.jit(fn).clear_cache` does."""
        self._traces.clear()
        self._jits.clear()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and lower, as `jax.jit(fn).lower` does."""
        args, kwargs = self._hold(args, kwargs)
        return self._jitted(False, shardings_of(args, kwargs)).lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, if it is found on an instance: as functions are."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        requested = self._requested
        return f"<remat of {name_of(self._fn)} within {requested.share if requested.size is None else requested.size}>"

    def _hold(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Functions among the leaves, as modules of equinox have, are part of the structure: they are not traced."""
        if not any(map(is_function, tree_util.tree_leaves((args, kwargs)))):
            return args, kwargs
        dynamic = self._signature.without(args, kwargs)
        return self._signature.filled(args, kwargs, tree_util.tree_map(held, dynamic))

    def _jitted(self, inside: bool, shardings: Shardings) -> Any:
        jitted = self._jits.get((inside, shardings))
        if jitted is None:
            options = None if inside else self._requested.compiler_options() or None
            following = self._following(inside, shardings)
            jitted = jax.jit(following, compiler_options=options, **self._jit_options)
            self._jits[inside, shardings] = jitted
        return jitted

    def _following(self, inside: bool, shardings: Shardings) -> Callable[..., Any]:
        def follow(*args: Any, **kwargs: Any) -> Any:
            if jax.config.values["jax_disable_jit"] or looks_for_nans(args, kwargs):
                return self._run(*args, **kwargs)
            traced = self._traces(args, kwargs, inside, shardings)
            if inside and (not traced.closed.effects or any(map(is_check, traced.closed.effects))):
                return tree_util.tree_unflatten(traced.tree, traced.call(*traced.closed.consts, *traced.leaves))
            planned = self._traces.plan(traced)
            if planned.emitted is None:
                return self._run(*args, **kwargs)
            return tree_util.tree_unflatten(traced.tree, planned(traced.leaves))

        update_wrapper(follow, self._fn, updated=())
        return follow


def _static(jit_options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in jit_options.items() if name.startswith("static")}
