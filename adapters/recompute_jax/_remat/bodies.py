"""The bodies of loops and branches, planned where more is in use inside than there is room: each is a function, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from recompute.planners import PlanError
from recompute_jax._emit.gates import Gate
from recompute_jax._emit.regions import LENGTH
from recompute_jax._program.costs import nbytes
from recompute_jax._program.jaxpr import Flat, flatten
from recompute_jax._program.segments import INSIDE, inside
from recompute_jax._remat.recipe import Recipe, as_body

if TYPE_CHECKING:
    from recompute_jax._remat.candidates import AnyCandidates, Candidate

_SPARE: Final = 0.95  # of what a loop's operands and results leave of the budget: what may be in use inside
_BODIES: Final = ("bodies of loops and branches are planned, too",)


@dataclass(frozen=True)
class Planned:
    """A body after a plan."""

    closed: ClosedJaxpr
    again: float
    """The cost of what runs again in it."""
    recipe: Recipe
    texts: tuple[str, ...]
    """What becomes of its loops."""


@dataclass(frozen=True)
class Fitted:
    """A function with some bodies of its loops and branches planned."""

    flat: Flat
    again: float = 0.0
    """The cost of what runs again in them."""
    length: int = 0
    """Segments in a region of theirs; 0: none is cut in regions."""
    bodies: dict[str, dict[str, list[Recipe | None]]] | None = None
    """Number of an equation -> parameter -> the recipe of each of its bodies; None: it is as it was."""
    texts: tuple[str, ...] = ()
    """That there are some, and what becomes of their loops."""


class Bodies:
    """What plans the bodies of one function, and of the same with its loops in other shapes."""

    def __init__(self, of_body: Callable[[Flat], AnyCandidates], gate: Gate) -> None:
        self._of_body = of_body
        self._gate = gate
        self._candidates: dict[int, tuple[ClosedJaxpr, AnyCandidates]] = {}
        """By id of a body."""
        self._inside: dict[int, tuple[JaxprEqn, int]] = {}
        """By id of an equation: bytes in use inside of it."""
        self._planned: dict[tuple[int, int], Candidate] = {}
        """By id of a body, and room."""

    def within(self, flat: Flat, given: int, effort: float, length: int) -> Fitted:
        """Planned where so many bytes are too few, in regions of so many segments."""
        outside = {*flat.constvars, *flat.invars}
        outside.update(var for var in flat.outvars if isinstance(var, Var))  # no temporaries
        rooms: dict[int, int] = {}
        for number, eqn in enumerate(flat.equations):
            needed = self._needed(eqn)
            around = {var for var in (*eqn.invars, *eqn.outvars) if isinstance(var, Var) and var not in outside}
            room = max(0, int(_SPARE * (given - sum(nbytes(var.aval) for var in around)))) if needed else 0
            if needed > room:
                rooms[number] = room

        def plan(number: int, closed: ClosedJaxpr) -> Planned | None:
            return self._within(closed, rooms[number], effort / len(rooms), length)

        return self._fitted(flat, rooms, plan, length)

    def uniform(self, flat: Flat, effort: float) -> Iterator[Fitted]:
        """With each step of the loops in bodies run again by itself."""
        options: dict[int, list[Candidate]] = {}
        numbers: dict[int, None] = {}
        for number, eqn in enumerate(flat.equations):
            for closed in _bodies(eqn):
                if id(closed) not in options:
                    options[id(closed)] = list(self._of(closed).uniform(effort))
                if options[id(closed)]:
                    numbers[number] = None
        for place in range(max(map(len, options.values()), default=0)):

            def plan(number: int, closed: ClosedJaxpr, place: int = place) -> Planned | None:
                found = options.get(id(closed))
                return self._emitted(closed, found[min(place, len(found) - 1)], 0) if found else None

            fitted = self._fitted(flat, numbers, plan, 0)
            if fitted.bodies:
                yield fitted

    def _needed(self, eqn: JaxprEqn) -> int:
        if not _bodies(eqn):
            return 0
        if id(eqn) not in self._inside:
            self._inside[id(eqn)] = eqn, inside(eqn)
        return self._inside[id(eqn)][1]

    def _of(self, closed: ClosedJaxpr) -> AnyCandidates:
        if id(closed) not in self._candidates:
            self._candidates[id(closed)] = closed, self._of_body(flatten(closed, inline_custom=False))
        return self._candidates[id(closed)][1]

    def _fitted(
        self,
        flat: Flat,
        numbers: Iterable[int],
        plan: Callable[[int, ClosedJaxpr], Planned | None],
        length: int,
    ) -> Fitted:
        """The function with what `plan` makes of the bodies of these equations.

        Of branches what runs again is the dearest one's; a loop of unknown length counts as one step.
        """
        equations, again = list(flat.equations), 0.0
        recipes: dict[str, dict[str, list[Recipe | None]]] = {}
        texts = dict.fromkeys(_BODIES)
        for number in numbers:
            eqn = equations[number]
            params, found = dict(eqn.params), dict[str, list[Recipe | None]]()
            for name, value in eqn.params.items():
                bodies = _closed(value)
                made = [plan(number, each) for each in bodies]
                if any(made):
                    new = tuple([each.closed if each else body for each, body in zip(made, bodies, strict=True)])
                    params[name] = new if isinstance(value, tuple) else new[0]
                    again += max(each.again for each in made if each) * params.get("length", 1)
                    found[name] = [each.recipe if each else None for each in made]
                    texts.update((f"in a body: {text}", None) for each in made if each for text in each.texts)
            if found:
                equations[number] = eqn.replace(params=params)
                recipes[str(number)] = found
        if not recipes:
            return Fitted(flat)
        return Fitted(flat._replace(equations=equations), again, length, recipes, tuple(texts))

    def _within(self, closed: ClosedJaxpr, room: int, effort: float, length: int) -> Planned | None:
        """A body within so many bytes, or as few as it can do with; None: it stays as it is."""
        candidates = self._of(closed)
        if candidates.predicted <= room:
            return None
        candidate = self._planned.get((id(closed), room))
        if candidate is None or candidate.length not in (0, length):
            try:
                candidate = candidates.candidate(room, effort, None, length)
            except PlanError:
                candidate = candidates.least(effort)
            self._planned[id(closed), room] = candidate
        return self._emitted(closed, candidate, room, length)

    def _emitted(self, closed: ClosedJaxpr, candidate: Candidate, room: int, length: int = LENGTH) -> Planned | None:
        steps = candidate.regions(max(room, candidate.plan.budget), length)
        found = as_body(closed, candidate.emitted(steps, self._gate), candidate.looped.constants)
        if found is None:
            return None
        again = (candidate.overhead - 1) * self._of(closed).plain.program.model_time
        texts = candidate.looped.texts + candidate.fitted.texts[len(_BODIES) :]
        return Planned(found, again, candidate.recipe(steps, self._gate), texts)


def _bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    if eqn.primitive.name not in INSIDE:
        return []
    return [each for value in eqn.params.values() for each in _closed(value)]


def _closed(value: object) -> tuple[ClosedJaxpr, ...]:
    """The bodies that a parameter is."""
    found = value if isinstance(value, tuple) else (value,)
    return found if found and all(isinstance(each, ClosedJaxpr) for each in found) else ()
