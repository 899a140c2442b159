"""A jaxpr as one list of equations, calls inlined and without what nothing needs; and what types of values say."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr  # it has no public name
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.ref import AbstractRef

import recompute as rc

INTERNAL: Final = tuple(
    [f"{folder}{os.sep}" for folder in (Path(jax.__file__).parent, Path(rc.__file__).parent, Path(__file__).parents[1])]
)
"""Folders of code that is not the caller's: JAX's, and this library's."""

Atom = Var | Literal

CALLS: Final = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # instead of these two since JAX 0.11
}
"""Primitives that only call, and where they keep what they call."""

_CUSTOM: Final = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vmap_call": "call"}
"""Primitives that call, and have rules of their own for derivatives or batches."""


class Flat(NamedTuple):
    """A closed jaxpr in which no variable is bound twice. Outputs may be inputs, constants and literals."""

    constvars: list[Var]
    consts: list[Any]
    invars: list[Var]
    outvars: list[Atom]
    equations: list[JaxprEqn]

    def trace(self, run: Callable[..., Any]) -> ClosedJaxpr:
        """A function of the constants and arguments, traced with these constants for arguments of these types."""
        return trace(partial(run, *self.consts), [var.aval for var in self.invars])

    def rewritten(self, run_one: Callable[[JaxprEqn, dict[Var, Any]], None]) -> ClosedJaxpr:
        """The same function, with something else instead of `run_equation` for each equation."""

        def run(*sources: Any) -> list[Any]:
            env: dict[Var, Any] = dict(zip([*self.constvars, *self.invars], sources, strict=True))
            for equation in self.equations:
                run_one(equation, env)
            return [read(atom, env) for atom in self.outvars]

        return self.trace(run)


