"""For tests with JAX: its adapter registered, all there is to know of an array, and its own interpreter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import recompute as rc
from recompute.testing import conformance

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from jax.extend import core  # noqa: E402  # after importorskip

from recompute_jax import adapter  # noqa: E402  # after importorskip

jnp = jax.numpy

FOR_VALUES = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Options where only values count, which are compared with a tolerance: code is made several times as fast."""


@contextmanager
def registered() -> Iterator[None]:
    """JAX's adapter serves, whether or not the package is installed; nobody has used the default cache."""
    with conformance.registered(adapter, jax.Array, jax.core.Tracer, jax.ref.Ref):
        rc.set_default_cache(None)
        yield
        rc.set_default_cache(None)


def bits(tree: Any) -> list[Any]:
    """All there is to know of each array in a tree."""
    return [adapter.fingerprint(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree)]


def content(tree: Any) -> list[Any]:
    """The same without weak types, which JAX keeps track of loosely in the body of a scan."""
    strong = lambda array: array if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else jnp.array(array, array.dtype)
    return bits(jax.tree.map(strong, tree))


def live() -> tuple[int, int]:
    """How many arrays there are, and how many bytes they take."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def plainly(fn: Callable[..., Any], *args: Any) -> Any:
    """Equation by equation without a cache: `jax.core.eval_jaxpr`, with calls replaced by what they call."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    results = _interpreted(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), map(jnp.asarray, results))


def _interpreted(jaxpr: Any, consts: Any, *args: Any) -> list[Any]:
    """A jaxpr without calls in the end goes to JAX's own interpreter, one equation at a time."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = equation.params.get({"jit": "jaxpr", "remat2": "jaxpr"}.get(name, "call_jaxpr"))
        if name in ("jit", "remat2", "custom_jvp_call", "custom_vjp_call", "closed_call", "eval_jaxpr"):
            inner, inner_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            values = [invar.val if isinstance(invar, core.Literal) else known[invar] for invar in equation.invars]
            results = _interpreted(inner, inner_consts, *values)
        else:
            free = list(dict.fromkeys(invar for invar in equation.invars if not isinstance(invar, core.Literal)))
            info = jaxpr.debug_info.with_unknown_names()
            one = core.Jaxpr((), free, equation.outvars, [equation], equation.effects, info)
            results = jax.core.eval_jaxpr(one, (), *[known[variable] for variable in free])
        known.update(zip(equation.outvars, results, strict=True))
    return [outvar.val if isinstance(outvar, core.Literal) else known[outvar] for outvar in jaxpr.outvars]
