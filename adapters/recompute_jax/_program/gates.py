"""Gates: what keeps XLA from merging a recomputation with the first run, and from starting it too early.

Each makes a recomputed region depend on the newest value before it. `holds` is a predicate that is always true, read
from the bits of that value, so that no compiler can know.

branch    the region is a branch of a conditional: nothing is copied, merged, or fused with what is outside
select    the smallest operand of what begins the region goes through `select(holds, x, 0)`: XLA may still fuse over it
barrier   operands go through `jax.lax.optimization_barrier`; XLA on CPU removes it before it merges
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Gate = Literal["branch", "select", "barrier"]
GATES: Final[tuple[Gate, ...]] = ("branch", "select", "barrier")

_holds: Final = Primitive("recompute_holds")


def holds(value: jax.Array) -> jax.Array:
    """True, but only once `value` (of at least one element) is known; one predicate for a whole batch under vmap."""
    return _bind(value)  # type: ignore[no-any-return]  # a scalar


def _bind(*values: Any) -> Any:
    return _holds.bind(*values)  # type: ignore[no-untyped-call]  # JAX's own


def can_hold(aval: Any) -> bool:
    """Whether a predicate can be read from such a value."""
    return hasattr(aval, "dtype") and 0 not in aval.shape and aval.dtype.name != "float0" and not _elsewhere(aval)


def _compute(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if explicit_sharding(jax.typeof(value)) is None:
        first = lax.squeeze(lax.slice(value, (0,) * value.ndim, (1,) * value.ndim), range(value.ndim))
    else:
        first = value  # no single element of it can be had by a slice
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = lax.bitcast_convert_type(first, f"uint{first.dtype.itemsize * 8}")
    elif first.dtype == jnp.bool_ or first.dtype.itemsize < 1 or first.dtype.name.endswith(("int4", "int2")):
        first = lax.convert_element_type(first, jnp.int32)
    one = lax.full_like(first, 1)
    bit = lax.ne(lax.bitwise_or(first, one), lax.full_like(first, 0))
    return jnp.all(bit) if bit.ndim else bit


def _batch(arguments: Any, axes: Any) -> Any:
    return _bind(*arguments), None


def _jvp(primals: Any, tangents: Any) -> Any:
    return _bind(*primals), ad.Zero(jax.core.ShapedArray((), jax.dtypes.float0))


_holds.def_impl(jax.jit(_compute))  # type: ignore[no-untyped-call]  # JAX's own
_holds.def_abstract_eval(lambda value: jax.core.ShapedArray((), jnp.dtype(bool)))  # type: ignore[no-untyped-call]  # JAX's own
batching.primitive_batchers[_holds] = _batch
ad.primitive_jvps[_holds] = _jvp
mlir.register_lowering(_holds, mlir.lower_fun(_compute, multiple_results=False))


def zeros(aval: Any) -> Any:
    """Zeros of this type; keys of zeros."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        shape = (*aval.shape, *aval.dtype._impl.key_shape)
        return jax.random.wrap_key_data(jnp.zeros(shape, jnp.uint32), impl=aval.dtype._impl.name)
    sharding = explicit_sharding(aval)
    with nullcontext() if sharding is None else jax.sharding.use_abstract_mesh(sharding.mesh):
        made = lax.full(aval.shape, 0, aval.dtype, sharding=sharding)
    varying = varying_axes(aval)
    if varying:
        made = lax.pcast(made, varying, to="varying")
    return jax.device_put(made, aval.memory_space) if _elsewhere(aval) else made


def _elsewhere(aval: Any) -> bool:
    """Whether such a value is in another memory than that of the device."""
    return bool(getattr(aval, "memory_space", jax.memory.Space.Device) != jax.memory.Space.Device)


def varying_axes(aval: Any) -> tuple[str, ...]:
    """The axes of a `shard_map` around over which the value differs."""
    return tuple(sorted(getattr(getattr(aval, "manual_axis_type", None), "varying", ())))


def explicit_sharding(aval: Any) -> Any:
    """The sharding that is part of the type; None: there is none."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and any(sharding.spec) else None
