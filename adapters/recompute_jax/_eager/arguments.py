"""What callers pass to a function that is evaluated: static or not, traced as what, and refused with its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any, Final

import jax
from jax import tree_util
from jax.extend import source_info_util

import recompute as rc
from recompute.extend import EVICTED, common_engine, outline_of
from recompute_jax._arrays.adapter import Outline, adapter
from recompute_jax._program.jaxpr import INTERNAL, refuse_ref

_CURE: Final = (
    "as under jax.jit there are no values yet; use jnp.where, jax.lax.cond or while_loop instead of if and while, "
    "sizes that do not depend on values, jax.pure_callback for NumPy, and static_argnums of recompute_jax.op_by_op"
)


def is_handle(leaf: Any) -> bool:
    """Whether a leaf of the arguments is a Recomputable."""
    return isinstance(leaf, rc.Recomputable)


def spec(leaf: Any) -> Any:
    """What stands for an argument when the function is traced; nothing is recomputed for it."""
    if not is_handle(leaf):
        if isinstance(leaf, jax.core.Tracer):
            adapter.check(leaf)  # raises
        if isinstance(leaf, jax.ref.Ref):
            refuse_ref(jax.typeof(leaf))  # raises
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError("it is a ShapeDtypeStruct, which has no content; pass an array")
        return leaf
    payload, outline = leaf.node.payload, outline_of(leaf.node)
    if payload is EVICTED and isinstance(outline, Outline):
        aval = outline.aval
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]  # JAX's
            aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=outline.sharding
        )
    if payload is EVICTED:
        payload = rc.Recomputable.get(leaf)
    if not hasattr(payload, "dtype") and not isinstance(payload, (int, float, complex)):
        raise TypeError(
            f"it is a Recomputable of a {type(payload).__name__}, not of an array; pass a tree of Recomputables "
            "instead: recompute_jax.ap gives those"
        )
    return payload


def source(cache: rc.Cache, leaf: Any) -> rc.Recomputable[Any]:
    """A leaf of the arguments as a handle in `cache` that nobody else can let refer to something else."""
    if not is_handle(leaf):
        return rc.pure(jax.numpy.asarray(leaf))
    common_engine(cache.engine, leaf)  # raises, if that is another one
    node = leaf.node
    if not isinstance(node.payload, jax.Array) and not isinstance(outline_of(node), Outline):
        return rc.ap(jax.numpy.asarray, leaf)  # it is NumPy's, or a number
    return rc.Recomputable(cache, node)


def named(fn: Callable[..., Any]) -> str:
    """A function and where it was written."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def specs(fn: Callable[..., Any], leaves: Sequence[Any], arguments: Any) -> list[Any]:
    """`spec` of each leaf; an error names the argument, `arguments` being the tree of the leaves."""
    found: list[Any] = []
    for leaf in leaves:
        try:
            found.append(spec(leaf))
        except (TypeError, NotImplementedError) as error:
            path, _ = tree_util.tree_flatten_with_path(arguments, is_leaf=is_handle)[0][len(found)]
            which = ("args", "kwargs")[path[0].idx] + tree_util.keystr(path[1:])
            raise type(error)(f"{which} of {named(fn)}: {error}") from None
    return found


def traced(fn: Callable[..., Any], jitted: Any, args: Sequence[Any], kwargs: dict[str, Any], count: int) -> Any:
    """`jitted.trace`, with a note on what it raises. `count`: leaves of the arguments.

    Raises TypeError if the function uses a traced value that it was not given.
    """
    try:
        found = jitted.trace(*args, **kwargs)
    except Exception as error:
        frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
        own = [(code, line) for code, line in frames if not code.co_filename.startswith((*INTERNAL, "<frozen"))]
        where = "".join(f"at {code.co_filename}:{line} ({code.co_name}), " for code, line in own[-1:])
        cure = f": {_CURE}" if type(error).__module__.startswith("jax") else ""
        error.add_note(f"{where}while recompute_jax traced {named(fn)}{cure}")
        raise
    strange = found.jaxpr.jaxpr.invars[count:]
    for each in strange:
        used = next(equation for equation in found.jaxpr.eqns if each in equation.invars)
        raise TypeError(
            f"{named(fn)} uses a traced value ({each.aval.str_short()}) that it was not given, in "
            f"{used.primitive.name} ({source_info_util.summarize(used.source_info)}): there is no value to evaluate "
            "with; pass it as an argument, and evaluate around jax.jit, grad, vmap, scan and the like, not in them"
        )
    return found
