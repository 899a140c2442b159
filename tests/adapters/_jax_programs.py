"""`functions()`: a Hypothesis strategy of functions that JAX can trace, each with arguments: `fn(*args)` runs.

A function is a list of steps, some of which have steps inside (jit, cond, scan, a custom derivative ...). Each takes
two values made before and leaves new ones; the function returns a tree of the last ones. Values are arrays of any dtype
and shape; a step casts them to what it needs. `smooth=True` leaves out what makes a small difference a large one, so
that results under jit, where XLA rounds otherwise, are close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

jnp = jax.numpy
lax = jax.lax

DTYPES = ("float32", "int32", "bool", "bfloat16", "float16", "int8", "uint8", "complex64")
SHAPES = ((2, 3), (3,), (), (0, 2), (1,))

seen: list[bytes] = []
"""What functions with effects have told their callbacks; in any order."""


def told() -> list[bytes]:
    """What callbacks have seen since the last time."""
    jax.effects_barrier()
    values = sorted(seen)
    seen.clear()
    return values


@dataclass(frozen=True)
class Step:
    """One step, or one that has steps inside. Operands count backwards from the newest value."""

    name: str
    first: int = 0
    second: int = 0
    inner: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        inside = f", {list(self.inner)}" if self.inner else ""
        return f"{self.name}({self.first}, {self.second}{inside})"


@dataclass(frozen=True)
class Function:
    """`Function(steps)(x, tree, key)`: arrays, a number, and keys in; a tree of the same and more out."""

    steps: tuple[Step, ...]

    __name__ = "generated"

    def __call__(self, x: Any, tree: Any, key: Any) -> Any:
        key, one = jax.random.split(key)
        values = [jax.random.uniform(one, (3,)), *jax.tree.leaves(tree), x]
        taken(self.steps, values)
        total = sum(real(value).sum() for value in values[-6:])
        return {"last": values[-4:], "again": (values[-1], x), "total": total, "key": key, "none": None}


def taken(steps: Sequence[Step], values: list[Any]) -> None:
    """Take the steps; what they make is appended to the values."""
    for step in steps:
        operands = [values[-1 - number % len(values)] for number in (step.first, step.second)]
        make = SMOOTH.get(step.name) or ROUGH.get(step.name) or NESTED.get(step.name) or EFFECTS[step.name]
        made = make(*map(jnp.asarray, operands), *([step.inner] if step.name in NESTED else []))
        values += made if isinstance(made, (tuple, list)) else (made,)


def real(x: Any) -> Any:
    """As float32, small: what came of an overflow is no number anyway."""
    x = jnp.asarray(x)
    return jnp.tanh((x.real if jnp.iscomplexobj(x) else x).astype("float32"))


def fit(x: Any, like: Any) -> Any:
    """All of `x` in one array that has the shape and dtype of `like`."""
    x = real(x)
    if x.shape != like.shape:
        x = jnp.broadcast_to(x.sum(), like.shape)
    return x.astype(like.dtype) if like.dtype != bool else x > 0


def run(inner: tuple[Step, ...], *values: Any) -> list[Any]:
    """The values, and what the steps make of them."""
    made = list(values)
    taken(inner, made)
    return made


# Steps of one kind of equation or a few


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.sin(x) + x


bent.defjvp(lambda primals, tangents: (bent(*primals), tangents[0] * 2))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.tanh(x)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))

SMOOTH: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda a, b: jnp.sin(real(a)),
    "add": lambda a, b: real(a) + fit(b, real(a)),
    "weak": lambda a, b: (real(a) * 2.0, 3.0, 2 * jnp.asarray(1)),
    "dot": lambda a, b: jnp.outer(real(a).ravel(), real(b).ravel()[:2]) @ jnp.ones((min(b.size, 2), 3)),
    "mean": lambda a, b: real(a).sum(keepdims=True),
    "custom jvp": lambda a, b: bent(real(a)),
    "custom vjp": lambda a, b: clipped(real(a)),
    "checkpoint": lambda a, b: jax.checkpoint(lambda a: jnp.sin(jnp.cos(a)))(real(a)),
    "vmap": lambda a, b: jax.vmap(lambda row: row - row.sum())(real(a).reshape(-1, 1)),
    "same": lambda a, b: (lax.stop_gradient(a), a[...], jax.device_put(a), a.reshape(a.shape), a.astype(a.dtype)),
    "where": lambda a, b: jnp.where(jnp.arange(a.size).reshape(a.shape) % 2 == 0, real(a), 0.5),
    "index": lambda a, b: real(a).at[..., :1].set(0.5) if a.ndim else real(a),
    "empty": lambda a, b: (real(a).ravel()[:0], jnp.zeros((0, 2)).sum() + real(a)),
    "split": lambda a, b: jnp.split(jnp.concatenate([real(a).ravel(), real(b).ravel(), jnp.ones(1)]), [1]),
    "wave": lambda a, b: jnp.exp(1j * real(a)),
    "while": lambda a, b: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, real(a)))[1],
    "fori": lambda a, b: lax.fori_loop(0, 3, lambda i, c: jnp.cos(c) + i, real(a)),
    "grad": lambda a, b: jax.grad(lambda x: (bent(x) * clipped(x) * fit(b, x)).sum())(real(a)),
    "solve": lambda a, b: jnp.linalg.solve(jnp.eye(2) * 3 + fit(a, jnp.ones((2, 2))), jnp.ones(2)),
    "normal": lambda a, b: jax.random.normal(jax.random.key(3), a.shape) + real(a),
    "iota": lambda a, b: (jnp.arange(3), jnp.full((2,), 1.5)),
}
ROUGH: dict[str, Callable[[Any, Any], Any]] = {
    "sort": lambda a, b: lax.sort((real(a).ravel(), real(a).ravel() * -1), num_keys=1),
    "compare": lambda a, b: (a == a) | (real(a) > 0),
    "narrow": lambda a, b: [real(a).astype(dtype) * 3 for dtype in ("bfloat16", "float16", "int8", "uint8")],
    "bits": lambda a, b: jax.random.bits(jax.random.fold_in(jax.random.key(1), a.size), a.shape, "uint8"),
    "keys": lambda a, b: jax.random.key_data(jax.random.split(jax.random.key(a.size, impl="rbg"), 3)),
    "integer": lambda a, b: (fit(a, jnp.ones((3,), "int8")) + jnp.int8(100)) // 7,
    "bitcast": lambda a, b: lax.bitcast_convert_type(real(a), "int32"),
    "largest": lambda a, b: lax.top_k(jnp.append(real(a).ravel(), jnp.array([0.5, 1.5])), 2),
    "host": lambda a, b: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(a.shape, "float32"), real(a), vmap_method="expand_dims"
    ),
    "complex": lambda a, b: lax.complex(real(a), fit(b, real(a))) * 1j,
    "rounded": lambda a, b: lax.reduce_precision(real(a), 5, 2),
}


# Steps with steps inside


def _cond(a: Any, b: Any, inner: tuple[Step, ...]) -> Any:
    return lax.cond(real(b).sum() > 0.1, lambda x: fit(run(inner, x)[-1], x), lambda x: x, real(a))


def _scan(a: Any, b: Any, inner: tuple[Step, ...], reverse: bool = False) -> Any:
    def step(carry: Any, row: Any) -> Any:
        made = run(inner, b, row, carry)
        return fit(made[-1], carry), (fit(made[-1], row), row)

    last, (rows, _) = lax.scan(step, real(a), jnp.linspace(0, 1, 4), reverse=reverse)
    return last, rows


def _custom(a: Any, b: Any, inner: tuple[Step, ...]) -> Any:
    function = jax.custom_jvp(lambda x: fit(run(inner, x)[-1], x))
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    return function(real(a))


def _grad(a: Any, b: Any, inner: tuple[Step, ...]) -> Any:
    return jax.value_and_grad(lambda x: real(run(inner, x)[-1]).sum() + (x * x).sum())(real(a))


NESTED: dict[str, Callable[[Any, Any, tuple[Step, ...]], Any]] = {
    "jit": lambda a, b, inner: jax.jit(lambda a, b: (b, *run(inner, a, b)[-2:], a))(a, b),
    "checkpointed": lambda a, b, inner: jax.checkpoint(lambda a: run(inner, a)[-1])(a),
    "cond of": _cond,
    "scan of": _scan,
    "reverse scan of": partial(_scan, reverse=True),
    "map of": lambda a, b, inner: lax.map(lambda x: fit(run(inner, x)[-1], x), jnp.stack([real(a), real(a) + 1])),
    "vmap of": lambda a, b, inner: jax.vmap(lambda x: fit(run(inner, x)[-1], x))(jnp.stack([real(a)] * 2)),
    "custom of": _custom,
    "jitted grad of": lambda a, b, inner: jax.jit(partial(_grad, inner=inner))(a, b),
    "grad of": _grad,
}
_DIFFERENTIABLE = sorted(set(SMOOTH) - {"while"})


# Steps with effects


def _note(x: Any) -> None:
    seen.append(np.asarray(x).tobytes())


def _noted(a: Any, b: Any) -> Any:
    jax.debug.callback(_note, real(a).sum())
    return real(a)


def _noted_in_scan(a: Any, b: Any) -> Any:
    return lax.scan(lambda carry, _: (_noted(jnp.cos(carry), b), carry.sum()), real(a), None, length=2)


def _noted_in_order(a: Any, b: Any) -> Any:
    def count(x: Any) -> Any:
        _note(x)
        return np.float32(2)

    return real(a) * jax.experimental.io_callback(count, jax.ShapeDtypeStruct((), "float32"), real(a), ordered=True)


EFFECTS: dict[str, Callable[[Any, Any], Any]] = {
    "note": _noted,
    "note in scan": _noted_in_scan,
    "note in order": _noted_in_order,
    "note in jit": lambda a, b: jax.jit(_noted)(a, b),
}


# Strategies


def _simple(names: Sequence[str]) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.sampled_from(names), st.integers(0, 6), st.integers(0, 6))


def _nested(names: Sequence[str], inside: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    inner = st.lists(inside, min_size=1, max_size=3).map(tuple)
    return st.builds(Step, st.sampled_from(names), st.integers(0, 6), st.integers(0, 6), inner)


def steps(*, smooth: bool = False, effects: bool = False) -> st.SearchStrategy[Step]:
    """One step, with up to two levels of steps inside."""
    names = [*SMOOTH, *(() if smooth else ROUGH)]
    differentiable = _simple(_DIFFERENTIABLE)
    grads = _nested(["grad of", "jitted grad of"], differentiable | _nested(["jit", "scan of"], differentiable))
    calls = [name for name in NESTED if "grad" not in name]
    once = _nested(calls, _simple(names))
    choices = [_simple(names), once, _nested(["jit", "scan of", "checkpointed"], _simple(names) | once), grads]
    return st.one_of(*choices, *([_simple(list(EFFECTS))] if effects else []))


@st.composite
def functions(
    draw: st.DrawFn, *, most: int = 5, smooth: bool = False, effects: bool = False
) -> tuple[Function, tuple[Any, Any, Any]]:
    """A function and its arguments: an array, a tree with a number and arrays of any dtype and shape, and a key.

    `most`: steps; `smooth`: results under jit are close to those without; `effects`: callbacks add to `seen`.
    """
    made = draw(st.lists(steps(smooth=smooth, effects=effects), min_size=1, max_size=most))
    dtypes = st.just("float32") if smooth else st.sampled_from(DTYPES)
    x = _array(draw(st.sampled_from(SHAPES)), draw(dtypes))
    more = [_array(draw(st.sampled_from(SHAPES)), draw(dtypes)) for _ in range(draw(st.integers(0, 2)))]
    number = draw(st.sampled_from([0.5, 2, True, np.float32(0.25), np.arange(3.0, dtype="float32")]))
    key = jax.random.key(draw(st.integers(0, 3)), impl=draw(st.sampled_from(["threefry2x32", "rbg"])))
    return Function(tuple(made)), (x, {"more": more, "number": number}, key)


def _array(shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.linspace(-1, 2, int(np.prod(shape))).reshape(shape).astype(dtype)
