"""Conditionals under `grad`: what a branch keeps for its backward pass is planned, and no value changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from jax.extend.core import Var  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._control.branches import branch_groups as groups_of  # noqa: E402  # after importorskip
from recompute_jax._control.branches import rewrite_branches as rewrite  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import bind, flatten  # noqa: E402  # after importorskip
from recompute_jax._program.segments import nbytes  # noqa: E402  # after importorskip
from recompute_jax._remat.candidates import Candidates, Planning  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax


def layers(act: Any, count: int = 4, wrap: Any = lambda step: step) -> Any:
    def run(w: Any, x: Any) -> Any:
        for _ in range(count):
            x = wrap(lambda w, x: act(x @ w))(w, x)
        return x

    return run


def switched(w: Any, x: Any, index: Any) -> Any:
    """Branches that keep different values, and one that keeps none."""
    x = lax.switch(index, [layers(jnp.tanh, 2), layers(jax.nn.silu, 2), lambda w, x: x + 1], w, x)
    return (x**2).mean()


def in_a_row(w: Any, x: Any, index: Any) -> Any:
    """Two conditionals with one index, the second of which reads the first one's result twice."""
    y = lax.cond(index > 0, layers(jnp.sin, 2), layers(jnp.tanh, 1), w, x)
    z = lax.cond(index > 0, lambda w, y: y * jnp.cos(y @ w), lambda w, y: y, w, y)
    return (z * y).mean()


def nested(w: Any, x: Any, index: Any) -> Any:
    """A conditional within a branch, and a constant that a branch closes over."""
    table = np.arange(x.shape[1], dtype=np.float32)
    inner = lambda w, x: lax.cond(x[0, 0] > 0, layers(jnp.tanh, 2), layers(jnp.sin, 2), w, x * table)
    return (lax.switch(index, [inner, layers(jnp.cos, 2), inner], w, x) ** 2).mean()


LOSSES = (switched, in_a_row, nested)


def arrays(size: int = 8) -> tuple[Any, Any]:
    one, two = jax.random.split(jax.random.key(1))
    return jax.random.normal(one, (size, size)) / 3, jax.random.normal(two, (4 * size, size))


def derivative(loss: Any, order: int) -> Any:
    if order == 1:
        return jax.value_and_grad(loss, argnums=(0, 1))
    return jax.grad(lambda w, x, index: (jax.grad(loss, argnums=1)(w, x, index) ** 2).sum())


def interpreted(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    """A jaxpr equation by equation, of conditionals the branch that is taken."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda atom: env[atom] if isinstance(atom, Var) else atom.val
    for eqn in jaxpr.eqns:
        values = [read(invar) for invar in eqn.invars]
        if eqn.primitive.name == "cond":
            branch = eqn.params["branches"][int(values[0])]
            made = interpreted(branch.jaxpr, branch.consts, values[1:])
        elif eqn.primitive.name == "jit":
            made = interpreted(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, values)
        else:
            made = bind(eqn, values)
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(outvar) for outvar in jaxpr.outvars]


@cache
def traced(loss: Any, order: int) -> Any:
    return jax.make_jaxpr(derivative(loss, order))(*arrays(), 0)


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=6)
@given(st.data())
def test_any_choice_of_what_is_kept_is_the_same_function(loss: Any, order: int, data: st.DataObject) -> None:
    """Whatever branches keep, and whatever of it runs again, results are those of the function to the last bit."""
    w, x = arrays()
    args = w, x, jnp.int32(data.draw(st.integers(0, 2)))
    closed = traced(loss, order)
    flat = flatten(closed)
    groups = groups_of(flat)
    assert groups
    some = lambda branch: sorted(
        data.draw(st.sets(st.sampled_from(range(len(branch.values))))) if branch.values else ()
    )
    made = rewrite(flat, [(group, [some(branch) for branch in group.branches]) for group in groups])
    expected = interpreted(closed.jaxpr, closed.consts, args)
    found = interpreted(made.jaxpr, made.consts, args)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, two)
        assert one.dtype == two.dtype


def test_what_is_kept_falls_with_the_budget() -> None:
    """By the planner's own count every candidate is within the bytes that it was made for, at rising costs."""
    loss = lambda w, x, index: lax.cond(index > 0, layers(jnp.tanh, 6), layers(jnp.sin, 6), w, x).sum()
    flat = flatten(jax.make_jaxpr(jax.grad(loss))(*arrays(32), 0))
    candidates = Candidates(flat, Planning("loss", "branch"))
    overheads = []
    for share in (0.7, 0.5):
        found = candidates.candidate(int(share * candidates.predicted), 0.05)
        assert found.plan.peak <= share * candidates.predicted
        overheads.append(found.overhead)
    assert overheads == sorted(overheads)
    assert found.joined


@pytest.mark.slow
def test_fits_where_a_checkpoint_in_the_branch_does() -> None:
    """Where `jax.checkpoint` of each layer in the branches fits, a plan does, and needs no more FLOPs."""
    w, x = arrays(64)

    def gradient(wrap: Any) -> Any:
        branches = [layers(jnp.tanh, 8, wrap), layers(jax.nn.gelu, 8, wrap)]
        return jax.grad(lambda w, x, index: (lax.switch(index, branches, w, x) ** 2).mean())

    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    rival = jax.jit(gradient(jax.checkpoint), compiler_options=options).lower(w, x, 0).compile()
    budget = rival.memory_analysis().temp_size_in_bytes
    planned = remat(gradient(lambda step: step), budget, compilations=4)
    assert planned.plan(w, x, 0).compiled <= budget
    flops = planned.lower(w, x, 0).compile().cost_analysis()["flops"]
    assert flops <= 1.02 * rival.cost_analysis()["flops"]
    expected = jax.jit(gradient(lambda step: step))
    for index in (0, 1):
        np.testing.assert_allclose(planned(w, x, index), expected(w, x, index), rtol=1e-4, atol=1e-6)


def test_a_loop_of_steps_with_a_conditional() -> None:
    """Where the body of a loop holds a conditional and its gradient, what is kept between them is planned."""

    def steps(w: Any, x: Any) -> Any:
        loss = lambda w: lax.cond(w[0, 0] > 0, layers(jnp.tanh, 6), layers(jnp.sin, 6), w, x).sum()
        return lax.fori_loop(0, 2, lambda _, w: w - 0.1 * jax.grad(loss)(w), w)

    flat = flatten(jax.make_jaxpr(steps)(*arrays(32)))
    candidates = Candidates(flat, Planning("steps", "branch"))
    found = candidates.candidate(int(0.6 * candidates.predicted), 0.05)
    recipes = [body for params in found.fitted.bodies.values() for bodies in params.values() for body in bodies]
    assert any(recipe is not None and recipe.joined for recipe in recipes)


def test_effects_stay_where_they_are() -> None:
    """What has effects is in no group."""

    def loss(w: Any, x: Any, index: Any) -> Any:
        def loud(w: Any, x: Any) -> Any:
            jax.debug.callback(lambda: None)
            return jnp.tanh(x @ w)

        return lax.cond(index > 0, loud, layers(jnp.sin), w, x).sum()

    flat = flatten(jax.make_jaxpr(jax.grad(loss))(*arrays(), 0))
    assert not groups_of(flat)


def test_the_counted_size_is_what_others_do_not_read() -> None:
    """The result that the loss reads is no part of what a group may leave out."""
    w, x = arrays()
    (group,) = groups_of(flatten(jax.make_jaxpr(jax.value_and_grad(switched))(w, x, 0)))
    made = group.equations[0].outvars
    assert group.size == sum(nbytes(var.aval) for var in made) - x.nbytes
