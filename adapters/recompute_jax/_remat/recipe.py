"""What a plan decides, in numbers: enough to make the planned equations again from the same traced function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._branches.rewrite import Choice, joined
from recompute_jax._emit.emit import emit
from recompute_jax._emit.gates import Gate
from recompute_jax._emit.moves import with_moves
from recompute_jax._emit.regions import Region, regions_of
from recompute_jax._program.jaxpr import Flat, flatten, struct
from recompute_jax._program.segments import Segments, segment
from recompute_jax._scans.blocks import Part, Shape
from recompute_jax._scans.groups import Mode, groups_of
from recompute_jax._scans.rewrite import rewrite
from recompute_jax._scans.split import split


@dataclass(frozen=True)
class Recipe:
    """Which runs, in which regions, with the scans in which parts; the same again for bodies that are planned."""

    gate: Gate
    order: list[int]
    """Numbers of segments."""
    regions: list[int]
    """How many runs are in each."""
    scans: list[list[Any]] = field(default_factory=list)
    """Number of a group's first equation, and its parts: start, stop, levels, numbers of the stacks that are kept."""
    bodies: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Number of an equation, after scans are changed -> parameter -> for each body a recipe, or None: as it is."""
    joined: Choice = ()
    """What the branches of conditionals keep for later ones; the numbers above are those of the function after that."""
    free: list[int] = field(default_factory=list)
    """Numbers of the regions behind no gate."""
    moved: list[int] = field(default_factory=list)
    """Numbers of the segments whose results move to the memory of the host."""
    split: int | None = None
    """Which of the ways to have scans within scans in two; None: none. The numbers above are after that, too."""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Recipe:
        """From what JSON made of one. Raises TypeError, AttributeError or ValueError if it is none."""
        made = cls(**content)
        bodies = {
            at: {name: [each and cls.read(each) for each in found] for name, found in params.items()}
            for at, params in made.bodies.items()
        }
        return replace(made, bodies=bodies, joined=_tuples(made.joined))


def _tuples(value: Any) -> Any:
    """JSON has lists instead."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Followed:
    """The function of constants and arguments that follows a recipe."""

    emitted: ClosedJaxpr
    constants: tuple[Any, ...]
    segments: Segments


def follow(flat: Flat, recipe: Recipe, name: str) -> Followed:
    """The planned equations of the function that the recipe was made for."""
    if recipe.joined:
        flat = joined(flat, recipe.joined)
    if recipe.split is not None:
        flat = split(flat, recipe.split).flat
    constants = tuple(flat.consts)
    if recipe.scans:
        flat = flatten(rewrite(flat, _parts(flat, recipe.scans)), inline_custom=False)
        constants = (*flat.consts, *constants)
    equations = list(flat.equations)
    for at, params in recipe.bodies.items():
        eqn = equations[int(at)]
        equations[int(at)] = eqn.replace(params={**eqn.params, **_bodies(eqn.params, params, name)})
    flat = flat._replace(equations=equations)
    segments = with_moves(segment(flat, name), recipe.moved)
    cuts = pairwise(accumulate(recipe.regions, initial=0))
    steps = regions_of(segments, [recipe.order[start:stop] for start, stop in cuts])
    for number in recipe.free:
        steps[number].is_open = True
    return Followed(emitted(flat, segments, steps, recipe.gate), constants, segments)


def emitted(flat: Flat, segments: Segments, steps: Sequence[Region], gate: Gate) -> ClosedJaxpr:
    """The function of constants and arguments that runs these regions."""
    run = emit(segments, flat.outvars, steps, gate)
    return jax.make_jaxpr(run)(*[struct(var.aval) for var in (*flat.constvars, *flat.invars)])


def as_body(closed: ClosedJaxpr, planned: ClosedJaxpr, constants: Sequence[Any]) -> ClosedJaxpr | None:
    """What was planned instead of a body; None: it has other types, or constants of its own."""

    def run(*values: Any) -> list[Any]:
        return list(jaxpr_as_fun(planned)(*constants, *values))

    found: ClosedJaxpr = jax.make_jaxpr(run)(*map(struct, closed.in_avals))
    same = not found.consts and [str(each) for each in found.out_avals] == [str(each) for each in closed.out_avals]
    return found if same else None


def scans_of(flat: Flat, shapes: Sequence[Shape]) -> list[list[Any]]:
    """For a recipe: what becomes of scans."""
    place = {id(eqn): number for number, eqn in enumerate(flat.equations)}
    found: list[list[Any]] = []
    for each in shapes:
        if not each.is_plain:
            number = {var: at for at, var in enumerate(each.group.values)}
            parts = [
                [part.start, part.stop, list(part.levels), sorted(number[var] for var in part.mode.real)]
                for part in each.parts
            ]
            found.append([place[id(each.group.bodies[0].eqn)], *parts])
    return found


def _parts(flat: Flat, scans: Sequence[Sequence[Any]]) -> list[tuple[Any, list[Part]]]:
    first = {id(group.bodies[0].eqn): group for group in groups_of(flat)}
    found: list[tuple[Any, list[Part]]] = []
    for number, *parts in scans:
        group = first[id(flat.equations[number])]
        made = [
            Part(
                start,
                stop,
                tuple(levels),
                Mode("loaded", frozenset(group.values[at] for at in kept), 0, 0, 0, 0.0, 0.0),
            )
            for start, stop, levels, kept in parts
        ]
        found.append((group, made))
    return found


def _bodies(params: Mapping[str, Any], planned: Mapping[str, Sequence[Recipe | None]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, recipes in planned.items():
        value = params[key]
        bodies = value if isinstance(value, tuple) else (value,)
        pairs = zip(bodies, recipes, strict=True)
        made = [each if recipe is None else _body(each, recipe, name) for each, recipe in pairs]
        found[key] = tuple(made) if isinstance(value, tuple) else made[0]
    return found


def _body(closed: ClosedJaxpr, recipe: Recipe, name: str) -> ClosedJaxpr:
    followed = follow(flatten(closed, inline_custom=False), recipe, name)
    made = as_body(closed, followed.emitted, followed.constants)
    assert made is not None, "it was possible when the recipe was made"
    return made
