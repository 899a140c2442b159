"""A planned function under `grad`: the backward pass is planned too, together with the forward pass.

Differentiating planned equations would keep what was to be recomputed. So a planned function in a larger one is one
operation, with rules of its own (JAX calls that a `VJPHiPrimitive`), until it is lowered. If its one differentiable
result is a number, as a loss is, its value and gradient are one program within the budget. Otherwise the forward pass
keeps nothing but the arguments, and the backward pass, which runs it again, is a program within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import hijax
from jax.experimental.hijax import VJPHiPrimitive, Zero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._program.jaxpr import struct
from recompute_jax._remat.report import PlannedProgram

_instantiate: Any = hijax.instantiate_zeros  # which has no types

Planning = Callable[[ClosedJaxpr], PlannedProgram]


class Call:
    """A function without constants that is planned when it is needed, and those that are derived from it."""

    def __init__(self, closed: ClosedJaxpr, planning: Planning, derived: Planning) -> None:
        self.closed = closed
        self._planning = planning
        self._planned: PlannedProgram | None = None
        self._derivative = derived
        self._derived: dict[Any, PlannedCall] = {}

    def run(self, *args: Any) -> tuple[Any, ...]:
        """As planned."""
        if self._planned is None:
            self._planned = self._planning(self.closed)
        if self._planned.emitted is None:
            return self.plain(*args)
        return tuple(self._planned(args))

    def plain(self, *args: Any) -> tuple[Any, ...]:
        """As it is."""
        return tuple(jaxpr_as_fun(self.closed)(*args))

    def made_of(self, closed: ClosedJaxpr) -> PlannedCall:
        """Another function, made of this one, planned within the same budget."""
        return PlannedCall(Call(closed, self._derivative, self._derivative))

    def derived(self, key: Any, fn: Callable[..., Any], avals: Sequence[Any]) -> PlannedCall:
        """A function of arguments of these types that is made of this one, planned within the same budget."""
        if key not in self._derived:
            closed = jax.make_jaxpr(fn)(*map(struct, avals))
            self._derived[key] = self.made_of(closed)
        return self._derived[key]

    def __repr__(self) -> str:
        return "Call"

    def of(self, places: Sequence[int], args: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """The function as it is, of the arguments at these places alone."""

        def run(*chosen: Any) -> tuple[Any, ...]:
            whole = list(args)
            for at, each in zip(places, chosen, strict=True):
                whole[at] = each
            return self.plain(*whole)

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

    def expand(self, *args: Any) -> tuple[Any, ...]:
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
        places = tuple([at for at, each in enumerate(moving) if each is not False and _is_inexact(self.in_avals[at])])
        floats = [at for at, aval in enumerate(self.out_aval) if _is_inexact(aval)]
        if len(floats) == 1 and self.out_aval[floats[0]].shape == () and _is_real(self.out_aval[floats[0]]):
            together = self.call.derived(places, self._value_and_gradient(places, floats[0]), self.in_avals)
            found = together(*args)
            count = len(self.out_aval)
            return found[:count], _Slopes(places, floats[0], found[count:])
        return self(*args), _Arguments(places, args)

    def vjp_bwd_retval(self, kept: Any, slopes: Any) -> tuple[Any, ...]:
        results = [Zero(aval.to_ct_aval()) for aval in self.in_avals]
        if isinstance(kept, _Slopes):
            factor = slopes[kept.result]
            found = [] if isinstance(factor, Zero) else [each * factor.astype(each.dtype) for each in kept.gradients]
        else:
            floats = [at for at, aval in enumerate(self.out_aval) if _is_inexact(aval)]
            given = [_instantiate(slopes[at]) for at in floats]
            avals = [*self.in_avals, *(self.out_aval[at] for at in floats)]
            backward = self.call.derived(("back", kept.places), self._backward(kept.places, floats), avals)
            found = backward(*kept.args, *given)
        for at, each in zip(kept.places, found, strict=False):
            results[at] = each
        return tuple(results)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        places = [at for at, aval in enumerate(self.in_avals) if _is_inexact(aval)]
        moving = tuple([_instantiate(tangents[at]) for at in places])
        made, slopes = jax.jvp(self._planned_of(places, primals), tuple([primals[at] for at in places]), moving)
        return made, tuple(map(_or_zero, slopes, self.out_aval))

    def lin(self, moving: Any, *args: Any) -> tuple[Any, Any]:
        places = [at for at, aval in enumerate(self.in_avals) if _is_inexact(aval)]
        return jax.linearize(self._planned_of(places, args), *[args[at] for at in places])

    def linearized(self, kept: Any, *tangents: Any) -> tuple[Any, ...]:
        places = [at for at, aval in enumerate(self.in_avals) if _is_inexact(aval)]
        slopes = kept(*[_instantiate(tangents[at]) for at in places])
        return tuple(map(_or_zero, slopes, self.out_aval))

    def _planned_of(self, places: Sequence[int], args: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        def run(*chosen: Any) -> tuple[Any, ...]:
            whole = list(args)
            for at, each in zip(places, chosen, strict=True):
                whole[at] = each
            return self.call.run(*whole)

        return run

    def _value_and_gradient(self, places: Sequence[int], result: int) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any) -> tuple[Any, ...]:
            def number(*chosen: Any) -> tuple[Any, tuple[Any, ...]]:
                made = self.call.of(places, args)(*chosen)
                return made[result], made

            chosen = [args[at] for at in places]
            slopes, made = jax.grad(number, argnums=tuple(range(len(places))), has_aux=True)(*chosen)
            return (*made, *slopes)

        return run

    def _backward(self, places: Sequence[int], floats: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
        count = len(self.in_avals)

        def run(*values: Any) -> tuple[Any, ...]:
            args, given = values[:count], values[count:]

            def chosen(*moving: Any) -> list[Any]:
                made = self.call.of(places, args)(*moving)
                return [made[at] for at in floats]

            _, back = jax.vjp(chosen, *[args[at] for at in places])
            return tuple(back(list(given)))

        return run


@jax.tree_util.register_pytree_node_class
class _Slopes:
    """What the forward pass keeps of a number: its gradients."""

    def __init__(self, places: tuple[int, ...], result: int, gradients: Any) -> None:
        self.places, self.result, self.gradients = places, result, gradients

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.gradients,), (self.places, self.result)

    @classmethod
    def tree_unflatten(cls, about: Any, children: Any) -> _Slopes:
        return cls(*about, *children)


@jax.tree_util.register_pytree_node_class
class _Arguments:
    """What the forward pass keeps otherwise."""

    def __init__(self, places: tuple[int, ...], args: Any) -> None:
        self.places, self.args = places, args

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.args,), self.places

    @classmethod
    def tree_unflatten(cls, about: Any, children: Any) -> _Arguments:
        return cls(about, *children)


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _is_real(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _or_zero(slope: Any, aval: Any) -> Any:
    return slope if _is_inexact(aval) else Zero(aval.to_tangent_aval())
