"""Scans as loops over blocks of steps, in which stacks that are left out are made again: the function after a shape.

A part of the steps has levels (K, ..., k): K blocks of blocks of ... of k steps. The maker of a stack that is left out
keeps its carry at the beginning of each of the K blocks. A reader, at a block, runs the maker from there, which gives
the carries at the beginning of the blocks within; and at a block of k steps the stack itself, for these steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from recompute_jax._control.body import Body, Needs, Spread
from recompute_jax._control.groups import Again, Group
from recompute_jax._control.shapes import Part
from recompute_jax._program.jaxpr import Flat, bind, read, variables
from recompute_jax._program.segments import nbytes

Carry = dict[int, Any]
Stacks = dict[Var, Any]


def rewrite(flat: Flat, shapes: Sequence[tuple[Group, Sequence[Part]]]) -> ClosedJaxpr:
    """The same function, with the scans of these groups in these parts."""
    owner: dict[int, tuple[_Scans, Body]] = {}
    for group, parts in shapes:
        scans = _Scans(group, parts)
        owner.update((id(body.eqn), (scans, body)) for body in group.bodies)
    spread: dict[Var, Spread] = {}

    def run(eqn: JaxprEqn, env: dict[Var, Any]) -> None:
        values = [read(atom, env) for atom in eqn.invars]
        if id(eqn) in owner:
            scans, body = owner[id(eqn)]
            for place, atom in enumerate(eqn.invars[: len(body.constants)]):
                values[place] = spread.get(atom, values[place]) if isinstance(atom, Var) else values[place]
            results = scans.scan(body, values)
        else:
            results = bind(eqn, values)
            if eqn.primitive.name == "broadcast_in_dim" and _widens(eqn):
                spread[eqn.outvars[0]] = Spread(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))

    made = flat.rewritten(run)
    pruned, _ = dce_jaxpr(made.jaxpr, used_outputs=True, instantiate=True)
    return ClosedJaxpr(pruned, made.consts)  # no stacks that nothing reads, in scans within scans either


def _widens(eqn: JaxprEqn) -> bool:
    return all(2 * nbytes(var.aval) <= nbytes(eqn.outvars[0].aval) for var in eqn.invars)


@dataclass(frozen=True)
class _Step:
    """A stack of one step: its only value, so that what makes it and what reads it see the same one."""

    value: Any


class _Scans:
    """The scans of one group, as the function comes to them."""

    def __init__(self, group: Group, parts: Sequence[Part]) -> None:
        self.group = group
        self.parts = parts
        self.stacks: list[Stacks] = [{} for _ in parts]
        self.entries: list[dict[int, Carry]] = [{} for _ in parts]
        """By id of the scan: carries at the beginning of all blocks, stacked."""
        self.constants: dict[int, list[Any]] = {}

    def scan(self, body: Body, values: Sequence[Any]) -> list[Any]:
        """The results of one of the scans."""
        constants, carries = len(body.constants), len(body.carries)
        self.constants[id(body)] = list(values[:constants])
        carry: Carry = dict(enumerate(values[constants : constants + carries]))
        outside: Stacks = {}
        for place, value in enumerate(values[constants + carries :]):
            var = self.group.name(body, place)
            assert var is not None, "a stack is no literal"
            if var not in self.group.maker:
                outside[var] = value
        for at in range(len(self.parts))[:: -1 if body.reverse else 1]:
            carry = self._part(body, at, carry, outside)
        stacks = [self._result(atom, body.length) for atom in body.made]
        return [*(carry[at] for at in range(carries)), *stacks]

    def _part(self, body: Body, at: int, carry: Carry, outside: Stacks) -> Carry:
        part, made = self.parts[at], self.stacks[at]
        for var, value in outside.items():
            if var not in made:
                made[var] = value if len(self.parts) == 1 else lax.slice_in_dim(value, part.start, part.stop)
        real = part.mode.real
        wanted = tuple(var for var in dict.fromkeys(variables(body.made)) if var in real)
        wanted += tuple(var for var in body.maker if var in real and self.group.maker.get(var) is None)
        run = _Run(self.group, part, self.constants)
        entries = self.group.entries(real).get(id(body), ())
        needs = body.needs(wanted, carries=range(len(body.carries)))
        block = _Block(part.levels, made, {}, self.entries[at])
        carry, stacks, kept = run.run(Again(body, wanted, needs), carry, block, keep=entries)
        made.update((var, _stacked(value)) for var, value in stacks.items())
        self.entries[at][id(body)] = kept
        return carry

    def _result(self, atom: Any, length: int) -> Any:
        if not isinstance(atom, Var):
            return lax.broadcast(jnp.asarray(atom.val, atom.aval.dtype), (length,))
        parts: list[Any] = [made.get(atom) for made in self.stacks]
        if any(part is None for part in parts):
            return None
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


@dataclass(frozen=True)
class _Block:
    """Where a scan runs: the lengths of the blocks within, stacks and carries."""

    levels: tuple[int, ...]
    stacks: Mapping[Var, Any]
    entries: Mapping[int, Carry]
    """At the beginning of this block."""
    within: Mapping[int, Carry]
    """At the beginning of each block in it, stacked; only of those that are known already."""


class _Run:
    """Scans over a part, and what they run again."""

    def __init__(self, group: Group, part: Part, constants: Mapping[int, list[Any]]) -> None:
        self.group = group
        self.real = part.mode.real
        self.constants = constants

    def run(self, what: Again, carry: Carry, block: _Block, keep: Sequence[int] = ()) -> tuple[Carry, Stacks, Carry]:
        """The carries after a block, the wanted stacks, and the carries to `keep`, of the beginning of blocks in it."""
        again = self.group.again(what.body, what.needs.stacks, self.real)
        if len(block.levels) == 1 or not (again or keep):
            stacks = dict(block.stacks)
            inner = _Block((prod(block.levels),), stacks, block.entries, {})
            for rerun in again:
                stacks.update(self.run(rerun, self._entry(rerun.needs, block.entries[id(rerun.body)]), inner)[1])
            return (*self._steps(what, carry, inner), {})
        within = dict(block.within)
        for rerun in again:
            if id(rerun.body) not in within:
                carries = rerun.needs.carries
                alone = Again(rerun.body, (), rerun.body.needs((), carries, self.real))
                start = self._entry(alone.needs, block.entries[id(rerun.body)])
                inside = _Block(block.levels, block.stacks, block.entries, within)
                within[id(rerun.body)] = self.run(alone, start, inside, keep=carries)[2]
        return self._blocks(what, again, carry, block, within, keep)

    def _blocks(
        self,
        what: Again,
        again: list[Again],
        carry: Carry,
        block: _Block,
        within: Mapping[int, Carry],
        keep: Sequence[int],
    ) -> tuple[Carry, Stacks, Carry]:
        count, levels = block.levels[0], block.levels[1:]
        read = self._names(what).union(*map(self._names, again))
        names = [var for var in block.stacks if var in read]
        size = prod(levels)
        stacks = [_split(block.stacks[var], count, size) for var in names]
        entries = {id(rerun.body): within[id(rerun.body)] for rerun in again}

        def body(carry: Carry, given: Any) -> Any:
            slices, entries = given
            parts = [_Step(value) if size == 1 else value for value in slices]
            inner = _Block(levels, dict(zip(names, parts, strict=True)), entries, {})
            after, made, _ = self.run(what, carry, inner)
            stacked = [_short(made[var]) if size == 1 else _stacked(made[var]) for var in what.wanted]
            return after, (stacked, {at: carry[at] for at in keep})

        after, (made, kept) = lax.scan(body, carry, (stacks, entries), count, reverse=what.body.reverse)
        return after, dict(zip(what.wanted, [_join(value, size) for value in made], strict=True)), kept

    def _steps(self, what: Again, carry: Carry, block: _Block) -> tuple[Carry, Stacks]:
        body, needs = what.body, what.needs
        if block.levels[0] == 1 and what.alone is not None:
            needs = replace(what.alone, carries=())
        slices = {body.stacks[at]: block.stacks[self._name(body, at)] for at in needs.stacks}
        slices |= {var: block.stacks[var] for var in needs.given}

        def step(carry: Carry, given: Sequence[Any]) -> tuple[Carry, list[Any]]:
            known = {body.carries[at]: value for at, value in carry.items()}
            known |= dict(zip(slices, given, strict=True))
            return body.step(needs, self.constants[id(body)], known, what.wanted)

        length = block.levels[0]
        if length == 1:
            after, made = step(carry, list(map(_short, slices.values())))
            made = [_Step(jnp.asarray(value)) for value in made]
        else:
            stacks = list(map(_stacked, slices.values()))
            after, made = lax.scan(step, carry, stacks, length, reverse=body.reverse)
        return after, dict(zip(what.wanted, made, strict=True))

    def _names(self, what: Again) -> set[Var]:
        names = {self._name(what.body, at) for at in what.needs.stacks}
        return names | set(what.needs.given)

    def _name(self, body: Body, place: int) -> Var:
        var = self.group.name(body, place)
        assert var is not None, "a stack is no literal"
        return var

    @staticmethod
    def _entry(needs: Needs, carry: Carry) -> Carry:
        return {at: carry[at] for at in needs.carries}


def _split(value: Any, count: int, size: int) -> Any:
    """A stack as `count` blocks of `size` steps. Of one step: as it is, which spares XLA a copy."""
    value = _stacked(value)
    return value if size == 1 else lax.reshape(value, (count, size, *value.shape[1:]))


def _stacked(value: Any) -> Any:
    return lax.expand_dims(value.value, (0,)) if isinstance(value, _Step) else value


def _short(value: Any) -> Any:
    """The value of the only step."""
    return value.value if isinstance(value, _Step) else lax.squeeze(value, (0,))


def _join(value: Any, size: int) -> Any:
    return value if size == 1 else lax.reshape(value, (value.shape[0] * size, *value.shape[2:]))
