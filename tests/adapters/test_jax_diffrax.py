"""diffrax within a budget: gradients are those of its own adjoint, and checkpoints take no more than the budget."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
diffrax = pytest.importorskip("diffrax", reason="the extra 'diffrax' is not installed")

import jax.numpy as jnp  # noqa: E402  # after importorskip
from _jax_oracle import FOR_VALUES  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import recompute as rc  # noqa: E402
from recompute_jax.diffrax import BudgetAdjoint  # noqa: E402

FOR_BYTES = {"xla_backend_optimization_level": 0}  # of LLVM, which works when buffers are placed
SIZE = 1000
STEPS = 200
SOLVERS: dict[str, Any] = {"euler": diffrax.Euler(), "tsit5": diffrax.Tsit5(), "dopri8": diffrax.Dopri8()}


def solve(y: Any, adjoint: Any, solver: Any, max_steps: int | None = 4096, saveat: Any = None) -> Any:
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: -jnp.sin(y) * t),
        solver,
        0.0,
        1.0,
        1.0 / STEPS,
        y,
        saveat=saveat or diffrax.SaveAt(t1=True),
        adjoint=adjoint,
        max_steps=max_steps,
    ).ys


def gradient(adjoint: Any, solver: Any, made: Any = FOR_VALUES, **options: Any) -> Any:
    return jax.jit(jax.grad(lambda y: (solve(y, adjoint, solver, **options) ** 2).sum()), compiler_options=made)


def temporaries(adjoint: Any, solver: Any, **options: Any) -> int:
    """Bytes that XLA needs for a gradient."""
    lowered = gradient(adjoint, solver, FOR_BYTES, **options).lower(jnp.ones(SIZE))
    return int(lowered.compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize("name", SOLVERS)
def test_checkpoints_stay_within_the_budget(name: str) -> None:
    """More than one step needs, XLA takes no more than the budget, and a good part of it, with any solver."""
    alone = temporaries(diffrax.RecursiveCheckpointAdjoint(checkpoints=1), SOLVERS[name])
    for budget in (100_000, 400_000, 1_600_000):
        taken = temporaries(BudgetAdjoint(budget), SOLVERS[name]) - alone
        assert 0.3 * budget < taken <= budget, (budget, taken)


@settings(max_examples=5)
@given(st.sampled_from(sorted(SOLVERS)), st.integers(60_000, 3_000_000), st.booleans())
def test_gradients_are_those_of_diffrax(name: str, budget: int, several: bool) -> None:
    """With few checkpoints or many, and whatever is saved, they are close to those with all steps kept."""
    saveat = diffrax.SaveAt(ts=jnp.linspace(0, 1, 5)) if several else diffrax.SaveAt(t1=True)
    y = jnp.linspace(0.0, 3.0, SIZE)
    made = gradient(BudgetAdjoint(budget), SOLVERS[name], saveat=saveat)(y)
    whole = gradient(diffrax.RecursiveCheckpointAdjoint(checkpoints=4096), SOLVERS[name], saveat=saveat)(y)
    assert jnp.allclose(made, whole, rtol=1e-5, atol=1e-6)


def test_all_steps_are_kept_where_they_fit() -> None:
    """Then none is computed twice, and no checkpoint is counted twice."""
    asked: list[int] = []

    class Asked(BudgetAdjoint):
        def checkpoints(self, init_state: Any, max_steps: int | None) -> int:
            asked.append(super().checkpoints(init_state, max_steps))
            return asked[-1]

    for budget in ("100MB", 800_000, 400_000):
        gradient(Asked(budget), SOLVERS["euler"], max_steps=STEPS + 10).lower(jnp.ones(SIZE))
    assert asked[0] == STEPS + 10
    assert asked[1] < STEPS / 2
    assert 2 * asked[2] in (asked[1], asked[1] - 1)


def test_what_cannot_fit_is_refused() -> None:
    """An error says what one checkpoint takes; a budget that is none, what a budget is."""
    with pytest.raises(rc.BudgetError, match=r"one checkpoint of this solver takes 8\.\d+ kB"):
        gradient(BudgetAdjoint(1000), SOLVERS["euler"])(jnp.ones(SIZE))
    with pytest.raises((ValueError, TypeError)):
        BudgetAdjoint("much")
    assert BudgetAdjoint("2GB").budget == 2_000_000_000
    assert BudgetAdjoint("2GB") == BudgetAdjoint(2_000_000_000)


def test_the_number_of_steps_need_not_be_known() -> None:
    """Without `max_steps`, where diffrax by itself needs a number of checkpoints."""
    free = gradient(BudgetAdjoint(400_000), SOLVERS["tsit5"], max_steps=None)(jnp.ones(SIZE))
    bounded = gradient(BudgetAdjoint(400_000), SOLVERS["tsit5"])(jnp.ones(SIZE))
    assert jnp.allclose(free, bounded)
