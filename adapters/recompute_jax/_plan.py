"""The search for a schedule whose compiled temporaries are within a budget: plan, compile, look, plan again.

XLA has the last word on memory: it fuses, orders and places buffers. So what the planner counts is checked against the
compiled program, and the planner's budget is scaled until that fits. The compilations for looking are done without
LLVM's optimizations, which change no buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute._budget import format_bytes
from recompute._errors import BudgetError
from recompute._plans._liveness import schedule
from recompute._plans._problem import problem_of
from recompute._plans._schedule import Plan, PlanError
from recompute.planners import plan as plan_program
from recompute_jax._emit import LENGTH, Region, emit, regions
from recompute_jax._gates import Gate
from recompute_jax._jaxpr import Flat, flatten
from recompute_jax._report import RematPlan, Trial, describe
from recompute_jax._scans import cut, parts_of, struct
from recompute_jax._segments import Segment, Segments, segment

_LOOKING: Final[dict[str, Any]] = {"xla_backend_optimization_level": 0}
_NEAR: Final = 0.85  # of the budget: not worth another compilation
_LITTLE: Final = 1.02  # overhead not worth another compilation
_CLOSE: Final = 1.25  # times the budget: the plain function may fit, if scheduled for memory
_SHORT: Final = 4  # segments in a region, when more need too much memory
_STEP: Final = 0.02  # of the budget: plans for budgets that differ by less are alike
_LEAST: Final = 8  # plans, when looking for the least budget


@dataclass(frozen=True)
class Options:
    """How to plan."""

    budget: int | None
    """Bytes; None: `share`."""
    share: float | None
    gate: Gate
    time_limit: float
    """Seconds for planning, without compiling."""
    compilations: int
    """At most so many schedules are compiled to look at their memory."""
    seed: int
    price: Callable[[Segment], float] | None
    """The cost of a segment; None: estimated."""
    compiler_options: Mapping[str, Any]
    """What the planned function will be compiled with."""
    platform: str


@dataclass(frozen=True)
class Planned:
    """The plan, and the function of constants and arguments that follows it; None: the function as it is."""

    report: RematPlan
    emitted: ClosedJaxpr | None
    constants: Sequence[Any]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        assert self.emitted is not None, "the function is left as it is"
        return list(jaxpr_as_fun(self.emitted)(*self.constants, *leaves))


@dataclass(frozen=True)
class _Schedule:
    """A plan that was compiled."""

    trial: Trial
    plan: Plan
    sequence: list[int]
    regions: list[Region]
    emitted: ClosedJaxpr


def make(closed: ClosedJaxpr, name: str, options: Options, donated: Sequence[bool]) -> Planned:
    """Plan a traced function. Raises BudgetError if no schedule is found that fits when compiled."""
    return _Making(closed, name, options, donated).make()


class _Making:
    """One search."""

    def __init__(self, closed: ClosedJaxpr, name: str, options: Options, donated: Sequence[bool]) -> None:
        self.started = perf_counter()
        self.name = name
        self.options = options
        self.closed = closed
        flat = self.flat = flatten(closed, inline_custom=False)
        self.constants = list(flat.consts)
        self.donated = [False] * len(self.constants) + list(donated)
        self.trials: list[Trial] = []
        self.baseline: int | None = None
        self.planning = 0.0

    def make(self) -> Planned:
        options = self.options
        if options.budget is None:
            assert options.share is not None
            self.baseline = self._look(self._plain(), "the plain function", {}).compiled
            budget = int(options.share * self.baseline)
        else:
            budget = options.budget
        segments = segment(self.flat, self.name, options.price)
        predicted = _peak(segments)
        if self.baseline is not None and self.baseline <= budget:
            return self._as_it_is(segments, budget, predicted, self.baseline)
        if (options.compiler_options or self.baseline is None) and predicted <= _CLOSE * budget:
            trial = self._look(self._plain(), "the plain function, as it will be scheduled", options.compiler_options)
            if trial.compiled <= budget:
                return self._as_it_is(segments, budget, predicted, trial.compiled)
        flat = self.flat
        pieces = parts_of(flat, budget)
        if pieces:
            flat = flatten(cut(flat, pieces), inline_custom=False)
            self.constants[:0] = flat.consts
            self.donated[:0] = [False] * len(flat.consts)
            segments = segment(flat, self.name, options.price)
        return self._search(flat, segments, budget)

    def _search(self, flat: Flat, segments: Segments, budget: int) -> Planned:
        best: _Schedule | None = None
        known = math.inf  # the overhead of the last that fitted
        given = budget  # what the planner gets
        low, high, none = 0, 0, 0  # the most that fitted, the least that did not, the most that has no plan
        length = LENGTH
        plan: Plan | None = None
        for attempt in range(self.options.compilations):
            try:
                plan = plan or self._plan(segments, given, attempt)
            except PlanError:
                none = max(none, given)
                if best is not None or not high or high - none < _STEP * budget:
                    break
                given = (none + high) // 2
                continue
            found = self._schedule(flat, segments, plan, given, length, f"planned for {format_bytes(given)}")
            trial = found.trial
            if trial.compiled <= budget:
                low = max(low, given)
                if best is None or trial.overhead < best.trial.overhead:
                    best = found
                if trial.overhead <= _LITTLE or trial.compiled >= _NEAR * budget or known - trial.overhead < 0.01:
                    break
                known = trial.overhead
                wish = int(given * min(1.3, 0.97 * budget / max(1, trial.compiled)))
            elif length > _SHORT and trial.compiled > plan.peak:
                length = _SHORT  # the same plan, with less for XLA to order
                continue
            else:
                high = min(high or given, given)
                wish = int(given * max(0.5, 0.97 * budget / trial.compiled))
            below = max(low, none)
            if high and not below < wish < high:
                wish = (below + high) // 2
                if wish - below < _STEP * budget:
                    break
            given = wish
            plan = None
        if best is None:
            best = self._least(flat, segments)
        if best.trial.compiled > budget:
            least = min(each.compiled for each in self.trials)
            raise BudgetError(
                f"{self.name}: no schedule was found that fits in {format_bytes(budget)} of temporaries; the least "
                f"that was found needs {least:,} bytes ({format_bytes(least)}) when compiled: give at least that"
            )
        kept, recomputed = describe(segments, best.sequence)
        extra = sum(segments.segments[number].flops for number in best.sequence) - segments.flops
        peak, compiled = best.plan.peak, best.trial.compiled
        report = self._report(segments, budget, peak, compiled, kept, recomputed, extra, len(best.regions), best.plan)
        return Planned(report, best.emitted, self.constants)

    def _schedule(self, flat: Flat, segments: Segments, plan: Plan, given: int, length: int, what: str) -> _Schedule:
        sequence = [which for kind, which in plan.steps if kind == "compute"]
        _check_once(segments, sequence)
        steps = regions(segments, sequence, given, length)
        emitted = self._emit(flat, segments, steps)
        what = f"{what}, {len(steps)} regions"
        trial = self._look(emitted, what, self.options.compiler_options, given, plan)
        return _Schedule(trial, plan, sequence, steps, emitted)

    def _as_it_is(self, segments: Segments, budget: int, predicted: int, compiled: int) -> Planned:
        kept, recomputed = describe(segments, list(range(len(segments.segments))))
        report = self._report(segments, budget, predicted, compiled, kept, recomputed, 0.0, 0, None)
        return Planned(report, None, ())

    def _report(
        self,
        segments: Segments,
        budget: int,
        predicted: int,
        compiled: int,
        kept: Any,
        recomputed: Any,
        extra: float,
        count: int,
        plan: Plan | None,
    ) -> RematPlan:
        return RematPlan(
            name=self.name,
            budget=budget,
            share=self.options.share,
            baseline=self.baseline,
            predicted=predicted,
            compiled=compiled,
            flops=segments.flops,
            extra_flops=extra,
            gate=None if plan is None else self.options.gate,
            kept=kept,
            recomputed=recomputed,
            regions=count,
            trials=tuple(self.trials),
            seconds=perf_counter() - self.started,
            program=segments.program,
            plan=plan,
        )

    def _plan(self, segments: Segments, given: int, attempt: int) -> Plan:
        started = perf_counter()
        left = max(0.2, self.options.time_limit - self.planning)
        share = left / 2 if attempt + 1 < self.options.compilations else left
        try:
            return plan_program(segments.program, max(2, given), time_limit=share, seed=self.options.seed)
        finally:
            self.planning += perf_counter() - started

    def _plain(self) -> ClosedJaxpr:
        flat = self.flat
        closed = self.closed
        known = len(flat.consts)

        def run(*sources: Any) -> list[Any]:
            return list(jaxpr_as_fun(closed)(*sources[known:]))

        return jax.make_jaxpr(run)(*[struct(var.aval) for var in (*flat.constvars, *flat.invars)])

    def _emit(self, flat: Flat, segments: Segments, steps: list[Region]) -> ClosedJaxpr:
        run = emit(segments, flat.outvars, steps, self.options.gate)
        return jax.make_jaxpr(run)(*[struct(var.aval) for var in (*flat.constvars, *flat.invars)])

    def _look(
        self,
        emitted: ClosedJaxpr,
        what: str,
        compiler_options: Mapping[str, Any],
        given: int | None = None,
        plan: Plan | None = None,
    ) -> Trial:
        started = perf_counter()
        looking = {**compiler_options, **(_LOOKING if self.options.platform == "cpu" else {})}
        donated = tuple([at for at, each in enumerate(self.donated) if each])
        function = jax.jit(jaxpr_as_fun(emitted), donate_argnums=donated, compiler_options=looking)
        compiled = function.lower(*map(struct, emitted.in_avals)).compile()
        memory: Any = compiled.memory_analysis()
        trial = Trial(
            what,
            given,
            None if plan is None else plan.peak,
            int(memory.temp_size_in_bytes),
            1.0 if plan is None else plan.overhead,
            perf_counter() - started,
        )
        self.trials.append(trial)
        return trial

    def _least(self, flat: Flat, segments: Segments) -> _Schedule:
        """About the least budget that a plan exists for, compiled as finely as can be."""
        low, high = problem_of(segments.program, 1).least, _peak(segments)
        found: Plan | None = None
        for _ in range(_LEAST):
            middle = low if found is None and low < high else (low + high) // 2
            try:
                found = plan_program(segments.program, middle, rounds=1, time_limit=1.0)
                high = middle
            except PlanError:
                low = middle + 1 if found is not None or low != middle else low
                if found is None:
                    low = (low + high) // 2
            if high - low < 0.03 * high:
                break
        if found is None:
            found = plan_program(segments.program, high, rounds=1, time_limit=1.0)
        return self._schedule(flat, segments, found, high, 1, "the least plan")


def _peak(segments: Segments) -> int:
    """Bytes in use at the worst moment if each segment runs once."""
    problem = problem_of(segments.program, 1)
    return schedule(problem, problem.order)[1]


def _check_once(segments: Segments, sequence: Sequence[int]) -> None:
    seen: set[int] = set()
    for number in sequence:
        part = segments.segments[number]
        if part.once and number in seen:
            raise BudgetError(
                f"{part.name} has side effects and would have to run again to fit: give a larger budget, or take the "
                "effect out of the function"
            )
        seen.add(number)
