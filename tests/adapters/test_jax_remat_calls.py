"""`recompute_jax.remat` is called as `jax.jit` is: methods, static arguments, JAX's configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

import jax.numpy as jnp  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip

QUICK: Any = {"compilations": 3}


def chain(weights: Any, x: Any) -> Any:
    """Tanh layers; the gradient keeps them all."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


gradient = jax.grad(chain, 1)


@pytest.fixture(scope="module")
def given() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 7)
    return [jax.random.normal(key, (32, 32)) / 6 for key in keys[1:]], jax.random.normal(keys[0], (64, 32))


def test_another_configuration_is_another_plan(given: Any) -> None:
    """Random numbers and the precision of products are those that jit gives under the same configuration."""
    drawn = lambda weights, key: gradient(weights, jax.random.normal(key, (64, 32)))
    function = remat(drawn, of_peak=0.8, **QUICK)
    key = jax.random.key(3)
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            expected = jax.jit(drawn)(given[0], key)
            np.testing.assert_allclose(function(given[0], key), expected, rtol=0, atol=1e-6)
    precise = remat(gradient, of_peak=0.8, **QUICK)
    assert "HIGHEST" not in precise.lower(*given).as_text()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in precise.lower(*given).as_text()


def test_a_method(given: Any) -> None:
    """As a decorator inside of a class it makes methods."""

    class Model:
        @partial(remat, of_peak=0.8, static_argnums=0, **QUICK)
        def slope(self, x: Any) -> Any:
            return gradient(given[0], x)

    expected = jax.jit(gradient)(*given)
    np.testing.assert_allclose(Model().slope(given[1]), expected, atol=1e-6)
    assert isinstance(Model.slope, type(remat(chain, of_peak=0.5)))


def test_without_jit(given: Any) -> None:
    """Under `jax.disable_jit` it is the function itself; what makes a NaN is named as under jit."""
    function = remat(gradient, of_peak=0.8, **QUICK)
    with jax.disable_jit():
        np.testing.assert_allclose(function(*given), gradient(*given), rtol=0, atol=0)
    logarithm = remat(lambda x: jnp.log(x), "1MB", **QUICK)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        logarithm(-jnp.ones(3))


@jax.tree_util.register_pytree_node_class
class Scale:
    """Hashed by its identity, as jit takes it, though its leaf cannot be hashed."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.factor,), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> Scale:
        return cls(*leaves)


def test_static_arguments_are_told_apart() -> None:
    """By value and by type; and they may be trees of arrays, if they can be hashed."""
    function = remat(lambda x, factor: x * factor, "1MB", static_argnames="factor", **QUICK)
    x = jnp.arange(3)
    assert function(x, factor=2).dtype == "int32"
    assert function(x, factor=2.0).dtype == "float32"
    assert function(x, factor=True).tolist() == [0, 1, 2]
    assert function(x, factor=1.0).dtype == "float32"
    scaled = remat(lambda x, scale: x * scale.factor, "1MB", static_argnums=1, **QUICK)
    one, other = Scale(np.full(3, 2)), Scale(np.full(3, 5))
    for scale in (one, other, one):
        assert scaled(x, scale).tolist() == (np.arange(3) * scale.factor).tolist()


def test_results_that_are_no_arrays_are_refused() -> None:
    """By the name of the function and its line."""

    def named(x: Any) -> Any:
        return x, "text"

    with pytest.raises(TypeError, match=r"named at .*test_jax_remat_calls.py:\d+"):
        remat(named, "1MB", **QUICK)(jnp.ones(3))
