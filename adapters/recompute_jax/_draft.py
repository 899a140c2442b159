"""The best plan of a function for so many bytes, by the planner's count: its loops in some shape, the rest in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from recompute._plans._improve import Search, fitted
from recompute._plans._liveness import prune, schedule
from recompute._plans._problem import check_least, problem_of
from recompute._plans._schedule import Plan, PlanError
from recompute._traces._program import Program
from recompute.planners import plan as plan_program
from recompute_jax._costs import nbytes
from recompute_jax._emit import LENGTH, Region, emit, regions
from recompute_jax._gates import Gate
from recompute_jax._jaxpr import Flat, flatten, struct
from recompute_jax._loops import Looped, Loops
from recompute_jax._segments import Segment, Segments, inside, peak, segment

_COMPARED: Final = 0.25  # of the time for a plan: to find out which share of the budget loops should have
_HEAT: Final = 0.1  # of the mean cost of a segment: how much dearer a change of a known plan may be at first
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

    def draft(self, given: int, seconds: float, before: Draft | None = None) -> Draft:
        """The best plan that is found for so many bytes, maybe from one `before`. Raises PlanError if there is none."""
        flat = self._fitted(given, seconds / 2)
        loops = Loops(flat, given)
        best: Draft | None = None
        failure: PlanError | None = None
        for room in loops.rooms(given, self.predicted):
            try:
                draft = self._within(loops, room, given, seconds * (_COMPARED if loops.groups else 1.0), before)
            except PlanError as error:
                failure = error
                continue
            if best is None or draft.overhead < best.overhead:
                best = draft
        if best is None:
            assert failure is not None, "there is one room at least"
            raise failure
        return best

    def least(self, seconds: float) -> Draft:
        """About the least budget that a plan exists for."""
        loops = Loops(self.flat, 1)
        segments = self._segments(loops.within(0).flat)
        low, high = problem_of(segments.program, 1).least, peak(segments)
        found = self._within(loops, 0, high, seconds, None)
        for middle in (low, *(low + (high - low) * part // 8 for part in (1, 2, 3, 5, 6))):
            try:
                return self._within(loops, 0, middle, seconds, None)
            except PlanError:
                continue
        return found

    def _within(self, loops: Loops, room: int, given: int, seconds: float, before: Draft | None) -> Draft:
        looped = loops.within(room)
        segments = self._segments(looped.flat)
        for correction in range(_CORRECTIONS if loops.groups else 0):
            excess = peak(segments) - given  # what is around the loops may need more than was thought
            if excess <= 0 or excess >= room:
                break
            room -= excess + correction * given // 200
            looped = loops.within(room)
            segments = self._segments(looped.flat)
        plan: Plan | None = None
        if before is not None and len(before.segments.segments) == len(segments.segments):
            plan = replan(segments.program, given, before.sequence, seconds, self.seed)
        plan = plan or plan_program(segments.program, max(2, given), time_limit=seconds, seed=self.seed)
        again = (plan.overhead - 1) * segments.program.model_time + sum(each.cost for each in looped.shapes)
        return Draft(looped, segments, plan, 1 + again / max(1e-9, self.plain.program.model_time))

    def _segments(self, flat: Flat) -> Segments:
        return self.plain if flat is self.flat else segment(flat, self.name, self.price)

    def _fitted(self, given: int, seconds: float) -> Flat:
        """With the bodies of loops and the branches planned, too, where more is in use inside than there is room."""
        changed: list[JaxprEqn] = []
        sources = {*self.flat.constvars, *self.flat.invars}
        for eqn in self.flat.equations:
            used = self._inside[id(eqn)]
            around = {var for var in (*eqn.invars, *eqn.outvars) if isinstance(var, Var) and var not in sources}
            room = int(_SPARE * (given - sum(nbytes(var.aval) for var in around)))
            changed.append(self._fit(eqn, room, seconds) if used > room > 0 else eqn)
        if all(one is two for one, two in zip(changed, self.flat.equations, strict=True)):
            return self.flat
        return self.flat._replace(equations=changed)

    def _fit(self, eqn: JaxprEqn, room: int, seconds: float) -> JaxprEqn:
        """A loop or conditional whose bodies take so many bytes, where that can be."""
        params = dict(eqn.params)
        for name, value in params.items():
            if isinstance(value, ClosedJaxpr):
                params[name] = self._body(value, room, seconds)
            elif isinstance(value, tuple) and value and all(isinstance(each, ClosedJaxpr) for each in value):
                params[name] = tuple([self._body(each, room, seconds) for each in value])
        return eqn.replace(params=params)  # type: ignore[no-any-return]  # JAX has no type for it

    def _body(self, closed: ClosedJaxpr, room: int, seconds: float) -> ClosedJaxpr:
        drafting = Drafting(flatten(closed, inline_custom=False), self.name, self.gate, self.seed, self.price)
        if drafting.predicted <= room:
            return closed
        try:
            draft = drafting.draft(room, seconds)
        except PlanError:
            return closed
        emitted = draft.emitted(draft.regions(room), self.gate)
        constants = draft.looped.constants

        def run(*values: Any) -> list[Any]:
            return list(jaxpr_as_fun(emitted)(*constants, *values))

        found: ClosedJaxpr = jax.make_jaxpr(run)(*map(struct, closed.in_avals))
        same = not found.consts and [str(each) for each in found.out_avals] == [str(each) for each in closed.out_avals]
        return found if same else closed


def replan(program: Program, given: int, sequence: Sequence[int], seconds: float, seed: int) -> Plan | None:
    """A plan that a known order of runs leads to, made to fit and improved; None: it could not be made to fit."""
    start = perf_counter()
    problem = problem_of(program, given)
    check_least(problem)
    fits = fitted(problem, [*sequence, problem.final], seed)
    if fits is None:
        return None
    search = Search(problem, fits, seed)
    mean = problem.model_cost / max(1, len(problem.order))
    while (part := (perf_counter() - start) / max(1e-9, seconds)) < 1 and search.line.repeated():
        search.round(_HEAT * mean * (1 - part) ** 2)
    steps, most = schedule(problem, prune(problem, search.best))
    overhead = search.best_cost / problem.model_cost if problem.model_cost else 1.0
    return Plan(program.name, "own", given, steps, most, overhead, seconds=perf_counter() - start)
