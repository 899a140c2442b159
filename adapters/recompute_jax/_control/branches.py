"""Conditionals that take the same branch and hand values to each other, as `cond` and its transpose under `grad` do.

What only conditionals of the group read need not be kept: a later one may run equations of an earlier one again, since
it is in the same branch. What is kept of a branch is what the planner keeps of the whole of it within some bytes: the
equations of the conditionals are one program to it, with an operation in between for the rest of the function, which
takes what an earlier conditional makes for others, and makes what a later one reads of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var

from recompute import planners
from recompute.planners import PlanError
from recompute_jax._program.jaxpr import (
    Atom,
    Flat,
    bind,
    effects,
    flatten,
    needed,
    read,
    run_equation,
    short,
    typed,
    variables,
    zeros,
)
from recompute_jax._program.segments import VIEWS, Segment, Segments, nbytes, peak, segment


@dataclass(frozen=True)
class BranchNeeds:
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
            flat = flatten(eqn.params["branches"][number])
            self.consts.update(zip(flat.constvars, flat.consts, strict=True))
            own = {var: _named(atom, names) for var, atom in zip(flat.invars, eqn.invars[1:], strict=True)}
            renamed = [eqn.replace(invars=[_named(atom, own) for atom in eqn.invars]) for eqn in flat.equations]
            self.equations.append(renamed)
            self.results.append([_named(atom, own) for atom in flat.outvars])
            names.update(zip(eqn.outvars, self.results[-1], strict=True))
        made = [(var, at) for at, own in enumerate(self.equations) for eqn in own for var in eqn.outvars]
        self.maker = dict(made)
        """Which conditional makes a value."""
        self.values = [var for var, _ in made]

    def needs(self, wanted: Iterable[Atom], given: Collection[Var], last: int) -> BranchNeeds:
        """What these values need, if some are `given`, of the conditionals up to the `last`. O(equations)."""
        equations, reads = needed([eqn for own in self.equations[: last + 1] for eqn in own], wanted, given)
        used = set(reads).intersection(given)
        ordered = tuple([var for var in self.values if var in used])
        outside = tuple([var for var in reads if var not in used and var not in self.consts])
        return BranchNeeds(tuple(equations), ordered, outside)


class BranchGroup:
    """Conditionals with one index, in the order of the function."""

    def __init__(self, flat: Flat, numbers: Sequence[int]) -> None:
        self.equations = [flat.equations[number] for number in numbers]
        count = len(self.equations[0].params["branches"])
        self.branches = [Branch(self.equations, number) for number in range(count)]
        inside = set(numbers)
        outside = set(variables(flat.outvars))
        for number, eqn in enumerate(flat.equations):
            if number not in inside:
                outside.update(variables(eqn.invars))
        self.required = [[at for at, var in enumerate(eqn.outvars) if var in outside] for eqn in self.equations]
        """Which results of each conditional others read, by place."""

    @property
    def size(self) -> int:
        """Bytes of what need not be kept."""
        pairs = zip(self.equations, self.required, strict=True)
        return sum(nbytes(var.aval) for eqn, places in pairs for at, var in enumerate(eqn.outvars) if at not in places)

    def wanted(self, branch: Branch, at: int) -> list[Atom]:
        """What the others read of one conditional."""
        return [branch.results[at][place] for place in self.required[at]]


def branch_groups(flat: Flat) -> list[BranchGroup]:
    """The groups of a function, without those that have effects. O(equations)."""
    same: dict[Var, Var] = {}
    group: dict[int, list[int]] = {}
    maker: dict[Var, int] = {}
    for number, eqn in enumerate(flat.equations):
        reads = variables(eqn.invars)
        if eqn.primitive.name in VIEWS and len(reads) == 1 and nbytes(reads[0].aval) == nbytes(eqn.outvars[0].aval):
            same[eqn.outvars[0]] = same.get(reads[0], reads[0])
        if eqn.primitive.name != "cond" or effects(eqn) or not isinstance(eqn.invars[0], Var):
            continue
        maker.update((var, number) for var in eqn.outvars)
        group[number] = [number]
        index = same.get(eqn.invars[0], eqn.invars[0])
        for var in reads:
            other = maker.get(var)
            if other is None or other == number:
                continue
            first = flat.equations[other].invars[0]
            one, two = group[other], group[number]
            if one is not two and isinstance(first, Var) and same.get(first, first) is index:
                one += two
                group.update((other, one) for other in two)
    distinct = {id(conditionals): conditionals for conditionals in group.values() if len(conditionals) > 1}
    return [BranchGroup(flat, sorted(conditionals)) for conditionals in distinct.values()]


def _named(atom: Atom, names: dict[Var, Atom]) -> Atom:
    return names.get(atom, atom) if isinstance(atom, Var) else atom


Kept = tuple[tuple[int, ...], ...]
"""Of each branch the numbers of the values that are kept, in the order of the group's equations."""

