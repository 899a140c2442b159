"""Scans within a budget: what they stack is kept, or recomputed in blocks, and no value changes."""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute import BudgetError

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import FOR_VALUES  # noqa: E402  # after importorskip
from jax.extend.core import Var, jaxpr_as_fun  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._control.body import Body, choices  # noqa: E402  # after importorskip
from recompute_jax._control.groups import groups_of  # noqa: E402  # after importorskip
from recompute_jax._control.rewrite import rewrite  # noqa: E402  # after importorskip
from recompute_jax._control.shapes import Shape, shape  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip
from recompute_jax._program.segments import kind, nbytes  # noqa: E402  # after importorskip
from recompute_jax._remat.candidates import Candidates, Planning  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax

QUICK: Any = {"compilations": 3, "effort": 0.1}


def recurrence(w: Any, x: Any, length: int, reverse: bool = False, kind: str = "last") -> Any:
    """A loss of a recurrence with two carries, an operand for each step, and a constant."""

    def step(carry: Any, t: Any) -> Any:
        x, total = carry
        new = jnp.tanh(x @ w + jnp.sin(t)) * 0.9 + 0.1 * x
        return (new, total + (new**2).mean()), (new[0], t * 2)

    (last, total), (rows, _) = lax.scan(step, (x, 0.0), jnp.arange(length) * 0.1, reverse=reverse)
    return total + (last**2).mean() + ((rows**2).sum() if kind == "rows" else 0.0)


def twice(w: Any, x: Any, length: int, reverse: bool = False, kind: str = "last") -> Any:
    """One recurrence reads what the other stacks, in the other direction."""

    def step(x: Any, t: Any) -> Any:
        x = jnp.cos(x @ w) + t
        return x, x

    last, stack = lax.scan(step, x, jnp.arange(length) * 0.1, reverse=reverse)
    back, _ = lax.scan(lambda y, x: (jnp.sin(y + x) @ w, None), last, stack, reverse=not reverse)
    return (back**2).mean()


def checkpointed(w: Any, x: Any, length: int, reverse: bool = False, kind: str = "last") -> Any:
    """The body keeps nothing but its carry and its operand, which is all that it stacks."""
    weights = jnp.stack([w] * length)

    @jax.checkpoint
    def step(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) + x, x if kind == "rows" else None

    last, rows = lax.scan(step, x, weights, reverse=reverse)
    return (last**2).mean() + (0.0 if rows is None else (rows**2).sum())


def functions(loss: Any, order: int, length: int, reverse: bool, kind: str) -> Any:
    run = lambda w, x: loss(w, x, length, reverse, kind)
    if order == 1:
        return jax.value_and_grad(run, argnums=(0, 1))
    return jax.grad(lambda w, x: (jax.grad(run, argnums=1)(w, x) ** 2).sum())


def flat_of(function: Any, args: Any) -> Any:
    return flatten(jax.make_jaxpr(function)(*args))


def values(width: int = 4) -> tuple[Any, Any]:
    one, two = jax.random.split(jax.random.key(5))
    return jax.random.normal(one, (width, width)) / width, jax.random.normal(two, (3, width))


