"""Plans of a function for so many bytes, by the planner's count: loops, branches and bodies in some shape.

Three things compete for the bytes. Scans and conditionals may keep less for later ones, which then run it again. Where
more is in use inside a loop or a branch than there is room, its body is planned, too: as a function of its own. What is
left is for the planner: the order of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from jax.extend.core import ClosedJaxpr, JaxprEqn

from recompute import planners
from recompute.planners import PlanError, ProgramPlan
from recompute_jax._control.branches import Choice, branch_groups, joined, kept
from recompute_jax._control.loops import Looped, Loops
from recompute_jax._program.emit import LENGTH, Gate, order_with_moves, with_moves
from recompute_jax._program.jaxpr import Flat, flatten, variables
from recompute_jax._program.segments import INSIDE, Segment, Segments, inside, nbytes, nesting, peak, segment
from recompute_jax._remat.recipe import Candidate, Fitted, Recipe, as_body

_INSIDE: Final = 0.95  # of what a loop's operands and results leave of the budget: what may be in use inside
_BODIES: Final = ("bodies of loops and branches are planned, too",)
_COMPARED: Final = 0.25  # of the effort for a plan: to find out which share of the budget loops should have
_CORRECTIONS: Final = 5
_SPEED: Final = 1e9  # FLOPs in a second, to speak of bytes in a second
_HOST_BYTE: Final = 200.0  # FLOPs that could be done while a byte moves to the host, or back: it takes 100 times longer
# than in the memory of the device, as over PCIe
_NOTICED: Final = 0.05  # of the budget: conditionals that hand on less are left as they are
_SLIGHT: Final = 1.005  # overhead not worth another plan
_SHARES: Final = (1.0, 0.5)  # of what the rest leaves of the budget: what a branch may have


@dataclass(frozen=True)
class Planning:
    """How candidates of a function are made."""

    name: str
    gate: Gate
    seed: int = 0
    price: Callable[[Segment], float] | None = None
    """The cost of a segment; None: estimated."""
    offload: bool = False
    """Values may move to the memory of the host."""
    depth: int | None = None
    """Of the loops that may be changed; None: all. Loops that changing others made are not changed again."""


class Candidates:
    """What makes candidates of one function: of it as it is, and with conditionals that keep less."""

    def __init__(self, flat: Flat, how: Planning) -> None:
        self._how = how if how.depth is not None else replace(how, depth=nesting(flat.equations))
        self._alone = _Alone(flat, self._how)
        self._groups = branch_groups(flat)
        self._known: dict[Choice, _Alone] = {(): self._alone}
        self._share = 0.5 if self._groups else 1.0  # of the effort, for the function as it is
        self.flat = flat
        self.plain = self._alone.plain
        self.predicted = self._alone.predicted
        """Bytes of the function as it is."""
        self.has_loops = bool(self._alone.loops.groups)
        """Whether scans hand stacks to each other."""

    def candidate(self, given: int, effort: float, before: Candidate | None = None, length: int = LENGTH) -> Candidate:
        """The best plan that is found for so many bytes, maybe from one `before`. Raises PlanError if there is none.

        `length`: segments in a region of bodies.
        """
        plans: list[Candidate] = []
        failure = PlanError("no plan")
        try:
            start = before if before and not before.joined else None
            plans.append(self._alone.candidate(given, self._share * effort, start, length))
        except PlanError as error:
            failure = error
        choices = self._choices(given, effort / 4) if not plans or plans[0].overhead > _SLIGHT else []
        for choice in choices:
            start = before if before and before.joined == choice else None
            with suppress(PlanError):
                plans.append(self._joined(choice).candidate(given, effort / 4 / len(choices), start, length))
        if not plans:
            raise failure
        return min(plans, key=lambda plan: plan.overhead)

    def least(self, effort: float) -> Candidate:
        """About the least budget that a plan exists for."""
        candidates = [function.least(self._share * effort) for function in self._extremes]
        return min(candidates, key=lambda candidate: candidate.peak)

    def leasts(self, effort: float) -> Iterator[Candidate]:
        """The same in several shapes."""
        for function in self._extremes:
            yield from function.leasts(self._share * effort)

    def uniform(self, effort: float) -> Iterator[Candidate]:
        """With each step of a loop, and each branch, run again by itself; nothing else runs again."""
        for function in self._extremes:
            if function.choice:
                yield function.as_it_is()
            yield from function.uniform(self._share * effort)

    @property
    def _extremes(self) -> list[_Alone]:
        """Conditionals are as they are; and no branch keeps anything for later ones."""
        return [self._alone, self._joined(self._nothing)] if self._groups else [self._alone]

    @property
    def _nothing(self) -> Choice:
        return tuple([(at, ((),) * len(group.branches)) for at, group in enumerate(self._groups)])

    def _choices(self, given: int, effort: float) -> list[Choice]:
        """Those that differ: of planned branches with some room, and the one that keeps nothing."""
        noticed = [at for at, group in enumerate(self._groups) if group.size > _NOTICED * given]
        if not noticed:
            return []
        total = sum(self._groups[at].size for at in noticed)
        how, part = self._how, effort / len(noticed) / len(_SHARES)
        choices: dict[Choice, None] = {}
        for share in _SHARES:
            room = max(0, int(share * (given - max(0, self.predicted - total))))
            pairs = [(at, self._groups[at]) for at in noticed]
            choice = [(at, kept(group, room * group.size // total, part, how.seed, how.price)) for at, group in pairs]
            choices[tuple(choice)] = None
        choices[self._nothing] = None
        return list(choices)

    def _joined(self, choice: Choice) -> _Alone:
        if choice not in self._known:
            cost = self.plain.program.model_time
            self._known[choice] = _Alone(joined(self.flat, choice), self._how, choice, cost)
        return self._known[choice]


class _Alone:
    """What makes candidates of one function whose conditionals are left as they are.

    They are candidates for what it was before a `choice`, which had the `cost`; None: its own.
    """

    def __init__(self, flat: Flat, how: Planning, choice: Choice = (), cost: float | None = None) -> None:
        self.flat = flat
        self.how = how
        self.choice = choice
        self.plain = segment(flat, how.name, how.price)
        self._more = 1.0 if cost is None else self.plain.program.model_time / max(1e-9, cost)
        self.predicted = peak(self.plain)
        self.loops = Loops(flat, are_left=not how.depth)
        self._bodies = _Bodies(how)
        self._smallest: Candidate | None = None
        self._segmented: dict[int, tuple[Flat, Segments]] = {id(flat): (flat, self.plain)}
        """By id."""

    def candidate(self, given: int, effort: float, before: Candidate | None, length: int) -> Candidate:
        """The best plan that is found for so many bytes, maybe from one `before`. Raises PlanError if there is none."""
        loops = self.loops.noticed(given)
        share = _COMPARED if loops.groups else 1.0
        plans: list[Candidate] = []
        failure = PlanError("no room for loops")
        for room in loops.rooms(given, self.predicted):
            try:
                plans.append(self._within(loops, room, given, effort * share, before, length))
            except PlanError as error:
                failure = error
        if not plans:
            raise failure
        return min(plans, key=lambda plan: plan.overhead)

    def as_it_is(self) -> Candidate:
        """Nothing runs again."""
        return self._planned(self.loops.as_they_are(), Fitted(self.flat), self.predicted, 0.0)

    def least(self, effort: float) -> Candidate:
        """About the least budget that a plan exists for. It is looked for once."""
        if self._smallest is None:
            looped = self.loops.within(0)
            self._smallest = self._least(looped, effort, self._bodies.within(looped.flat, 0, effort / 2, 1))
        return self._smallest

    def uniform(self, effort: float) -> Iterator[Candidate]:
        """With each step of the loops run again by itself, from what one of its modes keeps; the same in bodies."""
        as_they_are = self.loops.as_they_are()
        for looped in (as_they_are, *self.loops.uniform()):
            bodies = list(self._bodies.uniform(looped.flat, effort))
            for fitted in bodies if looped is as_they_are else (Fitted(looped.flat), *bodies):
                yield self._planned(looped, fitted, peak(self._segments(fitted.flat)), effort)

    def leasts(self, effort: float) -> Iterator[Candidate]:
        """That, and more with loops in several shapes, by rising cost: XLA may need less where it should need more."""
        yield self.least(effort)
        if not self.loops.groups:
            return
        for looped in self.loops.smallest():
            yield self._least(looped, effort / 2, Fitted(looped.flat))
        for looped in self.loops.smallest():
            fitted = self._bodies.within(looped.flat, 0, effort / 2, 1)
            if fitted.bodies:
                yield self._least(looped, effort / 2, fitted)

    def _least(self, looped: Looped, effort: float, fitted: Fitted) -> Candidate:
        segments = self._segments(fitted.flat)
        low, high = planners.least(segments.program), peak(segments)
        for middle in (low, *(low + (high - low) * part // 8 for part in (1, 2, 3, 5, 6))):
            try:
                return self._planned(looped, fitted, middle, effort)
            except PlanError:
                continue
        return self._planned(looped, fitted, high, effort)

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
        return self._planned(looped, fitted, given, effort, before)

    def _planned(
        self, looped: Looped, fitted: Fitted, given: int, effort: float, before: Candidate | None = None
    ) -> Candidate:
        segments, seed = self._segments(fitted.flat), self.how.seed
        plan: ProgramPlan | None = None
        if self.how.offload:
            segments.program.unit = 1 / _SPEED
            tier = f"{int(_SPEED / _HOST_BYTE)}B/s"
            plan = planners.plan(segments.program, max(2, given), effort=effort, seed=seed, tier=tier)
        elif before is not None and len(before.segments.segments) == len(segments.segments):
            plan = planners.replan(segments.program, given, before.sequence, effort, seed)
        plan = plan or planners.plan(segments.program, max(2, given), effort=effort, seed=seed)
        again = fitted.again + looped.cost + (plan.overhead - 1) * segments.program.model_time
        overhead = self._more * (1 + again / max(1e-9, self.plain.program.model_time))
        _, moved = order_with_moves(plan.steps, len(segments.segments))
        segments = with_moves(segments, moved) if moved else segments
        return Candidate(looped, segments, plan, overhead, fitted, self.choice, tuple(moved))

    def _segments(self, flat: Flat) -> Segments:
        if id(flat) not in self._segmented:
            self._segmented[id(flat)] = flat, segment(flat, self.how.name, self.how.price)
        return self._segmented[id(flat)][1]


@dataclass(frozen=True)
class _Body:
    """The body of a loop or a branch after a plan."""

    closed: ClosedJaxpr
    again: float
    """The cost of what runs again in it."""
    recipe: Recipe
    texts: tuple[str, ...]
    """What becomes of its loops."""


class _Bodies:
    """What plans the bodies of one function, and of the same with its loops in other shapes."""

    def __init__(self, how: Planning) -> None:
        self._how = replace(how, offload=False, depth=max(0, (how.depth or 0) - 1))
        self._candidates: dict[int, tuple[ClosedJaxpr, Candidates]] = {}
        """By id of a body."""
        self._planned: dict[tuple[int, int], Candidate] = {}
        """By id of a body, and room."""

    def within(self, flat: Flat, given: int, effort: float, length: int) -> Fitted:
        """Planned where so many bytes are too few, in regions of so many segments."""
        outside = {*flat.constvars, *flat.invars, *variables(flat.outvars)}  # no temporaries
        rooms: dict[int, int] = {}
        for number, eqn in enumerate(flat.equations):
            needed = inside(eqn)
            around = set(variables([*eqn.invars, *eqn.outvars])) - outside
            room = max(0, int(_INSIDE * (given - sum(nbytes(var.aval) for var in around)))) if needed else 0
            if needed > room:
                rooms[number] = room

        def plan(number: int, closed: ClosedJaxpr) -> _Body | None:
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

            def plan(number: int, closed: ClosedJaxpr, place: int = place) -> _Body | None:
                ways = options.get(id(closed))
                return self._emitted(closed, ways[min(place, len(ways) - 1)], 0) if ways else None

            fitted = self._fitted(flat, numbers, plan, 0)
            if fitted.bodies:
                yield fitted

    def _of(self, closed: ClosedJaxpr) -> Candidates:
        if id(closed) not in self._candidates:
            self._candidates[id(closed)] = closed, Candidates(flatten(closed), self._how)
        return self._candidates[id(closed)][1]

    def _fitted(
        self,
        flat: Flat,
        numbers: Iterable[int],
        plan: Callable[[int, ClosedJaxpr], _Body | None],
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
            params, changed = dict(eqn.params), dict[str, list[Recipe | None]]()
            for name, value in eqn.params.items():
                bodies = _closed(value)
                plans = [plan(number, body) for body in bodies]
                made = [body for body in plans if body]
                if made:
                    new = tuple([after.closed if after else body for after, body in zip(plans, bodies, strict=True)])
                    params[name] = new if isinstance(value, tuple) else new[0]
                    again += max(body.again for body in made) * params.get("length", 1)
                    changed[name] = [body.recipe if body else None for body in plans]
                    texts.update((f"in a body: {text}", None) for body in made for text in body.texts)
            if changed:
                equations[number] = eqn.replace(params=params)
                recipes[str(number)] = changed
        if not recipes:
            return Fitted(flat)
        return Fitted(flat._replace(equations=equations), again, length, recipes, tuple(texts))

    def _within(self, closed: ClosedJaxpr, room: int, effort: float, length: int) -> _Body | None:
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

    def _emitted(self, closed: ClosedJaxpr, candidate: Candidate, room: int, length: int = LENGTH) -> _Body | None:
        gate = self._how.gate
        steps = candidate.regions(max(room, candidate.plan.budget), length)
        body = as_body(closed, candidate.emitted(steps, gate))
        if body is None:
            return None
        again = (candidate.overhead - 1) * self._of(closed).plain.program.model_time
        texts = candidate.looped.texts + candidate.fitted.texts[len(_BODIES) :]
        return _Body(body, again, candidate.recipe(steps, gate), texts)


def _bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    if eqn.primitive.name not in INSIDE:
        return []
    return [closed for value in eqn.params.values() for closed in _closed(value)]


def _closed(value: object) -> tuple[ClosedJaxpr, ...]:
    """The bodies that a parameter is."""
    bodies = value if isinstance(value, tuple) else (value,)
    return bodies if bodies and all(isinstance(body, ClosedJaxpr) for body in bodies) else ()
