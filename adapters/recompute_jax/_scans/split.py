"""Scans and conditionals within scans in two: one for the forward pass, and one that makes what later scans read.

The scan of a gradient reads what a scan or a conditional within the forward scan has saved. The second of the two makes
that from less: from the carries of each step, or from products of matrices. It need not run in the forward pass: it
runs before it is read. So it is what `jax.checkpoint` around the inner body or the branch does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

import recompute_jax._branches.groups as branches
from recompute_jax._branches.rewrite import rewrite
from recompute_jax._program.costs import flops
from recompute_jax._program.jaxpr import Flat, bind, struct
from recompute_jax._scans.body import Body
from recompute_jax._scans.cut import choices, is_dot, is_dot_without_batch
from recompute_jax._scans.groups import Group, groups_of


@dataclass(frozen=True)
class Split:
    """The function with such scans and conditionals in two."""

    flat: Flat
    level: int
    """Its number."""
    more: float
    """FLOPs, if the second ones run in the forward pass, too."""


def splits(flat: Flat) -> Iterator[Split]:
    """The function with one thing after the other that the first hand to the second. None, if nothing is in a scan."""
    within = _within(flat)
    options = [len(each.options) for _, inner in within for each in inner.values()]
    for level in range(max(options, default=0)):
        yield _split(flat, within, level)


def split(flat: Flat, level: int) -> Split:
    """The one of `splits` with this number."""
    return _split(flat, _within(flat), level)


def _within(flat: Flat) -> list[tuple[Body, dict[int, _Inner]]]:
    """What makers of stacks have in them, by id of the equation."""
    found = [
        (outer, {id(eqn): each for eqn, each in _inner(outer, group) if each.options})
        for group in groups_of(flat)
        for outer in group.bodies
    ]
    return [(outer, inner) for outer, inner in found if inner]


def _split(flat: Flat, within: Sequence[tuple[Body, dict[int, _Inner]]], level: int) -> Split:
    equations = list(flat.equations)
    place = {id(eqn): at for at, eqn in enumerate(equations)}
    for outer, inner in within:
        at = place[id(outer.eqn)]
        equations[at] = outer.eqn.replace(params={**outer.eqn.params, "jaxpr": _body(outer, inner, level)})
    made = flat._replace(equations=equations)
    return Split(made, level, sum(map(flops, made.equations)) - sum(map(flops, flat.equations)))


def _inner(outer: Body, group: Group) -> Iterator[tuple[JaxprEqn, _Inner]]:
    """The scans and conditionals in a body some of whose results only later scans read."""
    uses = Counter(atom for eqn in outer.flat.equations for atom in eqn.invars if isinstance(atom, Var))
    uses.update(atom for atom in outer.next if isinstance(atom, Var))
    handed = {atom for atom in outer.made if isinstance(atom, Var)} - group.fixed
    for eqn in outer.flat.equations:
        late = [place for place, var in enumerate(eqn.outvars) if var in handed and not uses[var]]
        if not late or eqn.effects:
            continue
        if eqn.primitive.name == "cond":
            yield eqn, _Cond(eqn, late)
        elif eqn.primitive.name == "scan" and eqn.params["length"] > 1 and late[-1] >= eqn.params["num_carry"]:
            carries = eqn.params["num_carry"]
            yield eqn, _Scan(eqn, [place - carries for place in late if place >= carries])


class _Scan:
    """A scan in a body."""

    def __init__(self, eqn: JaxprEqn, late: Sequence[int]) -> None:
        self.body = Body(eqn)
        self.late = list(late)
        read = [var for place in self.late if isinstance(var := self.body.made[place], Var)]
        self.options = [
            *((each, True) for each in [*choices(self.body, read, (), alone=True), frozenset[Var]()]),
            *((each, False) for each in choices(self.body, read, ())),
        ]
        """What is handed on beside the carries, or without them if the rest leads from one to the next."""

    def run(self, values: Sequence[Any], level: int) -> list[Any]:
        """The results of the scan, by two scans."""
        body = self.body
        chosen, alone = self.options[min(level, len(self.options) - 1)]
        firm = sorted(chosen, key=body.maker.__getitem__)
        constants, carries = len(body.constants), len(body.carries)
        given, start = values[:constants], values[constants : constants + carries]
        stacks = values[constants + carries :]
        soon = [place for place in range(len(body.made)) if place not in self.late]
        wanted = [*firm, *(body.made[place] for place in soon)]
        early = body.needs(wanted, carries=range(carries))
        rest = [body.made[place] for place in self.late]
        later = body.needs(rest, given=firm, alone=alone)
        entered = later.carries if alone else ()

        def on(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], Any]:
            known = dict(zip(body.carries, carry, strict=True)) | _known(body, early.stacks, slices)
            after, made = body.step(early, given, known, wanted)
            return [after[at] for at in range(carries)], (made, [carry[at] for at in entered])

        def again(carry: dict[int, Any], slices: tuple[Any, Any, Any]) -> tuple[dict[int, Any], list[Any]]:
            read, kept, entries = slices
            known = _known(body, later.stacks, read)
            known |= dict(zip(firm, kept, strict=True))
            entry = carry | dict(zip(entered, entries, strict=True))
            known |= {body.carries[at]: value for at, value in entry.items()}
            return body.step(replace(later, carries=tuple(carry)), given, known, rest)

        options = {"length": body.length, "reverse": body.reverse, "unroll": body.eqn.params["unroll"]}
        last, (made, entries) = lax.scan(on, list(start), [stacks[at] for at in early.stacks], **options)
        kept = made[: len(firm)]
        first = {} if alone else {at: start[at] for at in later.carries}
        _, found = lax.scan(again, first, ([stacks[at] for at in later.stacks], kept, entries), **options)
        stacked = dict(zip(soon, made[len(firm) :], strict=True)) | dict(zip(self.late, found, strict=True))
        return [*last, *(stacked[place] for place in range(len(body.made)))]


class _Cond:
    """A conditional in a body. The second is at first one that hands its operands on, in the same branch."""

    def __init__(self, eqn: JaxprEqn, late: Sequence[int]) -> None:
        read = [eqn.outvars[place] for place in late]
        again = [Var(var.aval) for var in read]
        hand_on = jax.make_jaxpr(lambda *values: values)(*[struct(var.aval) for var in read])
        params = {**eqn.params, "branches": (hand_on,) * len(eqn.params["branches"])}
        second = eqn.replace(invars=[eqn.invars[0], *read], outvars=again, params=params)
        outvars: list[Any] = list(eqn.outvars)
        for place, var in zip(late, again, strict=True):
            outvars[place] = var
        invars = list(dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var)))
        self.flat = Flat([], [], invars, outvars, [eqn, second])
        self._places = [eqn.invars.index(var) for var in invars]
        self.group = branches.groups_of(self.flat)[0] if isinstance(eqn.invars[0], Var) else None
        self.options = [kept for saves in (is_dot, is_dot_without_batch) if any(kept := self._kept(saves))]
        """Which values each branch hands on."""

    def run(self, values: Sequence[Any], level: int) -> list[Any]:
        """The results of the conditional, by two."""
        assert self.group is not None, "there are options"
        kept = self.options[min(level, len(self.options) - 1)]
        made = rewrite(self.flat, [(self.group, kept)])
        return list(jaxpr_as_fun(made)(*[values[place] for place in self._places]))

    def _kept(self, saves: Callable[[JaxprEqn], bool]) -> list[list[int]]:
        found = []
        for branch in self.group.branches if self.group else ():
            products = {var for eqn in branch.equations[0] if saves(eqn) for var in eqn.outvars}
            found.append([at for at, var in enumerate(branch.values) if var in products])
        return found


_Inner = _Scan | _Cond


def _known(body: Body, places: Sequence[int], slices: Sequence[Any]) -> dict[Var, Any]:
    return dict(zip([body.stacks[at] for at in places], slices, strict=True))


def _body(outer: Body, inner: Mapping[int, _Inner], level: int) -> ClosedJaxpr:
    """The body with what is in it in two."""
    flat = outer.flat

    def run(*sources: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
        env.update(zip(flat.invars, sources, strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]
        for eqn in flat.equations:
            values = list(map(read, eqn.invars))
            found = inner.get(id(eqn))
            env.update(zip(eqn.outvars, bind(eqn, values) if found is None else found.run(values, level), strict=True))
        return list(map(read, flat.outvars))

    return jax.make_jaxpr(run)(*[struct(var.aval) for var in flat.invars])