def flatten(closed: ClosedJaxpr, *, inline_custom: bool = False, source: Any = None) -> Flat:
    """The equations of `closed` in order, those of nested calls instead of the calls.

    Names for `jax.checkpoint` are left out. Inlined are `jit`, `closed_call` and `checkpoint`, and with `inline_custom`
    also `custom_jvp`, `custom_vjp` and `custom_vmap`, whose rules are lost thereby. A `jit` with shardings, layouts or
    compiler options of its own stays as it is, but nothing is donated to it. Left out are equations without effects
    whose results nothing needs. Equations made in JAX's own code have the source of the call that they are in; `source`
    is that of the call of `closed`. Raises NotImplementedError for refs that live longer than one equation. O(equations
    after inlining).
    """
    inlined = {**CALLS, **_CUSTOM} if inline_custom else CALLS
    constant: dict[int, tuple[Var, Any]] = {}  # by id of the constant: a jaxpr may be called many times
    equations: list[JaxprEqn] = []

    def inline(called: ClosedJaxpr | Jaxpr, atoms: Sequence[Atom], source: Any) -> list[Atom]:
        jaxpr, consts = (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, atoms, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            names[var] = constant.setdefault(id(const), (Var(var.aval), const))[0]
        for equation in jaxpr.eqns:
            operands = [_named(atom, names) for atom in equation.invars]
            made = _source(equation, source)
            inner = planned_call(equation)
            place = inlined.get(equation.primitive.name)
            if place is not None and _only_calls(equation):
                inner = equation.params[place]
            results: list[Atom] = list(operands)
            if inner is not None:
                results = inline(inner, operands, made)
            elif not _is_name(equation):
                outvars = [Var(var.aval) for var in equation.outvars]
                params = equation.params
                if any(params.get("donated_invars", ())):
                    params = {**params, "donated_invars": (False,) * len(operands)}
                equations.append(equation.replace(invars=operands, outvars=outvars, params=params, source_info=made))
                results = list(outvars)
            names.update(zip(equation.outvars, results, strict=True))
        return [_named(atom, names) for atom in jaxpr.outvars]

    invars = [Var(var.aval) for var in closed.jaxpr.invars]
    outvars = inline(closed, invars, source)
    constvars = [var for var, _ in constant.values()]
    for var in [*constvars, *invars]:
        refuse_ref(var.aval)
    for equation in equations:
        for var in equation.outvars:
            refuse_ref(var.aval, equation)
    consts = [const for _, const in constant.values()]
    return Flat(constvars, consts, invars, outvars, needed(equations, outvars)[0])


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Those that are no literals, in order."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def effects(equation: JaxprEqn) -> list[Any]:
    """What the equation does beside its results. Refs that live inside it do not count."""
    return [effect for effect in equation.effects if type(effect).__name__ != "InternalMutableArrayEffect"]


def planned_call(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a planned function in a larger one calls, or a `jax.checkpoint` with the flag `jax_remat3`."""
    return getattr(equation.params.get("_prim"), "jaxpr", None)


def scan_operands(equation: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many carries; these come next, and the others are stacks."""
    params = equation.params
    if "num_carry" in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = map(len, params["ft_in"].unpack())
    return constants, carries


def _is_name(equation: JaxprEqn) -> bool:
    """Whether it is a `checkpoint_name`, with or without that flag."""
    return equation.primitive.name == "name" or type(equation.params.get("_prim")).__name__ == "CheckpointName"


def read(atom: Atom, env: Mapping[Var, Any]) -> Any:
    """The value of an operand."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def run_equation(equation: JaxprEqn, env: dict[Var, Any]) -> None:
    """Add the results of an equation to the values that there are."""
    results = bind(equation, [read(atom, env) for atom in equation.invars])
    env.update(zip(equation.outvars, results, strict=True))


def bind(equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The results of the equation for these operands, one for each of its invars."""
    params = equation.primitive.get_bind_params(equation.params)  # type: ignore[no-untyped-call]
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **params)  # type: ignore[no-untyped-call]
    return list(results) if equation.primitive.multiple_results else [results]


def lifted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same with its constants as first arguments."""
    return ClosedJaxpr(convert_constvars_jaxpr(closed.jaxpr), ()) if closed.consts else closed


def trace(fn: Callable[..., Any], avals: Iterable[Any]) -> ClosedJaxpr:
    """The function for arguments of these types: with their shardings, memory and varying axes.

    Raises NotImplementedError for the type of a ref.
    """
    avals = list(avals)
    for aval in avals:
        refuse_ref(aval)
    return jax.make_jaxpr(fn)(*avals)


def typed(value: Any, aval: Any) -> Any:
    """The value with the weak type that it should have: equations of literals alone forget it."""
    weak = bool(getattr(aval, "weak_type", False))
    if bool(getattr(jax.typeof(value), "weak_type", False)) == weak:
        return value
    return lax.convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=weak, sharding=None)


def refuse_ref(aval: Any, maker: JaxprEqn | Primitive | None = None) -> None:
    """Raise NotImplementedError if it is the type of a mutable array; `maker` is what made it."""
    if isinstance(aval, AbstractRef):
        origin = "an argument or a constant"
        if isinstance(maker, Primitive):
            origin = f"made by `{maker.name}`"
        elif maker is not None:
            place = where(maker)
            origin = f"made by `{maker.primitive.name}`{f' at {place}' if place else ''}"
        raise NotImplementedError(
            f"the function uses a mutable array ({aval.str_short()}, {origin}): what is written to it cannot be "
            "recomputed; use x.at[...].set(...), or keep refs inside one jax.lax.scan, while_loop or cond"
        )


def _source(equation: JaxprEqn, outer: Any) -> Any:
    """What made the equation, or what called that, if it is all in JAX."""
    own = equation.source_info
    return own if outer is None or source_info_util.summarize(own) else outer


def _named(atom: Atom, names: dict[Var, Atom]) -> Atom:
    return names[atom] if isinstance(atom, Var) else atom


def _only_calls(equation: JaxprEqn) -> bool:
    """Whether a call has no say in where and how what it calls is compiled."""
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
        and all(layout is None for layout in layouts)
        and not params.get("compiler_options_kvs")
    )


def needed(
    equations: Sequence[JaxprEqn], wanted: Iterable[Atom], given: Collection[Var] = ()
) -> tuple[list[JaxprEqn], list[Var]]:
    """Those that have effects, or make what is wanted; and what they read that is `given`, or that none of them makes.

    O(equations).
    """
    reads = dict.fromkeys(variables(wanted))  # in an order that is the same in every process
    kept: list[JaxprEqn] = []
    for equation in reversed(equations):
        made = [var for var in equation.outvars if var in reads and var not in given]
        if made or effects(equation):
            kept.append(equation)
            for var in made:
                del reads[var]
            reads.update(dict.fromkeys(variables(equation.invars)))
    kept.reverse()
    return kept, list(reads)


def where(eqn: Any) -> str:
    """The line outside of JAX that made an equation."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*INTERNAL, "<")):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name})"
    return ""


def short(aval: Any) -> str:
    """A type as "float32[8,128]"."""
    return str(aval.str_short())


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
    return jax.device_put(made, aval.memory_space) if is_elsewhere(aval) else made


def is_elsewhere(aval: Any) -> bool:
    """Whether such a value is in another memory than that of the device."""
    return bool(getattr(aval, "memory_space", jax.memory.Space.Device) != jax.memory.Space.Device)


def varying_axes(aval: Any) -> tuple[str, ...]:
    """The axes of a `shard_map` around over which the value differs."""
    return tuple(sorted(getattr(getattr(aval, "manual_axis_type", None), "varying", ())))


def explicit_sharding(aval: Any) -> Any:
    """The sharding that is part of the type; None: there is none."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and any(sharding.spec) else None
