"""Donated arguments of a planned function: no copies of them, and errors that say what donation costs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from recompute import BudgetError

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._program.emit import regions, updates_apart  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip
from recompute_jax._program.segments import kind, segment  # noqa: E402  # after importorskip

jnp = jax.numpy


def step(state: Any, x: Any) -> Any:
    """A step with momentum: what is donated is read until its update."""

    def loss(weights: Any) -> Any:
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight) + 0.1 * y
        return (y**2).mean()

    weights, momenta = state
    slopes = jax.grad(loss)(weights)
    momenta = [0.9 * momentum + slope for momentum, slope in zip(momenta, slopes, strict=True)]
    return [weight - 0.1 * moved for weight, moved in zip(weights, momenta, strict=True)], momenta


def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(1), 7)
    weights = [jax.random.normal(key, (64, 64)) / 8 for key in keys[:6]]
    return (weights, [jnp.zeros_like(weight) for weight in weights]), jax.random.normal(keys[6], (256, 64))


@pytest.mark.parametrize("length", [1, 4, 16])
def test_updates_come_out_of_their_regions(length: int) -> None:
    """Each run is in one region as before; what is behind no gate is elementwise, and read by nothing that is not."""
    segments = segment(flatten(jax.make_jaxpr(step)(*arguments())), "step")
    order = list(range(len(segments.segments)))
    found = updates_apart(segments, regions(segments, order, 1 << 40, length))
    assert sorted(number for region in found for number in region.runs) == order
    apart = [segments.segments[number] for region in found if region.is_open for number in region.runs]
    assert len(apart) == 12
    assert all(kind(eqn) != "heavy" for part in apart for eqn in part.equations)
    gated = {
        var
        for region in found
        if not region.is_open
        for number in region.runs
        for var in segments.segments[number].inputs
    }
    assert gated.isdisjoint(var for part in apart for var in part.outputs)


def test_a_donated_step_is_the_same_step() -> None:
    """Its results are those of the function, and each takes the memory of an argument."""
    state, x = arguments()
    expected = jax.jit(step)(state, x)
    planned = remat(step, of_peak=0.8, donate_argnums=0, compilations=3)
    compiled = planned.lower(state, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert planned.plan(state, x).saved.recipe.free
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(planned(state, x)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", ["number", "name"])
def test_what_is_donated_is_known_by_number_and_by_name(by: str) -> None:
    """As in `jax.jit`, a number donates what is passed by name, and a name what is passed by place: plans know it."""
    donated = {"number": {"donate_argnums": 0}, "name": {"donate_argnames": "state"}}[by]
    state, x = arguments()
    places, names = ((), {"state": state, "x": x}) if by == "number" else ((state, x), {})
    within = remat(step, of_peak=0.8, compilations=3, **donated)
    plan = within.plan(*places, **names)
    memory = within.lower(*places, **names).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes == plan.compiled <= plan.budget


@pytest.mark.slow
def test_too_little_says_what_donation_costs() -> None:
    """The least is more with donation: the error says so, and why."""
    least = []
    for donated in ((), (0,)):
        with pytest.raises(BudgetError) as caught:
            remat(step, 1000, donate_argnums=donated, compilations=1, effort=0.1)(*arguments())
        least.append(int(re.search(r"needs ([\d,]+) bytes", str(caught.value))[1].replace(",", "")))
        assert ("of arguments are donated" in str(caught.value)) == bool(donated)
    assert least[0] < least[1]
