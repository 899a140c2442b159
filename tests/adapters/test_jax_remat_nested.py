"""Scans within scans, and conditionals within scans, under `grad`: all are planned, and no value changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import FOR_VALUES  # noqa: E402  # after importorskip
from jax.extend.core import jaxpr_as_fun  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip
from recompute_jax._program.segments import flops, subjaxprs  # noqa: E402  # after importorskip
from recompute_jax._remat.candidates import Candidates, Planning  # noqa: E402  # after importorskip
from recompute_jax._remat.recipe import follow  # noqa: E402  # after importorskip
from recompute_jax._remat.schedules import Argument, look  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax

OPTIONS = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_cpu_use_fusion_emitters": False,  # it takes half as long without them, for all that are compared
}
POLICIES = None, "nothing_saveable", "dots_saveable"
WORSE = 1.02
SMALL = 1.002  # times the bytes of a policy: small stacks of an inner scan that others read, too, are not made again
Wrap = Callable[[Any], Any]


def layer(x: Any, weights: Any) -> Any:
    up, down = weights
    centred = x - x.mean(-1, keepdims=True)
    return x + jax.nn.gelu(centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) @ up) @ down, None


def stacks(outer: Wrap, inner: Wrap, unroll: int = 1) -> Any:
    """Layers in blocks, each with weights of its own."""

    def loss(weights: Any, x: Any) -> Any:
        block = lambda x, weights: (lax.scan(inner(layer), x, weights, unroll=unroll)[0], None)
        return (lax.scan(outer(block), x, weights, unroll=unroll)[0] ** 2).mean()

    return loss


def unrolled(outer: Wrap, inner: Wrap) -> Any:
    return stacks(outer, inner, unroll=2)


def rolled(outer: Wrap, inner: Wrap) -> Any:
    """In each layer a recurrence with the layer's weights, whose states are read, too."""

    def loss(weights: Any, x: Any) -> Any:
        def block(x: Any, weights: Any) -> Any:
            up, down = weights[0][0], weights[1][0]
            step = inner(lambda x, t: (jax.nn.silu(x @ up @ down * t) + x, x[0]))
            last, rows = lax.scan(step, x, jnp.linspace(0.1, 1.0, 6), reverse=True)
            return last, (rows**2).sum()

        last, sums = lax.scan(outer(block), x, weights)
        return (last**2).mean() + sums.mean()

    return loss


def chosen(outer: Wrap, inner: Wrap) -> Any:
    """Each step takes one of two branches."""

    def loss(weights: Any, x: Any) -> Any:
        def block(x: Any, given: Any) -> Any:
            weights, number = given
            one = inner(lambda x: layer(layer(x, _of(weights, 0))[0], _of(weights, 1))[0])
            two = inner(lambda x: jnp.sin(layer(x, _of(weights, 2))[0]))
            return lax.cond(number % 2 == 0, one, two, x), None

        count = weights[0].shape[0]
        return (lax.scan(outer(block), x, (weights, jnp.arange(count)))[0] ** 2).mean()

    return loss


def _of(weights: Any, number: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], weights)


def plainly(function: Any) -> Any:
    return function


def arguments(width: int, rows: int) -> Any:
    one, two, three = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(one, (4, 6, width, 4 * width)) / width**0.5
    down = jax.random.normal(two, (4, 6, 4 * width, width)) / width**0.5 / 2
    return (up, down), jax.random.normal(three, (rows, width))


def wrapped(policy: str | None) -> Wrap:
    """`jax.checkpoint` with this policy; None: not at all."""
    if policy is None:
        return plainly
    return lambda function: jax.checkpoint(function, policy=getattr(jax.checkpoint_policies, policy))


def results(function: Any, args: Any) -> list[Any]:
    """Of a compiled function."""
    return list(jax.tree.leaves(jax.jit(function, compiler_options=FOR_VALUES)(*jax.tree.leaves(args))))


@cache
def in_uniform_shapes(model: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    """The gradient of a small model, its arguments, what it is, and plans in which each step runs again by itself."""
    with jax.enable_x64(True):  # in single precision, what is rounded may be all that is left of a difference
        args = arguments(4, 3)
        closed = jax.make_jaxpr(jax.grad(model(plainly, plainly), argnums=(0, 1)))(*args)
        flat = flatten(closed)
        plans = list(Candidates(flat, Planning("model", "branch")).uniform(0.001))
        return flat, args, results(jaxpr_as_fun(closed), args), plans


@settings(max_examples=6, deadline=None)
@given(model=st.sampled_from([stacks, rolled, chosen]), place=st.integers(0, 1000))
def test_no_value_changes(model: Any, place: int) -> None:
    """Whatever scans in scans hand on, and whatever runs again, the values are those of the function."""
    flat, args, expected, plans = in_uniform_shapes(model)
    plan = plans[place % len(plans)]
    steps = plan.regions(plan.plan.budget)
    with jax.enable_x64(True):
        made = plan.emitted(steps, "branch")
        again, _ = follow(flat, plan.recipe(steps, "branch"), "model")
        found = results(jaxpr_as_fun(made), args)
    assert str(again) == str(made)
    for one, two in zip(expected, found, strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(two, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", [stacks, rolled], ids=lambda model: model.__name__)
def test_plans_reach_into_scans_in_scans(model: Any) -> None:
    """Among the plans are some that keep the carries of the inner scan, some that run it again, and both together."""
    flat, _, _, plans = in_uniform_shapes(model)
    assert any(plan.looped.split for plan in plans)
    assert any(plan.fitted.bodies for plan in plans)
    least = min(plan.plan.peak for plan in plans)
    assert least < 0.6 * min(plan.plan.peak for plan in plans if not (plan.looped.split or plan.fitted.bodies))
    assert least < 0.2 * Candidates(flat, Planning("model", "branch")).predicted


def compiled(function: Any, args: Any) -> int:
    closed = jax.make_jaxpr(function)(*args)
    assert not closed.consts
    return look("", closed, [Argument()] * len(closed.in_avals), OPTIONS).compiled


def products(jaxpr: Any) -> float:
    """FLOPs of the products of matrices in it, of every step of scans and of the dearest branch."""
    total = 0.0
    for eqn in jaxpr.eqns:
        of = max if eqn.primitive.name == "cond" else sum
        inner = of(map(products, subjaxprs(eqn))) * eqn.params.get("length", 1) if subjaxprs(eqn) else 0.0
        total += inner if inner else flops(eqn) if eqn.primitive.name == "dot_general" else 0.0
    return total


@pytest.mark.slow
@pytest.mark.parametrize("model", [stacks, unrolled, rolled, chosen], ids=lambda model: model.__name__)
def test_no_worse_than_policies_in_policies(model: Any) -> None:
    """Where a policy around the inner body, the outer one or both fits, so does a plan, with at most 1.02 of its

    products and 1.002 of its bytes; so the least is no larger than theirs.
    """
    args = arguments(16, 128)
    made: dict[int, float] = {}  # products, by budget
    for outer, inner in list(product(POLICIES, POLICIES))[1::2]:
        rival = jax.grad(model(wrapped(outer), wrapped(inner)))
        budget = int(SMALL * compiled(rival, args))
        if budget not in made:
            function = remat(jax.grad(model(plainly, plainly)), budget, compiler_options=OPTIONS)
            assert function.plan(*args).compiled <= budget, (outer, inner)
            made[budget] = products(function.trace(*args).jaxpr.jaxpr)
        assert 0 < made[budget] <= WORSE * products(jax.make_jaxpr(rival)(*args).jaxpr), (outer, inner)
