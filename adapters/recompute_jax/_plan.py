"""The search for a schedule whose compiled temporaries are within a budget: plan, compile, look, plan again.

What the planner counts is checked against the compiled program, and the planner's budget is scaled until that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute import BudgetError
from recompute.extend import format_bytes
from recompute.planners import PlanError
from recompute_jax._aim import Aim
from recompute_jax._draft import Draft, Drafting
from recompute_jax._emit import LENGTH, Region
from recompute_jax._gates import Gate
from recompute_jax._jaxpr import flatten, struct
from recompute_jax._looks import Looks
from recompute_jax._options import Options, Planned
from recompute_jax._report import RematPlan, Trial, describe
from recompute_jax._segments import Segments

_CLOSE: Final = 1.03  # times the budget: the plain function may fit, if scheduled for memory
_SLIGHT: Final = 1.005  # overhead not worth a trial of the other gate
_QUICK: Final = 2.0  # seconds of a compilation, for that trial
_MORE: Final = 1.02  # of the budget, for that trial: what is fused is not in memory
_HOPELESS: Final = 2.0  # times the budget: what needs so much by the planner's count is not compiled
_BODIES: Final = ("bodies of loops and branches are planned, too",)
_SHORT: Final = 4  # segments in a region, when more need too much memory


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
        aim = Aim(budget, self.options.compilations)
        draft: Draft | None = None
        before: Draft | None = None
        while (given := aim.given) is not None:
            if draft is None or aim.anew or draft.length:
                try:
                    draft = before = self._draft(given, aim.is_last, before, aim.length)
                except PlanError:
                    draft = None
                    aim.no_plan()
                    continue
            found = self._schedule(draft, given, aim.length, f"planned for {format_bytes(given)}")
            if found.trial.compiled > budget:
                aim.exceeded(found.trial.compiled, draft.plan.peak, self._shorter(aim.length, found))
                continue
            if best is None or found.trial.overhead < best.trial.overhead:
                best = found
            aim.fitted(found.trial.compiled, found.trial.overhead)
        if best is None:
            best = self._smallest(budget)
        if best.trial.compiled > budget:
            least = min(each.compiled for each in self.looks.trials)
            raise BudgetError(
                f"{self.name}: no schedule was found that fits in {format_bytes(budget)} of temporaries; the least "
                f"that was found needs {least:,} bytes ({format_bytes(least)}) when compiled: give at least that, or "
                "let it look longer (compilations=, time_limit=)"
            )
        if self.options.other is not None:
            best = self._through(self.options.other, best, budget)
        return self._planned(best, budget)

    def _draft(self, given: int, is_last: bool, before: Draft | None, length: int = LENGTH) -> Draft:
        started = perf_counter()
        left = max(0.1, self.options.time_limit - self.planning)
        try:
            return self.drafting.draft(given, left if is_last else left / 2, before, length)
        finally:
            self.planning += perf_counter() - started

    def _smallest(self, budget: int) -> _Schedule:
        """The first that fits of some schedules for little memory, or else the last."""
        draft: Draft | None = None
        found: _Schedule | None = None
        for draft in self.drafting.leasts(self.options.time_limit / 6):
            if draft.plan.peak <= _HOPELESS * budget:
                found = self._schedule(draft, draft.plan.budget, 1, "a plan for little")
                if found.trial.compiled <= budget:
                    return found
        assert draft is not None, "there is one at least"
        return found if found is not None else self._schedule(draft, draft.plan.budget, 1, "the least plan")

    def _through(self, other: Gate, best: _Schedule, budget: int) -> _Schedule:
        """The better of `best` and a plan for a little more behind the other gate, over which XLA fuses."""
        if (
            best.trial.overhead <= _SLIGHT
            or best.trial.seconds > _QUICK
            or best.draft.looped.texts
            or best.draft.length
        ):
            return best
        given = int(_MORE * budget)
        try:
            draft = self._draft(given, True, best.draft)
        except PlanError:
            return best
        found = self._schedule(draft, given, LENGTH, f"planned for {format_bytes(given)}, gate {other}", other)
        return found if found.trial.compiled <= budget and found.trial.flops < best.trial.flops else best

    @staticmethod
    def _shorter(length: int, found: _Schedule) -> int:
        """Segments in a region, if so many may need too much memory; 0: no fewer are worth another compilation."""
        draft, is_quick = found.draft, found.trial.seconds < _QUICK
        if (draft.is_plain and not draft.length) or found.trial.compiled <= draft.plan.peak:
            return 0
        if draft.length:  # bodies are small
            return 1 if length > 1 and is_quick else 0
        for shorter in (_SHORT, 1) if is_quick else (_SHORT,):
            if shorter < length and len(draft.regions(found.trial.budget or 0, shorter)) > len(found.regions):
                return shorter
        return 0

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
            loops=draft.looped.texts + (_BODIES if draft.length else ()),
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
