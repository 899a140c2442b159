"""Plans with a tier below the memory: some operations are not run again, their results are fetched.

The planners know nothing of tiers. They get a program in which an operation whose results may be fetched is two: the
first takes the arguments and makes what is never kept, the second takes none, costs a fetch, and makes the results.
Only the second one is worth running again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from recompute._plans.schedule import Action
from recompute._simulator.tier import SimulatedTier
from recompute._traces.program import Call, Program, Step

FACTORS: Final = (1.0, 4.0, 16.0, inf)
"""Fetch results whose transfers cost less than so many times a run: above one, since what they need may be evicted."""


@dataclass(frozen=True)
class Prices:
    """The price of a transfer of so many bytes, in units of a program. Raises ValueError for other tiers."""

    tier: SimulatedTier
    unit: float

    @classmethod
    def of(cls, text: str, program: Program) -> Prices:
        """From words: "12GB/s", "200MB/s,1ms"."""
        tier = SimulatedTier.read(text)
        if tier.overlap or tier.always or tier.limit is not None:
            raise ValueError(
                f"plans support only tiers without a limit whose transfers stop the compute, not {text!r}; use 12GB/s, "
                "or 200MB/s,1ms"
            )
        return cls(tier, program.unit)

    def __call__(self, nbytes: int) -> float:
        """Either way."""
        return (self.tier.latency + nbytes / self.tier.bandwidth) / self.unit


class Fetching:
    """A program as planners see it, and how their plans become those of the program itself."""

    def __init__(self, program: Program, prices: Prices, factor: float) -> None:
        self._program = program
        self._prices = prices
        self.fetched: dict[int, float] = {}
        """Call -> the price of a transfer of its results."""
        for number, call in enumerate(program.calls):
            size = _size_of_results(program, call)
            if size is not None and 2 * prices(size) < factor * call.cost:
                self.fetched[number] = prices(size)
        self._first: list[int] = []  # call -> the one that takes the arguments
        self._calls: list[int] = []  # call as planners see it -> call
        self._fetches: list[bool] = []  # whether that is the one that fetches
        self.seen = self._split()

    def _split(self) -> Program:
        program = self._program
        seen = replace(program.copy(), calls=[], steps=[], marks=[])
        for number, call in enumerate(program.calls):
            self._first.append(len(seen.calls))
            self._calls.append(number)
            self._fetches.append(False)
            if number not in self.fetched:
                seen.calls.append(replace(call))
            else:
                size = _size_of_results(program, call) or 0
                device = program.devices[program.storages[call.results[0]]]
                made = []
                for nbytes in (size, 0):  # what is never kept, and what says that it has been made
                    made.append(len(seen.storages))
                    seen.storages.append(seen.add_storage(nbytes, device))
                    seen.makers.append(len(seen.calls))
                seen.calls.append(Call(call.name, call.arguments, tuple(made), call.cost))
                seen.calls.append(Call(call.name, (made[1],), call.results, self.fetched[number]))
                self._calls.append(number)
                self._fetches.append(True)
            for value in call.results:
                seen.makers[value] = len(seen.calls) - 1
        seen.steps = list(self.steps(program.steps))
        ends = [*self._first, len(seen.calls)]
        seen.marks = [(ends[min(number, len(ends) - 1)], text) for number, text in program.marks]
        return seen

    def steps(self, steps: Sequence[Step]) -> Iterator[Step]:
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
            if kind != "compute":
                if which < len(self._program.sizes):
                    own.append((kind, which))
            elif not self._fetches[which]:
                own.append(("compute", self._calls[which]))
            elif which in made:
                own.append(("fetch", self._calls[which]))
            else:
                made.add(which)  # the run before it has made it
        return tuple(own)


def _size_of_results(program: Program, call: Call) -> int | None:
    """Bytes; None if it makes nothing, or shares memory with what it takes."""
    storages = {program.storages[value] for value in call.results}
    if not storages or storages & {program.storages[value] for value in call.arguments}:
        return None
    return sum(program.sizes[storage] for storage in storages)
