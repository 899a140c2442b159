"""Any function that JAX can trace, as a plan runs it: the values of plain jit, whatever runs again behind what gate."""

from __future__ import annotations

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

from recompute_jax._draft import Drafting  # noqa: E402  # after importorskip
from recompute_jax._emit import regions  # noqa: E402  # after importorskip
from recompute_jax._gates import GATES  # noqa: E402  # after importorskip
from recompute_jax._jaxpr import flatten  # noqa: E402  # after importorskip


@settings(max_examples=10, deadline=None)
@given(functions(smooth=True), st.floats(0, 1), st.sampled_from(GATES), st.integers(1, 4))
def test_values_are_those_of_jit(case: Any, share: float, gate: Any, length: int) -> None:
    """Under any plan between the least memory and all of it, in regions of any length, the values stay."""
    fn, args = case
    flat = flatten(jax.make_jaxpr(fn)(*args), inline_custom=False)
    drafting = Drafting(flat, "generated", gate, 0, None)
    least = planners.least(drafting.plain.program)
    try:
        draft = drafting.draft(int(least + share * (drafting.predicted - least)), 0.05)
    except PlanError:
        draft = drafting.least(0.05)
    steps = regions(draft.segments, draft.sequence, draft.plan.peak, length)
    emitted = draft.emitted(steps, gate)
    found = jax.jit(jaxpr_as_fun(emitted))(*draft.looped.constants, *jax.tree.leaves(args))
    for one, two in zip(jax.tree.leaves(jax.jit(fn)(*args)), found, strict=True):
        assert one.aval == two.aval
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-4)
