"""The best plan of a function for so many bytes, by the planner's count: its loops in some shape, the rest in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from recompute import planners
from recompute.planners import Plan, PlanError
from recompute_jax._costs import nbytes
from recompute_jax._emit import LENGTH, Region, emit, regions
from recompute_jax._gates import Gate
from recompute_jax._jaxpr import Flat, flatten, struct
from recompute_jax._loop_groups import groups_of
from recompute_jax._loops import Looped, Loops
from recompute_jax._segments import Segment, Segments, inside, peak, segment

_COMPARED: Final = 0.25  # of the time for a plan: to find out which share of the budget loops should have
_CORRECTIONS: Final = 5
_SPARE: Final = 0.95  # of what a loop's operands and results leave of the budget: what may be in use inside


@dataclass(frozen=True)
class Draft:
    """A plan of the function with its loops in some shape."""

    looped: Looped
    segments: Segments
    plan: Plan
    overhead: float
    """1 and the cost of what runs again, in loops too, divided by the cost of the function as it is."""
    length: int
    """Segments in a region of the planned bodies of loops and branches; 0: none is planned."""

    @property
    def sequence(self) -> list[int]:
        """Numbers of segments."""
        return [which for kind, which in self.plan.steps if kind == "compute"]

    @property
    def is_plain(self) -> bool:
        """Nothing runs again but what is in loops."""
        return self.sequence == list(range(len(self.segments.segments)))

    def regions(self, room: int, length: int = LENGTH) -> list[Region]:
        """The sequence cut for gates: not at all, if nothing runs again."""
        if self.is_plain:
            return regions(self.segments, self.sequence, sys.maxsize, max(1, len(self.sequence)))
        return regions(self.segments, self.sequence, room, length)

    def emitted(self, steps: Sequence[Region], gate: Gate) -> ClosedJaxpr:
        """The function of constants and arguments that follows the plan."""
        flat = self.looped.flat
        run = emit(self.segments, flat.outvars, steps, gate)
        return jax.make_jaxpr(run)(*[struct(var.aval) for var in (*flat.constvars, *flat.invars)])


@dataclass(frozen=True)
class _Fitted:
    """The function with the bodies of its loops and its branches planned, where they need it."""

    flat: Flat
    again: float
    """The cost of what runs again in them."""
    length: int
    """Segments in a region of theirs; 0: none is planned."""


class Drafting:
    """What makes drafts of one function."""

    def __init__(self, flat: Flat, name: str, gate: Gate, seed: int, price: Callable[[Segment], float] | None) -> None:
        self.flat = flat
        self.name = name
        self.gate = gate
        self.seed = seed
        self.price = price
        self.plain = segment(flat, name, price)
        self.predicted = peak(self.plain)
        """Bytes of the function as it is."""
        self._inside = {id(eqn): inside(eqn) for eqn in flat.equations}
        self._optional = frozenset(var for group in groups_of(flat) for var in group.optional)
        """Stacks that loops may leave out."""
        self._smallest: Draft | None = None
        self._bodies: dict[int, Drafting] = {}
        self._drafts: dict[tuple[int, int], Draft] = {}
        """Of the bodies, by id and room."""

    def draft(self, given: int, seconds: float, before: Draft | None = None, length: int = LENGTH) -> Draft:
        """The best plan that is found for so many bytes, maybe from one `before`. Raises PlanError if there is none.

        `length`: segments in a region of bodies.
        """
        fitted = self._fitted(given, seconds / 2, length)
        loops = Loops(fitted.flat, given)
        best, failure = None, PlanError("no room for loops")
        for room in loops.rooms(given, self.predicted):
            try:
                share = _COMPARED if loops.groups else 1.0
                draft = self._within(loops, room, given, seconds * share, before, fitted)
            except PlanError as error:
                failure = error
                continue
            if best is None or draft.overhead < best.overhead:
                best = draft
        if best is None:
            raise failure
        return best

    def least(self, seconds: float) -> Draft:
        """About the least budget that a plan exists for. It is looked for once."""
        if self._smallest is None:
            fitted = self._fitted(0, seconds / 2, 1)
            self._smallest = self._least(Loops(fitted.flat, 1).within(0), seconds, fitted)
        return self._smallest

    def leasts(self, seconds: float) -> Iterator[Draft]:
        """The same with loops in several shapes, by rising cost: XLA may need less for one that should need more."""
        fitted = self._fitted(0, seconds / 2, 1)
        for looped in Loops(fitted.flat, 1).smallest():
            yield self._least(looped, seconds / 2, fitted)

    def _least(self, looped: Looped, seconds: float, fitted: _Fitted) -> Draft:
        segments = self._segments(looped.flat)
        low, high = planners.least(segments.program), peak(segments)
        for middle in (low, *(low + (high - low) * part // 8 for part in (1, 2, 3, 5, 6))):
            try:
                return self._planned(looped, segments, middle, seconds, None, fitted)
            except PlanError:
                continue
        return self._planned(looped, segments, high, seconds, None, fitted)

    def _within(
        self, loops: Loops, room: int, given: int, seconds: float, before: Draft | None, fitted: _Fitted
    ) -> Draft:
        looped = loops.within(room)
        segments = self._segments(looped.flat)
        for correction in range(_CORRECTIONS if loops.groups else 0):
            excess = peak(segments) - given  # what is around the loops may need more than was thought
            if excess <= 0 or excess >= room:
                break
            room -= excess + correction * given // 200
            looped = loops.within(room)
            segments = self._segments(looped.flat)
        return self._planned(looped, segments, given, seconds, before, fitted)

    def _planned(
        self, looped: Looped, segments: Segments, given: int, seconds: float, before: Draft | None, fitted: _Fitted
    ) -> Draft:
        plan: Plan | None = None
        if before is not None and len(before.segments.segments) == len(segments.segments):
            plan = planners.replan(segments.program, given, before.sequence, seconds, self.seed)
        plan = plan or planners.plan(segments.program, max(2, given), time_limit=seconds, seed=self.seed)
        again = fitted.again + sum(each.cost for each in looped.shapes)
        again += (plan.overhead - 1) * segments.program.model_time
        overhead = 1 + again / max(1e-9, self.plain.program.model_time)
        return Draft(looped, segments, plan, overhead, fitted.length)

    def _segments(self, flat: Flat) -> Segments:
        return self.plain if flat is self.flat else segment(flat, self.name, self.price)

    def _fitted(self, given: int, seconds: float, length: int) -> _Fitted:
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
        for number, room in rooms.items():
            equations[number], cost = self._fit(equations[number], room, seconds / len(rooms), length)
            again += cost
        if all(one is two for one, two in zip(equations, self.flat.equations, strict=True)):
            return _Fitted(self.flat, 0.0, 0)
        return _Fitted(self.flat._replace(equations=equations), again, length)

    def _fit(self, eqn: JaxprEqn, room: int, seconds: float, length: int) -> tuple[JaxprEqn, float]:
        """A loop or conditional whose bodies take so many bytes, or as few as they can, and what runs again in it.

        Of branches that is the dearest one's; a loop of unknown length counts as one step.
        """
        params, again, is_same = dict(eqn.params), 0.0, True
        for name, value in eqn.params.items():
            bodies = value if isinstance(value, tuple) else (value,)
            if not bodies or not all(isinstance(each, ClosedJaxpr) for each in bodies):
                continue
            made = [self._body(each, room, seconds / len(bodies), length) for each in bodies]
            new = tuple([body for body, _ in made])
            params[name] = new if isinstance(value, tuple) else new[0]
            again += max(cost for _, cost in made) * params.get("length", 1)
            is_same &= all(one is two for one, two in zip(new, bodies, strict=True))
        return eqn if is_same else eqn.replace(params=params), again

    def _body(self, closed: ClosedJaxpr, room: int, seconds: float, length: int) -> tuple[ClosedJaxpr, float]:
        if id(closed) not in self._bodies:
            flat = flatten(closed, inline_custom=False)
            self._bodies[id(closed)] = Drafting(flat, self.name, self.gate, self.seed, self.price)
        drafting = self._bodies[id(closed)]
        if drafting.predicted <= room:
            return closed, 0.0
        draft = self._drafts.get((id(closed), room))
        if draft is None or draft.length not in (0, length):
            try:
                draft = drafting.draft(room, seconds, None, length)
            except PlanError:
                draft = drafting.least(seconds)
            self._drafts[id(closed), room] = draft
        effects = [number for number in draft.sequence if draft.segments.segments[number].once]
        if len(effects) > len(set(effects)):
            return closed, 0.0
        emitted = draft.emitted(draft.regions(max(room, draft.plan.budget), length), self.gate)
        constants = draft.looped.constants

        def run(*values: Any) -> list[Any]:
            return list(jaxpr_as_fun(emitted)(*constants, *values))

        found: ClosedJaxpr = jax.make_jaxpr(run)(*map(struct, closed.in_avals))
        same = not found.consts and [str(each) for each in found.out_avals] == [str(each) for each in closed.out_avals]
        return (found, (draft.overhead - 1) * drafting.plain.program.model_time) if same else (closed, 0.0)
