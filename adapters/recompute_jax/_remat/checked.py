"""`checkify` looks into a planned function: its checks become results, and the function with these is planned, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util
from jax._src import checkify  # it has no public way to add a rule
from jax._src.hijax import VmapOf, call_hi_primitive_p
from jax.extend.core import ClosedJaxpr

from recompute_jax._program.jaxpr import lifted, struct
from recompute_jax._remat.differentiated import PlannedCall

_others: Any = checkify.error_checks[call_hi_primitive_p]


def is_check(effect: Any) -> bool:
    """Whether it is what `checkify.check` leaves in a program."""
    return isinstance(effect, checkify.ErrorEffect)


def _rule(error: Any, enabled: Any, *values: Any, _prim: Any) -> Any:
    plain = _plain(_prim)
    if plain is None:
        return _others(error, enabled, *values, _prim=_prim)
    given, structure = tree_util.tree_flatten(error)
    if not isinstance(_prim, PlannedCall):  # a batch of them, whose budget is for each
        whole = jax.make_jaxpr(plain)(*map(struct, map(jax.typeof, values)))
        return checkify.checkify_jaxpr_flat(whole.jaxpr, whole.consts, enabled, structure, *given, *values)
    types = [jax.typeof(each) for each in (*given, *values)]
    found, tree, _ = checkify.jaxpr_to_checkify_jaxpr(_prim.call.closed, enabled, structure, *types)
    checked = ClosedJaxpr(lifted(found).jaxpr, ())
    return tree_util.tree_unflatten(tree, _prim.call.made_of(checked)(*found.consts, *given, *values))


def _plain(operation: Any) -> Callable[..., Any] | None:
    """What a planned function, or a batch of them, computes; None: it is something else."""
    if isinstance(operation, PlannedCall):
        return operation.call.plain
    inner = _plain(operation.prim) if isinstance(operation, VmapOf) else None
    if inner is None:
        return None
    return jax.vmap(inner, operation.in_dims, operation.out_dim, **operation._vmap_params)


checkify.error_checks[call_hi_primitive_p] = _rule
