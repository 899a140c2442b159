"""A planned function under `grad`: the backward pass is planned too, together with the forward pass.

Differentiating planned equations would keep what was to be recomputed. So a planned function in a larger one is one
operation, with rules of its own (JAX calls that a `VJPHiPrimitive`), until it is lowered. If its one differentiable
result is a number, as a loss is, its value and gradient are one program within the budget. Otherwise the forward pass
keeps nothing but the arguments, and the backward pass, which runs it again, is a program within the budget.

`checkify` looks into the operation: its checks become results, and the function with these is planned, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax._src import checkify  # it has no public way to add a rule
from jax._src.hijax import VmapOf, call_hi_primitive_p
from jax.experimental import hijax
from jax.experimental.hijax import VJPHiPrimitive, Zero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._program.gates import varying_axes
from recompute_jax._program.jaxpr import lifted, trace
from recompute_jax._remat.report import PlannedProgram

_instantiate: Any = hijax.instantiate_zeros  # which has no types

Results = tuple[Any, ...]
_Plan = Callable[[ClosedJaxpr], PlannedProgram]


class Call:
    """A function without constants that is planned when it is needed, and those that are derived from it."""

    def __init__(self, closed: ClosedJaxpr, plan: _Plan, plan_derived: _Plan) -> None:
        self.closed = closed
        self._plan = plan
        self._planned: PlannedProgram | None = None
        self._plan_derived = plan_derived
        self._derived: dict[Any, PlannedCall] = {}

    def run(self, *args: Any) -> Results:
        """As planned."""
        if self._planned is None:
            self._planned = self._plan(self.closed)
        return self.plain(*args) if self._planned.emitted is None else tuple(self._planned(args))

    def plain(self, *args: Any) -> Results:
        """As it is."""
        return tuple(jaxpr_as_fun(self.closed)(*args))

    def made_of(self, closed: ClosedJaxpr) -> PlannedCall:
        """Another function, made of this one, planned within the same budget."""
        return PlannedCall(Call(closed, self._plan_derived, self._plan_derived))

    def derived(self, key: Any, fn: Callable[..., Any], avals: Sequence[Any]) -> PlannedCall:
        """A function of arguments of these types that is made of this one, planned within the same budget."""
        if key not in self._derived:
            self._derived[key] = self.made_of(trace(fn, avals))
        return self._derived[key]

    def __repr__(self) -> str:
        return "Call"


def _chosen(fn: Callable[..., Results], places: Sequence[int], args: Sequence[Any]) -> Callable[..., Results]:
    """A function of the arguments at these places alone."""

    def run(*values: Any) -> Results:
        whole = list(args)
        for at, value in zip(places, values, strict=True):
            whole[at] = value
        return fn(*whole)

    return run


class PlannedCall(VJPHiPrimitive):
    """The operation. Arguments and results are tuples of arrays."""

    call: Call

    def __init__(self, call: Call) -> None:
        self.in_avals = tuple(call.closed.in_avals)
        self.out_aval = tuple(call.closed.out_avals)
        self.params = {"jaxpr": call.closed, "call": call}
        self.effects = frozenset(call.closed.effects)
        super().__init__()  # type: ignore[no-untyped-call]  # JAX's

    def expand(self, *args: Any) -> Results:
        return self.call.run(*args)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if not self.effects:
            return super().batch(axis_data, args, dims)  # type: ignore[no-untyped-call]  # JAX's
        names = {"axis_name": axis_data.name, "axis_size": axis_data.size, "spmd_axis_name": axis_data.spmd_name}
        made = jax.vmap(self.call.plain, dims, **names)(*args)  # JAX's batch of an operation forgets effects
        return made, (0,) * len(made)

    def batch_dim_rule(self, axis_data: Any, dims: Any) -> tuple[int, ...]:
        return (0,) * len(self.out_aval)

    def vjp_fwd(self, moving: Any, *args: Any) -> tuple[Any, Any]:
        places = tuple([at for at, moves in enumerate(moving) if moves is not False and _is_inexact(self.in_avals[at])])
        floats = _inexact(self.out_aval)
        if len(floats) == 1 and self._is_loss(self.out_aval[floats[0]], places):
            made = self.call.derived(places, self._value_and_gradient(places, floats[0]), self.in_avals)(*args)
            count = len(self.out_aval)
            return made[:count], _Kept(places, floats[0], made[count:])
        return self(*args), _Kept(places, None, args)

    def _is_loss(self, result: Any, places: Sequence[int]) -> bool:
        """Whether gradients times the slope of this result are the slopes of these arguments.

        In a `shard_map` an argument may be the same on all devices where the result is not: its slope is a sum over
        devices, each with a slope of its own.
        """
        varying = set(varying_axes(result))
        alike = all(varying.issubset(varying_axes(self.in_avals[at])) for at in places)
        return alike and result.shape == () and _is_real(result)

    def vjp_bwd_retval(self, kept: Any, slopes: Any) -> Results:
        results = [Zero(aval.to_ct_aval()) for aval in self.in_avals]
        back: Sequence[Any] = ()
        if kept.number is None:
            floats = _inexact(self.out_aval)
            given = [_instantiate(slopes[at]) for at in floats]
            avals = [*self.in_avals, *(self.out_aval[at] for at in floats)]
            backward = self.call.derived(("back", kept.places), self._backward(kept.places, floats), avals)
            back = backward(*kept.arrays, *given)
        elif not isinstance(factor := slopes[kept.number], Zero):
            back = [gradient * factor.astype(gradient.dtype) for gradient in kept.arrays]
        for at, slope in zip(kept.places, back, strict=False):
            results[at] = slope
        return tuple(results)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        places = _inexact(self.in_avals)
        moving = tuple([_instantiate(tangents[at]) for at in places])
        function = _chosen(self.call.run, places, primals)
        made, slopes = jax.jvp(function, tuple([primals[at] for at in places]), moving)
        return made, tuple(map(_or_zero, slopes, self.out_aval))

    def lin(self, moving: Any, *args: Any) -> tuple[Any, Any]:
        places = _inexact(self.in_avals)
        return jax.linearize(_chosen(self.call.run, places, args), *[args[at] for at in places])

    def linearized(self, kept: Any, *tangents: Any) -> Results:
        slopes = kept(*[_instantiate(tangents[at]) for at in _inexact(self.in_avals)])
        return tuple(map(_or_zero, slopes, self.out_aval))

    def _value_and_gradient(self, places: Sequence[int], result: int) -> Callable[..., Results]:
        def run(*args: Any) -> Results:
            def number(*moving: Any) -> tuple[Any, Results]:
                made = _chosen(self.call.plain, places, args)(*moving)
                return made[result], made

            moving = [args[at] for at in places]
            slopes, made = jax.grad(number, argnums=tuple(range(len(places))), has_aux=True)(*moving)
            return (*made, *slopes)

        return run

    def _backward(self, places: Sequence[int], floats: Sequence[int]) -> Callable[..., Results]:
        count = len(self.in_avals)

        def run(*values: Any) -> Results:
            args, given = values[:count], values[count:]

            def differentiable(*moving: Any) -> list[Any]:
                made = _chosen(self.call.plain, places, args)(*moving)
                return [made[at] for at in floats]

            _, back = jax.vjp(differentiable, *[args[at] for at in places])
            return tuple(back(list(given)))

        return run


@tree_util.register_pytree_node_class
class _Kept:
    """What the forward pass keeps: of a number its gradients, otherwise the arguments."""

    def __init__(self, places: tuple[int, ...], number: int | None, arrays: Any) -> None:
        self.places = places
        self.number = number
        """Which result is a number; None: none."""
        self.arrays = arrays

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.arrays,), (self.places, self.number)

    @classmethod
    def tree_unflatten(cls, about: Any, children: Any) -> _Kept:
        return cls(*about, *children)


def _inexact(avals: Sequence[Any]) -> list[int]:
    """Which of them can be differentiated, by place."""
    return [at for at, aval in enumerate(avals) if _is_inexact(aval)]


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _is_real(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _or_zero(slope: Any, aval: Any) -> Any:
    return slope if _is_inexact(aval) else Zero(aval.to_tangent_aval())


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
        whole = trace(plain, map(jax.typeof, values))
        return checkify.checkify_jaxpr_flat(whole.jaxpr, whole.consts, enabled, structure, *given, *values)
    types = [jax.typeof(value) for value in (*given, *values)]
    checking, tree, _ = checkify.jaxpr_to_checkify_jaxpr(_prim.call.closed, enabled, structure, *types)
    checked = ClosedJaxpr(lifted(checking).jaxpr, ())
    return tree_util.tree_unflatten(tree, _prim.call.made_of(checked)(*checking.consts, *given, *values))


def _plain(operation: Any) -> Callable[..., Any] | None:
    """What a planned function, or a batch of them, computes; None: it is something else."""
    if isinstance(operation, PlannedCall):
        return operation.call.plain
    inner = _plain(operation.prim) if isinstance(operation, VmapOf) else None
    if inner is None:
        return None
    return jax.vmap(inner, operation.in_dims, operation.out_dim, **operation._vmap_params)


checkify.error_checks[call_hi_primitive_p] = _rule
