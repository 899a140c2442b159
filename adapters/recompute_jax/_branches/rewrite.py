"""Conditionals that keep less for later ones, which run the rest again: the function after `kept`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var

from recompute_jax._branches.groups import Branch, Group, Needs, groups_of
from recompute_jax._branches.kept import Kept
from recompute_jax._emit.gates import zeros
from recompute_jax._program.jaxpr import Atom, Flat, bind, flatten, short, struct

Environment = dict[Var, Any]


Choice = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
"""Groups of a function by number, and for each branch the numbers of the values that are kept."""


def joined(flat: Flat, choice: Choice) -> Flat:
    """The function in which the branches of some groups keep this, and run the rest again."""
    groups = groups_of(flat)
    made = flatten(
        rewrite(flat, [(groups[at], [list(each) for each in branches]) for at, branches in choice]),
        inline_custom=False,
    )
    count = len(flat.constvars)
    return made._replace(
        constvars=[*made.constvars, *made.invars[:count]],
        consts=[*made.consts, *flat.consts],
        invars=made.invars[count:],
    )


def rewrite(flat: Flat, choices: Sequence[tuple[Group, Kept]]) -> ClosedJaxpr:
    """The same function of its constants and arguments, with the conditionals of these groups keeping this."""

    def run(*sources: Any) -> list[Any]:
        emitting = [_Emitting(group, kept) for group, kept in choices]
        owner = {number: (each, at) for each in emitting for at, number in enumerate(each.group.numbers)}
        env: Environment = dict(zip([*flat.constvars, *flat.invars], sources, strict=True))
        for number, eqn in enumerate(flat.equations):
            if number in owner:
                one, at = owner[number]
                one.emit(at, env)
            else:
                values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
                env.update(zip(eqn.outvars, bind(eqn, values), strict=True))
        return [atom.val if isinstance(atom, Literal) else env[atom] for atom in flat.outvars]

    return jax.make_jaxpr(run)(*[struct(var.aval) for var in (*flat.constvars, *flat.invars)])


class _Emitting:
    """The conditionals of one group, as the function comes to them."""

    def __init__(self, group: Group, kept: Kept) -> None:
        self.group = group
        self.kept = [
            {branch.values[number] for number in numbers} for branch, numbers in zip(group.branches, kept, strict=True)
        ]
        self.slots: list[dict[Var, tuple[int, int]]] = [{} for _ in group.branches]
        """Of each branch: where a kept value is among the arrays that conditionals hand on."""
        self.handed: list[list[Any]] = []
        """By conditional."""

    def emit(self, at: int, env: Environment) -> None:
        """One conditional: its results are added to what there is."""
        group = self.group
        eqn, places = group.equations[at], group.required[at]
        avals = self._assign(at)
        needs = [self._needs(branch, number, at) for number, branch in enumerate(group.branches)]
        if not places and not avals:
            self.handed.append([])
            return
        outside = list(dict.fromkeys(var for each in needs for var in each.outside))
        earlier = sorted(
            {
                slot
                for each, slots in zip(needs, self.slots, strict=True)
                for var in each.given
                if (slot := slots[var])[0] < at
            }
        )
        types = [eqn.outvars[place].aval for place in places] + avals

        def branch_of(number: int) -> Any:
            branch, need, slots = group.branches[number], needs[number], self.slots[number]
            back = {slots[var]: var for var in need.given}
            own = {slot[1]: var for var, slot in slots.items() if slot[0] == at}

            def run(*values: Any) -> list[Any]:
                env: Environment = {**branch.consts, **dict(zip(outside, values, strict=False))}
                given = zip(earlier, values[len(outside) :], strict=True)
                env.update((back[slot], value) for slot, value in given if slot in back)
                for each in need.equations:
                    env.update(zip(each.outvars, bind(each, [_read(one, env) for one in each.invars]), strict=True))
                made = [_read(atom, env) for atom in group.wanted(branch, at)]
                made += [env[own[place]] if place in own else zeros(aval) for place, aval in enumerate(avals)]
                return [_typed(value, aval) for value, aval in zip(made, types, strict=True)]

            return run

        operands = [*(env[var] for var in outside), *(self.handed[one][two] for one, two in earlier)]
        given = list(map(jax.typeof, operands))
        closed = tuple([jax.make_jaxpr(branch_of(number))(*given) for number in range(len(group.branches))])
        chosen = eqn.replace(params={**eqn.params, "branches": closed})  # with the same index, unlike `lax.switch`
        made = bind(chosen, [_read(eqn.invars[0], env), *operands])
        env.update((eqn.outvars[place], value) for place, value in zip(places, made, strict=False))
        self.handed.append(list(made[len(places) :]))

    def _needs(self, branch: Branch, number: int, at: int) -> Needs:
        kept = self.kept[number]
        own = [var for var in branch.values if var in kept and branch.maker[var] == at]
        given = {var for var in kept if branch.maker[var] < at}
        return branch.needs([*self.group.wanted(branch, at), *own], given, at)

    def _assign(self, at: int) -> list[Any]:
        """The types of the arrays that a conditional hands on: branches share those of one type."""
        avals: list[Any] = []
        for branch, kept, slots in zip(self.group.branches, self.kept, self.slots, strict=True):
            free: dict[str, list[int]] = {}
            for place, aval in enumerate(avals):
                free.setdefault(short(aval), []).append(place)
            for var in branch.values:
                if var in kept and branch.maker[var] == at:
                    same = free.get(short(var.aval))
                    if same:
                        slots[var] = at, same.pop(0)
                    else:
                        slots[var] = at, len(avals)
                        avals.append(var.aval)
        return avals


def _read(atom: Atom, env: Environment) -> Any:
    aval: Any = atom.aval
    return jnp.asarray(atom.val, aval.dtype) if isinstance(atom, Literal) else env[atom]


def _typed(value: Any, aval: Any) -> Any:
    """With the weak type that it should have: branches must agree."""
    weak = bool(getattr(aval, "weak_type", False))
    if bool(getattr(jax.typeof(value), "weak_type", False)) == weak:
        return value
    return lax.convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=weak, sharding=None)
