"""Conditionals that take the same branch and hand values to each other, as `cond` and its transpose under `grad` do.

What only conditionals of the group read need not be kept: a later one may run equations of an earlier one again, since
it is in the same branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Var

from recompute_jax._program.costs import VIEWS, nbytes
from recompute_jax._program.jaxpr import Atom, Flat, effects, flatten


@dataclass(frozen=True)
class Needs:
    """What some values of a branch need."""

    equations: tuple[JaxprEqn, ...]
    given: tuple[Var, ...]
    """Which of the given values are read."""
    outside: tuple[Var, ...]
    """Which values of the function are read."""


class Branch:
    """One branch through all conditionals of a group: their equations, one after the other, in the same variables."""

    def __init__(self, equations: Sequence[JaxprEqn], number: int) -> None:
        self.consts: dict[Var, Any] = {}
        self.equations: list[list[JaxprEqn]] = []
        """Of each conditional."""
        self.results: list[list[Atom]] = []
        """Of each conditional."""
        names: dict[Var, Atom] = {}
        for eqn in equations:
            flat = flatten(eqn.params["branches"][number], inline_custom=False)
            self.consts.update(zip(flat.constvars, flat.consts, strict=True))
            own = {var: _named(atom, names) for var, atom in zip(flat.invars, eqn.invars[1:], strict=True)}
            renamed = [each.replace(invars=[_named(atom, own) for atom in each.invars]) for each in flat.equations]
            self.equations.append(renamed)
            self.results.append([_named(atom, own) for atom in flat.outvars])
            names.update(zip(eqn.outvars, self.results[-1], strict=True))
        made = [(var, at) for at, own in enumerate(self.equations) for each in own for var in each.outvars]
        self.maker = dict(made)
        """Which conditional makes a value."""
        self.values = [var for var, _ in made]

    def needs(self, wanted: Iterable[Atom], given: Collection[Var], last: int) -> Needs:
        """What these values need, if some are `given`, of the conditionals up to the `last`. O(equations)."""
        missing: dict[Var, None] = {}  # in an order that is the same in every process
        read: set[Var] = set()

        def ask(atoms: Iterable[Atom]) -> None:
            for each in atoms:
                if isinstance(each, Var) and each in given:
                    read.add(each)
                elif isinstance(each, Var):
                    missing[each] = None

        ask(wanted)
        found: list[JaxprEqn] = []
        for own in reversed(self.equations[: last + 1]):
            for eqn in reversed(own):
                if missing.keys().isdisjoint(eqn.outvars):
                    continue
                found.append(eqn)
                for var in eqn.outvars:
                    missing.pop(var, None)
                ask(eqn.invars)
        ordered = tuple([var for var in self.values if var in read])
        outside = tuple([var for var in missing if var not in self.consts])
        return Needs(tuple(reversed(found)), ordered, outside)


class Group:
    """Conditionals with one index, in the order of the function."""

    def __init__(self, flat: Flat, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        """Of the equations."""
        self.equations = [flat.equations[number] for number in numbers]
        count = len(self.equations[0].params["branches"])
        self.branches = [Branch(self.equations, number) for number in range(count)]
        inside = set(numbers)
        outside = {atom for atom in flat.outvars if isinstance(atom, Var)}
        for number, eqn in enumerate(flat.equations):
            if number not in inside:
                outside.update(atom for atom in eqn.invars if isinstance(atom, Var))
        self.required = [[at for at, var in enumerate(eqn.outvars) if var in outside] for eqn in self.equations]
        """Which results of each conditional others read, by place."""
        self.optional = [
            var
            for eqn, places in zip(self.equations, self.required, strict=True)
            for at, var in enumerate(eqn.outvars)
            if at not in places
        ]

    @property
    def size(self) -> int:
        """Bytes of what need not be kept."""
        return sum(nbytes(var.aval) for var in self.optional)

    def wanted(self, branch: Branch, at: int) -> list[Atom]:
        """What the others read of one conditional."""
        return [branch.results[at][place] for place in self.required[at]]


def groups_of(flat: Flat) -> list[Group]:
    """The groups of a function, without those that have effects. O(equations)."""
    same: dict[Var, Var] = {}
    group: dict[int, list[int]] = {}
    maker: dict[Var, int] = {}
    for number, eqn in enumerate(flat.equations):
        read = [atom for atom in eqn.invars if isinstance(atom, Var)]
        if eqn.primitive.name in VIEWS and len(read) == 1 and nbytes(read[0].aval) == nbytes(eqn.outvars[0].aval):
            same[eqn.outvars[0]] = same.get(read[0], read[0])
        if eqn.primitive.name != "cond" or effects(eqn) or not isinstance(eqn.invars[0], Var):
            continue
        maker.update((var, number) for var in eqn.outvars)
        group[number] = [number]
        index = same.get(eqn.invars[0], eqn.invars[0])
        for var in read:
            other = maker.get(var)
            if other is None or other == number:
                continue
            first = flat.equations[other].invars[0]
            one, two = group[other], group[number]
            if one is not two and isinstance(first, Var) and same.get(first, first) is index:
                one += two
                group.update((each, one) for each in two)
    distinct = {id(each): each for each in group.values() if len(each) > 1}
    return [Group(flat, sorted(each)) for each in distinct.values()]


def _named(atom: Atom, names: dict[Var, Atom]) -> Atom:
    return names.get(atom, atom) if isinstance(atom, Var) else atom
