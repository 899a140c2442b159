"""Planned functions in an outer `jit` or `grad`, over four devices; run by test_jax_devices.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from _jax_remat_on_four_devices import KINDS, arrays, gradient, loss
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import recompute as rc
from recompute_jax import remat


def temporaries(fn: Any, *args: Any) -> int:
    return int(jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize(
    ("kind", "entered"), [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, True)]
)
def test_in_an_outer_jit(kind: Any, entered: bool) -> None:
    """A constraint, or the type, says what is sharded: the budget is per device, with and without a mesh in force."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    w, x = arrays(mesh)
    bound = lambda w, x: loss(w, lax.with_sharding_constraint(x, NamedSharding(mesh, P("d"))))
    spread = loss if kind == AxisType.Explicit else bound
    planned = remat(jax.grad(spread), "300kB", compilations=2, effort=0.1)
    with jax.set_mesh(mesh) if entered else nullcontext():
        assert temporaries(jax.grad(spread), w, x) > 350_000
        assert temporaries(lambda w, x: planned(w, x), w, x) <= 310_000
        np.testing.assert_allclose(
            jax.jit(lambda w, x: planned(w, x))(w, x), jax.jit(gradient)(w, x), rtol=1e-4, atol=1e-6
        )
        assert jax.jit(lambda w, x: planned.plan(w, x).compiled)(w, x) <= 300_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_under_grad(kind: Any) -> None:
    """The shardings of what is differentiated are known: the budget is per device."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    w, x = arrays(mesh)
    with jax.set_mesh(mesh):
        found = jax.grad(remat(loss, "300kB", compilations=2, effort=0.1))(w, x)
        np.testing.assert_allclose(found, jax.jit(gradient)(w, x), rtol=1e-4, atol=1e-6)


def test_shardings_that_are_not_known_yet() -> None:
    """Over automatic axes in an outer jit, arguments count whole; the error says how to make shardings known."""
    w, x = arrays(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,)))
    planned = remat(gradient, "300kB", compilations=1, effort=0.1)
    with pytest.raises(rc.BudgetError, match="with_sharding_constraint"):
        jax.jit(lambda w, x: planned(w, x))(w, x)
    enough = remat(gradient, "3MB", compilations=2, effort=0.1)
    np.testing.assert_allclose(jax.jit(lambda w, x: enough(w, x))(w, x), jax.jit(gradient)(w, x), rtol=1e-4, atol=1e-6)
