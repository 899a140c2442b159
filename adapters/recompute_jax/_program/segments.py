"""A flat jaxpr as a program of segments: what XLA will keep in memory, and the equations that make it.

XLA fuses chains of elementwise equations, and computes the cheap ones again in each of their users, so most variables
of a jaxpr are never in memory. A segment is one equation that makes values in memory, with the fused chains in front
of it. The library's planners see the segments as operations and the values between them as storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from recompute import planners
from recompute.planners import ProgramBuilder, last_uses
from recompute.traces import Program
from recompute_jax._program.costs import REDUCTIONS, VIEWS, flops, kind, nbytes, subjaxprs, weakly_cached, weigh
from recompute_jax._program.jaxpr import Flat, effects, flatten, short

INSIDE: Final = frozenset(("scan", "while", "cond"))
"""Loops and conditionals: memory is in use within them."""
_SUMS: Final = frozenset(("add", "add_any", "sub"))
_CHAIN: Final = 16  # fused equations that XLA computes again for each of several users


@dataclass
class Segment:
    """Equations that run as one operation; the last one makes what stays in memory."""

    equations: list[JaxprEqn]
    inputs: tuple[Var, ...]
    """Values in memory that it reads."""
    outputs: tuple[Var, ...]
    flops: float
    cost: float
    once: bool = False
    """It has effects, so it is never run again."""

    @property
    def name(self) -> str:
        """Of its last equation's primitive."""
        return str(self.equations[-1].primitive.name)


@dataclass
class Segments:
    """The segments in order, and the same as a program for the planners, in which outputs take no memory."""

    sources: list[Var]
    segments: list[Segment]
    builder: ProgramBuilder[Var]
    """By the values in memory."""
    outputs: list[Var] = field(default_factory=list)

    @property
    def program(self) -> Program:
        """The segments as its calls."""
        return self.builder.program

    @property
    def flops(self) -> float:
        """Of every segment once."""
        return sum(each.flops for each in self.segments)

    @property
    def largest(self) -> int:
        """Bytes of the largest value that a segment makes and that is no result."""
        made = [var for part in self.segments for var in part.outputs if var not in self.outputs]
        return max(map(self.builder.nbytes, made), default=0)


def segment(flat: Flat, name: str, price: Callable[[Segment], float] | None = None) -> Segments:
    """The segments of a flat jaxpr; `price` gives their costs, which are estimated otherwise.

    O(equations x the length of fused chains).
    """
    equations = flat.equations
    maker: dict[Var, int] = {}
    users: dict[Var, list[int]] = {}
    for number, eqn in enumerate(equations):
        for var in eqn.outvars:
            maker[var] = number
        for var in _vars(eqn.invars):
            users.setdefault(var, []).append(number)
    wanted = [var for var in dict.fromkeys(_vars(flat.outvars)) if var in maker]
    alive = _alive(equations, maker, wanted)
    kinds = [kind(eqn) for eqn in equations]
    kept: set[Var] = set(wanted)
    chain: dict[Var, list[int]] = {}  # fused variable -> the equations that make it from values in memory, in order
    for number, eqn in enumerate(equations):
        if number not in alive:
            continue
        if kinds[number] == "heavy":
            kept.update(eqn.outvars)
            continue
        fused = sorted({each for var in _vars(eqn.invars) for each in chain.get(var, ())} | {number})
        using = [each for var in eqn.outvars for each in users.get(var, ()) if each in alive]
        reads = any(kinds[each] == "heavy" and equations[each].primitive.name not in REDUCTIONS for each in using)
        view = all(equations[each].primitive.name in VIEWS for each in fused)
        many = len(using) > 1
        dear = kinds[number] == "dear"
        held = {var for each in fused for var in _vars(equations[each].invars) if var in kept}
        wide = sum(nbytes(var.aval) for var in held) >= 2 * sum(nbytes(var.aval) for var in eqn.outvars) > 0
        if (reads and not view) or (many and (dear or wide or len(fused) > _CHAIN)) or kept.intersection(eqn.outvars):
            kept.update(eqn.outvars)
        elif len(eqn.outvars) == 1:
            chain[eqn.outvars[0]] = fused
        else:
            kept.update(eqn.outvars)
    absorbed = _absorbed(equations, maker, users, kinds, alive, wanted)
    kept.difference_update(equations[number].outvars[0] for number in absorbed.values())
    ahead = set(absorbed.values())
    sources = [*flat.constvars, *flat.invars]
    found = Segments(list(dict.fromkeys(sources)), [], ProgramBuilder(Program(name)), wanted)
    for number, eqn in enumerate(equations):
        if number not in alive or number in ahead or not kept.issuperset(eqn.outvars):
            continue
        own = [number, absorbed[number]] if number in absorbed else [number]
        read = [var for each in own for var in _vars(equations[each].invars)]
        numbers = sorted({each for var in read for each in chain.get(var, ())}.union(own))
        chosen = [equations[each] for each in numbers]
        made = {var for each in chosen for var in each.outvars}
        inputs = tuple(dict.fromkeys(var for each in chosen for var in _vars(each.invars) if var not in made))
        outputs = tuple(eqn.outvars)
        work = sum(flops(each) for each in chosen)
        moved = float(sum(nbytes(var.aval) for var in (*inputs, *outputs)))
        once = any(bool(effects(each)) for each in chosen)
        part = Segment(chosen, inputs, outputs, work, weigh(work, moved), once)
        if price is not None:
            part.cost = price(part)
        found.segments.append(part)
    _add_program(found, set(wanted) | _summands(equations, maker, users, alive, wanted))
    return found


