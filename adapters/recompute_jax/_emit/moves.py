"""Values that move to the memory of the host and come back, instead of being repeated: as segments like others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from recompute_jax._program.jaxpr import struct
from recompute_jax._program.segments import Segment, Segments


def with_moves(segments: Segments, moved: Sequence[int]) -> Segments:
    """The same, and for each moved segment two more: one takes its results to the host, one brings them back.

    The first are numbered from the number of segments on, in the order of `moved`; the second follow. O(segments).
    """
    builder = segments.builder.copy()
    there: list[Segment] = []
    back: list[Segment] = []
    for number in moved:
        out, into = [], []
        for var in segments.segments[number].outputs:
            if builder.nbytes(var) and not jnp.issubdtype(_dtype(var), jax.dtypes.prng_key):
                to_host, host = _transfer(var, jax.memory.Space.Host, None)
                to_device, _ = _transfer(host, jax.memory.Space.Device, var)
                builder.source(host)
                out.append(to_host)
                into.append(to_device)
        there.append(_segment(out))
        back.append(_segment(into))
    return replace(segments, segments=[*segments.segments, *there, *back], builder=builder)


def order_with_moves(steps: Iterable[tuple[str, int]], count: int) -> tuple[list[int], list[int]]:
    """Numbers of segments in the order of a plan, and which of them are moved."""
    steps = [(kind, which) for kind, which in steps if kind != "free"]
    moved = sorted({which for kind, which in steps if kind == "fetch"})
    place = {which: at for at, which in enumerate(moved)}
    order: list[int] = []
    there: set[int] = set()
    for kind, which in steps:
        if kind == "fetch":
            order.append(count + len(moved) + place[which])
            continue
        order.append(which)
        if which in place and which not in there:
            there.add(which)
            order.append(count + place[which])
    return order, moved


def _segment(equations: list[JaxprEqn]) -> Segment:
    inputs = tuple([var for eqn in equations for var in eqn.invars if isinstance(var, Var)])
    return Segment(equations, inputs, tuple([var for eqn in equations for var in eqn.outvars]), 0.0, 0.0)


def _transfer(var: Var, space: Any, result: Var | None) -> tuple[JaxprEqn, Var]:
    """The equation that moves a value, and what it is called there."""
    traced = jax.make_jaxpr(lambda value: jax.device_put(value, space))(struct(var.aval))
    (eqn,) = traced.jaxpr.eqns
    result = result or Var(eqn.outvars[0].aval)
    return eqn.replace(invars=[var], outvars=[result]), result


def _dtype(var: Var) -> Any:
    aval: Any = var.aval
    return aval.dtype
