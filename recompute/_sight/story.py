"""The story of a value of a recorded run: the run is replayed with a log, which says what a trace does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recompute._sight.recording import DEAREST, budget_of
from recompute._sight.why import Why
from recompute._simulator.published_replay import baseline
from recompute._simulator.replay import Numbers, Replay
from recompute._simulator.simulate import budgets_of, by_amount
from recompute._traces.program import Program
from recompute.events import Step, Steps
from recompute.policies import POLICIES

_LOG = 10_000_000


@dataclass(frozen=True)
class Told:
    """One value, by its number in the trace, and what became of it."""

    number: int
    function: str
    place: str
    steps: Steps
    now: str
    """Its state at the end of the run."""

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        return "\n".join(
            [f"value {self.number}, made by {self.function}{where}", *map(str, self.steps), f"now  {self.now}"]
        )


class Replayed:
    """A recorded run, replayed with a log under its own budget or another one.

    Raises ValueError for a budget that is none, and for a run whose policy has no name.
    """

    def __init__(self, program: Program, budget: int | float | None = None) -> None:
        self.program = program
        peak = baseline(program)
        budgets = None
        given = budget_of(program.settings) if budget is None else budget
        if given is not None:
            budgets, _ = budgets_of(peak, **by_amount(given))
        recorded = {name: program.settings[name] for name in ("search", "release") if name in program.settings}
        policy = program.settings.get("policy", "default")
        if policy not in (*POLICIES, "default"):
            raise ValueError(
                f"{program.name} was recorded with a policy of its own, {policy!r}, which no replay knows: in the "
                "program itself, with Cache(log=...), `value.story()` and `cache.why()` tell the same"
            )
        replay = Replay(program, budgets, policy=policy, limit=DEAREST, log=_LOG, **recorded)
        numbers = Numbers(program)
        stop = replay.subscribe(numbers.hear)
        self.status = replay.run()
        """"ok", or why it ended early."""
        stop()
        self._cache = replay.cache
        self._homes = numbers.homes
        self._replay = replay

    def why(self) -> Why:
        """As `Cache.why`."""
        of_program = set(self._homes.values())
        return Why(self._scaled([step for step in self._cache.story() if step.number in of_program]))

    def find(self, what: str) -> list[int]:
        """The values that a number in the trace, a `file:line` or a function means. Raises ValueError if none does."""
        program = self.program
        numbers = program.numbers or list(range(len(program.storages)))
        if what.isdecimal():
            values = [value for value, number in enumerate(numbers) if number == int(what)]
        else:
            calls = [call for call in program.calls if call.name == what or _at(call.place, what)]
            values = [value for call in calls for value in call.results]
        if not values:
            raise ValueError(
                f"{program.name} has no value {what!r}; give its number (`value.number`), a file:line or the name of a "
                "function"
            )
        return values

    def tell(self, value: int) -> Told:
        """The story of a value of the program."""
        program = self.program
        maker = program.makers[value]
        name, place = ("a source", "") if maker < 0 else (program.calls[maker].name, program.calls[maker].place)
        number = program.numbers[value] if program.numbers else value
        steps = Steps(self._scaled(self._cache.story(self._homes[value]))) if value in self._homes else Steps()
        return Told(number, name, place, steps, steps[-1].state if steps else "never made")

    def _scaled(self, steps: Sequence[Step]) -> list[Step]:
        """With times in seconds."""
        unit = self.program.unit
        if unit == 1:
            return list(steps)
        scaled = []
        for step in steps:
            choice = step.choice
            if choice is not None:
                around = None if choice.neighbours is None else choice.neighbours * unit
                choice = replace(choice, cost=choice.cost * unit, neighbours=around, staleness=choice.staleness * unit)
            scaled.append(replace(step, time=step.time * unit, seconds=step.seconds * unit, choice=choice))
        return scaled


def _at(place: str, what: str) -> bool:
    """Whether `what` is this place, with less of its path."""
    return bool(place) and (place == what or place.endswith(("/" + what, "\\" + what)))
