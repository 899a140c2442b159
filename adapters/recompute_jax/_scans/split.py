"""Scans within scans in two: one that carries on, and one for what later scans read, from the carries of each step.

The scan of a gradient reads what a scan within the forward scan has stacked. What that stacks is all of a step, or a
cut through it, and then the second scan need not run in the forward pass: it runs before it is read, from less. So it
is what `jax.checkpoint` around the body of the inner scan does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from recompute_jax._program.costs import flops
from recompute_jax._program.jaxpr import Flat, bind, struct
from recompute_jax._scans.body import Body
from recompute_jax._scans.cut import choices
from recompute_jax._scans.groups import Group, groups_of


@dataclass(frozen=True)
class Split:
    """The function with such scans in two."""

    flat: Flat
    level: int
    """Its number."""
    more: float
    """FLOPs, if the second ones run in the forward pass, too."""


def splits(flat: Flat) -> Iterator[Split]:
    """The function with less and less that the first scans hand to the second. None, if no scan is within a scan."""
    within = _within(flat)
    options = [len(each.options) for _, inner in within for each in inner.values()]
    for level in range(max(options, default=0)):
        yield _split(flat, within, level)


def split(flat: Flat, level: int) -> Split:
    """The one of `splits` with this number."""
    return _split(flat, _within(flat), level)


def _within(flat: Flat) -> list[tuple[Body, dict[int, _Inner]]]:
    """The scans that makers of stacks have in them, by id of the equation."""
    found = [
        (outer, {id(eqn): _Inner(eqn, late) for eqn, late in _inner(outer, group)})
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


def _inner(outer: Body, group: Group) -> Iterator[tuple[JaxprEqn, list[int]]]:
    """The scans in a body, and which of their stacks only later scans read, by place."""
    uses = Counter(atom for eqn in outer.flat.equations for atom in eqn.invars if isinstance(atom, Var))
    uses.update(atom for atom in outer.next if isinstance(atom, Var))
    handed = {atom for atom in outer.made if isinstance(atom, Var)} - group.fixed
    for eqn in outer.flat.equations:
        if eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.effects:
            stacks = eqn.outvars[eqn.params["num_carry"] :]
            late = [place for place, var in enumerate(stacks) if var in handed and not uses[var]]
            if late:
                yield eqn, late


class _Inner:
    """A scan in a body."""

    def __init__(self, eqn: JaxprEqn, late: Sequence[int]) -> None:
        self.body = Body(eqn)
        self.late = list(late)
        read = [var for place in self.late if isinstance(var := self.body.made[place], Var)]
        self.options = [*choices(self.body, read, (), alone=True), frozenset[Var]()]

    def run(self, values: Sequence[Any], level: int) -> list[Any]:
        """The results of the scan, by two scans."""
        body = self.body
        firm = sorted(self.options[min(level, len(self.options) - 1)], key=body.maker.__getitem__)
        constants, carries = len(body.constants), len(body.carries)
        given, start = values[:constants], values[constants : constants + carries]
        stacks = values[constants + carries :]
        soon = [place for place in range(len(body.made)) if place not in self.late]
        wanted = [*firm, *(body.made[place] for place in soon)]
        early = body.needs(wanted, carries=range(carries))
        rest = [body.made[place] for place in self.late]
        later = body.needs(rest, given=firm, alone=True)

        def on(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], Any]:
            known = {**dict(zip(body.carries, carry, strict=True)), **_known(body, early.stacks, slices)}
            after, made = body.step(early, given, known, wanted)
            return [after[at] for at in range(carries)], (made, [carry[at] for at in later.carries])

        def again(_: None, slices: tuple[Any, Any, Any]) -> tuple[None, list[Any]]:
            read, kept, entries = slices
            known = _known(body, later.stacks, read)
            known |= dict(zip(firm, kept, strict=True))
            known |= {body.carries[at]: value for at, value in zip(later.carries, entries, strict=True)}
            return None, body.step(replace(later, carries=()), given, known, rest)[1]

        options = {"length": body.length, "reverse": body.reverse, "unroll": body.eqn.params["unroll"]}
        last, (made, entries) = lax.scan(on, list(start), [stacks[at] for at in early.stacks], **options)
        kept = made[: len(firm)]
        _, found = lax.scan(again, None, ([stacks[at] for at in later.stacks], kept, entries), **options)
        stacked = dict(zip(soon, made[len(firm) :], strict=True)) | dict(zip(self.late, found, strict=True))
        return [*last, *(stacked[place] for place in range(len(body.made)))]


def _known(body: Body, places: Sequence[int], slices: Sequence[Any]) -> dict[Var, Any]:
    return dict(zip([body.stacks[at] for at in places], slices, strict=True))


def _body(outer: Body, inner: Mapping[int, _Inner], level: int) -> ClosedJaxpr:
    """The body with the scans in it in two."""
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
