"""A flat jaxpr as a program of segments: what XLA will keep in memory, and the equations that make it.

XLA fuses chains of elementwise equations, and computes the cheap ones again in each of their users, so most variables
of a jaxpr are never in memory. A segment is one equation that makes values in memory, with the fused chains in front
of it. The library's planners see the segments as operations and the values between them as storages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from jax.extend.core import JaxprEqn, Literal, Var

from recompute._traces._program import Program
from recompute_jax._costs import CHEAP, DEAR, REDUCTIONS, VIEWS, flops, nbytes, subjaxprs, weigh
from recompute_jax._jaxpr import Flat, effects

_NEVER: Final = 1e9  # times the cost of what has effects: no plan repeats it
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
    program: Program
    values: dict[Var, int]
    """Value in memory -> value of the program."""
    outputs: list[Var] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """Of every segment once."""
        return sum(each.flops for each in self.segments)


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
    kinds = [_kind(eqn) for eqn in equations]
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
    sources = [*flat.constvars, *flat.invars]
    program = Program(name)
    values = {var: program.add_source(0) for var in dict.fromkeys(sources)}
    found = Segments(list(values), [], program, values, wanted)
    results = set(wanted)
    for number, eqn in enumerate(equations):
        if number not in alive or not kept.issuperset(eqn.outvars):
            continue
        numbers = sorted({each for var in _vars(eqn.invars) for each in chain.get(var, ())} | {number})
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
        if once:
            part.cost *= _NEVER
        found.segments.append(part)
        homes = [program.add_storage(0 if var in results else nbytes(var.aval)) for var in outputs]
        arguments = [values[var] for var in inputs]
        made_values = program.add_call(part.name, arguments, homes, part.cost)
        values.update(zip(outputs, made_values, strict=True))
    program.outputs = [values[var] for var in wanted]
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


def _kind(eqn: JaxprEqn) -> str:
    """Either "cheap" or "dear": fused into its users; "heavy": makes values in memory."""
    name = eqn.primitive.name
    if effects(eqn):
        return "heavy"
    if name in CHEAP:
        return "cheap"
    if name in DEAR:
        return "dear"
    if name.startswith("custom_"):
        inner = [_kind(each) for jaxpr in subjaxprs(eqn)[:1] for each in jaxpr.eqns]
        if inner and "heavy" not in inner:
            return "dear" if "dear" in inner else "cheap"
    if name in ("jit", "pjit", "closed_call", "remat", "checkpoint", "remat2"):
        inner = [_kind(each) for jaxpr in subjaxprs(eqn) for each in jaxpr.eqns]
        if "heavy" not in inner:
            return "dear" if "dear" in inner else "cheap"
    return "heavy"
