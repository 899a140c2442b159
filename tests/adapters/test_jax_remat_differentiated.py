"""`recompute_jax.remat` of a loss, under `grad` and JAX's other transformations: the backward pass is planned, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

import jax.numpy as jnp  # noqa: E402  # after importorskip
from jax import lax  # noqa: E402  # after importorskip
from jax.ad_checkpoint import checkpoint_name  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip

QUICK: Any = {"compilations": 3, "effort": 0.1}


def loss(w: Any, x: Any) -> Any:
    """Tanh layers; the gradient keeps them all."""
    for _ in range(6):
        x = jnp.tanh(x @ w) + 0.1 * x
    return (x**2).mean()


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w) + x


@pytest.fixture(scope="module")
def arrays() -> tuple[Any, Any]:
    one, two = jax.random.split(jax.random.key(1))
    return jax.random.normal(one, (32, 32)) / 8, jax.random.normal(two, (256, 32))


def temporaries(fn: Any, args: Any) -> int:
    return int(jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes)


def assert_same(expected: Any, found: Any) -> None:
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_a_planned_loss_is_within_the_budget(arrays: Any) -> None:
    """What a user of `jax.checkpoint` tries first saves memory: value and gradient are one planned program."""
    planned = remat(loss, "250kB", **QUICK)
    assert temporaries(jax.grad(loss), arrays) > 400_000
    assert temporaries(jax.grad(planned), arrays) <= 250_000
    assert_same(jax.value_and_grad(loss)(*arrays), jax.value_and_grad(planned)(*arrays))


def in_scan(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: (lax.scan(lambda x, _: (layer(x, w), None), x, None, length=4)[0] ** 2).sum()


def in_cond(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: (lax.cond(x.sum() > 0, lambda x: layer(x, w), lambda x: x, x) ** 2).sum()


def in_vmap(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: (jax.vmap(layer, (0, None))(x, w) ** 2).sum()


def in_jit(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: (jax.jit(layer)(x, w) ** 2).sum()


def in_checkpoint(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: (jax.checkpoint(layer)(x, w) ** 2).sum()


@pytest.mark.parametrize("around", [in_scan, in_cond, in_vmap, in_jit, in_checkpoint])
def test_a_planned_layer_in_a_larger_function(arrays: Any, around: Any) -> None:
    """Loops, branches, batches and calls around it differentiate it as they do the layer."""
    planned = remat(layer, "1MB", **QUICK)
    assert_same(jax.grad(around(layer))(*arrays), jax.grad(around(planned))(*arrays))


def test_batches_of_a_planned_loss(arrays: Any) -> None:
    """Each in the batch has its gradient, and what all share the sum; batches of batches, along any axis; forwards."""
    planned = remat(loss, "2MB", **QUICK)
    w, x = arrays
    args, moving = (w, jnp.stack([x, 2 * x, 3 * x], axis=1)), (w, jnp.stack([x, -x, x / 2], axis=1))
    shared = lambda fn: lambda w, x: jax.vmap(fn, (None, 1))(w, x).sum()
    for around in (
        shared,
        lambda fn: lambda w, x: (jnp.arange(3.0) * jax.vmap(fn, (0, 1))(jnp.stack([w, w / 2, -w]), x)).sum(),
        lambda fn: lambda w, x: jax.vmap(jax.vmap(fn, (None, 1)), (None, 2))(w, jnp.stack([x, x + 1], axis=2)).sum(),
    ):
        assert_same(*[jax.grad(around(fn), (0, 1))(*args) for fn in (loss, planned)])
    assert_same(*[jax.jvp(shared(fn), args, moving) for fn in (loss, planned)])
    assert_same(*[jax.linearize(shared(fn), *args)[1](*moving) for fn in (loss, planned)])


def test_a_batch_of_a_planned_loss_is_within_the_budget_for_each(arrays: Any) -> None:
    """The weights are not copied, and the forward pass keeps only gradients."""
    w, x = arrays
    many = jnp.stack([x] * 4)
    gradient = lambda fn: jax.grad(lambda w, x: jax.vmap(fn, (None, 0))(w, x).sum())
    assert temporaries(gradient(loss), (w, many)) > 4 * 400_000
    assert temporaries(gradient(remat(loss, "250kB", **QUICK)), (w, many)) <= 4 * 270_000


def test_forward_mode_and_higher_orders(arrays: Any) -> None:
    """jvp, linearize, forward over reverse, and reverse over reverse."""
    planned = remat(loss, "600kB", **QUICK)
    assert_same(jax.jvp(loss, arrays, arrays), jax.jvp(planned, arrays, arrays))
    assert_same(jax.linearize(loss, *arrays)[1](*arrays), jax.linearize(planned, *arrays)[1](*arrays))
    assert_same(jax.jvp(jax.grad(loss), arrays, arrays), jax.jvp(jax.grad(planned), arrays, arrays))
    squared = lambda fn: jax.grad(lambda w, x: (jax.grad(fn)(w, x) ** 2).sum())
    assert_same(squared(loss)(*arrays), squared(planned)(*arrays))


def test_forward_mode_differentiates_only_what_moves() -> None:
    """A tangent of zeros takes no products: neither for arrays that the function captures nor for other arguments."""
    x, w, captured = jnp.ones((4, 64)) / 3, jnp.eye(64) / 2, jax.random.normal(jax.random.key(0), (64, 64)) / 8

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w @ captured).sum(0)

    planned = remat(layer, "1MB", **QUICK)
    ways: list[Callable[[Any], Any]] = [
        lambda fn: lambda x: jax.jvp(lambda x: fn(x, w), (x,), (x,)),
        lambda fn: lambda x: jax.linearize(lambda x: fn(x, w), x)[1](x),
        lambda fn: lambda x: jax.jacfwd(fn)(x, w),
    ]
    for way in ways:
        products = [str(jax.make_jaxpr(way(fn))(x)).count("dot_general[") for fn in (layer, planned)]
        assert products[0] == products[1] > 0
    np.testing.assert_allclose(jax.jacfwd(planned)(x, w), jax.jacfwd(layer)(x, w), atol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(planned, 1)(x, w), jax.jacfwd(layer, 1)(x, w), atol=1e-5)


def test_integers_keys_and_results_beside(arrays: Any) -> None:
    """What has no derivative passes through; results beside the loss are given as `has_aux`."""
    w, x = arrays

    def drawn(w: Any, x: Any, key: Any, number: Any) -> Any:
        return loss(w, x) * jax.random.uniform(key), (x * 2, number + 1)

    args = w, x, jax.random.key(3), jnp.arange(3)
    for fn in (drawn, remat(drawn, "500kB", **QUICK)):
        found = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)(*args)
        assert_same(jax.value_and_grad(drawn, argnums=(0, 1), has_aux=True)(*args), found)


def test_a_plan_in_a_plan(arrays: Any) -> None:
    """A function that is planned as a whole is planned through what is planned in it."""
    outer = remat(jax.grad(remat(loss, "10MB", **QUICK)), "250kB", **QUICK)
    assert outer.plan(*arrays).extra_flops > 0
    assert_same(jax.grad(loss)(*arrays), outer(*arrays))


def test_modules_of_equinox(arrays: Any) -> None:
    """Functions among the leaves are not traced, as by `filter_jit`: in it, around it, and under `filter_grad`."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = eqx.nn.MLP(32, 32, 32, 2, key=jax.random.key(0))
    energy = lambda model, x: (jax.vmap(model)(x) ** 2).mean()
    gradient = eqx.filter_grad(energy)
    expected = gradient(model, arrays[1])
    ways = remat(gradient, "1MB", **QUICK), eqx.filter_grad(remat(energy, "1MB", **QUICK))
    for found in (*ways, eqx.filter_jit(ways[0])):
        assert_same(eqx.filter(expected, eqx.is_array), eqx.filter(found(model, arrays[1]), eqx.is_array))


