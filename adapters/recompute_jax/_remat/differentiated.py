"""A planned function under `grad`: the backward pass is planned too, together with the forward pass.

Differentiating planned equations would keep what was to be recomputed. So a planned function in a larger one is one
operation, with rules of its own (JAX calls that a `HiPrim`), until it is lowered. If its one differentiable
result is a number, as a loss is, its value and gradient are one program within the budget. Otherwise the forward pass
keeps nothing but the arguments, and the backward pass, which runs it again, is a program within the budget.

`checkify` looks into the operation: its checks become results, and the function with these is planned, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax._src import checkify  # it has no public way to add a rule
from jax._src.hijax import call_hi_primitive_p
from jax.experimental import hijax
from jax.experimental.hijax import Zero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, unmapped_aval

from recompute_jax._program.jaxpr import lifted, trace, varying_axes
from recompute_jax._remat.report import PlannedProgram

_HiPrim: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # the name before JAX 0.11
_instantiate: Any = hijax.instantiate_zeros  # which has no types

Results = tuple[Any, ...]
_Plan = Callable[[ClosedJaxpr], PlannedProgram]


def _chosen(fn: Callable[..., Results], places: Sequence[int], args: Sequence[Any]) -> Callable[..., Results]:
    """A function of the arguments at these places alone."""

    def run(*values: Any) -> Results:
        whole = list(args)
        for at, value in zip(places, values, strict=True):
            whole[at] = value
        return fn(*whole)

    return run


class _Operation(_HiPrim):  # type: ignore[misc]  # JAX's
    """Planned. Arguments and results are tuples of arrays."""

    in_avals: tuple[Any, ...]
    out_aval: tuple[Any, ...]
    effects: frozenset[Any]
    skip_linearization_on_zero_tangents = True  # otherwise JAX from 0.11 on differentiates what needs no derivative

    def plain(self, *args: Any) -> Results:
        """As it is without a plan."""
        raise NotImplementedError

    def number(self, places: Sequence[int]) -> int | None:
        """Which result is a number whose gradients, for the arguments at these places, are made with it; None: none."""
        raise NotImplementedError

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        ends = (0,) * len(self.out_aval)
        if self.effects:
            return _mapped(self.plain, axis_data, dims, 0)(*args), ends
        return _Batch(self, axis_data, dims)(*args), ends

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        places = [at for at in _inexact(self.in_avals) if not isinstance(tangents[at], Zero)]
        function = _chosen(self.expand, places, primals)
        moving = tuple([tangents[at] for at in places])
        made, slopes = jax.jvp(function, tuple([primals[at] for at in places]), moving)
        return made, tuple(map(_or_zero, slopes, self.out_aval))

    def lin(self, moving: Any, *args: Any) -> tuple[Any, Any]:
        places = _moving(moving, self.in_avals)
        made, slopes = jax.linearize(_chosen(self.expand, places, args), *[args[at] for at in places])
        return made, _Kept(places, None, slopes)

    def linearized(self, kept: Any, *tangents: Any) -> Results:
        slopes = kept.arrays(*[_instantiate(tangents[at]) for at in kept.places])
        return tuple(map(_or_zero, slopes, self.out_aval))


class PlannedCall(_Operation):
    """A function without constants that is planned when it is needed, and those that are made of it."""

    jaxpr: ClosedJaxpr

    def __init__(self, closed: ClosedJaxpr, plan: _Plan, plan_derived: _Plan) -> None:
        self.in_avals = tuple(closed.in_avals)
        self.out_aval = tuple(closed.out_avals)
        self.params = {"jaxpr": closed}
        self.effects = frozenset(closed.effects)
        self._plan = plan
        self._planned: PlannedProgram | None = None
        self._plan_derived = plan_derived
        self._derived: dict[Any, PlannedCall] = {}
        super().__init__()

    def plain(self, *args: Any) -> Results:
        return tuple(jaxpr_as_fun(self.jaxpr)(*args))

    def expand(self, *args: Any) -> Results:
        if self._planned is None:
            self._planned = self._plan(self.jaxpr)
        return self.plain(*args) if self._planned.emitted is None else tuple(self._planned(args))

    def made_of(self, closed: ClosedJaxpr) -> PlannedCall:
        """Another function, made of this one, planned within the same budget."""
        return PlannedCall(closed, self._plan_derived, self._plan_derived)

    def _made_once(self, key: Any, fn: Callable[..., Any], avals: Sequence[Any]) -> PlannedCall:
        """That of a function of arguments of these types."""
        if key not in self._derived:
            self._derived[key] = self.made_of(trace(fn, avals))
        return self._derived[key]

    def vjp_fwd(self, moving: Any, *args: Any) -> tuple[Any, Any]:
        places = _moving(moving, self.in_avals)
        number = self.number(places)
        if number is None:
            return self(*args), _Kept(places, None, args)
        made = self._made_once(places, self._value_and_gradient(places, number), self.in_avals)(*args)
        count = len(self.out_aval)
        return made[:count], _Kept(places, number, made[count:])

    def number(self, places: Sequence[int]) -> int | None:
        floats = _inexact(self.out_aval)
        return floats[0] if len(floats) == 1 and self._is_loss(self.out_aval[floats[0]], places) else None

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
            backward = self._made_once(("back", kept.places), self._backward(kept.places, floats), avals)
            back = backward(*kept.arrays, *given)
        elif not isinstance(factor := slopes[kept.number], Zero):
            back = [gradient * factor.astype(gradient.dtype) for gradient in kept.arrays]
        for at, slope in zip(kept.places, back, strict=False):
            results[at] = slope
        return tuple(results)

    def _value_and_gradient(self, places: Sequence[int], result: int) -> Callable[..., Results]:
        def run(*args: Any) -> Results:
            def number(*moving: Any) -> tuple[Any, Results]:
                made = _chosen(self.plain, places, args)(*moving)
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
                made = _chosen(self.plain, places, args)(*moving)
                return [made[at] for at in floats]

            _, back = jax.vjp(differentiable, *[args[at] for at in places])
            return tuple(back(list(given)))

        return run


class _Batch(_Operation):
    """An operation for many arguments, whose budget is for each."""

    one: _Operation
    axis: Any
    dims: tuple[int | None, ...]
    """Where an argument has them one after another; None: it is the same for all. Results begin with them."""

    def __init__(self, one: _Operation, axis: Any, dims: Sequence[int | None]) -> None:
        self.in_avals = tuple([self._many(aval, axis, dim) for aval, dim in zip(one.in_avals, dims, strict=True)])
        self.out_aval = tuple([self._many(aval, axis, 0) for aval in one.out_aval])
        self.params = {"one": one, "axis": axis, "dims": tuple(dims)}
        super().__init__()

    def plain(self, *args: Any) -> Results:
        return self._each(self.one.plain)(*args)

    def expand(self, *args: Any) -> Results:
        return self._each(self.one.expand)(*args)

    def number(self, places: Sequence[int]) -> int | None:
        return self.one.number(places)

    def vjp_fwd(self, moving: Any, *args: Any) -> tuple[Any, Any]:
        places = _moving(moving, self.in_avals)
        if self.number(places) is None:
            return self(*args), _Kept(places, None, args)
        made, kept = self._each(partial(self.one.vjp_fwd, moving))(*args)
        return made, kept

    def vjp_bwd_retval(self, kept: Any, slopes: Any) -> Results:
        results = [Zero(aval.to_ct_aval()) for aval in self.in_avals]
        if kept.number is not None and isinstance(slopes[kept.number], Zero):
            return tuple(results)
        floats = _inexact(self.out_aval)

        def back(arrays: Any, given: Sequence[Any]) -> list[Any]:
            slopes = [Zero(aval.to_ct_aval()) for aval in self.one.out_aval]
            for at, slope in zip(floats, given, strict=True):
                slopes[at] = slope
            found = self.one.vjp_bwd_retval(_Kept(kept.places, kept.number, arrays), slopes)
            return [found[at] for at in kept.places]

        given = [_instantiate(slopes[at]) for at in floats]
        ends = [self.dims[at] or 0 for at in kept.places]
        starts = self.dims if kept.number is None else 0, 0
        for at, slope in zip(kept.places, _mapped(back, self.axis, starts, ends)(kept.arrays, given), strict=True):
            results[at] = slope.sum(0) if self.dims[at] is None else slope
        return tuple(results)

    def _each(self, fn: Callable[..., Any]) -> Callable[..., Results]:
        return _mapped(fn, self.axis, self.dims, 0)

    @staticmethod
    def _many(aval: Any, axis: Any, dim: int | None) -> Any:
        return unmapped_aval(axis.size, dim, aval, axis.explicit_mesh_axis)


def _mapped(fn: Callable[..., Any], axis: Any, starts: Any, ends: Any) -> Callable[..., Any]:
    """The function for many arguments: what is called with an `axis` is a batch that JAX makes."""
    spread = axis.spmd_name or axis.explicit_mesh_axis
    return jax.vmap(fn, starts, ends, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=spread)


@partial(tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["places", "number"])
@dataclass
class _Kept:
    """What the forward pass keeps: of a number its gradients, otherwise the arguments; or the linear function."""

    places: tuple[int, ...]
    number: int | None
    """Which result is a number; None: none."""
    arrays: Any


def _moving(moving: Any, avals: Sequence[Any]) -> tuple[int, ...]:
    """Which arguments a derivative is for, by place."""
    return tuple([at for at in _inexact(avals) if moving[at] is not False])


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
_checked: Any = checkify.checkify_jaxpr_flat
_checking: Any = checkify.jaxpr_to_checkify_jaxpr


def is_check(effect: Any) -> bool:
    """Whether it is what `checkify.check` leaves in a program."""
    return isinstance(effect, checkify.ErrorEffect)


def _rule(*given: Any, _prim: Any) -> Any:
    if not isinstance(_prim, _Operation):
        return _others(*given, _prim=_prim)
    at = next(at for at, argument in enumerate(given) if isinstance(argument, checkify.Error))
    context, (error, enabled, *values) = given[:at], given[at:]  # since JAX 0.11 one object, before that nothing
    flat, structure = tree_util.tree_flatten(error)
    if not isinstance(_prim, PlannedCall):  # a batch of them, whose budget is for each
        whole = trace(_prim.plain, map(jax.typeof, values))
        return _checked(*context, whole.jaxpr, whole.consts, enabled, structure, *flat, *values)
    types = [jax.typeof(value) for value in (*flat, *values)]
    checking, tree, _ = _checking(*context, _prim.jaxpr, enabled, structure, *types)
    return tree_util.tree_unflatten(tree, _prim.made_of(lifted(checking))(*checking.consts, *flat, *values))


checkify.error_checks[call_hi_primitive_p] = _rule
