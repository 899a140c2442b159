"""A function traced for arguments of some types, once for all that `jax.jit` would compile once for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Final, NamedTuple

import jax
from jax import tree_util
from jax.extend.core import ClosedJaxpr

from recompute_jax._program.jaxpr import lifted, short, struct
from recompute_jax._remat.compile import Argument
from recompute_jax._remat.differentiated import Call, PlannedCall
from recompute_jax._remat.followed import follow_saved, stored
from recompute_jax._remat.options import Options
from recompute_jax._remat.report import PlannedProgram, RematPlan
from recompute_jax._remat.search import make
from recompute_jax._remat.surroundings import Shardings, context, released

_NOT_TRACEABLE: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Traced(NamedTuple):
    """The function for arguments of some types."""

    closed: ClosedJaxpr
    tree: Any
    """The structure of the results."""
    arguments: list[Argument]
    leaves: list[Any]
    """Its arguments."""
    call: PlannedCall
    planned: list[PlannedProgram]
    """With its plan, once that is made."""
    inside: bool


class Traces:
    """What was traced of one function, by types of arguments, and planned."""

    def __init__(self, fn: Callable[..., Any], options: Options, jit_options: dict[str, Any]) -> None:
        self._fn = fn
        self._run = released(fn)
        self._name = name_of(fn)
        self._options = options, replace(options, compiler_options={})
        """Of what is compiled here, and of what is part of something that JAX compiles."""
        self._jit_options = jit_options
        self._known: dict[Any, Traced] = {}
        self.latest: list[RematPlan] = []
        """The plan that was made, or asked for, last."""

    def clear(self) -> None:
        """Forget them."""
        self._known.clear()
        self.latest.clear()

    def plan(self, traced: Traced) -> PlannedProgram:
        """The plan, made once."""
        if not traced.planned:
            options = self._options[traced.inside]
            traced.planned.append(_make(traced.closed, self._name, options, traced.arguments, self.latest))
        self.latest[:] = [traced.planned[0].report]
        return traced.planned[0]

    def __call__(self, args: Any, kwargs: Any, inside: bool, shardings: Shardings) -> Traced:
        """The function for such arguments. Called while JAX traces."""
        given, structure = tree_util.tree_flatten((args, kwargs))
        dynamic = [isinstance(each, jax.core.Tracer) for each in given]
        leaves = [each for each, traced in zip(given, dynamic, strict=True) if traced]
        fixed = [None if traced else each for each, traced in zip(given, dynamic, strict=True)]

        def run(*values: Any) -> Any:
            fill = iter(values)
            whole = [next(fill) if traced else each for each, traced in zip(fixed, dynamic, strict=True)]
            args, kwargs = tree_util.tree_unflatten(structure, whole)
            return self._run(*args, **kwargs)

        update_wrapper(run, self._fn, updated=())  # JAX's errors name the function and its line
        avals = [jax.typeof(each) for each in leaves]
        for aval in avals:
            if not all(isinstance(size, int) for size in aval.shape):
                raise ValueError(
                    f"{self._name}: planned counts bytes, so shapes must be numbers, not those of {short(aval)}: "
                    "export a planned function for each shape, or the function without a plan"
                )
        key = inside, shardings, *_signature(args, kwargs), tuple(avals), jax.default_backend(), context()
        known = self._known.get(key)
        if known is not None:
            return known._replace(leaves=leaves)
        try:
            closed, shape = jax.make_jaxpr(run, return_shape=True)(*map(struct, avals))
        except _NOT_TRACEABLE as error:
            error.add_note(
                f"recompute_jax.planned traces {self._name} as jax.jit does, without values: use lax.cond or "
                "jnp.where for what depends on them, or static_argnums"
            )
            raise
        donated = _donated(args, kwargs, self._jit_options)
        places = dict(shardings)
        flags = [Argument(donated[at], places.get(at)) for at, traced in enumerate(dynamic) if traced]
        call = self._call(closed, flags, inside)
        found = Traced(closed, tree_util.tree_structure(shape), flags, leaves, call, [], inside)
        if not any(isinstance(each, jax.core.Tracer) for each in closed.consts):
            self._known[key] = found._replace(leaves=[])
        return found

    def _call(self, closed: ClosedJaxpr, flags: Sequence[Argument], inside: bool) -> PlannedCall:
        """The function as one operation of its constants and arguments."""
        whole = lifted(closed)
        name, options, latest = self._name, self._options[inside], self.latest  # what keeps no traced value
        arguments = [*[Argument()] * len(closed.consts), *[each._replace(donated=False) for each in flags]]

        def planned(closed: ClosedJaxpr) -> PlannedProgram:
            return _make(closed, name, options, arguments, latest)

        def derived(closed: ClosedJaxpr) -> PlannedProgram:
            more = [Argument()] * (len(closed.in_avals) - len(arguments))
            searched = replace(options, saved=None)
            return _make(closed, f"the gradient of {name}", searched, [*arguments, *more], latest)

        return PlannedCall(Call(ClosedJaxpr(whole.jaxpr, ()), planned, derived))


def _make(
    closed: ClosedJaxpr, name: str, options: Options, arguments: Sequence[Argument], latest: list[RematPlan]
) -> PlannedProgram:
    if options.saved is None:
        made = stored(closed, name, options, arguments, lambda: make(closed, name, options, arguments))
    else:
        made = follow_saved(closed, name, options.saved, options, arguments)
    latest[:] = [made.report]
    return made


def _signature(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The structure of the arguments that are traced, and the others, which jit wants to be hashable as a whole."""
    named = [*enumerate(args), *sorted(kwargs.items())]
    leaves = {name: tree_util.tree_leaves(arg) for name, arg in named}
    static = {
        name for name, found in leaves.items() if found and not any(isinstance(each, jax.core.Tracer) for each in found)
    }
    traced = [(name, None if name in static else arg) for name, arg in named]
    fixed = tuple([(name, type(arg), arg) for name, arg in named if name in static])
    return tree_util.tree_structure(traced), fixed


def _donated(args: Any, kwargs: Any, jit_options: dict[str, Any]) -> list[bool]:
    """For each leaf whether it is donated."""
    numbers = jit_options["donate_argnums"]
    names = jit_options["donate_argnames"]
    chosen = {numbers} if isinstance(numbers, int) else set(numbers or ())
    chosen = {each % len(args) for each in chosen if args and -len(args) <= each < len(args)}
    named = {names} if isinstance(names, str) else set(names or ())
    flags: list[bool] = []
    for at, arg in enumerate(args):
        flags += [at in chosen] * len(tree_util.tree_leaves(arg))
    for name in sorted(kwargs):
        flags += [name in named] * len(tree_util.tree_leaves(kwargs[name]))
    return flags


def name_of(fn: Any) -> str:
    """What reports and errors call a function."""
    return str(getattr(fn, "__name__", type(fn).__name__))
