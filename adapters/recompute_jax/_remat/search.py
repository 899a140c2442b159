"""The search for a schedule whose compiled temporaries are within a budget: plan, compile, look, plan again.

What the planner counts is checked against the compiled program, and the planner's budget is scaled until that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

from jax.extend.core import ClosedJaxpr

from recompute import BudgetError
from recompute.extend import format_bytes
from recompute_jax._emit.regions import LENGTH
from recompute_jax._program.costs import size_of
from recompute_jax._program.fingerprint import fingerprint
from recompute_jax._program.jaxpr import flatten
from recompute_jax._remat.budget_search import cheapest
from recompute_jax._remat.candidates import AnyCandidates, Candidate
from recompute_jax._remat.compile import Argument
from recompute_jax._remat.joined import candidates_of
from recompute_jax._remat.ladder import Ladder
from recompute_jax._remat.options import Options
from recompute_jax._remat.planned import Planned
from recompute_jax._remat.report import RematPlan, describe
from recompute_jax._remat.saved import SavedPlan, made_with
from recompute_jax._remat.schedule import Schedule, Schedules

_CLOSE: Final = 1.03  # times the budget: the plain function may fit, if scheduled for memory
_SLIGHT: Final = 1.005  # overhead not worth a trial of the other gate
_HOPELESS: Final = 2.0  # times the budget: what needs so much by the planner's count is not compiled
_FIRST: Final = 0.02  # effort for any function: some 0.2 seconds
_EQUATION: Final = 5e-5  # effort for each equation of the function: a part of what XLA takes to compile it
_SCRAP: Final = 0.002  # effort for bodies that are planned once more
_EXPECTED: Final = 0.8  # of the bytes that the planner counts is what XLA needs for large functions, often, or more
_STRIDE: Final = 2  # plans that are passed over at once in the search
_NEAR: Final = 1.3  # times the budget: shorter regions may help
_SHORT: Final = 4  # segments in a region, when more need too much memory


def make(closed: ClosedJaxpr, name: str, options: Options, arguments: Sequence[Argument]) -> Planned:
    """Plan a traced function. Raises BudgetError if no schedule is found that fits when compiled."""
    return _Search(closed, name, options, arguments).make()


class _Search:
    """One search."""

    def __init__(self, closed: ClosedJaxpr, name: str, options: Options, arguments: Sequence[Argument]) -> None:
        self.started = perf_counter()
        self.name = name
        self.options = options
        self.closed = closed
        self.schedules = Schedules(closed, options, arguments)
        self.baseline: int | None = None
        shardings = [each.sharding for each in arguments if each.sharding is not None]
        self.devices = max([1, *(each.num_devices for each in shardings)])
        self.effort = 0.0
        """In units of `recompute.planners.plan`."""
        self.looks = options.compilations
        """How many schedules may be compiled yet."""

    def make(self) -> Planned:
        options = self.options
        if options.budget is None:
            assert options.share is not None
            self.baseline = self.schedules.plain("the plain function", {})
            budget = int(options.share * self.baseline)
        else:
            budget = options.budget
        self.candidates: AnyCandidates = candidates_of(
            flatten(self.closed, inline_custom=False),
            self.name,
            options.gate,
            options.seed,
            options.price,
            options.offload,
        )
        self.effort = self._effort()
        predicted = self.candidates.predicted
        if self.devices > 1:
            if self.baseline is None:
                self.baseline = self.schedules.plain("the plain function", {})
            self.schedules.scale = min(1.0, self.baseline / max(1, predicted))
            predicted = int(self.schedules.scale * predicted)
        if self.baseline is not None and self.baseline <= budget:
            return self._planned(budget, predicted, self.baseline)
        if (options.compiler_options or self.baseline is None) and predicted <= _CLOSE * budget:
            compiled = self.schedules.plain("the plain function, as it will be scheduled", options.compiler_options)
            if compiled <= budget:
                return self._planned(budget, predicted, compiled)
        return self._search(budget)

    def _search(self, budget: int) -> Planned:
        """Of the plans that fit, the cheapest that is found; see `cheapest` for why more bytes never cost more."""
        equations = size_of(self.closed.jaxpr)
        ladder = Ladder(self.candidates, self.effort, equations)
        best = self._of(ladder.common, budget, ladder.is_large) or self._of(ladder.scarce, budget, ladder.is_large)
        if best is None:
            best = self._smallest(ladder, budget)
        if best.trial.compiled > budget:
            least = min(each.compiled for each in self.schedules.trials)
            raise BudgetError(
                f"{self.name}: no schedule was found that fits in {format_bytes(budget)} of temporaries; the least "
                f"that was found needs {least:,} bytes ({format_bytes(least)}) when compiled: give at least that, or "
                "let it look longer (compilations=, effort=)" + self._about_donation()
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

    def _effort(self) -> float:
        """All of it: it grows with the function, as the time of compiling does."""
        return self.options.effort * (_FIRST + _EQUATION * size_of(self.closed.jaxpr))

    def _of(self, rungs: Sequence[Candidate], budget: int, is_large: bool) -> Schedule | None:
        """The cheapest of these plans that is found to fit."""
        part = self.schedules.scale * (self._part_of_count() if is_large else 1.0)
        expected = [part * each.plan.peak for each in rungs]
        if not rungs or min(expected) > _HOPELESS * budget:
            return None
        known: dict[int, Schedule | None] = {}

        def fits(number: int) -> bool:
            if number not in known:
                known[number] = self._fitting(rungs[number], budget)
            return known[number] is not None

        start = next((number for number, size in enumerate(expected) if size <= budget), len(rungs) - 1)
        number = cheapest(len(rungs), start, fits, 1 if is_large else _STRIDE, upwards=not is_large)
        if number is None:
            return None
        best = known[number]
        assert best is not None, "it fits"
        return self._through(rungs[max(0, number - 1)], best, budget)

    def _part_of_count(self) -> float:
        """What XLA may need of the bytes that the planner counts: known of the plain function, or else guessed."""
        if self.baseline is None:
            return _EXPECTED
        counted = self.schedules.scale * self.candidates.predicted
        return max(_EXPECTED, min(1.0, self.baseline / max(1.0, counted)))

    def _fitting(self, candidate: Candidate, budget: int) -> Schedule | None:
        """The plan in regions that fit, which leave XLA less to order where they must; None: it does not fit."""
        length = LENGTH
        given = candidate.plan.budget
        while self.looks > 0:
            self.looks -= 1
            what = f"planned for {format_bytes(int(self.schedules.scale * given))}"
            found = self.schedules.compile(candidate, int(self.schedules.scale * given), length, what)
            if found.trial.compiled <= budget:
                return found
            length = self._shorter(length, found) if found.trial.compiled <= _NEAR * budget else 0
            if not length:
                return None
            if candidate.length:
                candidate = self.candidates.candidate(given, _SCRAP, None, length)
        return None

    def _smallest(self, ladder: Ladder, budget: int) -> Schedule:
        """The first that fits of some schedules for little memory, or else the one that needs least."""
        best: Schedule | None = None
        gates = [None] if self.options.other is None or not self.schedules.donated else [None, self.options.other]
        for candidate in ladder.little(_HOPELESS * budget / self.schedules.scale):
            for gate in gates:  # XLA copies donated arguments that a branch reads: another gate has none
                what = "a plan for little" + (f", gate {gate}" if gate else "")
                found = self.schedules.compile(
                    candidate, int(self.schedules.scale * candidate.plan.budget), 1, what, gate
                )
                if best is None or found.trial.compiled < best.trial.compiled:
                    best = found
                if best.trial.compiled <= budget:
                    return best
        assert best is not None, "there is one at least"
        return best

    def _through(self, cheaper: Candidate, best: Schedule, budget: int) -> Schedule:
        """The next cheaper plan if it fits behind the other gate, over which XLA fuses; or else `best` behind it."""
        other = self.options.other
        if other is None or best.trial.overhead <= _SLIGHT or not best.is_quick:
            return best
        for candidate in (cheaper, best.candidate):
            if candidate.looped.texts or candidate.length or candidate.is_plain:
                continue
            given = int(self.schedules.scale * candidate.plan.budget)
            found = self.schedules.compile(
                candidate, given, LENGTH, f"planned for {format_bytes(given)}, gate {other}", other
            )
            if found.trial.compiled <= budget and (candidate is cheaper or found.trial.flops < best.trial.flops):
                return found
        return best

    def _shorter(self, length: int, found: Schedule) -> int:
        """Segments in a region, if so many may need too much memory; 0: no fewer are worth another compilation."""
        candidate, is_quick = found.candidate, found.is_quick
        if (
            candidate.is_plain and not candidate.length
        ) or found.trial.compiled <= self.schedules.scale * candidate.plan.peak:
            return 0
        if candidate.length:  # bodies are small
            return 1 if length > 1 and is_quick else 0
        for shorter in (_SHORT, 1) if is_quick else (_SHORT,):
            if shorter < length and len(
                candidate.regions(int((found.trial.budget or 0) / self.schedules.scale), shorter)
            ) > len(found.regions):
                return shorter
        return 0

    def _planned(self, budget: int, predicted: int, compiled: int, best: Schedule | None = None) -> Planned:
        """The function by this schedule, or as it is, and what is said of it."""
        plain = self.candidates.plain
        segments, sequence = plain, list(range(len(plain.segments)))
        figures: dict[str, Any] = {
            "name": self.name,
            "budget": budget,
            "share": self.options.share,
            "baseline": self.baseline,
            "predicted": predicted,
            "compiled": compiled,
            "flops": plain.flops,
        }
        more: dict[str, Any] = {}
        if best is not None:
            candidate = best.candidate
            segments, sequence = candidate.segments, candidate.sequence
            extra = sum(segments.segments[number].flops for number in sequence) - plain.flops
            figures |= {"extra_flops": extra, "overhead": candidate.overhead, "loops": best.loops}
            gate = best.gate if len(best.regions) > 1 else None
            more = {"gate": gate, "regions": len(best.regions), "plan": candidate.plan}
        kept, recomputed = describe(segments, sequence, self.schedules.scale)
        report = RematPlan(
            **figures,
            **more,
            kept=kept,
            recomputed=recomputed,
            trials=self.schedules.trials,
            seconds=perf_counter() - self.started,
            program=segments.program,
            devices=self.devices,
            saved=SavedPlan(
                **figures,
                program=fingerprint(self.candidates.flat),
                made_with=made_with(self.options.platform, self.options.compiler_options),
                recipe=None if best is None else best.recipe,
            ),
        )
        if best is None:
            return Planned(report, None, ())
        return Planned(report, best.emitted, best.candidate.looped.constants)
