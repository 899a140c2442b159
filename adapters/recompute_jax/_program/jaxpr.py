"""A jaxpr as one list of equations: calls are inlined, equations that nothing needs are left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.ref import AbstractRef

import recompute as rc

INTERNAL: Final = tuple(
    [f"{folder}{os.sep}" for folder in (Path(jax.__file__).parent, Path(rc.__file__).parent, Path(__file__).parents[1])]
)
"""Folders of code that is not the caller's: JAX's, and this library's."""

Atom = Var | Literal

_CALLS: Final = {
    "jit": "jaxpr",
    "pjit": "jaxpr",  # its name before JAX 0.7
    "call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",  # its name before
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


class _Call:
    """A jaxpr being inlined: which equation is next, what its variables are called outside, who calls it."""

    __slots__ = ("equations", "names", "outvars", "results", "source")

    def __init__(self, jaxpr: Jaxpr, names: dict[Var, Atom], results: Sequence[Var], source: Any) -> None:
        self.equations: Iterator[JaxprEqn] = iter(jaxpr.eqns)
        self.outvars = jaxpr.outvars
        self.names = names
        self.results = results  # what the caller calls them
        self.source = source  # the line of the call; None: there is none


def flatten(closed: ClosedJaxpr, *, inline_custom: bool, source: Any = None) -> Flat:
    """The equations of `closed` in order, those of nested calls instead of the calls.

    Names for `jax.checkpoint` are left out. Inlined are `jit`, `closed_call` and `checkpoint`, and with `inline_custom`
    also `custom_jvp`, `custom_vjp` and `custom_vmap`, whose rules are lost thereby. A `jit` with shardings, layouts or
    compiler options of its own stays as it is, but nothing is donated to it. Left out are equations without effects
    whose results nothing needs. Equations made in JAX's own code have the source of the call that they are in; `source`
    is that of the call of `closed`. Raises NotImplementedError for refs that live longer than one equation. O(equations
    after inlining).
    """
    inlined = {**_CALLS, **_CUSTOM} if inline_custom else _CALLS
    constvars: list[Var] = []
    consts: list[Any] = []
    constant: dict[int, Var] = {}  # by id of the constant: a jaxpr may be called many times

    def names_of(called: Jaxpr, constants: Sequence[Any], atoms: Sequence[Atom]) -> dict[Var, Atom]:
        names = dict(zip(called.invars, atoms, strict=True))
        for var, const in zip(called.constvars, constants, strict=True):
            known = constant.get(id(const))
            if known is None:
                known = constant[id(const)] = Var(var.aval)
                constvars.append(known)
                consts.append(const)
            names[var] = known
        return names

    invars = [Var(each.aval) for each in closed.jaxpr.invars]
    top = _Call(closed.jaxpr, names_of(closed.jaxpr, closed.consts, invars), (), source)
    calls = [top]
    equations: list[JaxprEqn] = []
    while True:
        call = calls[-1]
        equation = next(call.equations, None)
        if equation is None:
            outvars = [_named(each, call.names) for each in call.outvars]
            calls.pop()
            if not calls:
                break
            calls[-1].names.update(zip(call.results, outvars, strict=True))
            continue
        atoms = [_named(each, call.names) for each in equation.invars]
        made = _source(equation, call.source)
        inner = planned_call(equation)
        jaxpr_of = inlined.get(equation.primitive.name)
        if jaxpr_of is not None and _only_calls(equation):
            inner = equation.params[jaxpr_of]
        if inner is not None:
            called, constants = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            calls.append(_Call(called, names_of(called, constants, atoms), equation.outvars, made))
            continue
        if _is_name(equation):
            call.names.update(zip(equation.outvars, atoms, strict=True))
            continue
        results = [Var(each.aval) for each in equation.outvars]
        call.names.update(zip(equation.outvars, results, strict=True))
        params = equation.params
        if any(params.get("donated_invars", ())):
            params = {**params, "donated_invars": (False,) * len(atoms)}
        equations.append(equation.replace(invars=atoms, outvars=results, params=params, source_info=made))
    for each in [*constvars, *invars]:
        refuse_ref(each.aval)
    for equation in equations:
        for each in equation.outvars:
            refuse_ref(each.aval, equation)
    return Flat(constvars, consts, invars, outvars, _needed(equations, outvars))


def effects(equation: JaxprEqn) -> list[Any]:
    """What the equation does beside its results. Refs that live inside it are nobody's business."""
    return [each for each in equation.effects if type(each).__name__ != "InternalMutableArrayEffect"]


def planned_call(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a planned function in a larger one calls, or a `jax.checkpoint` with the flag `jax_remat3`."""
    return getattr(equation.params.get("_prim"), "jaxpr", None)


def _is_name(equation: JaxprEqn) -> bool:
    """Whether it is a `checkpoint_name`, with or without that flag."""
    return equation.primitive.name == "name" or type(equation.params.get("_prim")).__name__ == "CheckpointName"


def bind(equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The results of the equation for these operands, one for each of its invars."""
    params = bind_params(equation)
    with equation.ctx.manager:
        results = equation.primitive.bind(*params[0], *values, **params[1])  # type: ignore[no-untyped-call]
    return list(results) if equation.primitive.multiple_results else [results]


def bind_params(equation: JaxprEqn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `bind` of the primitive takes beside the operands: before them, and by name."""
    params = equation.primitive.get_bind_params(equation.params)  # type: ignore[no-untyped-call]
    if isinstance(params, dict):
        return (), params
    return tuple(params[0]), params[1]  # before JAX 0.8


def lifted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same with its constants as first arguments."""
    if not closed.consts:
        return closed
    count = len(closed.consts)

    def run(*values: Any) -> Any:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, values[:count]))(*values[count:])

    types = [each.aval for each in (*closed.jaxpr.constvars, *closed.jaxpr.invars)]
    made: ClosedJaxpr = jax.make_jaxpr(run)(*map(struct, types))
    return made


def struct(aval: Any) -> Any:
    """What stands for an array of this type when a function is traced: the type itself, with its sharding, memory

    and varying axes. Raises NotImplementedError for a ref.
    """
    refuse_ref(aval)
    return aval


def refuse_ref(aval: Any, maker: JaxprEqn | None = None) -> None:
    """Raise NotImplementedError if it is the type of a mutable array; `maker` is what made it."""
    if isinstance(aval, AbstractRef):
        origin = "an argument or a constant"
        if maker is not None:
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
        all(type(each).__name__ == "UnspecifiedValue" for each in shardings)
        and all(each is None for each in layouts)
        and not params.get("compiler_options_kvs")
    )


def _needed(equations: list[JaxprEqn], outvars: Sequence[Atom]) -> list[JaxprEqn]:
    """Without those that have no effects and whose results nothing needs."""
    needed = {each for each in outvars if isinstance(each, Var)}
    kept: list[JaxprEqn] = []
    for equation in reversed(equations):
        if effects(equation) or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(each for each in equation.invars if isinstance(each, Var))
    kept.reverse()
    return kept


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