def test_what_jit_has(arrays: Any) -> None:
    """A decorator, `trace`, `eval_shape`, `export`; and one error for shapes that are no numbers."""

    @remat(budget="400kB", **QUICK)
    def gradient(w: Any, x: Any) -> Any:
        return jax.grad(loss)(w, x)

    expected = jax.grad(loss)(*arrays)
    assert gradient.trace(*arrays).jaxpr.out_avals[0].shape == (32, 32)
    assert gradient.eval_shape(*arrays).shape == (32, 32)
    assert_same(expected, jax.export.export(gradient)(*arrays).call(*arrays))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 32"), jnp.float32)
    with pytest.raises(ValueError, match="shapes must be numbers"):
        jax.export.export(gradient)(arrays[0], shape)
    gradient.clear_cache()
    assert_same(expected, gradient(*arrays))


POLICIES: Any = {
    "names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_offload_policies_inside(arrays: Any, policy: str) -> None:
    """What a policy moves to the host passes through gates as it is."""

    def moved(w: Any, x: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(checkpoint_name(x @ w, "product")) + 0.1 * x
        return (x**2).mean()

    gradient = jax.grad(jax.checkpoint(moved, policy=POLICIES[policy]))
    planned = remat(gradient, "280kB", **QUICK)
    assert planned.plan(*arrays).gate is not None
    assert "<host>" in str(planned.trace(*arrays).jaxpr)
    assert_same(jax.grad(moved)(*arrays), planned(*arrays))
