"""`remat` on what users of optax and equinox write; larger programs are in `benchmarks/jax_others.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from recompute_jax import remat  # noqa: E402  # after importorskip

jnp = jax.numpy


def loss(params: Any, x: Any) -> Any:
    y = x
    for weight in params:
        y = jnp.tanh(y @ weight) + 0.1 * y
    return ((y - x[::-1]) ** 2).mean()


def arrays(depth: int = 4) -> tuple[list[Any], Any]:
    keys = jax.random.split(jax.random.key(0), depth + 1)
    return [jax.random.normal(key, (16, 16)) / 4 for key in keys[:depth]], jax.random.normal(keys[-1], (128, 16))


def same(expected: Any, found: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
        assert one.dtype == two.dtype


@pytest.mark.slow
def test_accumulated_gradients_of_optax() -> None:
    """Steps of MultiSteps, with a conditional on its counter, update as under jit, within less memory."""
    optax = pytest.importorskip("optax", reason="the extra 'dev' is not installed")
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 2)
    params, x = arrays()

    def step(params: Any, state: Any, x: Any) -> Any:
        slopes = jax.grad(loss)(params, x)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state

    planned = remat(step, of_peak=0.7, compilations=1, effort=0.1)
    one = two = params, optimizer.init(params)
    for _ in range(3):
        one, two = jax.jit(step)(*one, x), planned(*two, x)
    same(one, two)
    plan = planned.plan(*two, x)
    assert plan.compiled <= plan.budget < plan.baseline


@pytest.mark.slow
def test_modules_of_equinox_with_a_scan() -> None:
    """A recurrent module as argument: value and gradient have its structure, and the values of jit."""
    eqx = pytest.importorskip("equinox", reason="the extra 'dev' is not installed")
    cell = eqx.nn.GRUCell(4, 16, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 8, 4))

    def gradient(cell: Any, x: Any) -> Any:
        def number(cell: Any) -> Any:
            run = lambda row: jax.lax.scan(lambda h, u: (cell(u, h), None), jnp.zeros(16), row)[0]
            return (jax.vmap(run)(x) ** 2).mean()

        return eqx.filter_value_and_grad(number)(cell)

    planned = remat(gradient, of_peak=0.6, compilations=2, effort=0.1)
    same(jax.jit(gradient)(cell, x), planned(cell, x))
    plan = planned.plan(cell, x)
    assert plan.compiled <= plan.budget < plan.baseline