Choice = tuple[tuple[int, Kept], ...]
"""Groups of a function by number, and what their branches keep."""

_rest: Final = Primitive("recompute_rest")
_rest.multiple_results = True
_PARTS: Final = (0, 1, 2, 4)  # eighths of the way from the least to the most, where no plan was found for less
_HARDER: Final = 10  # times the effort of a function's plan: a branch is small, and its order is where a plan begins


def kept(group: BranchGroup, room: int, effort: float, seed: int, price: Callable[[Segment], float] | None) -> Kept:
    """What to keep if a branch has so many bytes, or as few as it can do with."""
    numbers: list[tuple[int, ...]] = []
    for branch in group.branches:
        segments = segment(_together(group, branch), "branch", price)
        order = _order(_with_dear_rest(segments), room, _HARDER * effort / len(group.branches), seed)
        crossing = _crossing(segments, order, branch)
        numbers.append(tuple([at for at, var in enumerate(branch.values) if var in crossing]))
    return tuple(numbers)


def _together(group: BranchGroup, branch: Branch) -> Flat:
    """The branch as one function of what its conditionals read; its results are what others read of them."""
    equations: list[JaxprEqn] = []
    known: set[Var] = set()
    sources: list[Var] = []
    results: list[Var] = []
    for at, own in enumerate(branch.equations):
        wanted = variables(group.wanted(branch, at))
        reads = dict.fromkeys([*variables(atom for eqn in own for atom in eqn.invars), *wanted])
        fresh = [var for var in reads if var not in branch.maker and var not in branch.consts and var not in known]
        known.update(fresh)
        made: list[Atom] = [var for var in dict.fromkeys(results) if var in branch.maker]
        if at and fresh and made:
            like = own[0] if own else equations[0]
            equations.append(like.replace(primitive=_rest, params={}, invars=made, outvars=fresh, effects=set()))
        else:
            sources += fresh
        equations += own
        results += wanted
    inner: list[Atom] = list(dict.fromkeys(var for var in results if var in branch.maker))
    consts = list(branch.consts.values())
    return Flat(list(branch.consts), consts, sources, inner, needed(equations, inner)[0])


def _with_dear_rest(segments: Segments) -> Segments:
    """The rest of the function runs once."""
    total = segments.program.model_time
    for part, call in zip(segments.segments, segments.program.calls, strict=True):
        if part.equations[-1].primitive is _rest:
            call.cost = total
    return segments


