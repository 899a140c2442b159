"""A plan as a function that JAX can trace: the segments in the planned order, in regions behind gates.

XLA orders what is in one region as it likes, and one comes after the other. Values that move to the memory of the host
and come back, instead of being repeated, do so by segments like others.

Gates keep XLA from merging a recomputation with the first run, and from starting it too early. Each makes a recomputed
region depend on the newest value before it. `holds` is a predicate that is always true, read from the bits of that
value, so that no compiler can know.

branch    the region is a branch of a conditional: nothing is copied, merged, or fused with what is outside
select    the smallest operand of what begins the region goes through `select(holds, x, 0)`: XLA may still fuse over it
barrier   operands go through `jax.lax.optimization_barrier`; XLA on CPU removes it before it merges
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from recompute.planners import last_uses
from recompute_jax._program.jaxpr import Atom, bind, explicit_sharding, is_elsewhere, read, trace, typed, zeros
from recompute_jax._program.segments import Segment, Segments, kind, nbytes

LENGTH: Final = 16  # segments in a region, which XLA orders as it likes


@dataclass
class Region:
    """Consecutive runs behind one gate. No segment is in it twice."""

    runs: list[int]
    """Numbers of segments."""
    inputs: list[Var]
    outputs: list[Var]
    """What later regions need of it."""
    is_open: bool = False
    """Behind no gate."""


def regions(segments: Segments, sequence: Sequence[int], room: int, length: int = LENGTH) -> list[Region]:
    """The sequence cut into regions that XLA may order as it likes: their inputs, what passes by, and all that
    is made inside are at most `room` bytes together, or it is a single run. O(runs).
    """
    parts = segments.segments
    runs = [(parts[number].outputs, parts[number].inputs) for number in sequence]
    dying = last_uses(runs, [*segments.outputs, *segments.sources])
    sizes = {var: segments.builder.nbytes(var) for var in segments.builder.values}
    cuts = [0]
    alive: set[Var] = set()  # made before the region
    before = 0
    inside: set[Var] = set()
    used = 0
    for place, number in enumerate(sequence):
        outputs = parts[number].outputs
        made = sum(sizes[var] for var in outputs)
        start = cuts[-1]
        if place > start and (
            before + used + made > room
            or place - start >= length
            or number in sequence[start:place]
            or not alive.isdisjoint(outputs)
        ):
            cuts.append(place)
            gone = {var for dead in dying[start:place] for var in dead}
            alive = (alive | inside) - gone
            before = sum(sizes[var] for var in alive)
            inside = set()
            used = 0
        inside.update(outputs)
        used += made
    cuts.append(len(sequence))
    if length == LENGTH:  # nothing runs again in what comes first: there is nothing that XLA could merge or put off
        last = {number: place for place, number in enumerate(reversed(sequence))}  # its first run, from the end
        firsts = {len(sequence) - 1 - place for place in last.values()}
        again = next((place for place in range(len(sequence)) if place not in firsts), len(sequence))
        cuts = [0, *(cut for cut in cuts if cut > again - length), len(sequence)]
    return regions_of(segments, [list(sequence[one:two]) for one, two in pairwise(cuts) if one < two])


def updates_apart(segments: Segments, steps: Sequence[Region]) -> list[Region]:
    """What makes nothing but results, by elementwise equations, comes out of its region, behind no gate.

    A result that takes the memory of a donated argument would be copied out of a branch. O(runs).
    """
    updates = _updates(segments)
    once = Counter(number for region in steps for number in region.runs)
    groups: list[list[int]] = []
    are_open: list[bool] = []
    for region in steps:
        apart = [number for number in region.runs if number in updates and once[number] == 1]
        within = [number for number in region.runs if number not in apart]
        for runs, is_open in ((within, False), (apart, True)):
            if runs:
                groups.append(runs)
                are_open.append(is_open)
    made = regions_of(segments, groups)
    for region, is_open in zip(made, are_open, strict=True):
        region.is_open = is_open
    return made


def _updates(segments: Segments) -> set[int]:
    """The elementwise segments that only results are made of. O(segments)."""
    results = set(segments.outputs)
    read_elsewhere: set[Var] = set()
    updates: set[int] = set()
    for number in reversed(range(len(segments.segments))):
        part = segments.segments[number]
        fused = all(kind(eqn) != "heavy" for eqn in part.equations)
        if fused and results.issuperset(part.outputs) and read_elsewhere.isdisjoint(part.outputs):
            updates.add(number)
        else:
            read_elsewhere.update(part.inputs)
    return updates


def regions_of(segments: Segments, groups: list[list[int]]) -> list[Region]:
    """These groups of runs, with what goes in and out of each. O(runs)."""
    parts = segments.segments
    made: list[Region] = []
    for runs in groups:
        inside: set[Var] = set()
        reads: dict[Var, None] = {}
        for number in runs:
            reads.update(dict.fromkeys(var for var in parts[number].inputs if var not in inside))
            inside.update(parts[number].outputs)
        made.append(Region(runs, list(reads), []))
    needed: set[Var] = set(segments.outputs)
    for region in reversed(made):
        outputs = dict.fromkeys(var for number in region.runs for var in parts[number].outputs)
        region.outputs = [var for var in outputs if var in needed]
        needed.difference_update(outputs)
        needed.update(region.inputs)
    return made


def with_moves(segments: Segments, moved: Sequence[int]) -> Segments:
    """The same, and for each moved segment two more: one takes its results to the host, one brings them back.

    The first are numbered from the number of segments on, in the order of `moved`; the second follow. O(segments).
    """
    builder = segments.builder.copy()
    there: list[Segment] = []
    back: list[Segment] = []
    for number in moved:
        out, into = [], []
        for var in segments.segments[number].outputs:
            if builder.nbytes(var) and not _is_key(var.aval):
                out.append(_transfer(var, jax.memory.Space.Host, None))
                host = out[-1].outvars[0]
                builder.source(host)
                into.append(_transfer(host, jax.memory.Space.Device, var))
        there.append(_segment(out))
        back.append(_segment(into))
    return replace(segments, segments=[*segments.segments, *there, *back], builder=builder)


def order_with_moves(steps: Iterable[tuple[str, int]], count: int) -> tuple[list[int], list[int]]:
    """Numbers of segments in the order of a plan, and which of them are moved."""
    runs = [(action, which) for action, which in steps if action != "free"]
    moved = sorted({which for action, which in runs if action == "fetch"})
    place = {which: at for at, which in enumerate(moved)}
    order: list[int] = []
    there: set[int] = set()
    for action, which in runs:
        if action == "fetch":
            order.append(count + len(moved) + place[which])
            continue
        order.append(which)
        if which in place and which not in there:
            there.add(which)
            order.append(count + place[which])
    return order, moved


def _is_key(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _segment(equations: list[JaxprEqn]) -> Segment:
    inputs = tuple([var for eqn in equations for var in eqn.invars if isinstance(var, Var)])
    return Segment(equations, inputs, tuple([var for eqn in equations for var in eqn.outvars]), 0.0, 0.0)


def _transfer(var: Var, space: Any, result: Var | None) -> JaxprEqn:
    """The equation that moves a value to where it is another variable."""
    eqn = trace(lambda value: jax.device_put(value, space), [var.aval]).jaxpr.eqns[0]
    moving: JaxprEqn = eqn.replace(invars=[var], outvars=[result or Var(eqn.outvars[0].aval)])
    return moving


Gate = Literal["branch", "select", "barrier"]
GATES: Final[tuple[Gate, ...]] = ("branch", "select", "barrier")

_holds: Final = Primitive("recompute_holds")


def holds(value: jax.Array) -> jax.Array:
    """True, but only once `value` (of at least one element) is known; one predicate for a whole batch under vmap."""
    return _bind(value)  # type: ignore[no-any-return]  # a scalar


def _bind(*values: Any) -> Any:
    return _holds.bind(*values)  # type: ignore[no-untyped-call]  # JAX's own


def can_hold(aval: Any) -> bool:
    """Whether a predicate can be read from such a value."""
    return hasattr(aval, "dtype") and 0 not in aval.shape and aval.dtype.name != "float0" and not is_elsewhere(aval)


def _compute(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if explicit_sharding(jax.typeof(value)) is None:
        first = lax.squeeze(lax.slice(value, (0,) * value.ndim, (1,) * value.ndim), range(value.ndim))
    else:
        first = value  # no single element of it can be had by a slice
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = lax.bitcast_convert_type(first, f"uint{first.dtype.itemsize * 8}")
    elif first.dtype == jnp.bool_ or first.dtype.itemsize < 1 or first.dtype.name.endswith(("int4", "int2")):
        first = lax.convert_element_type(first, jnp.int32)
    one = lax.full_like(first, 1)
    bit = lax.ne(lax.bitwise_or(first, one), lax.full_like(first, 0))
    return jnp.all(bit) if bit.ndim else bit


def _batch(arguments: Any, axes: Any) -> Any:
    return _bind(*arguments), None


def _jvp(primals: Any, tangents: Any) -> Any:
    return _bind(*primals), ad.Zero(jax.core.ShapedArray((), jax.dtypes.float0))


_holds.def_impl(jax.jit(_compute))  # type: ignore[no-untyped-call]  # JAX's own
_holds.def_abstract_eval(lambda value: jax.core.ShapedArray((), jnp.dtype(bool)))  # type: ignore[no-untyped-call]  # JAX's own
batching.primitive_batchers[_holds] = _batch
ad.primitive_jvps[_holds] = _jvp
mlir.register_lowering(_holds, mlir.lower_fun(_compute, multiple_results=False))


_CONVOLUTION: Final = "conv_general_dilated"


def emit(segments: Segments, outvars: Sequence[Atom], steps: Sequence[Region], gate: Gate) -> Callable[..., list[Any]]:
    """A function of the sources (constants first) that returns the values of `outvars`."""
    parts = segments.segments
    through = _GATED[gate]

    def run(*sources: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(segments.sources, sources, strict=True))
        newest: Any = None
        for region in steps:
            before = {var: env[var] for var in region.inputs}
            chosen = [parts[number] for number in region.runs]
            if newest is None or region.is_open:
                after = _plain(chosen, before, region.outputs)
            else:
                after = through(chosen, before, region.outputs, newest)
            env.update(zip(region.outputs, after, strict=True))
            newest = _newest(region, env, newest)
        return [typed(read(atom, env), atom.aval) for atom in outvars]

    return run


def _newest(region: Region, env: dict[Var, Any], newest: Any) -> Any:
    """The smallest array that the region made."""
    made = [var for var in region.outputs if can_hold(var.aval)]
    return env[min(made, key=lambda var: nbytes(var.aval))] if made else newest


class _Fused:
    """Fused values that were made before from the same values in memory: XLA need not merge what is emitted once."""

    def __init__(self) -> None:
        self.made: dict[Var, tuple[list[Any], list[Any]]] = {}

    def apply(self, eqn: Any, arguments: list[Any]) -> list[Any]:
        known = self.made.get(eqn.outvars[0]) if eqn.outvars else None
        if known is not None and all(one is two for one, two in zip(known[0], arguments, strict=True)):
            return known[1]
        results: list[Any] = _convolve(eqn, arguments) if eqn.primitive.name == _CONVOLUTION else bind(eqn, arguments)
        if eqn.outvars:
            self.made[eqn.outvars[0]] = arguments, results
        return results


def _convolve(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """A convolution in the layout that XLA on CPU has a fast kernel for.

    XLA transposes others itself, but only outside of branches (its pass looks at the entry computation); in a branch
    they run twenty times slower. In the first region and on other platforms it makes no difference.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    spatial = tuple(range(1, len(numbers.lhs_spec) - 1))
    last = len(spatial) + 1
    lhs, rhs, out = (0, last, *spatial), (last, last - 1, *[axis - 1 for axis in spatial]), (0, last, *spatial)
    if params["batch_group_count"] != 1 or (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (lhs, rhs, out):
        return bind(eqn, arguments)
    image = lax.transpose(arguments[0], (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    kernel = lax.transpose(arguments[1], (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]))
    changed = eqn.replace(params={**params, "dimension_numbers": lax.ConvDimensionNumbers(lhs, rhs, out)})
    (made,) = bind(changed, [image, kernel])
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return [lax.transpose(made, [order.index(axis) for axis in range(last + 1)])]


def _run(part: Segment, env: dict[Var, Any], fused: _Fused) -> None:
    """Compute a segment; only what it leaves in memory enters the environment."""
    known: ChainMap[Var, Any] = ChainMap({}, env)
    for eqn in part.equations:
        results = fused.apply(eqn, [read(atom, known) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    env.update((var, known[var]) for var in part.outputs)


def _plain(parts: list[Segment], inputs: dict[Var, Any], outputs: list[Var]) -> Sequence[Any]:
    env = dict(inputs)
    fused = _Fused()
    for part in parts:
        _run(part, env, fused)
    return [env[var] for var in outputs]


def _branch(parts: list[Segment], inputs: dict[Var, Any], outputs: list[Var], newest: Any) -> Sequence[Any]:
    names = list(inputs)

    def always(*values: Any) -> Sequence[Any]:
        return _plain(parts, dict(zip(names, values, strict=True)), outputs)

    def never(*values: Any) -> list[Any]:
        return [zeros(var.aval) for var in outputs]

    return lax.cond(holds(newest), always, never, *inputs.values())  # type: ignore[no-any-return]  # JAX has no type for it


def _select(parts: list[Segment], inputs: dict[Var, Any], outputs: list[Var], newest: Any) -> Sequence[Any]:
    predicate = holds(newest)
    env = dict(inputs)
    late: set[Var] = set()  # behind the gate
    fused = _Fused()
    for part in parts:
        if not late.intersection(part.inputs):
            open_ = [var for var in part.inputs if can_hold(var.aval)]
            if open_:
                var = min(open_, key=lambda candidate: nbytes(candidate.aval))
                env[var] = lax.select(predicate, env[var], zeros(var.aval))
                late.add(var)
        _run(part, env, fused)
        late.update(part.outputs)
    return [env[var] for var in outputs]


def _barrier(parts: list[Segment], inputs: dict[Var, Any], outputs: list[Var], newest: Any) -> Sequence[Any]:
    *values, _ = lax.optimization_barrier((*inputs.values(), newest))  # type: ignore[no-untyped-call]  # JAX's own
    return _plain(parts, dict(zip(inputs, values, strict=True)), outputs)


_GATED: Final[dict[Gate, Callable[[list[Segment], dict[Var, Any], list[Var], Any], Sequence[Any]]]] = {
    "branch": _branch,
    "select": _select,
    "barrier": _barrier,
}
