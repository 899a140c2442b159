"""The loops of a function within the budget: how much of it they get, and the function rewritten for that.

The rest of the function competes for the same bytes, so a few shares are tried: all that the rest leaves if nothing
of it is recomputed, and less, for which the rest has to recompute less. The planner says which is cheapest.

Scans and conditionals within scans may come in two, one for the forward pass, and one that makes what later scans read.
The scan of a gradient reads what a scan or a conditional within the forward scan has saved. The second of the two makes
that from less: from the carries of each step, or from products of matrices. It need not run in the forward pass: it
runs before it is read. So it is what `jax.checkpoint` around the inner body or the branch does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from recompute_jax._control.body import Body, choices, is_dot, is_dot_without_batch
from recompute_jax._control.branches import Kept, branch_groups, rewrite_branches
from recompute_jax._control.groups import Group, groups_of
from recompute_jax._control.rewrite import rewrite
from recompute_jax._control.shapes import Shape, shape, smallest, uniform
from recompute_jax._program.jaxpr import Flat, bind, flatten, read, scan_operands, trace, variables
from recompute_jax._program.segments import flops

_NOTICED: Final = 0.05  # of the budget: groups that stack less are left as they are
_SHARES: Final = (0.6, 0.3)
_SAME: Final = 1.001  # times a cost: no gain


@dataclass(frozen=True)
class Split:
    """The function with scans and conditionals within scans in two."""

    flat: Flat
    level: int
    """Its number."""
    more: float
    """FLOPs, if the second ones run in the forward pass, too."""


@dataclass(frozen=True)
class Looped:
    """The function with its loops in some shape."""

    before: Flat
    flat: Flat
    shapes: tuple[Shape, ...]
    split: Split | None = None
    """What came first: `before` is what became of the function."""

    @property
    def cost(self) -> float:
        """Of what runs again."""
        return sum(shape.cost for shape in self.shapes) + (self.split.more if self.split else 0.0)

    @property
    def texts(self) -> tuple[str, ...]:
        """What becomes of each group that is changed."""
        changed = [shape for shape in self.shapes if not shape.is_plain]
        return tuple([f"scans over {shape.group.length:,} steps: {shape}" for shape in changed])


class Loops:
    """The groups of scans of a function, or those of them that matter."""

    def __init__(self, flat: Flat, split: Split | None = None, *, are_left: bool = False) -> None:
        """`are_left`: no loop is to be changed."""
        self.flat = flat
        self._split = split
        self.groups = [] if are_left else [group for group in groups_of(flat) if len(group.modes) > 1]
        self._known: dict[Any, Looped] = {}
        """What was made already, by groups and their parts."""

    @property
    def size(self) -> int:
        """Bytes of all their stacks."""
        return sum(group.size for group in self.groups)

    def noticed(self, budget: int) -> Loops:
        """Those that stack a good part of the budget."""
        few = copy(self)
        few.groups = [group for group in self.groups if group.size > _NOTICED * budget]
        return few

    def rooms(self, given: int, predicted: int) -> list[int]:
        """Bytes that the loops might get of `given`, if the function needs `predicted` as it is."""
        rest = max(0, predicted - self.size)
        shares = _SHARES if self.groups and rest > _NOTICED * given else ()
        return [given - rest, *(int(share * given) for share in shares)]

    def as_they_are(self) -> Looped:
        """The function with no loop changed."""
        return Looped(self.flat, self.flat, ())

    def within(self, room: int) -> Looped:
        """The function with loops that take about so many bytes, or as few as they can."""
        total = max(1, self.size)
        return self._looped(tuple([shape(group, max(0, room * group.size // total)) for group in self.groups]))

    def smallest(self) -> Iterator[Looped]:
        """The function with loops in several shapes that take little; the last takes least by their own count."""
        shapes = [smallest(group) for group in self.groups]
        most = max(map(len, shapes), default=1)
        for place in range(most):
            yield self._looped(tuple([ways[max(0, place - most + len(ways))] for ways in shapes]))

    def uniform(self) -> Iterator[Looped]:
        """The function with each step of its loops run again by itself; all loops in the same mode, by its place.

        Then the same of the function with scans within scans in two, where that has less memory or cost.
        """
        known: list[tuple[float, int]] = []
        for loops in (self, *(Loops(split.flat, split) for split in splits(self.flat))):
            ways = [uniform(group) for group in loops.groups]
            for place in range(max(map(len, ways), default=0)):
                shapes = tuple([shapes[min(place, len(shapes) - 1)] for shapes in ways])
                cost = sum(shape.cost for shape in shapes) + (loops._split.more if loops._split else 0.0)
                size = sum(shape.peak for shape in shapes)
                if loops is self or not any(one <= cost * _SAME and two <= size for one, two in known):
                    known.append((cost, size))
                    yield loops._looped(shapes)

    def _looped(self, shapes: tuple[Shape, ...]) -> Looped:
        changed = [(shape.group, shape.parts) for shape in shapes if not shape.is_plain]
        if not changed:
            return self.as_they_are()
        key = tuple([(id(group), parts) for group, parts in changed])
        if key not in self._known:
            self._known[key] = Looped(self.flat, flatten(rewrite(self.flat, changed)), shapes, self._split)
        return self._known[key]


def splits(flat: Flat) -> Iterator[Split]:
    """The function with one thing after the other that the first hand to the second. None, if nothing is in a scan."""
    within = _within(flat)
    options = [len(inner.options) for _, inside in within for inner in inside.values()]
    for level in range(max(options, default=0)):
        yield _split(flat, within, level)


def split(flat: Flat, level: int) -> Split:
    """The one of `splits` with this number."""
    return _split(flat, _within(flat), level)


def _within(flat: Flat) -> list[tuple[Body, dict[int, _Inner]]]:
    """What makers of stacks have in them, by id of the equation."""
    pairs = [(outer, _inside(outer, group)) for group in groups_of(flat) for outer in group.bodies]
    return [(outer, inside) for outer, inside in pairs if inside]


def _split(flat: Flat, within: Sequence[tuple[Body, dict[int, _Inner]]], level: int) -> Split:
    equations = list(flat.equations)
    place = {id(eqn): at for at, eqn in enumerate(equations)}
    for outer, inside in within:
        at = place[id(outer.eqn)]
        equations[at] = outer.eqn.replace(params={**outer.eqn.params, "jaxpr": _body(outer, inside, level)})
    more = sum(map(flops, equations)) - sum(map(flops, flat.equations))
    return Split(flat._replace(equations=equations), level, more)


def _inside(outer: Body, group: Group) -> dict[int, _Inner]:
    """The scans and conditionals in a body some of whose results only later scans read, by id of the equation."""
    uses = Counter(variables(atom for eqn in outer.flat.equations for atom in eqn.invars))
    uses.update(variables(outer.next))
    handed = set(variables(outer.made)) - group.fixed
    inside: dict[int, _Inner] = {}
    for eqn in outer.flat.equations:
        late = [place for place, var in enumerate(eqn.outvars) if var in handed and not uses[var]]
        if not late or eqn.effects:
            continue
        if eqn.primitive.name == "cond":
            inside[id(eqn)] = _Cond(eqn, late)
        elif eqn.primitive.name == "scan" and eqn.params["length"] > 1:
            _, carries = scan_operands(eqn)
            if late[-1] >= carries:
                inside[id(eqn)] = _Scan(eqn, [place - carries for place in late if place >= carries])
    return {number: inner for number, inner in inside.items() if inner.options}


class _Scan:
    """A scan in a body."""

    def __init__(self, eqn: JaxprEqn, late: Sequence[int]) -> None:
        self.body = Body(eqn)
        self.late = list(late)
        read = variables(self.body.made[place] for place in self.late)
        self.options = [
            *((chosen, True) for chosen in [*choices(self.body, read, (), alone=True), frozenset[Var]()]),
            *((chosen, False) for chosen in choices(self.body, read, ())),
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
        first = {} if alone else {at: start[at] for at in later.carries}
        slices = [stacks[at] for at in later.stacks], made[: len(firm)], entries
        _, late = lax.scan(again, first, slices, **options)
        stacked = dict(zip(soon, made[len(firm) :], strict=True)) | dict(zip(self.late, late, strict=True))
        return [*last, *(stacked[place] for place in range(len(body.made)))]


class _Cond:
    """A conditional in a body. The second is at first one that hands its operands on, in the same branch."""

    def __init__(self, eqn: JaxprEqn, late: Sequence[int]) -> None:
        read = [eqn.outvars[place] for place in late]
        again = [Var(var.aval) for var in read]
        hand_on = trace(lambda *values: values, [var.aval for var in read])
        params = {**eqn.params, "branches": (hand_on,) * len(eqn.params["branches"])}
        second = eqn.replace(invars=[eqn.invars[0], *read], outvars=again, params=params)
        outvars: list[Any] = list(eqn.outvars)
        for place, var in zip(late, again, strict=True):
            outvars[place] = var
        invars = list(dict.fromkeys(variables(eqn.invars)))
        self.flat = Flat([], [], invars, outvars, [eqn, second])
        self._places = [eqn.invars.index(var) for var in invars]
        self.group = branch_groups(self.flat)[0] if isinstance(eqn.invars[0], Var) else None
        self.options = [kept for saves in (is_dot, is_dot_without_batch) if any(kept := self._kept(saves))]
        """Which values each branch hands on."""

    def run(self, values: Sequence[Any], level: int) -> list[Any]:
        """The results of the conditional, by two."""
        assert self.group is not None, "there are options"
        kept = self.options[min(level, len(self.options) - 1)]
        made = rewrite_branches(self.flat, [(self.group, kept)])
        return list(jaxpr_as_fun(made)(*[values[place] for place in self._places]))

    def _kept(self, saves: Callable[[JaxprEqn], bool]) -> Kept:
        kept: list[tuple[int, ...]] = []
        for branch in self.group.branches if self.group else ():
            products = {var for eqn in branch.equations[0] if saves(eqn) for var in eqn.outvars}
            kept.append(tuple([at for at, var in enumerate(branch.values) if var in products]))
        return tuple(kept)


_Inner = _Scan | _Cond


def _known(body: Body, places: Sequence[int], slices: Sequence[Any]) -> dict[Var, Any]:
    return dict(zip([body.stacks[at] for at in places], slices, strict=True))


def _body(outer: Body, inside: Mapping[int, _Inner], level: int) -> ClosedJaxpr:
    """The body, with scans and conditionals in it in two."""

    def run(eqn: JaxprEqn, env: dict[Var, Any]) -> None:
        values, inner = [read(atom, env) for atom in eqn.invars], inside.get(id(eqn))
        env.update(zip(eqn.outvars, inner.run(values, level) if inner else bind(eqn, values), strict=True))

    return outer.flat.rewritten(run)
