"""Plans that move values to the memory of the host, by the planner's count: XLA on CPU has no such memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from jax.extend.core import jaxpr_as_fun  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip
from recompute_jax._remat.candidates import Candidates, Planning  # noqa: E402  # after importorskip
from recompute_jax._remat.options import host_memory  # noqa: E402  # after importorskip
from recompute_jax._remat.recipe import Candidate, follow  # noqa: E402  # after importorskip

jnp = jax.numpy

WIDTH = 1024  # a product of such matrices costs more than to move its result


def loss(w: Any, x: Any) -> Any:
    """Layers that are dear for their size."""
    for _ in range(10):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def traced() -> tuple[Any, tuple[Any, Any]]:
    one, two = jax.random.split(jax.random.key(1))
    args = jax.random.normal(one, (WIDTH, WIDTH)) / WIDTH**0.5, jax.random.normal(two, (4, WIDTH))
    return flatten(jax.make_jaxpr(jax.grad(loss, argnums=1))(*args)), args


def planned(flat: Any, share: float, gate: Any, offload: bool) -> Candidate:
    candidates = Candidates(flat, Planning("loss", gate, offload=offload))
    return candidates.candidate(int(share * candidates.predicted), 0.02)


def test_moving_is_cheaper_than_repeating_what_is_dear() -> None:
    """Where it costs less, values move: within the same bytes, at a smaller overhead than without."""
    flat, _ = traced()
    without, found = (planned(flat, 0.5, "barrier", offload) for offload in (False, True))
    assert found.moved
    assert not without.moved
    assert found.overhead < without.overhead
    assert found.plan.peak <= found.plan.budget


@pytest.mark.parametrize("gate", ["branch", "barrier"])
def test_a_plan_with_moves_is_the_same_function(gate: Any) -> None:
    """Its equations move values there and back, compute the gradient, and are made again from the recipe."""
    flat, args = traced()
    found = planned(flat, 0.5, gate, True)
    steps = found.regions(found.plan.budget, 4)
    emitted = found.emitted(steps, gate)
    assert "f32<host>[4,1024]" in str(emitted)
    followed, _ = follow(flat, found.recipe(steps, gate), "loss")
    assert str(followed) == str(emitted)
    result = jax.jit(jaxpr_as_fun(emitted))(*args)
    np.testing.assert_allclose(result[0], jax.grad(loss, argnums=1)(*args), rtol=1e-4, atol=1e-6)


def test_the_cpu_says_that_nothing_moves() -> None:
    """With tiers="host" on CPU results are those without, and a warning says why."""
    x = jnp.ones((8, 4))
    with pytest.warns(UserWarning, match="pinned_host is the same memory"):
        found = remat(jnp.sin, "1MB", tiers="host")(x)
    np.testing.assert_allclose(found, jnp.sin(x), rtol=1e-6)


def test_a_backend_without_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading needs `pinned_host`: the error names the backend and what memory it has."""
    memory = SimpleNamespace(kind="device")
    device = SimpleNamespace(platform="toy", addressable_memories=lambda: [memory])
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(ValueError, match="which the toy backend does not have"):
        host_memory()
