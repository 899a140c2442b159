"""A saved plan is followed: the program is checked, nothing is searched for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from jax.extend.core import ClosedJaxpr

from recompute import BudgetError
from recompute.planners import PlanError
from recompute_jax._program.fingerprint import fingerprint
from recompute_jax._program.jaxpr import flatten
from recompute_jax._program.segments import segment
from recompute_jax._remat.compile import Argument, Compilations
from recompute_jax._remat.figures import Figures
from recompute_jax._remat.options import Options
from recompute_jax._remat.planned import Planned
from recompute_jax._remat.recipe import follow
from recompute_jax._remat.report import RematPlan, describe
from recompute_jax._remat.saved import SavedPlan, made_with


def follow_saved(
    closed: ClosedJaxpr, name: str, saved: SavedPlan, options: Options, arguments: Sequence[Argument]
) -> Planned:
    """The function as the saved plan says.

    It is compiled for a look at its memory only if the plan was made with other versions or options. Raises PlanError
    if the plan is of another program, BudgetError if it needs more than its budget here.
    """
    flat = flatten(closed, inline_custom=False)
    if fingerprint(flat) != saved.program:
        raise PlanError(
            f"{name}: the plan, of {saved.name}, was made for another program: the function, the shapes and types of "
            "its arguments, JAX's configuration or its version differ; plan again with remat(fn, budget)"
        )
    recipe = saved.recipe
    followed = None if recipe is None else follow(flat, recipe, saved.name)
    segments = segment(flat, saved.name) if followed is None else followed.segments
    kept, recomputed = describe(segments, recipe.order if recipe else list(range(len(segments.segments))))
    compilations = Compilations(options.platform)
    compiled, now = saved.compiled, made_with(options.platform, options.compiler_options)
    if followed is not None and now != saved.made_with:
        trial = compilations.compile(
            followed.emitted, arguments, "the saved plan", options.compiler_options, constants=followed.constants
        )
        compiled = trial.compiled
        if compiled > saved.budget:
            raise BudgetError(
                f"{name}: the plan was made with {saved.made_with}; with {now} it needs {compiled:,} bytes, more than "
                f"its budget of {saved.budget:,}: plan again with remat(fn, budget)"
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
    return Planned(report, None, ()) if followed is None else Planned(report, followed.emitted, followed.constants)