def _add_program(found: Segments, housed: set[Var]) -> None:
    """The segments as calls; what is `housed` takes no memory, and what has effects never runs again. O(segments)."""
    builder = found.builder
    for var in found.sources:
        builder.source(var)
    once = {var for part in found.segments if part.once for var in part.outputs}
    dying = last_uses([(part.outputs, part.inputs) for part in found.segments], found.outputs)
    for part, dead in zip(found.segments, dying, strict=True):
        made = {var: 0 if var in housed else nbytes(var.aval) for var in part.outputs}
        builder.call(part.name, part.inputs, made, part.cost, inside(part.equations[-1]))
        builder.step("detach", part.outputs if part.once else ())
        builder.step("drop", [var for var in dead if var in once])
    builder.program.outputs = [builder.values[var] for var in found.outputs]


def _absorbed(
    equations: Sequence[JaxprEqn],
    maker: dict[Var, int],
    users: dict[Var, list[int]],
    kinds: Sequence[str],
    alive: set[int],
    wanted: Sequence[Var],
) -> dict[int, int]:
    """Results that are the transpose or the like of what nothing else reads: their equation -> the one before.

    XLA makes both in one, as long as it sees them together.
    """
    found: dict[int, int] = {}
    for var in wanted:
        number = maker[var]
        read = _vars(equations[number].invars)
        if equations[number].primitive.name in VIEWS and len(read) == 1 and read[0] in maker:
            before = maker[read[0]]
            alone = len(equations[before].outvars) == 1 and sum(each in alive for each in users[read[0]]) == 1
            if kinds[before] == "heavy" and alone and read[0] not in wanted and not effects(equations[before]):
                found[number] = before
    return found


def _summands(
    equations: Sequence[JaxprEqn],
    maker: dict[Var, int],
    users: dict[Var, list[int]],
    alive: set[int],
    wanted: Sequence[Var],
) -> set[Var]:
    """Values that only a sum reads which is a result, and what only these read in turn: they are in its memory."""
    found: set[Var] = set()
    stack = list(wanted)
    while stack:
        total = stack.pop()
        eqn = equations[maker[total]]
        if eqn.primitive.name not in _SUMS:
            continue
        for var in _vars(eqn.invars):
            fits = var in maker and short(var.aval) == short(total.aval)
            if fits and var not in wanted and sum(each in alive for each in users[var]) == 1:
                found.add(var)
                stack.append(var)
                break  # there is room for one
    return found


def _vars(atoms: Sequence[Var | Literal]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


def _alive(equations: Sequence[JaxprEqn], maker: dict[Var, int], wanted: Sequence[Var]) -> set[int]:
    """The equations that the results need, and those with effects."""
    alive = {number for number, eqn in enumerate(equations) if effects(eqn)}
    alive.update(maker[var] for var in wanted)
    stack = list(alive)
    while stack:
        for var in _vars(equations[stack.pop()].invars):
            number = maker.get(var)
            if number is not None and number not in alive:
                alive.add(number)
                stack.append(number)
    return alive


def inside(eqn: JaxprEqn) -> int:
    """Bytes in use at the worst moment inside of a loop or a conditional, about."""
    if eqn.primitive.name not in INSIDE:
        return 0
    return max(map(_needed, subjaxprs(eqn)))


@weakly_cached
def _needed(jaxpr: Jaxpr) -> int:
    return peak(segment(flatten(ClosedJaxpr(jaxpr, [object() for _ in jaxpr.constvars]), inline_custom=False), "body"))


def nesting(equations: Iterable[JaxprEqn]) -> int:
    """How deep loops and conditionals are in each other. O(equations)."""
    depth = 0
    for eqn in equations:
        inner = max([nesting(jaxpr.eqns) for jaxpr in subjaxprs(eqn)], default=0)
        depth = max(depth, inner + (eqn.primitive.name in INSIDE))
    return depth


def peak(segments: Segments) -> int:
    """Bytes in use at the worst moment if each segment runs once."""
    return planners.peak(segments.program)
