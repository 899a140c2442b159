"""The search for a schedule whose compiled temporaries are within a budget: plan, compile, look, plan again.

What the planner counts is checked against the compiled program, and the planner's budget is scaled until that fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute._budget import format_bytes
from recompute._errors import BudgetError
from recompute._plans._schedule import PlanError
from recompute_jax._draft import Draft, Drafting
from recompute_jax._emit import LENGTH, Region
from recompute_jax._gates import Gate
from recompute_jax._jaxpr import flatten, struct
from recompute_jax._looks import Looks
from recompute_jax._options import Options, Planned
from recompute_jax._report import RematPlan, Trial, describe
from recompute_jax._segments import Segments

_NEAR: Final = 0.85  # of the budget: not worth another compilation
_ALMOST: Final = 1.05  # times the budget: a plan for hardly less will fit
_LEAP: Final = 1.6  # times the last budget at most; XLA has temporaries in the memory of results that are not there yet
_LITTLE: Final = 1.02  # overhead not worth another compilation
_CLOSE: Final = 1.03  # times the budget: the plain function may fit, if scheduled for memory
_SLIGHT: Final = 1.005  # overhead not worth a trial of the other gate
_QUICK: Final = 2.0  # seconds of a compilation, for that trial
_MORE: Final = 1.02  # of the budget, for that trial: what is fused is not in memory
_SHORT: Final = 4  # segments in a region, when more need too much memory
_STEP: Final = 0.02  # of the budget: plans for budgets that differ by less are alike
_FIRST: Final = 0.99  # of the budget, for the first plan: small values are not counted exactly


@dataclass(frozen=True)
class _Schedule:
    """A draft that was compiled."""

    trial: Trial
    draft: Draft
    regions: list[Region]
    emitted: ClosedJaxpr
    gate: Gate


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
        self.donated = donated
        self.looks = Looks(options.platform)
        self.baseline: int | None = None
        self.planning = 0.0

    def make(self) -> Planned:
        options = self.options
        if options.budget is None:
            assert options.share is not None
            self.baseline = self._look_plain("the plain function", {})
            budget = int(options.share * self.baseline)
        else:
            budget = options.budget
        self.drafting = Drafting(
            flatten(self.closed, inline_custom=False), self.name, options.gate, options.seed, options.price
        )
        segments, predicted = self.drafting.plain, self.drafting.predicted
        if self.baseline is not None and self.baseline <= budget:
            return self._as_it_is(segments, budget, predicted, self.baseline)
        if (options.compiler_options or self.baseline is None) and predicted <= _CLOSE * budget:
            compiled = self._look_plain("the plain function, as it will be scheduled", options.compiler_options)
            if compiled <= budget:
                return self._as_it_is(segments, budget, predicted, compiled)
        return self._search(budget)

    def _search(self, budget: int) -> Planned:
        best: _Schedule | None = None
        known = math.inf  # the overhead of the last that fitted
        given = int(_FIRST * budget)  # what the planner gets
        low, high, none = 0, 0, 0  # the most that fitted, the least that did not, the most that has no plan
        length = LENGTH
        draft: Draft | None = None
        before: Draft | None = None
        for attempt in range(self.options.compilations):
            try:
                draft = before = draft or self._draft(given, attempt, before)
            except PlanError:
                none = max(none, given)
                if best is not None or not high or high - none < _STEP * budget:
                    break
                given = (none + high) // 2
                continue
            found = self._schedule(draft, given, length, f"planned for {format_bytes(given)}")
            trial = found.trial
            if trial.compiled <= budget:
                low = max(low, given)
                if best is None or trial.overhead < best.trial.overhead:
                    best = found
                if trial.overhead <= _LITTLE or trial.compiled >= _NEAR * budget or known - trial.overhead < 0.01:
                    break
                known = trial.overhead
                wish = min(int(_LEAP * given), given + int(0.97 * budget) - trial.compiled)
            elif shorter := _shorter(length, found, given):
                length = shorter  # the same plan, with less for XLA to order
                continue
            else:
                given = high = min(high or given, given, draft.plan.peak)
                margin = 0.97 if trial.compiled > _ALMOST * budget else 0.99
                wish = max(given // 2, given + int(margin * budget) - trial.compiled)
            below = max(low, none)
            if high and not below < wish < high:
                wish = (below + high) // 2
                if wish - below < _STEP * budget:
                    break
            given = wish
            draft = None
        if best is None:
            draft = self.drafting.least(self.options.time_limit / 6)
            best = self._schedule(draft, draft.plan.budget, 1, "the least plan")
        if best.trial.compiled > budget:
            least = min(each.compiled for each in self.looks.trials)
            raise BudgetError(
                f"{self.name}: no schedule was found that fits in {format_bytes(budget)} of temporaries; the least "
                f"that was found needs {least:,} bytes ({format_bytes(least)}) when compiled: give at least that"
            )
        if self.options.other is not None:
            best = self._through(self.options.other, best, budget)
        return self._planned(best, budget)

    def _draft(self, given: int, attempt: int, before: Draft | None) -> Draft:
        started = perf_counter()
        left = max(0.1, self.options.time_limit - self.planning)
        try:
            return self.drafting.draft(given, left if attempt + 1 == self.options.compilations else left / 2, before)
        finally:
            self.planning += perf_counter() - started

    def _through(self, other: Gate, best: _Schedule, budget: int) -> _Schedule:
        """The better of `best` and a plan for a little more behind the other gate, over which XLA fuses."""
        if best.trial.overhead <= _SLIGHT or best.trial.seconds > _QUICK or best.draft.looped.texts:
            return best
        given = int(_MORE * budget)
        try:
            draft = self._draft(given, self.options.compilations - 1, best.draft)
        except PlanError:
            return best
        found = self._schedule(draft, given, LENGTH, f"planned for {format_bytes(given)}, gate {other}", other)
        return found if found.trial.compiled <= budget and found.trial.flops < best.trial.flops else best

    def _schedule(self, draft: Draft, given: int, length: int, what: str, gate: Gate | None = None) -> _Schedule:
        _check_once(draft.segments, draft.sequence)
        steps = draft.regions(given, length)
        gate = gate or self.options.gate
        emitted = draft.emitted(steps, gate)
        donated = [*[False] * len(draft.looped.constants), *self.donated]
        what = f"{what}, {len(steps)} regions" if len(steps) > 1 else what
        predicted = draft.plan.peak
        options = self.options.compiler_options
        trial = self.looks.look(emitted, donated, what, options, given, predicted, draft.overhead)
        return _Schedule(trial, draft, steps, emitted, gate)

    def _look_plain(self, what: str, compiler_options: Mapping[str, Any]) -> int:
        """Bytes of temporaries of the function as it is."""
        closed = self.closed

        def run(*sources: Any) -> list[Any]:
            return list(jaxpr_as_fun(closed)(*sources[len(closed.consts) :]))

        avals = [each.aval for each in (*closed.jaxpr.constvars, *closed.jaxpr.invars)]
        traced = jax.make_jaxpr(run)(*map(struct, avals))
        donated = [*[False] * len(closed.consts), *self.donated]
        return self.looks.look(traced, donated, what, compiler_options).compiled

    def _as_it_is(self, segments: Segments, budget: int, predicted: int, compiled: int) -> Planned:
        kept, recomputed = describe(segments, list(range(len(segments.segments))))
        return Planned(self._report(segments, budget, predicted, compiled, kept, recomputed), None, ())

    def _planned(self, best: _Schedule, budget: int) -> Planned:
        draft, plain = best.draft, self.drafting.plain
        segments = draft.segments
        kept, recomputed = describe(segments, draft.sequence)
        extra = sum(segments.segments[number].flops for number in draft.sequence) - plain.flops
        report = self._report(
            segments,
            budget,
            draft.plan.peak,
            best.trial.compiled,
            kept,
            recomputed,
            flops=plain.flops,
            extra_flops=extra,
            gate=best.gate if len(best.regions) > 1 else None,
            overhead=draft.overhead,
            loops=draft.looped.texts,
            regions=len(best.regions),
            plan=draft.plan,
        )
        return Planned(report, best.emitted, draft.looped.constants)

    def _report(
        self, segments: Segments, budget: int, predicted: int, compiled: int, kept: Any, recomputed: Any, **more: Any
    ) -> RematPlan:
        return RematPlan(
            name=self.name,
            budget=budget,
            share=self.options.share,
            baseline=self.baseline,
            predicted=predicted,
            compiled=compiled,
            kept=kept,
            recomputed=recomputed,
            trials=tuple(self.looks.trials),
            seconds=perf_counter() - self.started,
            program=segments.program,
            **{"flops": segments.flops, **more},
        )


def _shorter(length: int, found: _Schedule, given: int) -> int:
    """Segments in a region, if so many need too much memory; 0: no fewer are worth another compilation."""
    if found.draft.is_plain or found.trial.compiled <= found.draft.plan.peak:
        return 0
    for shorter in (_SHORT, 1) if found.trial.seconds < _QUICK else (_SHORT,):
        if shorter < length and len(found.draft.regions(given, shorter)) > len(found.regions):
            return shorter
    return 0


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