def _order(segments: Segments, room: int, effort: float, seed: int) -> list[int]:
    """Numbers of segments."""
    most = peak(segments)
    if most <= room:
        return list(range(len(segments.segments)))
    low, order = planners.least(segments.program), list(range(len(segments.segments)))
    for budget in (room, *(low + (most - low) * part // 8 for part in _PARTS)):
        with suppress(PlanError):
            plan = planners.replan(segments.program, max(2, budget), order, effort, seed)
            if plan is not None:
                return plan.order
    return order


def _crossing(segments: Segments, order: Sequence[int], branch: Branch) -> set[Var]:
    """What is made before the rest of the function, and read after it."""
    parts = [segments.segments[number] for number in order]
    crossing: set[Var] = set()
    for place, rest in enumerate(parts):
        if rest.equations[-1].primitive is not _rest:
            continue
        anew: set[Var] = set()
        for part in parts[place + 1 :]:
            crossing.update(var for var in part.inputs if var in branch.maker and var not in anew)
            anew.update(part.outputs)
    return crossing


def joined(flat: Flat, choice: Choice) -> Flat:
    """The function in which the branches of some groups keep this, and run the rest again."""
    groups = branch_groups(flat)
    return flatten(rewrite_branches(flat, [(groups[at], kept) for at, kept in choice]))


def rewrite_branches(flat: Flat, choices: Sequence[tuple[BranchGroup, Kept]]) -> ClosedJaxpr:
    """The same function, with the conditionals of these groups keeping this."""
    emitting = [_Conditionals(group, kept) for group, kept in choices]
    owner = {id(eqn): (one, at) for one in emitting for at, eqn in enumerate(one.group.equations)}

    def run(eqn: JaxprEqn, env: dict[Var, Any]) -> None:
        if id(eqn) in owner:
            one, at = owner[id(eqn)]
            one.emit(at, env)
        else:
            run_equation(eqn, env)

    return flat.rewritten(run)


class _Conditionals:
    """The conditionals of one group, as the function comes to them."""

    def __init__(self, group: BranchGroup, kept: Kept) -> None:
        self.group = group
        self.kept = [
            {branch.values[number] for number in numbers} for branch, numbers in zip(group.branches, kept, strict=True)
        ]
        self.slots: list[dict[Var, tuple[int, int]]] = [{} for _ in group.branches]
        """Of each branch: where a kept value is among the arrays that conditionals hand on."""
        self.handed: list[list[Any]] = []
        """By conditional."""

    def emit(self, at: int, env: dict[Var, Any]) -> None:
        """One conditional: its results are added to what there is."""
        group = self.group
        eqn, places = group.equations[at], group.required[at]
        avals = self._assign(at)
        needs = [self._needs(branch, number, at) for number, branch in enumerate(group.branches)]
        if not places and not avals:
            self.handed.append([])
            return
        outside = list(dict.fromkeys(var for need in needs for var in need.outside))
        earlier = sorted(
            {
                slot
                for need, slots in zip(needs, self.slots, strict=True)
                for var in need.given
                if (slot := slots[var])[0] < at
            }
        )
        types = [eqn.outvars[place].aval for place in places] + avals

        def branch_of(number: int) -> Any:
            branch, need, slots = group.branches[number], needs[number], self.slots[number]
            back = {slots[var]: var for var in need.given}
            own = {slot[1]: var for var, slot in slots.items() if slot[0] == at}

            def run(*values: Any) -> list[Any]:
                env: dict[Var, Any] = {**branch.consts, **dict(zip(outside, values, strict=False))}
                given = zip(earlier, values[len(outside) :], strict=True)
                env.update((back[slot], value) for slot, value in given if slot in back)
                for eqn in need.equations:
                    run_equation(eqn, env)
                made = [_array(atom, env) for atom in group.wanted(branch, at)]
                made += [env[own[place]] if place in own else zeros(aval) for place, aval in enumerate(avals)]
                return [typed(value, aval) for value, aval in zip(made, types, strict=True)]

            return run

        operands = [*(env[var] for var in outside), *(self.handed[one][two] for one, two in earlier)]
        given = list(map(jax.typeof, operands))
        closed = tuple([jax.make_jaxpr(branch_of(number))(*given) for number in range(len(group.branches))])
        chosen = eqn.replace(params={**eqn.params, "branches": closed})  # with the same index, unlike `lax.switch`
        made = bind(chosen, [read(eqn.invars[0], env), *operands])
        env.update((eqn.outvars[place], value) for place, value in zip(places, made, strict=False))
        self.handed.append(list(made[len(places) :]))

    def _needs(self, branch: Branch, number: int, at: int) -> BranchNeeds:
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


def _array(atom: Atom, env: dict[Var, Any]) -> Any:
    aval: Any = atom.aval
    return jnp.asarray(atom.val, aval.dtype) if isinstance(atom, Literal) else env[atom]
