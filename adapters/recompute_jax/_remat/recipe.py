"""A plan of a function, and what it decides in numbers: enough to make the planned equations again from the same one.

Two traced functions have the same fingerprint if they are equation by equation the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, Final

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from recompute.planners import ProgramPlan
from recompute_jax._control.branches import Choice, joined
from recompute_jax._control.groups import Group, Mode, groups_of
from recompute_jax._control.loops import Looped, split
from recompute_jax._control.rewrite import rewrite
from recompute_jax._control.shapes import Part, Shape
from recompute_jax._program.emit import LENGTH, Gate, Region, emit, order_with_moves, regions, regions_of, with_moves
from recompute_jax._program.jaxpr import Flat, flatten, short
from recompute_jax._program.segments import Segments, segment


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
            at: {name: [body and cls.read(body) for body in bodies] for name, bodies in params.items()}
            for at, params in made.bodies.items()
        }
        return replace(made, bodies=bodies, joined=_tuples(made.joined))


def _tuples(value: Any) -> Any:
    """JSON has lists instead."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Fitted:
    """A function with some bodies of its loops and branches planned."""

    flat: Flat
    again: float = 0.0
    """The cost of what runs again in them."""
    length: int = 0
    """Segments in a region of theirs; 0: none is cut in regions."""
    bodies: dict[str, dict[str, list[Recipe | None]]] = field(default_factory=dict)
    """Number of an equation -> parameter -> the recipe of each of its bodies; None: it is as it was."""
    texts: tuple[str, ...] = ()
    """That there are some, and what becomes of their loops."""


@dataclass(frozen=True)
class Candidate:
    """A plan of the function with its loops in some shape."""

    looped: Looped
    segments: Segments
    plan: ProgramPlan
    overhead: float
    """1 and the cost of what runs again, in loops too, divided by the cost of the function as it is."""
    fitted: Fitted
    """The function with planned bodies."""
    joined: Choice = ()
    """What the branches of its conditionals keep for later ones."""
    moved: tuple[int, ...] = ()
    """Numbers of segments whose results move to the memory of the host."""

    @property
    def peak(self) -> int:
        """Bytes that it needs by the planner's count."""
        return self.plan.peak

    @property
    def length(self) -> int:
        """Segments in a region of the planned bodies of loops and branches; 0: none is planned."""
        return self.fitted.length

    @property
    def sequence(self) -> list[int]:
        """Numbers of segments."""
        return order_with_moves(self.plan.steps, self._count)[0]

    @property
    def _count(self) -> int:
        """Segments that are no moves."""
        return len(self.segments.segments) - 2 * len(self.moved)

    @property
    def is_plain(self) -> bool:
        """Nothing runs again outside of loops."""
        return self.sequence == list(range(self._count))

    def regions(self, room: int, length: int = LENGTH) -> list[Region]:
        """The sequence cut for gates: not at all, if nothing runs again."""
        if self.is_plain:
            return regions(self.segments, self.sequence, sys.maxsize, max(1, len(self.sequence)))
        return regions(self.segments, self.sequence, room, length)

    def emitted(self, steps: Sequence[Region], gate: Gate) -> ClosedJaxpr:
        """The function that follows the plan."""
        flat = self.fitted.flat
        return flat.trace(emit(self.segments, flat.outvars, steps, gate))

    def recipe(self, steps: Sequence[Region], gate: Gate) -> Recipe:
        """The same in numbers."""
        return Recipe(
            gate=gate,
            order=[number for region in steps for number in region.runs],
            regions=[len(region.runs) for region in steps],
            scans=_scans_of(self.looped.before, self.looped.shapes),
            bodies=self.fitted.bodies,
            joined=self.joined,
            free=[at for at, region in enumerate(steps) if region.is_open],
            moved=list(self.moved),
            split=self.looped.split.level if self.looped.split else None,
        )


