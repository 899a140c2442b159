"""A plan that was made before is followed: it is in a file, or where JAX keeps what it compiles."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from jax.extend.core import ClosedJaxpr

from recompute import BudgetError
from recompute.planners import PlanError
from recompute_jax._program.fingerprint import fingerprint
from recompute_jax._program.jaxpr import flatten
from recompute_jax._program.segments import segment
from recompute_jax._remat.compile import Argument, Compilations
from recompute_jax._remat.options import Options
from recompute_jax._remat.recipe import follow
from recompute_jax._remat.report import PlannedProgram, RematPlan, describe
from recompute_jax._remat.saved import Figures, SavedPlan, made_with


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
        fingerprint(flatten(closed, inline_custom=False)),
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
    flat = flatten(closed, inline_custom=False)
    if fingerprint(flat) != saved.program:
        raise PlanError(
            f"{name}: the plan, of {saved.name}, was made for another program: the function, the shapes and types of "
            "its arguments, JAX's configuration or its version differ; plan again with planned(fn, budget)"
        )
    recipe = saved.recipe
    followed = None if recipe is None else follow(flat, recipe, saved.name)
    segments = segment(flat, saved.name) if followed is None else followed.segments
    kept, recomputed = describe(segments, recipe.order if recipe else list(range(len(segments.segments))))
    compilations = Compilations()
    compiled, now = saved.compiled, made_with(options.flags)
    if followed is not None and now != saved.made_with:
        trial = compilations.compile(
            followed.emitted, arguments, "the saved plan", options.flags, constants=followed.constants
        )
        compiled = trial.compiled
        if compiled > saved.budget:
            raise BudgetError(
                f"{name}: the plan was made with {saved.made_with}; with {now} it needs {compiled:,} bytes, more than "
                f"its budget of {saved.budget:,}: plan again with planned(fn, budget)"
            )
    figures = {each.name: getattr(saved, each.name) for each in fields(Figures)} | {"compiled": compiled}
    report = RematPlan(
        **figures,
        kept=kept,
        recomputed=recomputed,
        trials=tuple(compilations.trials),
        seconds=sum(each.seconds for each in compilations.trials),
        program=segments.program,
        saved=saved,
        gate=recipe.gate if recipe and len(recipe.regions) > 1 else None,
        regions=len(recipe.regions) if recipe else 0,
    )
    return (
        PlannedProgram(report, None, ())
        if followed is None
        else PlannedProgram(report, followed.emitted, followed.constants)
    )
