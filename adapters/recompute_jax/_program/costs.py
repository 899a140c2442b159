"""What an equation costs, from its shapes: FLOPs, bytes, and one number that weighs them; what XLA fuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from recompute_jax._program.jaxpr import CALLS, effects, planned_call

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