def follow(flat: Flat, recipe: Recipe, name: str) -> tuple[ClosedJaxpr, Segments]:
    """The planned equations of the function that the recipe was made for, and its segments."""
    if recipe.joined:
        flat = joined(flat, recipe.joined)
    if recipe.split is not None:
        flat = split(flat, recipe.split).flat
    if recipe.scans:
        flat = flatten(rewrite(flat, _parts(flat, recipe.scans)))
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
    return flat.trace(emit(segments, flat.outvars, steps, recipe.gate)), segments


def as_body(closed: ClosedJaxpr, planned: ClosedJaxpr) -> ClosedJaxpr | None:
    """What was planned instead of a body; None: it has other types, or constants of its own."""
    same = not planned.consts and [*map(str, planned.out_avals)] == [*map(str, closed.out_avals)]
    return planned if same else None


def _scans_of(flat: Flat, shapes: Sequence[Shape]) -> list[list[Any]]:
    """For a recipe: what becomes of scans."""
    place = {id(eqn): number for number, eqn in enumerate(flat.equations)}
    scans: list[list[Any]] = []
    for shape in shapes:
        if not shape.is_plain:
            number = {var: at for at, var in enumerate(shape.group.values)}
            parts = [
                [part.start, part.stop, list(part.levels), sorted(number[var] for var in part.mode.real)]
                for part in shape.parts
            ]
            scans.append([place[id(shape.group.bodies[0].eqn)], *parts])
    return scans


def _parts(flat: Flat, scans: Sequence[Sequence[Any]]) -> list[tuple[Group, list[Part]]]:
    first = {id(group.bodies[0].eqn): group for group in groups_of(flat)}
    shapes: list[tuple[Group, list[Part]]] = []
    for number, *parts in scans:
        group = first[id(flat.equations[number])]
        made: list[Part] = []
        for start, stop, levels, stacks in parts:
            mode = Mode(frozenset(group.values[at] for at in stacks), 0, 0, 0, 0.0, 0.0)
            made.append(Part(start, stop, tuple(levels), mode))
        shapes.append((group, made))
    return shapes


def _bodies(params: Mapping[str, Any], planned: Mapping[str, Sequence[Recipe | None]], name: str) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, recipes in planned.items():
        value = params[key]
        bodies = value if isinstance(value, tuple) else (value,)
        pairs = zip(bodies, recipes, strict=True)
        made = [body if recipe is None else _body(body, recipe, name) for body, recipe in pairs]
        changed[key] = tuple(made) if isinstance(value, tuple) else made[0]
    return changed


def _body(closed: ClosedJaxpr, recipe: Recipe, name: str) -> ClosedJaxpr:
    emitted, _ = follow(flatten(closed), recipe, name)
    body = as_body(closed, emitted)
    assert body is not None, "it was possible when the recipe was made"
    return body


_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")


def fingerprint(flat: Flat) -> str:
    """Of the equations, their parameters and types; constants count by type, functions by name. O(equations)."""
    digest = sha256()

    def say(text: str) -> None:
        digest.update(text.encode())
        digest.update(b"\n")

    _walk([*flat.constvars, *flat.invars], flat.equations, flat.outvars, say)
    return digest.hexdigest()


def _walk(invars: Iterable[Var], equations: Any, outvars: Any, say: Callable[[str], None]) -> None:
    names: dict[Var, int] = {}

    def bound(var: Any) -> str:
        names[var] = len(names)
        return short(var.aval)

    def read(atom: Any) -> str:
        return f"{atom.val!r}:{short(atom.aval)}" if isinstance(atom, Literal) else str(names[atom])

    say(f"given {[*map(bound, invars)]}")
    for eqn in equations:
        say(f"{eqn.primitive.name} {[*map(read, eqn.invars)]} {[*map(bound, eqn.outvars)]}")
        for name in sorted(eqn.params):
            value = eqn.params[name]
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = item.jaxpr if isinstance(item, ClosedJaxpr) else item
                if isinstance(inner, Jaxpr):
                    say(f"{name} is a program")
                    _walk([*inner.constvars, *inner.invars], inner.eqns, inner.outvars, say)
                else:
                    said = sorted(map(repr, item)) if isinstance(item, (set, frozenset)) else item
                    say(f"{name} {_ADDRESS.sub('', repr(said))}")
    say(f"made {[*map(read, outvars)]}")
