"""A function traced for arguments of some types, once for all that `jax.jit` would compile once for; and its plan.

A plan that was made before is followed: it is in a file, or where JAX keeps what it compiles.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import update_wrapper
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import jax
from jax import tree_util
from jax._src.config import trace_context  # what jit compiles anew for; there is no public way to ask
from jax._src.core import NamedAxisEffect  # it has no public name
from jax.extend.core import ClosedJaxpr

from recompute import BudgetError
from recompute.planners import PlanError
from recompute_jax._program.calls import Chosen, Shardings, released
from recompute_jax._program.jaxpr import flatten, lifted, refuse_ref, short
from recompute_jax._program.segments import segment
from recompute_jax._remat.differentiated import PlannedCall
from recompute_jax._remat.options import Options
from recompute_jax._remat.recipe import fingerprint, follow
from recompute_jax._remat.report import PlannedProgram, RematPlan, SavedPlan, Trial, made_with, report_of
from recompute_jax._remat.schedules import Argument, Asked, look
from recompute_jax._remat.search import Search


def _stored(asked: Asked) -> PlannedProgram:
    """The plan that some process made of this program with these options; if there is none, what a search gives."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    if not directory or "://" in directory or asked.options.costs == "measured":
        return Search(asked).make()
    path = Path(directory) / f"recompute-plan-{_key(asked)}.json"
    try:
        return _follow(asked, SavedPlan.load(path))
    except (OSError, PlanError, BudgetError):
        made = Search(asked).make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=path.stem) as work:  # so that half a plan is never seen
            file = Path(work, path.name)
            made.report.save(file)
            os.replace(file, path)
    except OSError as error:
        warnings.warn(f"the plan of {asked.name} could not be kept in {directory}: {error}", stacklevel=2)
    return made


def _key(asked: Asked) -> str:
    """Of everything that the plan depends on."""
    parts = [
        fingerprint(flatten(asked.closed)),
        made_with(asked.options.flags),
        asked.options,
        list(asked.arguments),
        jax.devices()[0].device_kind,
        os.environ.get("XLA_FLAGS"),
    ]
    return sha256(repr(parts).encode()).hexdigest()


def _follow(asked: Asked, saved: SavedPlan) -> PlannedProgram:
    """The function as the saved plan says.

    It is compiled for a look at its memory only if the plan was made with other versions or options. Raises PlanError
    if the plan is of another program, BudgetError if it needs more than its budget here.
    """
    flat = flatten(asked.closed)
    if fingerprint(flat) != saved.program:
        raise PlanError(
            f"{asked.name}: the plan, of {saved.name}, was made for another program: the function, the shapes and "
            "types of its arguments, JAX's configuration or its version differ; plan again with planned(fn, budget)"
        )
    recipe = saved.recipe
    emitted, segments = follow(flat, recipe, saved.name) if recipe else (None, segment(flat, saved.name))
    trials: list[Trial] = []
    flags, compiled = asked.options.flags, saved.compiled
    if emitted is not None and (now := made_with(flags)) != saved.made_with:
        trials.append(look("the saved plan", emitted, asked.arguments, flags))
        compiled = trials[0].compiled
        if compiled > saved.budget:
            raise BudgetError(
                f"{asked.name}: the plan was made with {saved.made_with}; with {now} it needs {compiled:,} bytes, "
                f"more than its budget of {saved.budget:,}: plan again with planned(fn, budget)"
            )
    order = recipe.order if recipe else range(len(segments.segments))
    seconds = sum(trial.seconds for trial in trials)
    report = report_of(saved, segments, order, compiled=compiled, trials=tuple(trials), seconds=seconds)
    return PlannedProgram(report, emitted)


_NOT_TRACEABLE: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Traced(NamedTuple):
    """The function for arguments of some types."""

    asked: Asked
    tree: Any
    """The structure of the results."""
    leaves: list[Any]
    """Its arguments."""
    call: PlannedCall
    planned: list[PlannedProgram]
    """With its plan, once that is made."""


