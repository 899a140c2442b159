"""`recompute_jax.remat` of programs for several devices; run by test_jax_devices.py with four of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from recompute_jax import remat

KINDS = (AxisType.Auto, AxisType.Explicit)


def loss(w: Any, x: Any) -> Any:
    for _ in range(5):
        x = jnp.tanh(x @ w) + 0.1 * x
    return (x**2).mean()


gradient = jax.grad(loss)


def arrays(mesh: Any) -> tuple[Any, Any]:
    w, x = jax.random.normal(jax.random.key(0), (32, 32)) / 5, jax.random.normal(jax.random.key(1), (1024, 32))
    return jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("d")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_is_per_device(kind: Any) -> None:
    """What the plain program needs on one device is enough, less is planned for, and the report is per device."""
    w, x = arrays(jax.make_mesh((4,), ("d",), axis_types=(kind,)))
    plain = jax.jit(gradient)
    need = plain.lower(w, x).compile().memory_analysis().temp_size_in_bytes
    assert remat(gradient, need).plan(w, x).overhead == 1
    planned = remat(gradient, int(0.6 * need), compilations=4, effort=0.1)
    plan = planned.plan(w, x)
    assert plan.compiled <= 0.6 * need
    assert plan.predicted <= need
    assert "on each of 4 devices" in str(plan)
    assert planned.lower(w, x).compile().memory_analysis().temp_size_in_bytes <= 0.6 * need
    np.testing.assert_allclose(planned(w, x), plain(w, x), rtol=1e-4, atol=1e-6)
    assert planned(w, x).sharding.is_equivalent_to(plain(w, x).sharding, 2)


@pytest.mark.parametrize("check", [True, False])
def test_inside_of_shard_map(check: bool) -> None:
    """Varying axes are kept, whether they are checked or not; the budget is that of one device."""
    mesh = jax.make_mesh((4,), ("d",))
    w, x = arrays(mesh)

    def mapped(slope: Any) -> Any:
        def run(w: Any, x: Any) -> Any:
            varying = lax.pcast(w, "d", to="varying") if check else w
            return lax.pmean(slope(varying, x), "d")

        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check))

    planned = mapped(remat(gradient, "300kB", compilations=2, effort=0.1))
    plain = mapped(gradient)
    assert plain.lower(w, x).compile().memory_analysis().temp_size_in_bytes > 350_000
    assert planned.lower(w, x).compile().memory_analysis().temp_size_in_bytes <= 310_000
    np.testing.assert_allclose(planned(w, x), plain(w, x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", ["loss", "layer"])
def test_gradients_of_what_is_planned_inside_of_shard_map(shape: str) -> None:
    """Weights that all devices share get the sum of their slopes, also where each device has a factor of its own."""
    mesh = jax.make_mesh((4,), ("d",))
    w, x = arrays(mesh)
    function = loss if shape == "loss" else lambda w, x: loss(w, x) * jnp.ones(3)

    def sloped(body: Any) -> Any:
        def run(w: Any, x: Any) -> Any:
            return lax.psum((body(w, x) * (1 + lax.axis_index("d"))).sum(), "d")

        return jax.jit(jax.grad(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P()), (0, 1)))

    found = sloped(remat(function, "1MB", compilations=2, effort=0.1))(w, x)
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6), found, sloped(function)(w, x)
    )


def test_collectives_behind_gates() -> None:
    """A function with collectives is planned inside of a shard_map: what is the same on all devices stays so."""
    mesh = jax.make_mesh((4,), ("d",))
    w, x = arrays(mesh)

    def run(w: Any, x: Any) -> Any:
        return remat(jax.grad(lambda w, x: lax.pmean(loss(w, x), "d")), "300kB", compilations=2, effort=0.1)(w, x)

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P()))
    np.testing.assert_allclose(mapped(w, x), jax.jit(gradient)(w, x), rtol=1e-4, atol=1e-6)


def test_around_shard_map_and_constraints() -> None:
    """A shard_map in the function, and constraints in it, change no value."""
    mesh = jax.make_mesh((4,), ("d",))
    w, x = arrays(mesh)
    mapped = jax.shard_map(lambda w, x: lax.pmean(loss(w, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    expected = jax.jit(gradient)(w, x)
    np.testing.assert_allclose(remat(jax.grad(mapped), "1MB")(w, x), expected, rtol=1e-4, atol=1e-6)
    auto = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    bound = lambda w, x: loss(w, lax.with_sharding_constraint(x * 1, NamedSharding(auto, P("d"))))
    w, x = arrays(auto)
    planned = remat(jax.grad(bound), of_peak=0.7, compilations=3, effort=0.1)
    np.testing.assert_allclose(planned(w, x), expected, rtol=1e-4, atol=1e-6)
    assert planned.plan(w, x).extra_flops > 0
