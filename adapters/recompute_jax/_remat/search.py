"""The search for a schedule whose compiled temporaries are within a budget: plan, compile, look, plan again.

What the planner counts is checked against the compiled program, and the planner's budget is scaled until that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, NamedTuple

from recompute import BudgetError
from recompute.planners import PlanError
from recompute.text import format_bytes
from recompute_jax._program.emit import LENGTH, Gate
from recompute_jax._program.jaxpr import explicit_sharding, flatten
from recompute_jax._program.segments import size_of
from recompute_jax._remat.candidates import Candidates, Planning
from recompute_jax._remat.ladder import Ladder, cheapest
from recompute_jax._remat.options import host_memory, measured
from recompute_jax._remat.recipe import Candidate, fingerprint
from recompute_jax._remat.report import PlannedProgram, SavedPlan, made_with, report_of
from recompute_jax._remat.schedules import Asked, Schedule, Schedules, mesh_of

_CLOSE: Final = 1.03  # times the budget: the plain function may fit, if scheduled for memory
_SLIGHT: Final = 1.005  # overhead not worth another plan
_HOPELESS: Final = 2.0  # times the budget: what needs so much by the planner's count is not compiled
_NEARLY: Final = 1.05  # times the budget: plans expected to need more are not compiled if something needs less
_FIRST: Final = 0.02  # effort for any function: some 0.2 seconds
_EQUATION: Final = 5e-5  # effort for each equation of a small function
_SMALL: Final = 100  # equations, above which no series of plans is made
_PLAN: Final = 0.002  # effort for one plan of a larger function
_PLAN_EQUATION: Final = 2e-6  # effort for each of its equations: a small part of what XLA takes to compile it
_SPARE: Final = 0.05  # of the budget: not worth another plan
_GAIN: Final = 0.01  # of the cost of the function: worth another compilation
_ROUGH: Final = 0.02  # of the budget: what regions need beside their values
_LITTLE: Final = 1.1  # times the budget: a plan of a large function for fewer bytes is better than shorter regions
_MORE_FOR_LOOPS: Final = (1.15, 1.3)  # times the bytes: loops are in whole steps, and some need less than was expected
_MORE: Final = 1  # looks after one that fits
_TAKEN: Final = 0.95  # of what was left over
_SCRAP: Final = 0.002  # effort for bodies that are planned once more
_EXPECTED: Final = 0.8  # of the bytes that the planner counts is what XLA needs for large functions, often, or more
_KEPT: Final = 0.9  # of what XLA needs less than the planner counts for the plain function it saves of any plan
_RUNGS: Final = 2  # plans of the series that are tried once more, in the shortest regions
_STRIDE: Final = 2  # plans that one step of the search passes over
_NEAR: Final = 1.3  # times the budget: shorter regions may help
_SHORT: Final = 4  # segments in a region of a large function, when more need too much memory
_NOTABLY: Final = 0.97  # times the bytes of another way: worth its run time


class _Way(NamedTuple):
    """How a plan becomes a schedule."""

    length: int
    """Segments in a region, at most."""
    gate: Gate | None = None
    """None: the one that was asked for."""


_FIRST_WAY: Final = _Way(LENGTH)


class Search:
    """One search."""

    def __init__(self, asked: Asked) -> None:
        self.started = perf_counter()
        self.asked = asked
        self.options = asked.options
        self.schedules = Schedules(asked)
        self.baseline: int | None = None
        mesh = mesh_of(asked.closed, asked.arguments)
        self.devices = 1 if mesh is None else mesh.size
        self.effort = 0.0
        """In units of `recompute.planners.plan`."""
        self.looks = asked.options.compilations
        """How many schedules may be compiled yet."""

    def make(self) -> PlannedProgram:
        """The planned function. Raises BudgetError if no schedule is found that fits when compiled."""
        options = self.options
        budget = options.budget
        if budget is None:
            self.baseline = self.schedules.plain("the plain function", {})
            budget = int((options.of_peak or 1.0) * self.baseline)
        price = measured() if options.costs == "measured" else None
        how = Planning(self.asked.name, options.first_gate, options.seed, price, bool(options.tiers) and host_memory())
        self.candidates = Candidates(flatten(self.asked.closed), how)
        self.effort = self._effort()
        predicted = self.candidates.predicted
        if self.devices > 1:
            if self.baseline is None:
                self.baseline = self.schedules.plain("the plain function", {})
            self.schedules.scale = min(1.0, self.baseline / max(1, predicted))
            predicted = int(self.schedules.scale * predicted)
        if self.baseline is not None and self.baseline <= budget:
            return self._planned(budget, predicted, self.baseline)
        if (options.flags or self.baseline is None) and predicted <= _CLOSE * budget:
            compiled = self.schedules.plain("the plain function, as it will be scheduled", options.flags)
            if compiled <= budget:
                return self._planned(budget, predicted, compiled)
        return self._search(budget)

    def _search(self, budget: int) -> PlannedProgram:
        """Of the plans that fit, the cheapest that is found.

        Small functions have a series of plans (`Ladder`), so that more bytes never cost more (`cheapest`). For others a
        plan is made for the bytes that XLA is expected to make the budget of, and another if it needs more or less.
        """
        rungs: list[Candidate] = []
        if size_of(self.asked.closed.jaxpr) > _SMALL:
            best = self._direct(budget)
        else:
            ladder = Ladder(self.candidates, self.effort)
            best = self._of(ladder.common, budget) or self._of(ladder.scarce, budget)
            rungs = [] if best else [*ladder.common, *ladder.scarce]
        best = best or self._smallest(rungs, budget)
        if best.trial.compiled > budget:
            least = min(trial.compiled for trial in self.schedules.trials)
            raise BudgetError(
                f"{self.asked.name}: no schedule was found that fits in {format_bytes(budget)} of temporaries; the "
                f"least that was found needs {least:,} bytes ({format_bytes(least)}) when compiled: give at least "
                "that, or let it look longer (compilations=, effort=)"
                + self._about_donation()
                + self._about_shardings()
            )
        return self._planned(budget, best.trial.predicted or 0, best.trial.compiled, best)

    def _about_donation(self) -> str:
        if not self.schedules.donated:
            return ""
        return (
            f". {format_bytes(self.schedules.donated)} of arguments are donated: without donation XLA has temporaries "
            "in the memory of the results, which are not there yet, so the least is smaller, and all memory together "
            "is more"
        )

    def _about_shardings(self) -> str:
        known = any(argument.sharding is not None for argument in self.asked.arguments)
        if self.devices == 1 or known or any(map(explicit_sharding, self.asked.closed.in_avals)):
            return ""
        return (
            ". While JAX traces, shardings over automatic axes are not known, and what is not constrained counts "
            "whole: begin the function with jax.lax.with_sharding_constraint, or have a mesh with explicit axes"
        )

    def _effort(self) -> float:
        """It grows with the function, as the time of compiling does."""
        equations = size_of(self.asked.closed.jaxpr)
        first, more = (_PLAN, _PLAN_EQUATION) if equations > _SMALL else (_FIRST, _EQUATION)
        return self.options.effort * (first + more * equations)

    def _of(self, rungs: Sequence[Candidate], budget: int) -> Schedule | None:
        """The cheapest of these plans that is found to fit."""
        expected = [self.schedules.scale * candidate.peak for candidate in rungs]
        if not rungs or min(expected) > _HOPELESS * budget:
            return None
        known: dict[int, Schedule] = {}
        most = _NEARLY * budget / self._part_of_count()

        def fits(number: int) -> bool:
            if number not in known and self.looks > 0 and expected[number] <= most:
                known[number] = self._fitting(rungs[number], budget)
            return number in known and known[number].trial.compiled <= budget

        start = next((number for number, size in enumerate(expected) if size <= budget), len(rungs) - 1)
        number = cheapest(len(rungs), start, fits, _STRIDE)
        return None if number is None else known[number]

    def _direct(self, budget: int) -> Schedule | None:
        """Plan for some bytes, compile, and plan for as many more or fewer as were left over or lacking."""
        uniform = list(self.candidates.uniform(self.effort / 4))
        scale = self.schedules.scale
        given = min(self._expected(budget), 0.999 * self.candidates.predicted)
        low, high = 0.0, float("inf")  # bytes by the planner's count that fit, and that do not
        best: Schedule | None = None
        way = _FIRST_WAY
        while self.looks > 0:
            candidate = self._planned_for(int(given), uniform)
            if candidate is None or not low < candidate.peak < high:
                break
            if best is not None and candidate.overhead > best.candidate.overhead - _GAIN:
                break
            schedule = self._fitting(candidate, budget, way, can_be_less=high == float("inf"))
            way = _Way(schedule.length, None if schedule.gate == self.options.first_gate else schedule.gate)
            spare = (budget - schedule.trial.compiled) / scale
            if spare >= 0:
                best, low = schedule, candidate.peak
                if spare * scale < _SPARE * budget or candidate.overhead <= _SLIGHT:
                    break
                given = low + _TAKEN * spare
            else:
                high = candidate.peak
                given = high + spare
            if best is not None:
                self.looks = min(self.looks, _MORE)
                given = min(max(given, (2 * low + high) / 3), (low + 2 * high) / 3) if high < float("inf") else given
        return best

    def _part_of_count(self) -> float:
        """What XLA may need of the bytes that the planner counts: known of the plain function, or else guessed."""
        if self.baseline is None:
            return _EXPECTED
        counted = self.schedules.scale * self.candidates.predicted
        return max(_EXPECTED, min(1.0, self.baseline / max(1.0, counted)))

    def _expected(self, budget: int) -> float:
        """Bytes by the planner's count that XLA is expected to make the budget of.

        What it needs less than is counted for the plain function, it needs less for a plan. A branch may hold one more
        value than it must.
        """
        room = budget / self.schedules.scale
        if self.baseline is None:
            return room / _EXPECTED
        counted = self.candidates.predicted
        saved = _KEPT * max(0.0, counted - self.baseline / self.schedules.scale)
        if self.candidates.has_loops:
            return min(room + saved, room / _EXPECTED)
        if self.options.first_gate != "branch":
            return room + saved
        return room + saved - self.candidates.plain.largest - _ROUGH * room

    def _planned_for(self, given: int, uniform: Sequence[Candidate]) -> Candidate | None:
        """The cheapest plan for so many bytes; None: there is none."""
        pool = list(uniform)
        for factor in (1.0, *_MORE_FOR_LOOPS) if self.candidates.has_loops else (1.0,):
            with suppress(PlanError):
                pool.append(self.candidates.candidate(max(2, int(factor * given)), self.effort))
        return min((plan for plan in pool if plan.peak <= given), key=lambda plan: plan.overhead, default=None)

    def _fitting(
        self, candidate: Candidate, budget: int, way: _Way = _FIRST_WAY, *, can_be_less: bool = False
    ) -> Schedule:
        """The plan in regions that fit, which leave XLA less to order where they must; or what needs the least."""
        given = candidate.plan.budget
        best: Schedule | None = None
        following: _Way | None = way
        while following is not None and (best is None or self.looks > 0):
            way = following
            self.looks -= 1
            if candidate.length and best is not None:
                candidate = self.candidates.candidate(given, _SCRAP, None, way.length)
            schedule = self.schedules.compile(candidate, "planned for {size}", way.length, way.gate)
            needed = schedule.trial.compiled
            if best is None or needed <= budget < best.trial.compiled or needed < _NOTABLY * best.trial.compiled:
                best = schedule
            near = _LITTLE if can_be_less and not schedule.is_quick else 1.0
            is_near = near * budget < needed <= _NEAR * budget
            following = self._after(way, schedule) if is_near else None
        assert best is not None, "one is compiled at least"
        return best

    def _smallest(self, rungs: Sequence[Candidate], budget: int) -> Schedule:
        """The first that fits of some schedules for little memory, or else the one that needs least.

        XLA may make less of some plans than of others. Where all are hopeless, the two are compiled that need least.
        """
        by_peak = lambda plan: plan.peak
        pool: dict[tuple[int, float], Candidate] = {}
        for plan in (*self.candidates.leasts(self.effort / 4), *sorted(rungs, key=by_peak)[:_RUNGS]):
            pool.setdefault((plan.peak, plan.overhead), plan)
        hopeful = [plan for plan in pool.values() if self.schedules.scale * plan.peak <= _HOPELESS * budget]
        best: Schedule | None = None
        other = self.options.other_gate if self.schedules.donated else None
        for candidate in hopeful or sorted(pool.values(), key=by_peak)[:2]:
            for gate in (None, other) if other else (None,):  # XLA copies donated arguments that a branch reads
                schedule = self.schedules.compile(candidate, "a plan for little", 1, gate)
                if best is None or schedule.trial.compiled < best.trial.compiled:
                    best = schedule
                if best.trial.compiled <= budget:
                    return best
        assert best is not None, "there is one at least"
        return best

    def _after(self, way: _Way, schedule: Schedule) -> _Way | None:
        """What may need less than this; None: nothing that is worth another compilation."""
        candidate, is_quick = schedule.candidate, schedule.is_quick
        is_body = bool(candidate.length)
        if (candidate.is_plain and not is_body) or schedule.trial.compiled <= self.schedules.scale * candidate.peak:
            return None
        if is_body:  # bodies are small
            return _Way(1) if way.length > 1 and is_quick else None
        if way.gate is None and self.options.other_gate is not None and is_quick and not candidate.looped.texts:
            return _Way(1, self.options.other_gate)  # it compiles quicker, and where it holds, it holds to the byte
        shorter = 1 if is_quick else _SHORT
        room = int((schedule.trial.budget or 0) / self.schedules.scale)
        are_more = shorter < way.length and len(candidate.regions(room, shorter)) > len(schedule.regions)
        return _Way(shorter) if are_more else None

    def _planned(self, budget: int, predicted: int, compiled: int, best: Schedule | None = None) -> PlannedProgram:
        """The function by this schedule, or unchanged, and its report."""
        plain = self.candidates.plain
        segments, sequence = plain, list(range(len(plain.segments)))
        more: dict[str, Any] = {}
        if best is not None:
            candidate = best.candidate
            segments, sequence = candidate.segments, candidate.sequence
            extra = sum(segments.segments[number].flops for number in sequence) - plain.flops
            more = {"extra_flops": extra, "overhead": candidate.overhead, "loops": best.loops, "recipe": best.recipe}
        saved = SavedPlan(
            name=self.asked.name,
            budget=budget,
            of_peak=self.options.of_peak,
            baseline=self.baseline,
            predicted=predicted,
            compiled=compiled,
            flops=plain.flops,
            program=fingerprint(self.candidates.flat),
            made_with=made_with(self.options.flags),
            **more,
        )
        report = report_of(
            saved,
            segments,
            sequence,
            self.schedules.scale,
            trials=tuple(self.schedules.trials),
            seconds=perf_counter() - self.started,
            devices=self.devices,
            plan=best.candidate.plan if best else None,
        )
        return PlannedProgram(report, best.emitted if best else None)
