"""The body of a scan, run in part: the wanted values of a step from given ones; and which values to stack.

A value of a body has its variable for a name, also where it is stacked: `made` says which of them the scan stacks.

Stacks from which the rest can be had without running dear equations are a vertex cut of least bytes between the values
of these and those that later scans read (Ford and Fulkerson 1956; the cut nearest to the readers, which leaves least
to run). Raising what counts as dear gives several such sets; so do the policies of `jax.checkpoint`: products of
matrices are dear, or those that have no batch dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax.extend.core import JaxprEqn, Var

from recompute_jax._program.jaxpr import Atom, bind, effects, flatten, read, scan_operands, variables
from recompute_jax._program.segments import flops, kind, nbytes, weigh


@dataclass(frozen=True)
class Needs:
    """What some values of a step need."""

    equations: tuple[JaxprEqn, ...]
    carries: tuple[int, ...]
    """Which carries are read, by place."""
    stacks: tuple[int, ...]
    """Which stacked operands are read, by place."""
    given: tuple[Var, ...]
    """Which of the given values are read."""
    cost: float
    """Of one step."""


@dataclass(frozen=True)
class Spread:
    """A constant of a scan that is broadcast from little: each step makes it anew, so that it takes no memory."""

    eqn: JaxprEqn
    values: Sequence[Any]

    def made(self) -> Any:
        return bind(self.eqn, self.values)[0]


class Body:
    """A scan of the function, and its equations for one step."""

    def __init__(self, eqn: JaxprEqn) -> None:
        params = eqn.params
        self.eqn = eqn
        self.length: int = params["length"]
        self.reverse: bool = params["reverse"]
        constants, carries = scan_operands(eqn)
        flat = flatten(params["jaxpr"])
        self.flat = flat
        self.constants = flat.invars[:constants]
        self.carries = flat.invars[constants : constants + carries]
        self.stacks = flat.invars[constants + carries :]
        self.next = flat.outvars[:carries]
        self.made = flat.outvars[carries:]
        self.stacked: list[Any] = list(eqn.invars[constants + carries :])
        """Outside: the stacked operands, and the stacks that are made."""
        self.results: list[Var] = list(eqn.outvars[carries:])
        self.maker = {var: number for number, eqn in enumerate(flat.equations) for var in eqn.outvars}
        self.has_effects = any(bool(effects(eqn)) for eqn in flat.equations)
        self._carry_of = {var: at for at, var in enumerate(self.carries)}
        self._stack_of = {var: at for at, var in enumerate(self.stacks)}

    def needs(
        self, wanted: Iterable[Atom], carries: Iterable[int] = (), given: Collection[Var] = (), *, alone: bool = False
    ) -> Needs:
        """What these values of each step need, and these carries from step to step; `alone`: of one step.

        O(equations).
        """
        read_carries = set(carries)
        stack = variables([*wanted, *(self.next[at] for at in read_carries)])
        seen: set[Var] = set()
        numbers: set[int] = set()
        read_stacks: set[int] = set()
        used: dict[Var, None] = {}
        while stack:
            var = stack.pop()
            if var in seen:
                continue
            seen.add(var)
            if var in given:
                used[var] = None
            elif var in self.maker:
                number = self.maker[var]
                if number not in numbers:
                    numbers.add(number)
                    stack += variables(self.flat.equations[number].invars)
            elif var in self._stack_of:
                read_stacks.add(self._stack_of[var])
            elif var in self._carry_of:
                at = self._carry_of[var]
                read_carries.add(at)
                stack += [] if alone else variables([self.next[at]])
        equations = tuple([self.flat.equations[number] for number in sorted(numbers)])
        order = tuple(sorted(used, key=lambda var: self.maker.get(var, -1)))
        return Needs(equations, tuple(sorted(read_carries)), tuple(sorted(read_stacks)), order, _cost(equations))

    def step(
        self, needs: Needs, constants: Sequence[Any], known: Mapping[Var, Any], wanted: Sequence[Atom]
    ) -> tuple[dict[int, Any], list[Any]]:
        """One step: the next of the needed carries, and the wanted values. `known`: carries, slices, given values."""
        env: dict[Var, Any] = dict(zip(self.flat.constvars, self.flat.consts, strict=True))
        values = [value.made() if isinstance(value, Spread) else value for value in constants]
        env.update(zip(self.constants, values, strict=True))
        env.update(known)

        for eqn in needs.equations:
            results = bind(eqn, [read(atom, env) for atom in eqn.invars])
            for var, value in zip(eqn.outvars, results, strict=True):
                env.setdefault(var, value)
        return {at: read(self.next[at], env) for at in needs.carries}, [read(atom, env) for atom in wanted]


def _cost(equations: Sequence[JaxprEqn]) -> float:
    total = 0.0
    for eqn in equations:
        moved = sum(nbytes(var.aval) for var in eqn.outvars) if kind(eqn) != "cheap" else 0
        total += weigh(flops(eqn), 2.0 * moved) if kind(eqn) == "heavy" else flops(eqn) + moved
    return total


_LEVELS: Final = 4  # ways to tell which equations are dear
_MOST_FLOW: Final = 2**30  # SciPy adds up in 32 bits: more bytes are counted in larger units


def choices(body: Body, read: Sequence[Var], kept: Collection[Var], *, alone: bool = False) -> list[frozenset[Var]]:
    """Sets of values to stack beside those that are `kept` anyway; the empty set is not among them.

    `alone`: the carries at the beginning of each step are there.

    O(levels x stacked values x equations).
    """
    needs = body.needs(read, given=kept, alone=alone)
    heavy = [eqn for eqn in needs.equations if kind(eqn) == "heavy"]
    levels = sorted(set(map(_intensity, heavy)))
    step = max(1, -(-len(levels) // _LEVELS))
    dear = [frozenset(eqn.outvars[0] for eqn in heavy if _intensity(eqn) >= level) for level in levels[::step]]
    dear += [frozenset(eqn.outvars[0] for eqn in heavy if saves(eqn)) for saves in (is_dot, is_dot_without_batch)]
    sets: dict[frozenset[Var], None] = {}
    for firm in dict.fromkeys(filter(None, dear)):
        sets[frozenset(_cut(body, read, kept, firm, () if alone else needs.carries, alone=alone))] = None
    return list(sets)


def is_dot(eqn: JaxprEqn) -> bool:
    """Whether it is a product of matrices."""
    return eqn.primitive.name == "dot_general"


def is_dot_without_batch(eqn: JaxprEqn) -> bool:
    """Whether it is one, and not one for each of a batch."""
    return is_dot(eqn) and not any(eqn.params["dimension_numbers"][1])


def _intensity(eqn: JaxprEqn) -> float:
    """FLOPs for each byte that is made."""
    return flops(eqn) / max(1, sum(nbytes(var.aval) for var in eqn.outvars))


def _cut(
    body: Body,
    read: Sequence[Var],
    kept: Collection[Var],
    dear: frozenset[Var],
    carries: Sequence[int],
    *,
    alone: bool,
) -> set[Var]:
    """What makes `dear` values is not to run again, nor for these carries."""
    from scipy.sparse import coo_array  # type: ignore[import-untyped]  # SciPy comes with JAX, and imports slowly
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

    needs = body.needs(read, given=kept, alone=alone)
    sinks = {*read, *variables(body.next[at] for at in carries)} - set(kept)
    made = [var for eqn in needs.equations for var in eqn.outvars if var not in kept]
    number = {var: at for at, var in enumerate(made)}
    unit = 1 + sum(nbytes(var.aval) for var in made) // _MOST_FLOW
    sizes = [-(-nbytes(var.aval) // unit) for var in made]
    start, end, no_limit = 2 * len(made), 2 * len(made) + 1, sum(sizes) + 1
    pipes: dict[tuple[int, int], int] = {(start, end): 0}
    for eqn in needs.equations:
        for var in eqn.outvars:
            if var not in number:
                continue
            into, out = 2 * number[var], 2 * number[var] + 1
            pipes[into, out] = sizes[number[var]]
            if not dear.isdisjoint(eqn.outvars):
                pipes[start, into] = no_limit
            else:
                reads = [number[var] for var in variables(eqn.invars) if var in number]
                pipes.update(((2 * at + 1, into), no_limit) for at in reads)
            if var in sinks:
                pipes[out, end] = no_limit
    ends = tuple(zip(*pipes, strict=True))
    room = coo_array((np.array([*pipes.values()], np.int32), ends), (end + 1, end + 1)).tocsr()
    left_over = room - maximum_flow(room, start, end).flow
    left_over.eliminate_zeros()
    near = set(breadth_first_order(left_over.T.tocsr(), end, return_predecessors=False).tolist())
    chosen = {var for var, at in number.items() if 2 * at not in near and 2 * at + 1 in near}
    if alone:
        return chosen
    left = body.needs(read, given={*kept, *chosen}).carries
    if len(left) == len(carries):
        return chosen
    fewer = _cut(body, read, kept, dear, left, alone=alone)  # the others need not be had again
    return fewer if set(body.needs(read, given={*kept, *fewer}).carries) <= set(left) else chosen
