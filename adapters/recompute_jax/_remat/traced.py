"""A function traced for arguments of some types, once for all that `jax.jit` would compile once for; and its plan.

A plan that was made before is followed: it is in a file, or where JAX keeps what it compiles.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
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
from recompute_jax._remat.differentiated import Call, PlannedCall
from recompute_jax._remat.options import Options
from recompute_jax._remat.recipe import fingerprint, follow
from recompute_jax._remat.report import PlannedProgram, RematPlan, SavedPlan, Trial, made_with, report_of
from recompute_jax._remat.schedules import Argument, look
from recompute_jax._remat.search import make


def stored(
    closed: ClosedJaxpr, name: str, options: Options, arguments: Sequence[Argument], make: Callable[[], PlannedProgram]
) -> PlannedProgram:
    """The plan that some process made of this program with these options; if there is none, what `make` gives."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    if not directory or "://" in directory or options.costs == "measured":
        return make()
    path = Path(directory) / f"recompute-plan-{_key(closed, options, arguments)}.json"
    try:
        return follow_saved(closed, name, SavedPlan.load(path), options, arguments)
    except (OSError, PlanError, BudgetError):
        made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=path.stem) as work:  # so that half a plan is never seen
            file = Path(work, path.name)
            made.report.save(file)
            os.replace(file, path)
    except OSError as error:
        warnings.warn(f"the plan of {name} could not be kept in {directory}: {error}", stacklevel=2)
    return made


def _key(closed: ClosedJaxpr, options: Options, arguments: Sequence[Argument]) -> str:
    """Of everything that the plan depends on."""
    parts = [
        fingerprint(flatten(closed)),
        made_with(options.flags),
        options,
        list(arguments),
        jax.devices()[0].device_kind,
        os.environ.get("XLA_FLAGS"),
    ]
    return sha256(repr(parts).encode()).hexdigest()


def follow_saved(
    closed: ClosedJaxpr, name: str, saved: SavedPlan, options: Options, arguments: Sequence[Argument]
) -> PlannedProgram:
    """The function as the saved plan says.

    It is compiled for a look at its memory only if the plan was made with other versions or options. Raises PlanError
    if the plan is of another program, BudgetError if it needs more than its budget here.
    """
    flat = flatten(closed)
    if fingerprint(flat) != saved.program:
        raise PlanError(
            f"{name}: the plan, of {saved.name}, was made for another program: the function, the shapes and types of "
            "its arguments, JAX's configuration or its version differ; plan again with planned(fn, budget)"
        )
    recipe = saved.recipe
    emitted, segments = follow(flat, recipe, saved.name) if recipe else (None, segment(flat, saved.name))
    trials: list[Trial] = []
    compiled, now = saved.compiled, made_with(options.flags)
    if emitted is not None and now != saved.made_with:
        trials.append(look("the saved plan", emitted, arguments, options.flags))
        compiled = trials[0].compiled
        if compiled > saved.budget:
            raise BudgetError(
                f"{name}: the plan was made with {saved.made_with}; with {now} it needs {compiled:,} bytes, more than "
                f"its budget of {saved.budget:,}: plan again with planned(fn, budget)"
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
            options = self._options[traced.inside]
            traced.planned.append(_make(traced.closed, self._name, options, traced.arguments, self.latest))
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
            return self._run(*args, **kwargs)

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
        call = self._call(closed, flags, inside)
        traced = Traced(closed, tree_util.tree_structure(shape), flags, leaves, call, [], inside)
        if not any(isinstance(const, jax.core.Tracer) for const in closed.consts):
            self._known[key] = traced._replace(leaves=[])
        return traced

    def _call(self, closed: ClosedJaxpr, flags: Sequence[Argument], inside: bool) -> PlannedCall:
        """The function as one operation of its constants and arguments."""
        whole = lifted(closed)
        name, options, latest = self._name, self._options[inside], self.latest  # what keeps no traced value
        arguments = [*[Argument()] * len(closed.consts), *[flag._replace(donated=False) for flag in flags]]

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
