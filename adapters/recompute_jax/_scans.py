"""Long scans as several shorter ones, so that what they stack up can be dropped and recomputed part by part.

The scan of a gradient reads, backwards, what the scan forward has stacked. Cut into parts, each part of the stack is a
value of its own, and the carries between parts are the checkpoints to recompute it from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from recompute_jax._costs import CHEAP, DEAR, nbytes
from recompute_jax._jaxpr import Flat, bind

_MOST: Final = 48  # parts: each is a loop to compile
_SHARE: Final = 4  # parts of the stack that should fit into the budget at once
_NOTICED: Final = 0.05  # of the budget
_ELEMENTWISE: Final = (CHEAP | DEAR) - frozenset(
    "broadcast_in_dim expand_dims iota pad reshape rev slice squeeze transpose".split()
)


def parts_of(flat: Flat, budget: int) -> dict[int, int]:
    """Length of scans -> into how many parts to cut them; those that stack little are left out. O(equations)."""
    stacked: dict[int, int] = {}
    for eqn in flat.equations:
        if eqn.primitive.name == "scan":
            length = eqn.params["length"]
            made = sum(nbytes(var.aval) for var in eqn.outvars[eqn.params["num_carry"] :])
            stacked[length] = stacked.get(length, 0) + made
    return {
        length: min(_MOST, ceil(length / 2), max(2, ceil(_SHARE * size / max(1, budget))))
        for length, size in stacked.items()
        if length >= 4 and size > _NOTICED * budget
    }


def cut(flat: Flat, parts: Mapping[int, int]) -> ClosedJaxpr:
    """The same function of its constants and arguments, with scans of these lengths cut into so many parts."""

    def run(*sources: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip([*flat.constvars, *flat.invars], sources, strict=True))
        for eqn in flat.equations:
            values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            if eqn.primitive.name == "scan" and eqn.params["length"] in parts:
                results = _scan(eqn, values, parts[eqn.params["length"]])
            elif (bounds := _bounds(eqn, values)) is not None:
                each = [
                    bind(eqn, [value.parts[at] if isinstance(value, _Stack) else value for value in values])[0]
                    for at in range(len(bounds) - 1)
                ]
                results = [_Stack(each, bounds)]
            else:
                results = bind(eqn, [_whole(value) for value in values])
            env.update(zip(eqn.outvars, results, strict=True))
        return [atom.val if isinstance(atom, Literal) else _whole(env[atom]) for atom in flat.outvars]

    avals = [var.aval for var in (*flat.constvars, *flat.invars)]
    return jax.make_jaxpr(run)(*map(struct, avals))


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """What stands for an array of this type when a function is traced."""
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)  # type: ignore[no-untyped-call]  # JAX's


class _Stack:
    """An array in parts along its first axis."""

    def __init__(self, parts: list[Any], bounds: tuple[int, ...]) -> None:
        self.parts = parts
        self.bounds = bounds
        self.all: Any = None

    def whole(self) -> Any:
        if self.all is None:
            self.all = lax.concatenate(self.parts, 0)
        return self.all


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, _Stack) else value


def _bounds(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[int, ...] | None:
    """How to do an elementwise equation part by part; None: it cannot be."""
    bounds = {value.bounds for value in values if isinstance(value, _Stack)}
    if len(bounds) != 1 or eqn.primitive.name not in _ELEMENTWISE or len(eqn.outvars) != 1:
        return None
    if any(not isinstance(value, _Stack) and getattr(value, "ndim", 0) for value in values):
        return None
    return bounds.pop()


def _scan(eqn: JaxprEqn, values: list[Any], count: int) -> list[Any]:
    params = eqn.params
    length, constants, carries = params["length"], params["num_consts"], params["num_carry"]
    bounds = tuple([length * at // count for at in range(count + 1)])
    fixed = [_whole(value) for value in values[:constants]]
    carry = [_whole(value) for value in values[constants : constants + carries]]
    stacks = values[constants + carries :]
    made: list[list[Any]] = [[] for _ in range(count)]
    order = range(count - 1, -1, -1) if params["reverse"] else range(count)
    for at in order:
        one, two = bounds[at], bounds[at + 1]
        given = [
            stack.parts[at]
            if isinstance(stack, _Stack) and stack.bounds == bounds
            else lax.slice_in_dim(_whole(stack), one, two)
            for stack in stacks
        ]
        shorter = eqn.replace(params={**params, "length": two - one})
        results = bind(shorter, [*fixed, *carry, *given])
        carry = results[:carries]
        made[at] = results[carries:]
    return [*carry, *(_Stack(list(each), bounds) for each in zip(*made, strict=True))]
