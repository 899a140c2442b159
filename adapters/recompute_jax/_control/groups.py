"""Scans that hand stacks of values to each other, as the scan of a loss and that of its gradient do.

A stack that only scans of the group read need not be kept: a reader may run a block of the maker's steps again, from
the maker's carry at the beginning of the block, when it gets there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.extend.core import Var

from recompute_jax._control.body import Body, Needs, choices
from recompute_jax._program.jaxpr import Flat, variables
from recompute_jax._program.segments import flops, nbytes


@dataclass(frozen=True)
class Again:
    """What a reader runs again of a maker."""

    body: Body
    wanted: tuple[Var, ...]
    needs: Needs
    alone: Needs | None = None
    """Of one step from which nothing is carried on; None: something is."""


@dataclass(frozen=True)
class Mode:
    """A way to run the scans of a group: which values are stacked in full. Bytes and costs of one step."""

    real: frozenset[Var]
    stacked: int
    entry: int
    """Bytes of the carries at the beginning of a block."""
    work: int
    """Bytes of what is stacked within a block only."""
    cost: float
    alone: float
    """The cost if each block is one step: nothing is carried on then."""


class Group:
    """Scans of one length, in the order of the function. A stack has the name that it has in its maker's body."""

    def __init__(self, bodies: Sequence[Body], outside: Collection[Var], results: Collection[Var] = ()) -> None:
        self.bodies = bodies
        self.length = bodies[0].length
        self.maker: dict[Var, Body] = {}
        self.inner: dict[Var, Var] = {}
        """Outside variable of a stack -> its name."""
        self.fixed: set[Var] = set()
        """Stacks that others read, too."""
        self.results: set[Var] = set()
        """Those of the function, which are no temporaries."""
        for body in bodies:
            for result, atom in zip(body.results, body.made, strict=True):
                if isinstance(atom, Var):
                    self.maker[atom] = body
                    self.inner[result] = atom
                    if result in outside or body.has_effects:
                        self.fixed.add(atom)
                    if result in results:
                        self.results.add(atom)

    @property
    def size(self) -> int:
        """Bytes of all stacks."""
        return self.length * self.modes[0].stacked

    @property
    def values(self) -> list[Var]:
        """All that could be stacked, in order: what the scans stack and what their steps make."""
        return list(dict.fromkeys([*self.maker, *(var for body in self.bodies for var in body.maker)]))

    def name(self, body: Body, place: int) -> Var | None:
        """The stack that is read there, by its name; by its outside variable if none of the group makes it."""
        atom = body.stacked[place]
        return self.inner.get(atom, atom) if isinstance(atom, Var) else None

    def again(self, body: Body, stacks: Sequence[int], real: Collection[Var]) -> list[Again]:
        """What must run again, in order, for these stacked operands of a scan, if those in `real` are there."""
        wanted: dict[int, dict[Var, None]] = {}
        reruns: list[Again] = []

        def ask(reader: Body, places: Sequence[int]) -> None:
            for place in places:
                var = self.name(reader, place)
                if var is not None and var in self.maker and var not in real:
                    wanted.setdefault(id(self.maker[var]), {})[var] = None

        ask(body, stacks)
        for maker in reversed(self.bodies):
            names = tuple(wanted.get(id(maker), ()))
            if names:
                needs = maker.needs(names, given=real)
                reruns.append(Again(maker, names, needs, maker.needs(names, given=real, alone=True)))
                ask(maker, needs.stacks)
        reruns.reverse()
        return reruns

    def readers(self, real: Collection[Var]) -> Iterator[list[Again]]:
        """For each scan what it must run again."""
        for body in self.bodies:
            yield self.again(body, range(len(body.stacked)), real)

    def entries(self, real: Collection[Var]) -> dict[int, tuple[int, ...]]:
        """By id of the scan the carries that are kept at the beginning of each block."""
        carries: dict[int, set[int]] = {}
        for runs in self.readers(real):
            for again in runs:
                carries.setdefault(id(again.body), set()).update(again.needs.carries)
        return {number: tuple(sorted(places)) for number, places in carries.items()}

    @cached_property
    def modes(self) -> list[Mode]:
        """Everything stacked, and then by falling bytes what is worth running again: less memory, at a higher cost."""
        everything = self._mode(frozenset(self.maker))
        least = frozenset(self.fixed)
        reads = {
            id(body): list(dict.fromkeys(self.inner[result] for result in body.results if result in self.inner))
            for body in self.bodies
        }
        modes = [self._mode(least)]
        for alone in (False, True):
            options = [
                choices(body, [var for var in reads[id(body)] if var not in least], least, alone=alone)
                for body in self.bodies
            ]
            for level in range(max(map(len, options))):
                chosen = [ways[min(level, len(ways) - 1)] for ways in options if ways]
                modes.append(self._mode(least.union(*chosen)))
        better: list[Mode] = []
        for mode in sorted(modes, key=lambda mode: (mode.stacked, mode.cost)):
            worth = all(mode.cost < known.cost or mode.alone < known.alone for known in better)
            if mode.stacked < everything.stacked and worth:
                better.append(mode)
        return [everything, *reversed(better)]

    def _mode(self, real: frozenset[Var]) -> Mode:
        work, cost, alone = 0, 0.0, 0.0
        for runs in self.readers(real):
            work = max(work, sum(nbytes(var.aval) for again in runs for var in again.wanted))
            cost += sum(again.needs.cost for again in runs)
            alone += sum(again.alone.cost for again in runs if again.alone is not None)
        spared = self._first(frozenset(self.maker)) - self._first(real)
        carried = self.entries(real)
        entry = sum(nbytes(body.carries[at].aval) for body in self.bodies for at in carried.get(id(body), ()))
        stacked = sum(nbytes(var.aval) for var in real if var not in self.results)
        return Mode(real, stacked, entry, work, cost - spared, alone - spared)

    def _first(self, real: Collection[Var]) -> float:
        """FLOPs of a step of all scans, if they make this for others, and run nothing again."""
        total = 0.0
        for body in self.bodies:
            made = [var for var in variables((*body.made, *body.maker)) if var in real]
            needs = body.needs(made, carries=range(len(body.carries)))
            total += sum(map(flops, needs.equations))
        return total


def groups_of(flat: Flat) -> list[Group]:
    """The groups of a function, those that have a stack which may be left out. O(equations)."""
    scans = [eqn for eqn in flat.equations if eqn.primitive.name == "scan" and eqn.params["length"] > 1]
    if len(scans) < 2:
        return []
    bodies = {id(eqn): Body(eqn) for eqn in scans}
    maker = {var: body for body in bodies.values() for var in body.results}
    readers: dict[Var, list[Body]] = {}
    results = set(variables(flat.outvars))
    outside = set(results)
    for eqn in flat.equations:
        body = bodies.get(id(eqn))
        first = len(eqn.invars) - len(body.stacked) if body else len(eqn.invars)
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Var) and atom in maker:
                if body is not None and place >= first and maker[atom].length == body.length:
                    readers.setdefault(atom, []).append(body)
                else:
                    outside.add(atom)
    group = {id(body): [body] for body in bodies.values()}
    for var, reading in readers.items():
        if var in outside:
            continue
        for body in reading:
            one, two = group[id(maker[var])], group[id(body)]
            if one is not two:
                one += two
                group.update((id(body), one) for body in two)
    order = {id(bodies[id(eqn)]): at for at, eqn in enumerate(scans)}
    distinct = {id(scans): scans for scans in group.values() if len(scans) > 1}
    return [Group(sorted(scans, key=lambda body: order[id(body)]), outside, results) for scans in distinct.values()]
