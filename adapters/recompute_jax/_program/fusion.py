"""Which equations XLA fuses into their users, and which make values in memory."""

from __future__ import annotations

from typing import Literal

from jax.extend.core import JaxprEqn

from recompute_jax._program.costs import CHEAP, DEAR, subjaxprs
from recompute_jax._program.jaxpr import effects

Kind = Literal["cheap", "dear", "heavy"]

_CALLS = frozenset(("jit", "pjit", "closed_call", "remat", "checkpoint", "remat2"))


def kind(eqn: JaxprEqn) -> Kind:
    """Either "cheap" or "dear": fused into its users, the dear not several times; or "heavy"."""
    name = eqn.primitive.name
    if effects(eqn):
        return "heavy"
    if name in CHEAP:
        return "cheap"
    if name in DEAR:
        return "dear"
    if name.startswith("custom_") or name in _CALLS:
        called = subjaxprs(eqn)[:1] if name.startswith("custom_") else subjaxprs(eqn)
        inner = [kind(each) for jaxpr in called for each in jaxpr.eqns]
        if "heavy" not in inner and (inner or name in _CALLS):
            return "dear" if "dear" in inner else "cheap"
    return "heavy"
