"""A flat jaxpr as a program of segments: what XLA will keep in memory, the equations that make it, and their costs.

XLA fuses chains of elementwise equations, and computes the cheap ones again in each of their users, so most variables
of a jaxpr are never in memory. A segment is one equation that makes values in memory, with the fused chains in front
of it. The library's planners see the segments as operations and the values between them as storages. What an equation
costs follows from its shapes: FLOPs, bytes, and one number that weighs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from recompute import planners
from recompute.planners import ProgramBuilder, last_uses
from recompute.traces import Program
from recompute_jax._program.jaxpr import CALLS, Flat, effects, flatten, planned_call, short, variables

R = TypeVar("R")

CHEAP: Final = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp complex conj convert_element_type copy "
    "copy_p eq expand_dims floor ge gt imag integer_pow iota is_finite le lt max min mul ne neg not one_minus_square "
    "or pad real reduce_precision reshape rev round select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign slice square squeeze stop_gradient sub transpose xor".split()
)
"""Elementwise and data movement: XLA fuses these into whatever uses them, several times if need be."""

DEAR: Final = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma log log1p "
    "log2 logistic nextafter pow rem rsqrt sin sinh sqrt tan tanh".split()
)
"""Elementwise, but XLA does not compute them twice to save memory."""

VIEWS: Final = frozenset("reshape squeeze expand_dims transpose copy convert_element_type broadcast_in_dim".split())
"""Of a value in memory these are no further value in memory where a matrix product reads them."""

REDUCTIONS: Final = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)
"""XLA fuses what these read into them."""

_DEAR_FLOPS: Final = 12.0
_BYTE: Final = 2.0  # FLOPs that could be done while a byte is read or written
_CALL: Final = 5_000.0  # FLOPs that could be done while an operation is started


def weakly_cached(fn: Callable[[Jaxpr], R]) -> Callable[[Jaxpr], R]:
    """The function, which is called once for each jaxpr."""
    known: WeakKeyDictionary[Jaxpr, R] = WeakKeyDictionary()

    @wraps(fn)
    def cached(jaxpr: Jaxpr) -> R:
        if jaxpr not in known:
            known[jaxpr] = fn(jaxpr)
        return known[jaxpr]

    return cached


def nbytes(aval: Any) -> int:
    """Bytes of an array of this type; PRNG keys as the words they are made of."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    size: int = prod(aval.shape)
    if dtype.name.startswith("key<"):
        return size * 4 * int(prod(dtype._impl.key_shape))
    return size * max(1, int(dtype.itemsize))


def subjaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among the parameters."""
    inner: list[Jaxpr] = []
    for value in (*eqn.params.values(), planned_call(eqn)):
        for item in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = item.jaxpr if isinstance(item, ClosedJaxpr) else item
            if isinstance(jaxpr, Jaxpr):
                inner.append(jaxpr)
    return inner


def size_of(jaxpr: Jaxpr) -> int:
    """How many equations it has, those of inner jaxprs too. O(them)."""
    count, stack = 0, [jaxpr]
    while stack:
        equations = stack.pop().eqns
        count += len(equations)
        for eqn in equations:
            stack += subjaxprs(eqn)
    return count


Kind = Literal["cheap", "dear", "heavy"]


def kind(eqn: JaxprEqn) -> Kind:
    """Either "cheap" or "dear": fused into its users, the dear not several times; or "heavy"."""
    name = eqn.primitive.name
    if effects(eqn):
        return "heavy"
    if name in CHEAP:
        return "cheap"
    if name in DEAR:
        return "dear"
    if name.startswith("custom_") or name in CALLS:
        called = subjaxprs(eqn)[:1] if name.startswith("custom_") else subjaxprs(eqn)
        inner = [kind(eqn) for jaxpr in called for eqn in jaxpr.eqns]
        if "heavy" not in inner and (inner or name in CALLS):
            return "dear" if "dear" in inner else "cheap"
    return "heavy"


def flops(eqn: JaxprEqn) -> float:
    """Floating-point operations, roughly: products of matrices and convolutions exactly, an exponential as twelve."""
    name = eqn.primitive.name
    made = max(map(_elements, eqn.outvars), default=0.0)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape: Sequence[int] = eqn.invars[0].aval.shape  # type: ignore[attr-defined]  # it is an array
        return 2.0 * made * int(prod(shape[axis] for axis in contracted))
    if name == "conv_general_dilated":
        kernel: Sequence[int] = eqn.invars[1].aval.shape  # type: ignore[attr-defined]  # likewise
        numbers = eqn.params["dimension_numbers"]
        return 2.0 * made * int(prod(kernel)) / max(1, int(kernel[numbers.rhs_spec[0]]))
    inner = subjaxprs(eqn)
    if inner:
        if name == "cond":
            return max(_flops(jaxpr) for jaxpr in inner)
        once = sum(map(_flops, inner))
        return once * int(eqn.params["length"]) if name == "scan" else once
    if name in REDUCTIONS or name.startswith("cum"):
        return sum(map(_elements, eqn.invars))
    return made * _DEAR_FLOPS if name in DEAR else made


@weakly_cached
def _flops(jaxpr: Jaxpr) -> float:
    return float(sum(map(flops, jaxpr.eqns)))


def _elements(atom: Any) -> float:
    return float(prod(getattr(atom.aval, "shape", ())))


def weigh(work: float, moved: float) -> float:
    """The cost of an operation, in FLOPs: `work` of them, and `moved` bytes between it and memory."""
    return work + _BYTE * moved + _CALL


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
        return sum(part.flops for part in self.segments)

    @property
    def largest(self) -> int:
        """Bytes of the largest value that a segment makes and that is no result."""
        made = [var for part in self.segments for var in part.outputs if var not in self.outputs]
        return max(map(self.builder.nbytes, made), default=0)


class _Graph:
    """Which equations make and read the values of a function without equations that nothing needs."""

    def __init__(self, flat: Flat) -> None:
        self.equations = flat.equations
        self.kinds = [kind(eqn) for eqn in flat.equations]
        self.maker = {var: number for number, eqn in enumerate(flat.equations) for var in eqn.outvars}
        self.wanted = [var for var in dict.fromkeys(variables(flat.outvars)) if var in self.maker]
        self._users: dict[Var, list[int]] = {}
        for number, eqn in enumerate(flat.equations):
            for var in variables(eqn.invars):
                self._users.setdefault(var, []).append(number)

    def users(self, var: Var) -> list[int]:
        """Numbers of the equations that read a value; one that reads it twice is there twice."""
        return self._users.get(var, [])

    def reads(self, numbers: Iterable[int]) -> list[Var]:
        """What these equations read."""
        return [var for number in numbers for var in variables(self.equations[number].invars)]


def segment(flat: Flat, name: str, price: Callable[[Segment], float] | None = None) -> Segments:
    """The segments of a flat jaxpr; `price` gives their costs, which are estimated otherwise.

    O(equations x the length of fused chains).
    """
    graph = _Graph(flat)
    kept, chain = _fused(graph)
    absorbed = _absorbed(graph)
    kept.difference_update(graph.equations[number].outvars[0] for number in absorbed.values())
    ahead = set(absorbed.values())
    sources = list(dict.fromkeys([*flat.constvars, *flat.invars]))
    segments = Segments(sources, [], ProgramBuilder(Program(name)), graph.wanted)
    for number, eqn in enumerate(graph.equations):
        if number in ahead or not kept.issuperset(eqn.outvars):
            continue
        own = [number, absorbed[number]] if number in absorbed else [number]
        numbers = {before for var in graph.reads(own) for before in chain.get(var, ())}.union(own)
        chosen = [graph.equations[before] for before in sorted(numbers)]
        made = {var for before in chosen for var in before.outvars}
        inputs = tuple(dict.fromkeys(var for before in chosen for var in variables(before.invars) if var not in made))
        outputs = tuple(eqn.outvars)
        work = sum(map(flops, chosen))
        moved = float(sum(nbytes(var.aval) for var in (*inputs, *outputs)))
        part = Segment(chosen, inputs, outputs, work, weigh(work, moved), any(map(effects, chosen)))
        if price is not None:
            part.cost = price(part)
        segments.segments.append(part)
    _add_program(segments, set(graph.wanted) | _summands(graph))
    return segments


def _fused(graph: _Graph) -> tuple[set[Var], dict[Var, list[int]]]:
    """The values that stay in memory; and for others the equations that make them from values in memory, in order."""
    equations, kinds = graph.equations, graph.kinds
    kept: set[Var] = set(graph.wanted)
    chain: dict[Var, list[int]] = {}
    for number, eqn in enumerate(equations):
        if kinds[number] == "heavy":
            kept.update(eqn.outvars)
            continue
        fused = sorted({before for var in variables(eqn.invars) for before in chain.get(var, ())} | {number})
        using = [user for var in eqn.outvars for user in graph.users(var)]
        reads = any(kinds[user] == "heavy" and equations[user].primitive.name not in REDUCTIONS for user in using)
        view = all(equations[before].primitive.name in VIEWS for before in fused)
        held = kept.intersection(graph.reads(fused))
        wide = sum(nbytes(var.aval) for var in held) >= 2 * sum(nbytes(var.aval) for var in eqn.outvars) > 0
        many = len(using) > 1 and (kinds[number] == "dear" or wide or len(fused) > _CHAIN)
        if (reads and not view) or many or kept.intersection(eqn.outvars) or len(eqn.outvars) != 1:
            kept.update(eqn.outvars)
        else:
            chain[eqn.outvars[0]] = fused
    return kept, chain


def _add_program(segments: Segments, housed: set[Var]) -> None:
    """The segments as calls; what is `housed` takes no memory, and what has effects never runs again. O(segments)."""
    builder, parts = segments.builder, segments.segments
    for var in segments.sources:
        builder.source(var)
    once = {var for part in parts if part.once for var in part.outputs}
    dying = last_uses([(part.outputs, part.inputs) for part in parts], segments.outputs)
    for part, dead in zip(parts, dying, strict=True):
        made = {var: 0 if var in housed else nbytes(var.aval) for var in part.outputs}
        builder.call(part.name, part.inputs, made, part.cost, inside(part.equations[-1]))
        builder.step("detach", part.outputs if part.once else ())
        builder.step("drop", [var for var in dead if var in once])
    builder.program.outputs = [builder.values[var] for var in segments.outputs]


def _absorbed(graph: _Graph) -> dict[int, int]:
    """Results that are the transpose or the like of what nothing else reads: their equation -> the one before.

    XLA makes both in one, as long as it sees them together.
    """
    absorbed: dict[int, int] = {}
    for var in graph.wanted:
        number = graph.maker[var]
        read = graph.reads([number])
        if graph.equations[number].primitive.name in VIEWS and len(read) == 1 and read[0] in graph.maker:
            before = graph.maker[read[0]]
            eqn = graph.equations[before]
            alone = len(eqn.outvars) == 1 and len(graph.users(read[0])) == 1
            if graph.kinds[before] == "heavy" and alone and read[0] not in graph.wanted and not effects(eqn):
                absorbed[number] = before
    return absorbed


def _summands(graph: _Graph) -> set[Var]:
    """Values that only a sum reads which is a result, and what only these read in turn: they are in its memory."""
    summands: set[Var] = set()
    stack = list(graph.wanted)
    while stack:
        total = stack.pop()
        eqn = graph.equations[graph.maker[total]]
        if eqn.primitive.name not in _SUMS:
            continue
        for var in variables(eqn.invars):
            fits = var in graph.maker and short(var.aval) == short(total.aval)
            if fits and var not in graph.wanted and len(graph.users(var)) == 1:
                summands.add(var)
                stack.append(var)
                break  # there is room for one
    return summands


def inside(eqn: JaxprEqn) -> int:
    """Bytes in use at the worst moment inside of a loop or a conditional, about."""
    if eqn.primitive.name not in INSIDE:
        return 0
    return max(map(_needed, subjaxprs(eqn)))


@weakly_cached
def _needed(jaxpr: Jaxpr) -> int:
    return peak(segment(flatten(ClosedJaxpr(jaxpr, [object() for _ in jaxpr.constvars])), "body"))


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