class Traces:
    """What was traced of one function, by types of arguments, and planned."""

    def __init__(self, fn: Callable[..., Any], options: Options, jit_options: dict[str, Any]) -> None:
        self._fn = fn
        self.run = released(fn)
        """The function, of arguments in which functions are held."""
        self._name = name_of(fn)
        self._options = options, replace(options, compiler_options={})
        """Of what is compiled here, and of what is part of something that JAX compiles."""
        self._donated = Chosen(fn, jit_options["donate_argnums"], jit_options["donate_argnames"])
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
            traced.planned.append(_make(traced.asked, self.latest))
        self.latest[:] = [traced.planned[0].report]
        return traced.planned[0]

    def __call__(self, args: Any, kwargs: Any, inside: bool, shardings: Shardings) -> Traced:
        """The function for such arguments. Called while JAX traces."""
        given, structure = tree_util.tree_flatten((args, kwargs))
        dynamic = [isinstance(leaf, jax.core.Tracer) for leaf in given]
        leaves = [leaf for leaf, traced in zip(given, dynamic, strict=True) if traced]
        fixed = [None if traced else leaf for leaf, traced in zip(given, dynamic, strict=True)]

        def run(*values: Any) -> Any:
            fill = iter(values)
            whole = [next(fill) if traced else leaf for leaf, traced in zip(fixed, dynamic, strict=True)]
            args, kwargs = tree_util.tree_unflatten(structure, whole)
            return self.run(*args, **kwargs)

        update_wrapper(run, self._fn, updated=())  # JAX's errors name the function and its line
        avals = [jax.typeof(leaf) for leaf in leaves]
        for aval in avals:
            refuse_ref(aval)
            if not all(isinstance(size, int) for size in aval.shape):
                raise ValueError(
                    f"{self._name}: planned counts bytes, so shapes must be numbers, not those of {short(aval)}: "
                    "export a planned function for each shape, or the function without a plan"
                )
        key = inside, shardings, *_signature(args, kwargs), tuple(avals), jax.default_backend(), trace_context()
        known = self._known.get(key)
        if known is not None:
            return known._replace(leaves=leaves)
        try:
            closed, shape = jax.make_jaxpr(run, return_shape=True)(*avals)
        except _NOT_TRACEABLE as error:
            error.add_note(
                f"recompute_jax.planned traces {self._name} as jax.jit does, without values: use lax.cond or "
                "jnp.where for what depends on them, or static_argnums"
            )
            raise
        _refuse_batch_axes(closed, self._name)
        donated: list[bool] = []
        for name, arg in (*enumerate(args), *sorted(kwargs.items())):
            donated += [self._donated.has(name, len(args))] * len(tree_util.tree_leaves(arg))
        places = dict(shardings)
        flags = [Argument(donated[at], places.get(at)) for at, traced in enumerate(dynamic) if traced]
        asked = Asked(closed, self._name, self._options[inside], flags)
        traced = Traced(asked, tree_util.tree_structure(shape), leaves, _call(asked, self.latest), [])
        if not any(isinstance(const, jax.core.Tracer) for const in closed.consts):
            self._known[key] = traced._replace(leaves=[])
        return traced


def _call(asked: Asked, latest: list[RematPlan]) -> PlannedCall:
    """The function as one operation of its constants and arguments."""
    name, options = asked.name, asked.options  # what keeps no traced value
    undonated = [argument._replace(donated=False) for argument in asked.arguments]
    arguments = [*[Argument()] * len(asked.closed.consts), *undonated]

    def planned(closed: ClosedJaxpr) -> PlannedProgram:
        return _make(Asked(closed, name, options, arguments), latest)

    def derived(closed: ClosedJaxpr) -> PlannedProgram:
        more = [Argument()] * (len(closed.in_avals) - len(arguments))
        searched = replace(options, saved=None)
        return _make(Asked(closed, f"the gradient of {name}", searched, [*arguments, *more]), latest)

    return PlannedCall(lifted(asked.closed), planned, derived)


def _make(asked: Asked, latest: list[RematPlan]) -> PlannedProgram:
    saved = asked.options.saved
    made = _stored(asked) if saved is None else _follow(asked, saved)
    latest[:] = [made.report]
    return made


def _refuse_batch_axes(closed: ClosedJaxpr, name: str) -> None:
    """Raise, if a function asks about the others of a batch that it is one of: alone it cannot be compiled."""
    names = {effect.name for effect in closed.effects if isinstance(effect, NamedAxisEffect)}
    unknown = sorted(map(repr, names.difference(jax.sharding.get_abstract_mesh().axis_names)))
    if unknown:
        raise NotImplementedError(
            f"{name}: a planned function cannot use an axis of a vmap around it (axis_name={', '.join(unknown)}), as "
            "its budget would be for one of a batch: plan the batch, planned(jax.vmap(fn, axis_name=...), budget)"
        )


def _signature(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The structure of the arguments that are traced, and the others, which jit wants to be hashable as a whole."""
    named = [*enumerate(args), *sorted(kwargs.items())]
    leaves = {name: tree_util.tree_leaves(arg) for name, arg in named}
    is_traced = lambda leaf: isinstance(leaf, jax.core.Tracer)
    static = {name for name, values in leaves.items() if values and not any(map(is_traced, values))}
    traced = [(name, None if name in static else arg) for name, arg in named]
    fixed = tuple([(name, type(arg), arg) for name, arg in named if name in static])
    return tree_util.tree_structure(traced), fixed


def name_of(fn: Any) -> str:
    """What reports and errors call a function."""
    return str(getattr(fn, "__name__", type(fn).__name__))
