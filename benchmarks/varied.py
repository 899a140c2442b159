"""Copies of a recorded program that differ a little: the rounds of one that almost repeats."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from recompute.traces import Call, Program

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
    random = Random(seed)
    copy = replace(program.copy(), calls=[], steps=[], numbers=[], settings={})
    starts: list[int] = []  # call of the program -> of the copy
    referred: dict[int, None] = {}  # values, in a fixed order
    new: list[tuple[int, int]] = []  # (number of the call before which it is dropped, value)

    def another(call: Call) -> Call:
        factor = 1 + random.uniform(-costs, costs)
        return replace(call, cost=factor * call.cost, again=[factor * cost for cost in call.again])

    def drop_new(last: bool = False) -> None:
        for due in [due for due in new if last or due[0] <= len(copy.calls)]:
            new.remove(due)
            copy.steps.append(("drop", due[1]))
            del referred[due[1]]

    for kind, number in program.steps:
        if kind != "call":
            copy.steps.append((kind, number))
            if kind in ("source", "keep"):
                referred[number] = None
            elif kind == "drop":
                referred.pop(number, None)
            continue
        drop_new()
        starts.append(len(copy.calls))
        call = another(program.calls[number])
        for value in call.results:
            copy.makers[value] = starts[-1]
            referred[value] = None
        copy.steps.append(("call", starts[-1]))
        copy.calls.append(call)
        if random.random() < inserted and referred:
            taken, like = random.choice(list(referred)), random.choice(program.calls)
            storage = copy.storages[taken]
            home = copy.add_storage(copy.sizes[storage], copy.devices[storage])
            (value,) = copy.add_call(like.name, [taken], [home], another(like).cost)
            referred[value] = None
            new.append((len(copy.calls) + random.randrange(_SOON), value))
    drop_new(last=True)
    copy.marks = [([*starts, len(copy.calls)][number], text) for number, text in program.marks]
    return copy
