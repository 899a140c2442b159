"""Copies of a recorded program that differ a little: the rounds of one that almost repeats."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from recompute._traces.program import StepKind
from recompute.traces import Program

_SOON: Final = 8
"""Operations, at most, after which the result of an inserted one is dropped."""


def varied(program: Program, seed: int, *, costs: float = 0.1, inserted: float = 0.0) -> Program:
    """A copy in which each cost is up to a share higher or lower, and some operations are new.

    Parameters
    ----------
    seed
        The same one makes the same copy.
    costs
        How far a cost is from the recorded one at most, as a share of it.
    inserted
        New operations as a share of those recorded, anywhere: each takes a value that is referred to, has the name and
        cost of some recorded operation, and makes a value of the same size, which is dropped a few operations later.

    Raises ValueError if `costs` or `inserted` is not between 0 and 1.
    """
    for name, share in (("costs", costs), ("inserted", inserted)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is a share, from 0 to 1, not {share!r}")
    made = _Copy(program, Random(seed), costs)
    for kind, which in program.steps:
        if kind != "call":
            made.step(kind, which)
            continue
        made.call(which)
        if made.random.random() < inserted:
            made.insert()
    made.finish()
    return made.copy


class _Copy:
    """A copy in the making: what has numbers of its own, and what is referred to."""

    def __init__(self, program: Program, random: Random, costs: float) -> None:
        self.copy = Program(program.name, program.unit, published=program.published)
        self.random = random
        self._program = program
        self._costs = costs
        self._storages: dict[int, int] = {}  # of the program -> of the copy
        self._values: dict[int, int] = {}
        self._starts: list[int] = []  # call of the program -> of the copy
        self._referred: dict[int, None] = {}  # values of the copy, in a fixed order
        self._inserted: list[tuple[int, int]] = []  # (number of the call before which it is dropped, value)

    def step(self, kind: StepKind, value: int) -> None:
        """What the program does with a value."""
        if kind == "source":
            self._values[value] = self.copy.add_source_on(self._storage(value))
        else:
            self.copy.steps.append((kind, self._values[value]))
        if kind in ("source", "keep"):
            self._referred[self._values[value]] = None
        elif kind == "drop":
            self._referred.pop(self._values[value], None)

    def call(self, number: int) -> None:
        """An operation of the program."""
        call = self._program.calls[number]
        self._drop_inserted()
        self._starts.append(len(self.copy.calls))
        arguments = [self._values[argument] for argument in call.arguments]
        results = self._add(call.name, arguments, [self._storage(value) for value in call.results], call.cost)
        self._values.update(zip(call.results, results, strict=True))
        factor = self.copy.calls[-1].cost / call.cost if call.cost else 1.0
        again = [factor * cost for cost in call.again]
        self.copy.calls[-1] = replace(self.copy.calls[-1], again=again, room=call.room, sure=call.sure)

    def insert(self) -> None:
        """An operation that the program does not have."""
        if not self._referred:
            return
        taken = self.random.choice(list(self._referred))
        like = self.random.choice(self._program.calls)
        storage = self.copy.storages[taken]
        home = self.copy.add_storage(self.copy.sizes[storage], self.copy.devices[storage])
        (value,) = self._add(like.name, [taken], [home], like.cost)
        self._inserted.append((len(self.copy.calls) + self.random.randrange(_SOON), value))

    def finish(self) -> None:
        """What is known of the whole."""
        program, copy, values = self._program, self.copy, self._values
        self._drop_inserted(at_the_end=True)
        starts = [*self._starts, len(copy.calls)]
        copy.marks = [(starts[number], text) for number, text in program.marks]
        copy.outputs = [values[value] for value in program.outputs]
        copy.revived = {values[value] for value in program.revived}

    def _add(self, name: str, arguments: list[int], homes: list[int], cost: float) -> tuple[int, ...]:
        factor = 1 + self.random.uniform(-self._costs, self._costs)
        results = self.copy.add_call(name, arguments, homes, factor * cost)
        self._referred.update(dict.fromkeys(results))
        return results

    def _drop_inserted(self, at_the_end: bool = False) -> None:
        number = len(self.copy.calls)
        for when, value in self._inserted:
            if at_the_end or when <= number:
                self.copy.steps.append(("drop", value))
                del self._referred[value]
        self._inserted = [] if at_the_end else [(when, value) for when, value in self._inserted if when > number]

    def _storage(self, value: int) -> int:
        storage = self._program.storages[value]
        if storage not in self._storages:
            program = self._program
            self._storages[storage] = self.copy.add_storage(program.sizes[storage], program.devices[storage])
        return self._storages[storage]
