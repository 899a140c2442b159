"""Any function that JAX can trace, run equation by equation: the bits of its own interpreter, in any budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute.extend import running
from recompute.testing import check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import bits, live, plainly  # noqa: E402  # after importorskip
from _jax_programs import Function, Step, functions, told  # noqa: E402  # after importorskip

from recompute_jax import op_by_op  # noqa: E402  # after importorskip
from recompute_jax._eager.kernels import Kernel  # noqa: E402  # after importorskip

lax = jax.lax


pytestmark = pytest.mark.usefixtures("registered_jax")


@contextmanager
def evictions(random: Random) -> Iterator[None]:
    """Now and then an operation makes the cache evict, some of it or all; at most 50 times, or it would never end."""
    run, left = Kernel.run, iter(range(50))

    def interfering(kernel: Kernel, *how: Any, **more: Any) -> Any:
        frame: Any = running()
        if frame is not None and random.random() < 0.2 and next(left, None) is not None:
            frame.engine.cache.release_memory(random.choice([None, 8]))
        return run(kernel, *how, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "run", interfering)
        yield


POLICIES = ["needed", "dtr", "dtr-local", "lru", "random"]


@settings(max_examples=12)
@given(functions(effects=True), st.floats(0.2, 1), st.integers(0, 2**32), st.sampled_from(POLICIES))
def test_same_bits_in_any_budget(case: Any, fraction: float, seed: int, policy: str) -> None:
    """The bits are those of JAX's interpreter, within any budget, whatever is evicted when; effects happen once."""
    fn, args = case
    told()
    expected = bits(plainly(fn, *args))
    effects = told()
    evaluated = op_by_op(fn)
    with rc.Cache() as cache:
        assert bits(evaluated(*args)) == expected
        assert told() == effects
        peak = cache.stats().peak
    before = live()
    budget = max(int(fraction * peak), args[0].nbytes) + 1
    with evictions(Random(seed)):
        while True:
            with rc.Cache(budget, policy=policy) as cache:
                x = rc.ap(lambda: jax.numpy.array(args[0], copy=True))
                x.evict()
                try:
                    assert bits(evaluated(x, *args[1:])) == expected
                    assert told() == effects
                    break
                except rc.BudgetError:
                    told()
                    budget *= 2
                finally:
                    assert cache.stats().peak <= budget
                    assert cache.stats().overshoot == 0
                    check_invariants(cache, [x])
    del x
    check_invariants(cache, [])
    stats = cache.stats()
    assert (stats.used, [pool.candidates for pool in stats.pools if pool.candidates]) == (0, [])
    assert live() == before


LAST_BIT = Function((Step("reverse scan of", inner=(Step("sin"),)), Step("sin"), Step("note")))
"""XLA rounds the scan as a whole otherwise than its equations one by one, which the callback after it sees."""


@settings(max_examples=8)
@example((LAST_BIT, (jax.numpy.linspace(-1, 2, 6).reshape(2, 3), {}, jax.random.key(0))), 0, False)
@given(functions(most=4, effects=True), st.integers(0, 2**32), st.booleans())
def test_evicted_results_come_back(case: Any, seed: int, x64: bool) -> None:
    """Results keep their bits, through scans step by step too, and out of `enable_x64`; no effect is repeated.

    The bits, also those that callbacks see, are those of the same equations in a cache that evicts nothing. A scan that
    JAX compiles as a whole is close: XLA fuses its body.
    """
    fn, args = case
    with jax.enable_x64(x64):
        told()
        plain = plainly(fn, *args)
        sizes = sorted(map(len, told()))
        with rc.Cache():
            stepwise = op_by_op(fn, unroll_scans=True)(*args)
        effects = told()
    assert sorted(map(len, effects)) == sizes
    assert jax.tree.structure(stepwise) == jax.tree.structure(plain)
    for one, other in zip(jax.tree.leaves(stepwise), jax.tree.leaves(plain), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jax.numpy.issubdtype(one.dtype, np.floating):
            np.testing.assert_allclose(*map(np.float32, (one, other)), rtol=0.02, atol=0.02)
    expected = bits(stepwise)
    for cache in (rc.Cache(), rc.Cache(verify=True)):
        with cache, evictions(Random(seed)):
            with jax.enable_x64(x64):
                results = op_by_op(fn, unroll_scans=True, recomputable=True)(*args)
            assert bits([leaf.get() for leaf in jax.tree.leaves(results)]) == expected
            assert told() == effects
            cache.release_memory()
            assert bits([leaf.get() for leaf in jax.tree.leaves(results)]) == expected
            assert told() == []
            check_invariants(cache, jax.tree.leaves(results))
            assert jax.tree.structure(results) == jax.tree.structure(plain)


@settings(max_examples=6)
@given(functions(most=4, smooth=True))
def test_close_to_jit(case: Any) -> None:
    """Under jit, where XLA fuses, results are close."""
    fn, args = case
    with rc.Cache():
        found, expected = op_by_op(fn)(*args), jax.jit(fn)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.aval == other.aval
        if not jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
