"""Plans with a tier below the memory: some operations are not run again, their results are fetched.

The planners know nothing of tiers. They get a program in which an operation whose results may be fetched is two: the
first takes the arguments and makes what is never kept, the second takes none, costs a fetch, and makes the results.
Only the second one is worth running again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Final

from recompute._plans.liveness import schedule
from recompute._plans.own import Effort, online, own
from recompute._plans.problem import problem_of
from recompute._plans.schedule import Action, PlanError, ProgramPlan
from recompute._plans.verify import verify
from recompute._simulator.tier import SimulatedTier
from recompute._traces.program import Call, Program, Step

_FACTORS: Final = (1.0, 4.0, 16.0, inf)
"""Fetch results whose transfers cost less than so many times a run: above one, since what they need may be evicted."""


def tier_of(text: str) -> SimulatedTier:
    """From words: "12GB/s", "200MB/s,1ms". Raises ValueError for a tier that plans do not support."""
    tier = SimulatedTier.read(text)
    if tier.overlap or tier.always or tier.limit is not None:
        raise ValueError(
            f"plans support only tiers without a limit whose transfers stop the compute, not {text!r}; use 12GB/s, "
            "or 200MB/s,1ms"
        )
    return tier


def plan_with_tier(program: Program, budget: int, text: str, options: dict[str, Any]) -> ProgramPlan:
    """The best of the plan without a tier and of some that fetch more and more, which together take as long again."""
    tier = tier_of(text)
    progress, limit = options.pop("progress", None), options.pop("time_limit", None)
    effort = Effort(**options)
    plans: list[ProgramPlan] = []
    failed: PlanError | None = None
    tried: list[dict[int, float]] = []
    start = perf_counter()
    for factor in (0.0, *_FACTORS):
        if plans and limit is not None and perf_counter() - start > 2 * limit:
            break
        fetching = Fetching(program, tier, factor)
        if fetching.fetched in tried:
            continue
        tried.append(fetching.fetched)
        share = 1 / len(_FACTORS) if factor else 1.0
        limited = replace(effort, effort=effort.effort * share, time_limit=None if limit is None else limit * share)
        problem = problem_of(fetching.seen, budget)
        try:
            sequence, _ = own(problem, limited, progress, partial(online, program, problem, seen=fetching.steps))
            steps = fetching.actions(schedule(problem, sequence)[0])
            plan = ProgramPlan(program.name, "own", budget, steps, 0, 1.0, tier=text)
            peak, overhead = verify(program, plan)  # a fetch that comes late could need more room than was planned
        except PlanError as error:
            failed = failed or error
        else:
            note = f"{plan.fetches:,} fetches from a tier of {text}"
            plans.append(replace(plan, peak=peak, overhead=overhead, note=note))
    if failed is not None and not plans:
        raise failed
    return min(plans, key=lambda made: made.overhead)


class Fetching:
    """A program as planners see it, and how their plans become those of the program itself."""

    def __init__(self, program: Program, tier: SimulatedTier, factor: float) -> None:
        self._program = program
        self.fetched: dict[int, float] = {}
        """Call -> the price of a transfer of its results, in units of the program."""
        for number, call in enumerate(program.calls):
            price = tier.seconds(_size_of_results(program, call)) / program.unit
            if _is_alone(program, call) and 2 * price < factor * call.cost:
                self.fetched[number] = price
        self._first: list[int] = []  # call -> the one that takes the arguments, as planners see it
        self._actions: list[Action] = []  # call as planners see it -> what it is
        self.seen = self._split()

    def _split(self) -> Program:
        program = self._program
        seen = replace(program.copy(), calls=[], steps=[])
        for number, call in enumerate(program.calls):
            self._first.append(len(seen.calls))
            self._actions.append(("compute", number))
            if number not in self.fetched:
                seen.calls.append(replace(call))
            else:
                device = program.devices[program.storages[call.results[0]]]
                made = []
                for nbytes in (_size_of_results(program, call), 0):  # never kept; and what says that it has been made
                    made.append(len(seen.storages))
                    seen.storages.append(seen.add_storage(nbytes, device))
                    seen.makers.append(len(seen.calls))
                seen.calls.append(Call(call.name, call.arguments, tuple(made), call.cost))
                seen.calls.append(Call(call.name, (made[1],), call.results, self.fetched[number]))
                self._actions.append(("fetch", number))
            for value in call.results:
                seen.makers[value] = len(seen.calls) - 1
        seen.steps = list(self.steps(program.steps))
        return seen

    def steps(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Steps of the program, in which calls may be repeated, as planners see them."""
        begun: set[int] = set()
        for kind, which in steps:
            if kind != "call":
                yield kind, which
                continue
            first = self._first[which]
            if which not in begun or which not in self.fetched:
                yield "call", first
            if which in self.fetched:
                yield "call", first + 1
            begun.add(which)

    def actions(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """The steps of a plan, for the program itself."""
        own: list[Action] = []
        made: set[int] = set()
        for kind, which in actions:
            if kind == "free" and which < len(self._program.sizes):
                own.append((kind, which))
            elif kind == "compute":
                action = self._actions[which]
                if action[0] == "compute" or which in made:
                    own.append(action)
                made.add(which)  # the first fetch is the run before it
        return tuple(own)


def _is_alone(program: Program, call: Call) -> bool:
    """Whether it makes something, and shares no memory with what it takes."""
    made = {program.storages[value] for value in call.results}
    return bool(made) and made.isdisjoint([program.storages[value] for value in call.arguments])


def _size_of_results(program: Program, call: Call) -> int:
    return sum(program.sizes[storage] for storage in {program.storages[value] for value in call.results})
