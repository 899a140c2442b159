"""A plan as a function that JAX can trace: the segments in the planned order, in regions behind gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from recompute_jax._emit.gates import Gate, can_hold, holds, zeros
from recompute_jax._emit.regions import Region
from recompute_jax._program.costs import nbytes
from recompute_jax._program.jaxpr import bind
from recompute_jax._program.segments import Segment, Segments

Environment = dict[Var, Any]

_CONVOLUTION: Final = "conv_general_dilated"


def emit(
    segments: Segments, outvars: Sequence[Var | Literal], steps: Sequence[Region], gate: Gate
) -> Callable[..., list[Any]]:
    """A function of the sources (constants first) that returns the values of `outvars`."""
    parts = segments.segments
    through = _GATED[gate]

    def run(*sources: Any) -> list[Any]:
        env: Environment = dict(zip(segments.sources, sources, strict=True))
        newest: Any = None
        for region in steps:
            before = {var: env[var] for var in region.inputs}
            chosen = [parts[number] for number in region.runs]
            if newest is None or region.is_open:
                after = _plain(chosen, before, region.outputs)
            else:
                after = through(chosen, before, region.outputs, newest)
            env.update(zip(region.outputs, after, strict=True))
            newest = _newest(region, env, newest)
        return [_typed(atom.val if isinstance(atom, Literal) else env[atom], atom.aval) for atom in outvars]

    return run


def _typed(value: Any, aval: Any) -> Any:
    """The value with the weak type that it should have: equations of literals alone forget it."""
    if not getattr(aval, "weak_type", False) or getattr(jax.typeof(value), "weak_type", False):
        return value
    weak = lax.convert_element_type_p
    return weak.bind(value, new_dtype=aval.dtype, weak_type=True, sharding=None)


def _newest(region: Region, env: Environment, newest: Any) -> Any:
    """The smallest array that the region made."""
    made = [var for var in region.outputs if can_hold(var.aval)]
    return env[min(made, key=lambda var: nbytes(var.aval))] if made else newest


class _Fused:
    """Fused values that were made before from the same values in memory: XLA need not merge what is emitted once."""

    def __init__(self) -> None:
        self.made: dict[Var, tuple[list[Any], list[Any]]] = {}

    def apply(self, eqn: Any, arguments: list[Any]) -> list[Any]:
        known = self.made.get(eqn.outvars[0]) if eqn.outvars else None
        if known is not None and all(one is two for one, two in zip(known[0], arguments, strict=True)):
            return known[1]
        results: list[Any] = _convolve(eqn, arguments) if eqn.primitive.name == _CONVOLUTION else bind(eqn, arguments)
        if eqn.outvars:
            self.made[eqn.outvars[0]] = arguments, results
        return results


def _convolve(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """A convolution in the layout that XLA on CPU has a fast kernel for.

    XLA transposes others itself, but only outside of branches (its pass looks at the entry computation); in a branch
    they run twenty times slower. In the first region and on other platforms it makes no difference.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    spatial = tuple(range(1, len(numbers.lhs_spec) - 1))
    last = len(spatial) + 1
    lhs, rhs, out = (0, last, *spatial), (last, last - 1, *[axis - 1 for axis in spatial]), (0, last, *spatial)
    if params["batch_group_count"] != 1 or (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (lhs, rhs, out):
        return bind(eqn, arguments)
    image = lax.transpose(arguments[0], (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    kernel = lax.transpose(arguments[1], (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]))
    changed = eqn.replace(params={**params, "dimension_numbers": lax.ConvDimensionNumbers(lhs, rhs, out)})
    (made,) = bind(changed, [image, kernel])
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return [lax.transpose(made, [order.index(axis) for axis in range(last + 1)])]


def _run(part: Segment, env: Environment, fused: _Fused) -> None:
    """Compute a segment; only what it leaves in memory enters the environment."""
    local: Environment = {}
    for eqn in part.equations:
        arguments = [
            atom.val if isinstance(atom, Literal) else local[atom] if atom in local else env[atom]
            for atom in eqn.invars
        ]
        local.update(zip(eqn.outvars, fused.apply(eqn, arguments), strict=True))
    env.update((var, local[var]) for var in part.outputs)


def _plain(parts: list[Segment], inputs: Environment, outputs: list[Var]) -> Sequence[Any]:
    env = dict(inputs)
    fused = _Fused()
    for part in parts:
        _run(part, env, fused)
    return [env[var] for var in outputs]


def _branch(parts: list[Segment], inputs: Environment, outputs: list[Var], newest: Any) -> Sequence[Any]:
    names = list(inputs)

    def always(*values: Any) -> Sequence[Any]:
        return _plain(parts, dict(zip(names, values, strict=True)), outputs)

    def never(*values: Any) -> list[Any]:
        return [zeros(var.aval) for var in outputs]

    return lax.cond(holds(newest), always, never, *inputs.values())  # type: ignore[no-any-return]  # JAX has no type for it


def _select(parts: list[Segment], inputs: Environment, outputs: list[Var], newest: Any) -> Sequence[Any]:
    predicate = holds(newest)
    env = dict(inputs)
    late: set[Var] = set()  # behind the gate
    fused = _Fused()
    for part in parts:
        if not late.intersection(part.inputs):
            open_ = [var for var in part.inputs if can_hold(var.aval)]
            if open_:
                var = min(open_, key=lambda each: nbytes(each.aval))
                env[var] = lax.select(predicate, env[var], zeros(var.aval))
                late.add(var)
        _run(part, env, fused)
        late.update(part.outputs)
    return [env[var] for var in outputs]


def _barrier(parts: list[Segment], inputs: Environment, outputs: list[Var], newest: Any) -> Sequence[Any]:
    *values, _ = lax.optimization_barrier((*inputs.values(), newest))  # type: ignore[no-untyped-call]  # JAX's own
    return _plain(parts, dict(zip(inputs, values, strict=True)), outputs)


_GATED: Final[dict[Gate, Callable[[list[Segment], Environment, list[Var], Any], Sequence[Any]]]] = {
    "branch": _branch,
    "select": _select,
    "barrier": _barrier,
}
