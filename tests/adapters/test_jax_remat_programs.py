"""Any function that JAX can trace, as a plan runs it: the values of plain jit, whatever runs again behind what gate."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute import planners
from recompute.planners import PlanError

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_programs import functions  # noqa: E402  # after importorskip
from jax.extend.core import jaxpr_as_fun  # noqa: E402  # after importorskip

from recompute_jax._program.emit import GATES, regions  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip
from recompute_jax._remat.candidates import Candidates, Planning  # noqa: E402  # after importorskip
from recompute_jax._remat.recipe import (  # noqa: E402  # after importorskip
    Candidate,  # after importorskip
    Recipe,
    follow,
)


@settings(max_examples=10, deadline=None)
@given(functions(smooth=True), st.floats(0, 1), st.sampled_from(GATES), st.integers(1, 4))
def test_values_are_those_of_jit(case: Any, share: float, gate: Any, length: int) -> None:
    """Under any plan between the least memory and all of it, in regions of any length, the values stay."""
    fn, args = case
    flat = flatten(jax.make_jaxpr(fn)(*args))
    candidates = Candidates(flat, Planning("generated", gate))
    least = planners.least(candidates.plain.program)
    try:
        candidate = candidates.candidate(int(least + share * (candidates.predicted - least)), 0.05)
    except PlanError:
        candidate = candidates.least(0.05)
    effects = [number for number, part in enumerate(candidate.segments.segments) if part.once]
    assert [candidate.sequence.count(number) for number in effects] == [1] * len(effects), "effects happen once"
    steps = regions(candidate.segments, candidate.sequence, candidate.plan.peak, length)
    emitted = candidate.emitted(steps, gate)
    recipe = Recipe.read(json.loads(json.dumps(asdict(candidate.recipe(steps, gate)))))
    assert str(follow(flat, recipe, "generated")[0]) == str(emitted), "a saved plan is the same program"
    found = jax.jit(jaxpr_as_fun(emitted))(*jax.tree.leaves(args))
    for one, two in zip(jax.tree.leaves(jax.jit(fn)(*args)), found, strict=True):
        assert one.aval == two.aval
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-4)


def test_an_effect_makes_nothing_else_run_again() -> None:
    """A function that tells somebody is planned as if it did not: what runs again costs as much."""

    def candidate(tells: bool) -> Candidate:
        def loss(x: Any, w: Any) -> Any:
            for number in range(8):
                x = jax.numpy.tanh(x @ w)
                if tells and number == 2:
                    jax.debug.callback(lambda value: None, x[0, 0])
            return (x**2).mean()

        given = jax.numpy.ones((64, 8)), jax.numpy.ones((8, 8))
        flat = flatten(jax.make_jaxpr(jax.grad(loss, 1))(*given))
        candidates = Candidates(flat, Planning("loss", "branch"))
        return candidates.candidate(candidates.predicted // 2, 0.02)

    expected, found = candidate(tells=False), candidate(tells=True)
    assert expected.overhead > 1.1
    assert found.overhead == pytest.approx(expected.overhead, rel=0.05)