@settings(max_examples=12, deadline=None)
@given(
    loss=st.sampled_from([recurrence, twice, checkpointed]),
    order=st.integers(1, 2),
    length=st.integers(2, 40),
    reverse=st.booleans(),
    kind=st.sampled_from(["last", "rows"]),
    share=st.floats(0, 1),
)
def test_no_value_changes(loss: Any, order: int, length: int, reverse: bool, kind: str, share: float) -> None:
    """Whatever is stacked and in whatever blocks the rest runs again, the values are those of the function."""
    with jax.enable_x64(True):  # in single precision, what is rounded may be all that is left of a difference
        args = values()
        flat = flat_of(functions(loss, order, length, reverse, kind), args)
        shapes = [shape(group, int(share * length * group.modes[0].stacked)) for group in groups_of(flat)]
        changed = rewrite(flat, [(shaped.group, shaped.parts) for shaped in shapes])
        expected = jax.jit(functions(loss, order, length, reverse, kind), compiler_options=FOR_VALUES)(*args)
        found = jax.jit(jaxpr_as_fun(changed), compiler_options=FOR_VALUES)(*args)
    for one, two in zip(jax.tree.leaves(expected), found, strict=True):
        assert one.dtype == np.float64
        assert one.aval == two.aval
        np.testing.assert_allclose(two, one, rtol=1e-9, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(
    loss=st.sampled_from([recurrence, twice, checkpointed]),
    order=st.integers(1, 2),
    reverse=st.booleans(),
    kind=st.sampled_from(["last", "rows"]),
)
def test_modes_are_worth_it(loss: Any, order: int, reverse: bool, kind: str) -> None:
    """The first mode runs nothing again; each one after it stacks less, each after that costs more, too."""
    for group in groups_of(flat_of(functions(loss, order, 7, reverse, kind), values())):
        plain, *rest = group.modes
        assert plain.real == set(group.maker)
        assert plain.cost == 0
        assert all(one.stacked > two.stacked for one, two in pairwise(group.modes))
        assert all(one.cost < two.cost for one, two in pairwise(rest))


@settings(max_examples=12, deadline=None)
@given(length=st.integers(2, 3000), share=st.floats(0, 1.1))
def test_shapes_cover_all_steps_and_fit(length: int, share: float) -> None:
    """The parts are all the steps, once each and in order; a larger room is never dearer."""
    flat = flat_of(functions(recurrence, 1, length, False, "last"), values())
    (group,) = groups_of(flat)
    room = int(share * length * group.modes[0].stacked)
    found = shape(group, room)
    ends = [0, *(part.stop for part in found.parts)]
    assert [(part.start, part.stop) for part in found.parts] == list(pairwise(ends))
    assert ends[-1] == length
    assert all(part.stop - part.start == np.prod(part.levels) for part in found.parts)
    least = shape(group, 0).peak
    assert found.peak <= room or found.peak <= 1.001 * least
    if found.peak <= room:
        assert shape(group, 2 * room).cost <= found.cost * 1.001


def test_memory_grows_with_the_logarithm() -> None:
    """With as little memory as can be, a hundred times as many steps take only a few times as much."""

    def least(length: int) -> Shape:
        (group,) = groups_of(flat_of(functions(recurrence, 1, length, False, "last"), values()))
        return shape(group, 0)

    short, long = least(100), least(10_000)
    assert long.peak <= 4 * short.peak
    assert max(len(part.levels) for part in long.parts) > max(len(part.levels) for part in short.parts)


@pytest.mark.parametrize("rows", [5, 5 << 28])
def test_the_cut_is_the_least(rows: int) -> None:
    """What is stacked so that no product runs again takes as few bytes as can be, by trying all sets."""

    def step(x: Any, t: Any) -> Any:
        a = x @ jnp.ones((8, 4))
        b = jnp.concatenate([jnp.tanh(a), a * t], axis=1)
        c = jnp.sin(b[:, :2]) @ jnp.ones((2, 3))
        d = jnp.cos(c.sum(axis=1))
        return x * d.mean(), (b, d[:2], c * 2)

    types = jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((7,), jnp.float32)
    closed = jax.make_jaxpr(lambda x, t: lax.scan(step, x, t))(*types)
    (eqn,) = [equation for equation in flatten(closed).equations if equation.primitive.name == "scan"]
    body = Body(eqn)
    read = [atom for atom in body.made if isinstance(atom, Var)]
    made = [var for equation in body.flat.equations for var in equation.outvars]

    def enough(kept: tuple[Any, ...]) -> bool:
        return all(kind(equation) != "heavy" for equation in body.needs(read, given=kept).equations)

    sets = chain.from_iterable(combinations(made, size) for size in range(4))
    least = min(sum(nbytes(var.aval) for var in kept) for kept in sets if enough(kept))
    found = min(sum(nbytes(var.aval) for var in kept) for kept in choices(body, read, ()) if enough(tuple(kept)))
    assert found == least


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_long_scan_fits(share: float) -> None:
    """The compiled gradient of a long scan is within the budget, and its values are those of plain jit."""
    args = jnp.eye(32) * 0.9, jnp.ones((8, 32))
    gradient = functions(recurrence, 1, 400, False, "last")
    function = remat(gradient, of_peak=share, **QUICK)
    plan = function.plan(*args)
    assert plan.compiled <= plan.budget
    assert plan.gate is None
    assert plan.loops
    assert "blocks of" in str(plan)
    for one, two in zip(jax.tree.leaves(jax.jit(gradient)(*args)), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-5, atol=2e-6)


def test_constants_and_donation() -> None:
    """What the function closes over and what is donated to it is as under jit, also where a scan is changed."""
    table = jnp.linspace(0.0, 1.0, 200)

    def update(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            last, _ = lax.scan(lambda x, t: (jnp.tanh(x @ w + t), None), x, table)
            return (last**2).mean()

        return w - jax.grad(loss)(w)

    x, w = jnp.ones((8, 16)), jnp.eye(16)
    expected = jax.jit(update)(x, w)
    function = remat(update, of_peak=0.3, donate_argnums=1, **QUICK)
    assert function.plan(x, w).loops
    np.testing.assert_allclose(function(x, w), expected, rtol=2e-5, atol=2e-6)
    assert w.is_deleted()
    assert not x.is_deleted()


def test_a_scan_in_a_larger_function() -> None:
    """A scan and what is around it share the budget."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        x, _ = lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=30)
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    args = jnp.eye(64) * 0.9, jnp.ones((128, 64))
    function = remat(jax.grad(loss), of_peak=0.3, **QUICK)
    plan = function.plan(*args)
    assert plan.compiled <= plan.budget
    np.testing.assert_allclose(function(*args), jax.jit(jax.grad(loss))(*args), rtol=2e-5, atol=2e-6)


def test_a_gradient_inside_of_a_scan() -> None:
    """Where most memory is in use within one step, the body is planned."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(10):
            x = jnp.tanh(x @ w) + 0.1 * x
        return (x**2).mean()

    def train(w: Any, x: Any) -> Any:
        return lax.scan(lambda w, _: (w - 0.1 * jax.grad(loss)(w, x), loss(w, x)), w, None, length=3)

    args = jnp.eye(64) * 0.9, jnp.ones((256, 64))
    function = remat(train, of_peak=0.5, **QUICK)
    plan = function.plan(*args)
    assert plan.compiled <= plan.budget
    for one, two in zip(jax.jit(train)(*args), function(*args), strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-5, atol=2e-6)


def layers(w: Any, x: Any) -> Any:
    for _ in range(5):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def update(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(layers)(w, x)


def trained(w: Any, x: Any) -> Any:
    return lax.scan(lambda w, x: (update(w, x), layers(w, x)), w, x)


def counted(w: Any, x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, w: update(w, x[i]), w)


def mapped(w: Any, x: Any) -> Any:
    return lax.map(lambda x: jax.grad(layers, 1)(w, x), x)


def chosen(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0, 0] > 0, lambda w: update(w, x[0]), lambda w: update(w, x[1]), w)


@pytest.mark.parametrize("function", [trained, counted, mapped, chosen], ids=lambda function: function.__name__)
def test_gradients_inside_of_loops_and_branches(function: Any) -> None:
    """Where most memory is in use within one step or branch, that is planned; what runs again in it is reported."""
    args = jnp.eye(32) * 0.9, jnp.ones((3, 512, 32)) * jnp.array([[[0.5]], [[1.0]], [[1.5]]])
    planned = remat(function, of_peak=0.7, **QUICK)
    plan = planned.plan(*args)
    assert plan.compiled <= plan.budget
    assert plan.extra_flops > 0
    assert plan.overhead > 1
    assert "bodies" in str(plan)
    for one, two in zip(jax.tree.leaves(jax.jit(function)(*args)), jax.tree.leaves(planned(*args)), strict=True):
        np.testing.assert_allclose(two, one, rtol=2e-5, atol=2e-6)


def test_what_runs_again_in_bodies_is_counted() -> None:
    """The cost in a body counts once a step of a scan, once in a loop of unknown length, and for the dearest branch."""
    w, x = jnp.eye(32) * 0.9, jnp.ones((128, 32))

    def again(function: Any, *args: Any) -> float:
        candidates = Candidates(flat_of(function, args), Planning("loop", "branch"))
        return (candidates.least(0.2).overhead - 1) * candidates.plain.program.model_time

    once = again(lambda w: lax.while_loop(lambda w: w[0, 0] > 0, lambda w: update(w, x), w), w)
    assert once > 0
    many = again(lambda w: lax.scan(lambda w, _: (update(w, x), None), w, None, length=7), w)
    assert many == pytest.approx(7 * once, rel=0.01)
    assert again(lambda w: lax.cond(w[0, 0] > 0, lambda w: update(w, x), lambda w: w * 2, w), w) == pytest.approx(
        once, rel=0.01
    )


def test_blocks_that_compile_smaller_are_found() -> None:
    """Under vmap XLA copies what blocks of several steps stack: blocks of one step fit, as jax.checkpoint does."""

    def loss(weights: Any, x: Any, around: Any = lambda step: step) -> Any:
        last, _ = lax.scan(around(lambda x, w: (jnp.tanh(x @ w) + x, None)), x, weights)
        return (last**2).mean()

    gradient = jax.vmap(jax.grad(loss), (None, 0))
    args = jnp.stack([jnp.eye(48) * 0.9] * 12), jnp.ones((8, 32, 48))
    blocks = jax.vmap(jax.grad(partial(loss, around=jax.checkpoint)), (None, 0))
    budget = jax.jit(blocks).lower(*args).compile().memory_analysis().temp_size_in_bytes
    function = remat(gradient, budget, **QUICK)
    assert function.plan(*args).compiled <= budget
    np.testing.assert_allclose(function(*args), jax.jit(gradient)(*args), rtol=2e-5, atol=2e-6)


def test_the_least_that_is_named_is_enough() -> None:
    """Where nothing fits, the budget that the error names is one that works, and not above one that is known to."""
    xs, weights = jnp.ones((100, 16, 32)), [jnp.eye(32) * 0.5] * 3

    def loss(weights: Any, xs: Any) -> Any:
        def step(x: Any, t: Any) -> Any:
            x = jnp.tanh(t @ weights[0] + x @ weights[1])
            return x, x @ weights[2]

        return (lax.scan(step, jnp.zeros((16, 32)), xs)[1] ** 2).mean()

    function = jax.value_and_grad(loss)
    enough = remat(function, of_peak=0.5, **QUICK).plan(weights, xs).compiled
    with pytest.raises(BudgetError, match="no schedule was found") as caught:
        remat(function, of_peak=0.4, **QUICK).plan(weights, xs)
    named = int(str(caught.value).split(" needs ")[1].split(" bytes")[0].replace(",", ""))
    assert named <= enough
    assert remat(function, named, **QUICK).plan(weights, xs).compiled <= named


def test_layers_whose_weights_are_scanned() -> None:
    """Gradients of the weights are results, no temporaries; in blocks of one step no carry is computed again."""

    def loss(weights: Any, x: Any) -> Any:
        layer = lambda x, pair: (x + jnp.tanh(x @ pair[0]) @ pair[1], None)
        return (lax.scan(layer, x, weights)[0] ** 2).mean()

    weights = jnp.ones((12, 8, 32)), jnp.ones((12, 32, 8))
    (group,) = groups_of(flat_of(jax.grad(loss), (weights, jnp.ones((64, 8)))))
    assert {var.aval.shape for var in group.results} == {(8, 32), (32, 8)}
    assert min(mode.stacked for mode in group.modes) == 0
    assert all(mode.alone <= mode.cost for mode in group.modes)
    assert any(mode.alone < 0.8 * mode.cost for mode in group.modes)
