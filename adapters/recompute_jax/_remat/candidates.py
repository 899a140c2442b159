"""The best plan of a function for so many bytes, by the planner's count: its loops in some shape, the rest in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jax.extend.core import ClosedJaxpr

from recompute import planners
from recompute.planners import PlanError, ProgramPlan
from recompute_jax._branches.rewrite import Choice
from recompute_jax._emit.gates import Gate
from recompute_jax._emit.moves import order_with_moves, with_moves
from recompute_jax._emit.regions import LENGTH, Region, regions
from recompute_jax._program.jaxpr import Flat
from recompute_jax._program.segments import Segment, Segments, peak, segment
from recompute_jax._remat.bodies import Bodies, Fitted
from recompute_jax._remat.recipe import Recipe, emitted, scans_of
from recompute_jax._scans.loops import Looped, Loops

_COMPARED: Final = 0.25  # of the effort for a plan: to find out which share of the budget loops should have
_CORRECTIONS: Final = 5
_SPEED: Final = 1e9  # FLOPs in a second, to speak of bytes in a second
_HOST_BYTE: Final = 200.0  # FLOPs that could be done while a byte moves to the host, or back: it takes 100 times longer
# than in the memory of the device, as over PCIe


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
        return emitted(self.fitted.flat, self.segments, steps, gate)

    def recipe(self, steps: Sequence[Region], gate: Gate) -> Recipe:
        """The same in numbers."""
        scans = scans_of(self.looped.before, self.looped.shapes)
        order = [number for region in steps for number in region.runs]
        lengths, free = [len(each.runs) for each in steps], [at for at, each in enumerate(steps) if each.is_open]
        bodies, split = self.fitted.bodies or {}, self.looped.split
        level = split.level if split else None
        return Recipe(gate, order, lengths, scans, bodies, self.joined, free, list(self.moved), level)


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
        of_body: Callable[[Flat], AnyCandidates],
        offload: bool = False,
        loops: bool = True,
    ) -> None:
        self.flat = flat
        self.name = name
        self.gate = gate
        self.seed = seed
        self.price = price
        self.of_body = of_body
        self.offload = offload
        self.loops = loops
        self.plain = segment(flat, name, price)
        self.predicted = peak(self.plain)
        """Bytes of the function as it is."""
        self._loops = Loops(flat, None if loops else ())
        self.has_loops = bool(self._loops.groups)
        """Whether scans hand stacks to each other."""
        self._bodies = Bodies(of_body, gate)
        self._smallest: Candidate | None = None
        self._segmented: dict[int, tuple[Flat, Segments]] = {}
        """By id."""

    def candidate(self, given: int, effort: float, before: Candidate | None = None, length: int = LENGTH) -> Candidate:
        """The best plan that is found for so many bytes, maybe from one `before`. Raises PlanError if there is none.

        `length`: segments in a region of bodies.
        """
        loops = self._loops.noticed(given)
        best, failure = None, PlanError("no room for loops")
        for room in loops.rooms(given, self.predicted):
            try:
                share = _COMPARED if loops.groups else 1.0
                candidate = self._within(loops, room, given, effort * share, before, length)
            except PlanError as error:
                failure = error
                continue
            if best is None or candidate.overhead < best.overhead:
                best = candidate
        if best is None:
            raise failure
        return best

    def as_it_is(self) -> Candidate:
        """Nothing runs again."""
        return self._planned(self._loops.as_they_are(), self.plain, self.predicted, 0.0, None, Fitted(self.flat))

    def least(self, effort: float) -> Candidate:
        """About the least budget that a plan exists for. It is looked for once."""
        if self._smallest is None:
            looped = self._loops.within(0)
            self._smallest = self._least(looped, effort, self._bodies.within(looped.flat, 0, effort / 2, 1))
        return self._smallest

    def uniform(self, effort: float) -> Iterator[Candidate]:
        """With each step of a loop run again by itself, from what one of its modes keeps; the same in bodies of loops.

        Nothing else runs again.
        """
        as_they_are = self._loops.as_they_are()
        for looped in (as_they_are, *self._loops.uniform()):
            bodies = list(self._bodies.uniform(looped.flat, effort))
            for fitted in bodies if looped is as_they_are else (Fitted(looped.flat), *bodies):
                segments = self._segments(fitted.flat)
                yield self._planned(looped, segments, peak(segments), effort, None, fitted)

    def leasts(self, effort: float) -> Iterator[Candidate]:
        """The same with loops in several shapes, by rising cost: XLA may need less for one that should need more."""
        for looped in self._loops.smallest():
            yield self._least(looped, effort / 2, Fitted(looped.flat))
        for looped in self._loops.smallest():
            fitted = self._bodies.within(looped.flat, 0, effort / 2, 1)
            if fitted.bodies:
                yield self._least(looped, effort / 2, fitted)

    def _least(self, looped: Looped, effort: float, fitted: Fitted) -> Candidate:
        segments = self._segments(fitted.flat)
        low, high = planners.least(segments.program), peak(segments)
        for middle in (low, *(low + (high - low) * part // 8 for part in (1, 2, 3, 5, 6))):
            try:
                return self._planned(looped, segments, middle, effort, None, fitted)
            except PlanError:
                continue
        return self._planned(looped, segments, high, effort, None, fitted)

    def _within(
        self, loops: Loops, room: int, given: int, effort: float, before: Candidate | None, length: int
    ) -> Candidate:
        looped = loops.within(room)
        for correction in range(_CORRECTIONS if loops.groups else 0):
            excess = peak(self._segments(looped.flat)) - given  # what is around them may need more than was thought
            if excess <= 0 or excess >= room:
                break
            room -= excess + correction * given // 200
            looped = loops.within(room)
        fitted = self._bodies.within(looped.flat, given, effort / 2, length)
        return self._planned(looped, self._segments(fitted.flat), given, effort, before, fitted)

    def _planned(
        self, looped: Looped, segments: Segments, given: int, effort: float, before: Candidate | None, fitted: Fitted
    ) -> Candidate:
        plan: ProgramPlan | None = None
        if self.offload:
            segments.program.unit = 1 / _SPEED
            more = {"tier": f"{int(_SPEED / _HOST_BYTE)}B/s"}
            plan = planners.plan(segments.program, max(2, given), effort=effort, seed=self.seed, **more)
        elif before is not None and len(before.segments.segments) == len(segments.segments):
            plan = planners.replan(segments.program, given, before.sequence, effort, self.seed)
        plan = plan or planners.plan(segments.program, max(2, given), effort=effort, seed=self.seed)
        again = fitted.again + looped.cost
        again += (plan.overhead - 1) * segments.program.model_time
        overhead = 1 + again / max(1e-9, self.plain.program.model_time)
        _, moved = order_with_moves(plan.steps, len(segments.segments))
        segments = with_moves(segments, moved) if moved else segments
        return Candidate(looped, segments, plan, overhead, fitted, moved=tuple(moved))

    def _segments(self, flat: Flat) -> Segments:
        if flat is self.flat:
            return self.plain
        if id(flat) not in self._segmented:
            self._segmented[id(flat)] = flat, segment(flat, self.name, self.price)
        return self._segmented[id(flat)][1]
