"""The body of a scan, to be run in part: what is wanted of a step, from what is given.

A value of a body has its variable for a name, also where it is stacked: `made` says which of them the scan stacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from recompute_jax._program.costs import flops, kind, nbytes, weigh
from recompute_jax._program.jaxpr import Atom, bind, effects, flatten


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
        constants, carries = params["num_consts"], params["num_carry"]
        flat = flatten(params["jaxpr"], inline_custom=False)
        self.flat = flat
        self.constants = flat.invars[:constants]
        self.carries = flat.invars[constants : constants + carries]
        self.stacks = flat.invars[constants + carries :]
        self.next = flat.outvars[:carries]
        self.made = flat.outvars[carries:]
        self.stacked: list[Any] = list(eqn.invars[constants + carries :])
        """Outside: the stacked operands, and the stacks that are made."""
        self.results: list[Var] = list(eqn.outvars[carries:])
        self.maker = {var: number for number, each in enumerate(flat.equations) for var in each.outvars}
        self.has_effects = any(bool(effects(each)) for each in flat.equations)
        self._carry_of = {var: at for at, var in enumerate(self.carries)}
        self._stack_of = {var: at for at, var in enumerate(self.stacks)}

    def needs(
        self, wanted: Iterable[Atom], carries: Iterable[int] = (), given: Collection[Var] = (), alone: bool = False
    ) -> Needs:
        """What these values of each step need, and these carries from step to step; `alone`: of one step.

        O(equations).
        """
        read_carries = set(carries)
        stack = [each for each in wanted if isinstance(each, Var)]
        stack += [after for at in read_carries if isinstance(after := self.next[at], Var)]
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
                    stack += [each for each in self.flat.equations[number].invars if isinstance(each, Var)]
            elif var in self._stack_of:
                read_stacks.add(self._stack_of[var])
            elif var in self._carry_of:
                at = self._carry_of[var]
                read_carries.add(at)
                after = self.next[at]
                if isinstance(after, Var) and not alone:
                    stack.append(after)
        equations = tuple([self.flat.equations[number] for number in sorted(numbers)])
        order = tuple(sorted(used, key=lambda var: self.maker.get(var, -1)))
        return Needs(equations, tuple(sorted(read_carries)), tuple(sorted(read_stacks)), order, _cost(equations))

    def step(
        self, needs: Needs, constants: Sequence[Any], known: Mapping[Var, Any], wanted: Sequence[Atom]
    ) -> tuple[dict[int, Any], list[Any]]:
        """One step: the next of the needed carries, and the wanted values. `known`: carries, slices, given values."""
        env: dict[Var, Any] = dict(zip(self.flat.constvars, self.flat.consts, strict=True))
        values = [each.made() if isinstance(each, Spread) else each for each in constants]
        env.update(zip(self.constants, values, strict=True))
        env.update(known)

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in needs.equations:
            results = bind(eqn, [read(each) for each in eqn.invars])
            for var, value in zip(eqn.outvars, results, strict=True):
                env.setdefault(var, value)
        return {at: read(self.next[at]) for at in needs.carries}, [read(each) for each in wanted]


def _cost(equations: Sequence[JaxprEqn]) -> float:
    total = 0.0
    for eqn in equations:
        moved = sum(nbytes(var.aval) for var in eqn.outvars) if kind(eqn) != "cheap" else 0
        total += weigh(flops(eqn), 2.0 * moved) if kind(eqn) == "heavy" else flops(eqn) + moved
    return total
