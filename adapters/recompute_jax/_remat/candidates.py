"""The best plan of a function for so many bytes, by the planner's count: its loops in some shape, the rest in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from recompute import planners
from recompute.planners import Plan, PlanError
from recompute_jax._branches.rewrite import Choice
from recompute_jax._emit.gates import Gate
from recompute_jax._emit.moves import order_with_moves, with_moves
from recompute_jax._emit.regions import LENGTH, Region, regions
from recompute_jax._program.costs import nbytes
from recompute_jax._program.jaxpr import Flat, flatten
from recompute_jax._program.segments import Segment, Segments, inside, peak, segment
from recompute_jax._remat.recipe import Recipe, as_body, emitted, scans_of
from recompute_jax._scans.groups import groups_of
from recompute_jax._scans.loops import Looped, Loops

_COMPARED: Final = 0.25  # of the effort for a plan: to find out which share of the budget loops should have
_CORRECTIONS: Final = 5
_SPARE: Final = 0.95  # of what a loop's operands and results leave of the budget: what may be in use inside
_SPEED: Final = 1e9  # FLOPs in a second, to speak of bytes in a second
_HOST_BYTE: Final = 200.0  # FLOPs that could be done while a byte moves to the host, or back: it takes 100 times longer
# than in the memory of the device, as over PCIe


@dataclass(frozen=True)
class Candidate:
    """A plan of the function with its loops in some shape."""

    looped: Looped
    segments: Segments
    plan: Plan
    overhead: float
    """1 and the cost of what runs again, in loops too, divided by the cost of the function as it is."""
    fitted: Fitted
    """The function with planned bodies."""
    joined: Choice = ()
    """What the branches of its conditionals keep for later ones."""
    moved: tuple[int, ...] = ()
    """Numbers of segments whose results move to the memory of the host."""

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
        """Nothing runs again but what is in loops."""
        return self.sequence == list(range(self._count))

    def regions(self, room: int, length: int = LENGTH) -> list[Region]:
        """The sequence cut for gates: not at all, if nothing runs again."""
        if self.is_plain:
            return regions(self.segments, self.sequence, sys.maxsize, max(1, len(self.sequence)))
        return regions(self.segments, self.sequence, room, length)

    def emitted(self, steps: Sequence[Region], gate: Gate) -> ClosedJaxpr:
        """The function of constants and arguments that follows the plan."""
        return emitted(self.looped.flat, self.segments, steps, gate)

    def recipe(self, steps: Sequence[Region], gate: Gate) -> Recipe:
        """The same in numbers."""
        scans = scans_of(self.fitted.flat, self.looped.shapes)
        order = [number for region in steps for number in region.runs]
        lengths, free = [len(each.runs) for each in steps], [at for at, each in enumerate(steps) if each.is_open]
        return Recipe(gate, order, lengths, scans, self.fitted.bodies, self.joined, free, list(self.moved))


@dataclass(frozen=True)
class Fitted:
    """The function with the bodies of its loops and its branches planned, where they need it."""

    flat: Flat
    again: float
    """The cost of what runs again in them."""
    length: int
    """Segments in a region of theirs; 0: none is planned."""
    bodies: dict[str, dict[str, list[Recipe | None]]]
    """Number of an equation -> parameter -> the recipe of each of its bodies; None: it is as it was."""


class AnyCandidates(Protocol):
    """What makes candidates of one function, maybe with conditionals that keep less."""

    flat: Flat
    plain: Segments
    predicted: int
    """Bytes of the function as it is."""
    has_loops: bool
    """Whether scans hand stacks to each other."""

    def candidate(self, given: int, effort: float, before: Candidate | None = None, length: int = LENGTH) -> Candidate:
        """The best plan that is found for so many bytes. Raises PlanError if there is none."""

    def least(self, effort: float) -> Candidate:
        """About the least budget that a plan exists for."""

    def leasts(self, effort: float) -> Iterator[Candidate]:
        """The same in several shapes."""

    def uniform(self, effort: float) -> Iterator[Candidate]:
        """With each step of a loop run again by itself."""


class Candidates:
    """What makes candidates of one function."""

    def __init__(
        self,
        flat: Flat,
        name: str,
        gate: Gate,
        seed: int,
        price: Callable[[Segment], float] | None,
        of_body: Callable[[Flat], AnyCandidates] | None = None,
        offload: bool = False,
    ) -> None:
        self.flat = flat
        self.name = name
        self.gate = gate
        self.seed = seed
        self.price = price
        self.of_body: Callable[[Flat], AnyCandidates] = of_body or (
            lambda flat: Candidates(flat, name, gate, seed, price)
        )
        self.offload = offload
        self.plain = segment(flat, name, price)
        self.predicted = peak(self.plain)
        """Bytes of the function as it is."""
        self._inside = {id(eqn): inside(eqn) for eqn in flat.equations}
        groups = groups_of(flat)
        self.has_loops = bool(groups)
        """Whether scans hand stacks to each other."""
        self._optional = frozenset(var for group in groups for var in group.optional)
        """Stacks that loops may leave out."""
        self._smallest: Candidate | None = None
        self._bodies: dict[int, AnyCandidates] = {}
        self._known: dict[tuple[int, int], Candidate] = {}
        """Of the bodies, by id and room."""

    def candidate(self, given: int, effort: float, before: Candidate | None = None, length: int = LENGTH) -> Candidate:
        """The best plan that is found for so many bytes, maybe from one `before`. Raises PlanError if there is none.

        `length`: segments in a region of bodies.
        """
        fitted = self._fitted(given, effort / 2, length)
        loops = Loops(fitted.flat, given)
        best, failure = None, PlanError("no room for loops")
        for room in loops.rooms(given, self.predicted):
            try:
                share = _COMPARED if loops.groups else 1.0
                candidate = self._within(loops, room, given, effort * share, before, fitted)
            except PlanError as error:
                failure = error
                continue
            if best is None or candidate.overhead < best.overhead:
                best = candidate
        if best is None:
            raise failure
        return best

    def least(self, effort: float) -> Candidate:
        """About the least budget that a plan exists for. It is looked for once."""
        if self._smallest is None:
            fitted = self._fitted(0, effort / 2, 1)
            self._smallest = self._least(Loops(fitted.flat, 1).within(0), effort, fitted)
        return self._smallest

    def uniform(self, effort: float) -> Iterator[Candidate]:
        """With each step of a loop run again by itself, from what one of its modes keeps; nothing else runs again."""
        as_it_is = Fitted(self.flat, 0.0, 0, {})
        for looped in Loops(self.flat, self.predicted).uniform():
            segments = self._segments(looped.flat)
            yield self._planned(looped, segments, peak(segments), effort, None, as_it_is)

    def leasts(self, effort: float) -> Iterator[Candidate]:
        """The same with loops in several shapes, by rising cost: XLA may need less for one that should need more."""
        as_they_are = Fitted(self.flat, 0.0, 0, {})
        fitted = self._fitted(0, effort / 2, 1)
        for each in (as_they_are, fitted) if fitted.bodies else (fitted,):
            for looped in Loops(each.flat, 1).smallest():
                yield self._least(looped, effort / 2, each)

    def _least(self, looped: Looped, effort: float, fitted: Fitted) -> Candidate:
        segments = self._segments(looped.flat)
        low, high = planners.least(segments.program), peak(segments)
        for middle in (low, *(low + (high - low) * part // 8 for part in (1, 2, 3, 5, 6))):
            try:
                return self._planned(looped, segments, middle, effort, None, fitted)
            except PlanError:
                continue
        return self._planned(looped, segments, high, effort, None, fitted)

    def _within(
        self, loops: Loops, room: int, given: int, effort: float, before: Candidate | None, fitted: Fitted
    ) -> Candidate:
        looped = loops.within(room)
        segments = self._segments(looped.flat)
        for correction in range(_CORRECTIONS if loops.groups else 0):
            excess = peak(segments) - given  # what is around the loops may need more than was thought
            if excess <= 0 or excess >= room:
                break
            room -= excess + correction * given // 200
            looped = loops.within(room)
            segments = self._segments(looped.flat)
        return self._planned(looped, segments, given, effort, before, fitted)

    def _planned(
        self, looped: Looped, segments: Segments, given: int, effort: float, before: Candidate | None, fitted: Fitted
    ) -> Candidate:
        plan: Plan | None = None
        if self.offload:
            segments.program.unit = 1 / _SPEED
            more = {"tier": f"{int(_SPEED / _HOST_BYTE)}B/s"}
            plan = planners.plan(segments.program, max(2, given), effort=effort, seed=self.seed, **more)
        elif before is not None and len(before.segments.segments) == len(segments.segments):
            plan = planners.replan(segments.program, given, before.sequence, effort, self.seed)
        plan = plan or planners.plan(segments.program, max(2, given), effort=effort, seed=self.seed)
        again = fitted.again + sum(each.cost for each in looped.shapes)
        again += (plan.overhead - 1) * segments.program.model_time
        overhead = 1 + again / max(1e-9, self.plain.program.model_time)
        _, moved = order_with_moves(plan.steps, len(segments.segments))
        segments = with_moves(segments, moved) if moved else segments
        return Candidate(looped, segments, plan, overhead, fitted, moved=tuple(moved))

    def _segments(self, flat: Flat) -> Segments:
        return self.plain if flat is self.flat else segment(flat, self.name, self.price)

    def _fitted(self, given: int, effort: float, length: int) -> Fitted:
        """With bodies planned where more is in use inside than there is room, in regions of so many segments."""
        outside = {*self.flat.constvars, *self.flat.invars, *self._optional}
        outside.update(var for var in self.flat.outvars if isinstance(var, Var))  # no temporaries
        rooms: dict[int, int] = {}
        for number, eqn in enumerate(self.flat.equations):
            around = {var for var in (*eqn.invars, *eqn.outvars) if isinstance(var, Var) and var not in outside}
            room = max(0, int(_SPARE * (given - sum(nbytes(var.aval) for var in around))))
            if self._inside[id(eqn)] > room:
                rooms[number] = room
        equations, again = list(self.flat.equations), 0.0
        bodies: dict[str, dict[str, list[Recipe | None]]] = {}
        for number, room in rooms.items():
            equations[number], cost, recipes = self._fit(equations[number], room, effort / len(rooms), length)
            again += cost
            if recipes:
                bodies[str(number)] = recipes
        if not bodies:
            return Fitted(self.flat, 0.0, 0, {})
        return Fitted(self.flat._replace(equations=equations), again, length, bodies)

    def _fit(
        self, eqn: JaxprEqn, room: int, effort: float, length: int
    ) -> tuple[JaxprEqn, float, dict[str, list[Recipe | None]]]:
        """A loop or conditional whose bodies take so many bytes, or as few as they can; what runs again in it; how.

        Of branches that is the dearest one's; a loop of unknown length counts as one step.
        """
        params, again = dict(eqn.params), 0.0
        recipes: dict[str, list[Recipe | None]] = {}
        for name, value in eqn.params.items():
            bodies = value if isinstance(value, tuple) else (value,)
            if not bodies or not all(isinstance(each, ClosedJaxpr) for each in bodies):
                continue
            made = [self._body(each, room, effort / len(bodies), length) for each in bodies]
            new = tuple([body for body, _, _ in made])
            params[name] = new if isinstance(value, tuple) else new[0]
            again += max(cost for _, cost, _ in made) * params.get("length", 1)
            if any(recipe is not None for _, _, recipe in made):
                recipes[name] = [recipe for _, _, recipe in made]
        return eqn.replace(params=params) if recipes else eqn, again, recipes

    def _body(
        self, closed: ClosedJaxpr, room: int, effort: float, length: int
    ) -> tuple[ClosedJaxpr, float, Recipe | None]:
        if id(closed) not in self._bodies:
            self._bodies[id(closed)] = self.of_body(flatten(closed, inline_custom=False))
        candidates = self._bodies[id(closed)]
        if candidates.predicted <= room:
            return closed, 0.0, None
        candidate = self._known.get((id(closed), room))
        if candidate is None or candidate.length not in (0, length):
            try:
                candidate = candidates.candidate(room, effort, None, length)
            except PlanError:
                candidate = candidates.least(effort)
            self._known[id(closed), room] = candidate
        effects = [number for number in candidate.sequence if candidate.segments.segments[number].once]
        if len(effects) > len(set(effects)):
            return closed, 0.0, None
        steps = candidate.regions(max(room, candidate.plan.budget), length)
        found = as_body(closed, candidate.emitted(steps, self.gate), candidate.looped.constants)
        if found is None:
            return closed, 0.0, None
        again = (candidate.overhead - 1) * candidates.plain.program.model_time
        return found, again, candidate.recipe(steps, self.gate)
