"""Measured costs: each kind of segment is compiled by itself and timed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from recompute_jax._emit.gates import zeros
from recompute_jax._program.jaxpr import bind
from recompute_jax._program.segments import Segment
from recompute_jax._remat.report import short

_TIMES: Final = 3


def measured() -> Callable[[Segment], float]:
    """The price of a segment in seconds, the least of a few runs with zeros; segments that are alike are run once."""
    known: dict[str, float] = {}

    def price(part: Segment) -> float:
        kind = _kind(part)
        if kind not in known:
            known[kind] = _seconds(part)
        return known[kind]

    return price


def _kind(part: Segment) -> str:
    names = {var: f"v{at}" for at, var in enumerate(part.inputs)}
    lines = [",".join(short(var.aval) for var in part.inputs)]
    for eqn in part.equations:
        reads = [str(atom.val) if isinstance(atom, Literal) else names[atom] for atom in eqn.invars]
        for var in eqn.outvars:
            names[var] = f"v{len(names)}"
        lines.append(f"{eqn.primitive.name} {reads} {eqn.params} {[short(var.aval) for var in eqn.outvars]}")
    return "\n".join(lines)


def _seconds(part: Segment) -> float:
    def run(*values: Any) -> list[Any]:
        env = dict(zip(part.inputs, values, strict=True))
        for eqn in part.equations:
            results = bind(eqn, [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [env[var] for var in part.outputs]

    if part.once:
        return 0.0
    with jax.ensure_compile_time_eval():
        inputs = [jnp.asarray(zeros(var.aval)) for var in part.inputs]
        compiled = jax.jit(run).lower(*inputs).compile()
        _ready(compiled(*inputs))
        least = float("inf")
        for _ in range(_TIMES):
            began = perf_counter()
            _ready(compiled(*inputs))
            least = min(least, perf_counter() - began)
    return least


def _ready(values: Any) -> None:
    jax.block_until_ready(values)  # type: ignore[no-untyped-call]  # JAX's
