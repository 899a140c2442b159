"""Plain code in a `budget` block: the bits of JAX's own interpreter in any budget, with values that act as arrays."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import bits, live, plainly  # noqa: E402  # after importorskip
from _jax_programs import functions, told  # noqa: E402  # after importorskip

from recompute_jax import ap, budget, evaluate  # noqa: E402  # after importorskip
from recompute_jax._eager.live import _staged  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax

pytestmark = pytest.mark.usefixtures("registered_jax")


def left() -> tuple[int, int]:
    """How many arrays there are, and how many bytes they take, without what is known of kinds of operations."""
    _staged.cache_clear()
    return live()


def loss(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jax.nn.gelu(jnp.tanh(x @ weight))
    return jax.nn.relu(x**2).mean()


def weights_and_x() -> Any:
    keys = jax.random.split(jax.random.key(0), 9)
    return [jax.random.normal(key, (16, 16)) / 4 for key in keys[:8]], jax.random.normal(keys[8], (64, 16))


@settings(max_examples=12, phases=[Phase.generate])
@given(functions(effects=True), st.floats(0.2, 1))
def test_same_bits_in_any_budget(case: Any, fraction: float) -> None:
    """The bits are those of JAX's interpreter, within any budget; effects happen once, and nothing is left."""
    fn, args = case
    told()
    expected = bits(plainly(fn, *args))
    effects = told()
    with budget() as block:
        found = block.get(fn(*args))
    assert bits(found) == expected
    assert told() == effects
    del found
    before = left()
    least = max(int(fraction * block.stats().peak), 1)
    while True:
        try:
            with budget(least) as block:
                found = block.get(fn(*args))
            assert bits(found) == expected
            assert told() == effects
            break
        except rc.BudgetError:
            told()
            least *= 2
        finally:
            assert block.stats().peak <= least + block.stats().overshoot
    del found
    check_invariants(block.cache, [])
    assert block.stats().used == 0
    assert left() == before


def test_a_gradient_in_half_of_its_memory() -> None:
    """`jax.value_and_grad` of plain code keeps the budget and recomputes; the bits are those without a block."""
    args = weights_and_x()
    expected = bits(jax.value_and_grad(loss)(*args))
    with budget() as block:
        jax.value_and_grad(loss)(*args)
    half = block.stats().peak // 2
    with budget(half) as block:
        found = jax.value_and_grad(loss)(*args)
    stats = block.stats()
    assert bits(block.get(found)) == expected
    assert stats.peak <= half
    assert stats.overshoot == 0
    assert stats.rematerializations > 0


def test_values_act_as_arrays() -> None:
    """To `isinstance`, NumPy, Python's numbers, `format` and `pickle` a value is the array that JAX would have made."""
    with budget():
        x = jnp.arange(6.0).reshape(2, 3)
        total = x.sum()
        assert isinstance(x, jax.Array)
        assert np.array_equal(np.asarray(x), np.arange(6.0).reshape(2, 3))
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (float(total), int(total), complex(total), total.item()) == (15, 15, 15, 15)
        assert f"{total:.1f}" == "15.0"
        assert repr(total) == str(jnp.float32(15).__repr__())
        assert [float(row.sum()) for row in x] == [3, 12]
        assert x.tobytes() == np.arange(6, dtype=np.float32).tobytes()
        assert np.array_equal(pickle.loads(pickle.dumps(x)), x)
        assert x.block_until_ready() is x
        assert ("large" if total > 10 else "small") == "large"
        assert range(3)[jnp.int32(1) + 1] == 2


def test_what_is_evicted_comes_back() -> None:
    """Memory is given back when it is asked for; a value is recomputed when it is used, in the block or after it."""
    x = jnp.arange(100.0)
    expected = jnp.sin(x) * 2
    with budget() as block:
        y = jnp.sin(x) * 2
        used = block.stats().used
        block.cache.release_memory()
        assert block.stats().used < used
        assert bool((y == expected).all())
        block.cache.release_memory()
    assert bits(jax.jit(jnp.sum)(y)) == bits(jnp.sum(expected))
    assert bits(y + 1) == bits(expected + 1)
    assert block.stats().rematerializations > 0


def test_budget_is_set_at_any_time() -> None:
    """A smaller budget evicts at once; one that nothing fits in raises BudgetError where the operation stands."""
    with budget("1MB") as block:
        values = [jnp.full(1000, float(at)) * 2 for at in range(10)]
        assert block.budget == 1_000_000
        assert block.stats().used >= 40_000
        block.budget = 12_000
        assert block.stats().used <= 12_000
        assert [float(value[0]) for value in values] == [2 * at for at in range(10)]
        with pytest.raises(rc.BudgetError):
            jnp.ones(100_000) * 2
    assert "in memory" in str(block.report())


def test_an_array_counts_once_however_often_it_is_used() -> None:
    """Plain arrays are sources, one each, until nothing needs them."""
    x = jnp.ones(1000)
    with budget() as block:
        made = [x * at for at in range(3)]
        assert 16_000 <= block.stats().used < 17_000
        del made
        for at in range(200):
            jnp.asarray(np.full(1000, at)) + x
        assert block.stats().used <= 4_000


def test_transformations_and_control_flow() -> None:
    """`jit`, `vmap`, `scan`, `cond` and gradients of gradients work on values of a block."""

    def run(x: Any) -> Any:
        y = jax.jit(jnp.sin)(x)
        z = jax.vmap(lambda row: row @ row)(y)
        last, sums = lax.scan(lambda carry, row: (carry + row, carry.sum()), y[0], y)
        chosen = lax.cond(z[0] > 0, jnp.cos, jnp.sin, last)
        twice = jax.grad(lambda at: jax.grad(lambda at: jnp.tanh(at).sum())(at).sum())(last)
        return z, sums, chosen, twice, y.at[0].set(1.0)

    x = jax.random.normal(jax.random.key(1), (4, 8))
    expected = run(x)
    with budget() as block:
        found = block.get(run(x * 1))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_blocks_within_blocks() -> None:
    """An inner block takes values of the outer one; after it, and after an error, the outer one goes on."""
    with budget() as outer:
        x = jnp.arange(10.0) * 2
        with budget() as inner:
            y = x + 1
            with pytest.raises(TypeError, match="shapes"):
                x + jnp.ones(3)
        z = y + x
        assert outer.stats().operations > inner.stats().operations > 0
    assert bits(outer.get(z)) == bits(jnp.arange(10.0) * 4 + 1)
    with pytest.raises(TypeError, match="shapes"), outer:
        x + jnp.ones(3)
    assert not isinstance(jnp.sin(1.0), jax.core.Tracer)


def test_a_block_is_no_part_of_what_is_traced() -> None:
    """It is refused inside of `jit` and `grad`, and the cache refuses the values of a block; both errors say why."""

    def within(x: Any) -> Any:
        with budget():
            return jnp.sin(x).sum()

    for under in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(RuntimeError, match="cannot be opened while JAX traces"):
            under(within)(jnp.ones((3, 3)) if under is jax.vmap else 1.0)
    with budget(budget="1MB") as block:
        x = jnp.arange(3.0) * 2
        for use in (rc.pure, lambda x: rc.ap(jnp.sin, x), lambda x: ap(jnp.sin, x), lambda x: evaluate(jnp.sin, x)):
            with pytest.raises(TypeError, match=r"of a recompute_jax\.budget block .* block\.get\(x\)"):
                use(x)
        y = evaluate(jnp.sin, block.get(x))
    assert bits(y) == bits(jnp.sin(jnp.arange(3.0) * 2))


def test_plain_arrays_are_iterated_over_in_a_block() -> None:
    """The rows of a plain array are values of the block, however many there are."""
    x = jnp.arange(402.0).reshape(201, 2)
    with budget() as block:
        rows = list(x)
        assert block.stats().operations > 0
    assert bits(block.get(rows)) == bits(list(x))


def test_values_are_arrays_to_other_threads_and_in_callbacks() -> None:
    """What runs in another thread, or is called by an operation, computes with a block's values outside the block."""
    x = jnp.arange(10.0)
    uses: list[Any] = [
        lambda y: y + 1,
        lambda y: jax.jit(jnp.sin)(y),
        lambda y: jax.grad(lambda scale: (scale * y).sum())(jnp.ones(())),
        lambda y: jax.jit(lambda: y[2:])(),
    ]
    expected = bits([use(x * 2) for use in uses])
    with budget() as block, ThreadPoolExecutor(1) as pool:
        y = x * 2
        operations = block.stats().operations
        elsewhere = [pool.submit(use, y).result() for use in uses]
        assert block.stats().operations == operations
        assert not any(isinstance(value, jax.core.Tracer) for value in elsewhere)
        within = [jax.pure_callback(lambda use=use: np.asarray(use(y)), jax.typeof(use(y))) for use in uses]
    assert bits(elsewhere) == expected
    assert bits(within) == expected


def test_what_an_array_in_memory_has_is_refused_with_the_cure() -> None:
    """Where JAX needs an array in memory the error says that this is a value of a block, and how to get the array."""
    with budget() as block:
        y = jnp.arange(10.0) * 2
        for use in (lambda: y.devices(), lambda: y.sharding, lambda: np.from_dlpack(y), lambda: y.addressable_shards):
            with pytest.raises((TypeError, AttributeError), match=r"a recompute_jax\.budget block .*block\.get\(x\)"):
                use()
        assert block.get(y).devices()


def test_values_are_put_on_devices_after_the_block() -> None:
    """`jax.device_put`, and functions that were compiled ahead of time, take the arrays that values stand for."""
    x = jnp.arange(10.0)
    with budget():
        y, key = x * 2, jax.random.split(jax.random.key(0))[1]
    placed = jax.device_put({"y": y, "key": key, "x": x}, jax.devices()[0])
    assert placed["y"].devices() == {jax.devices()[0]}
    assert bits(placed) == bits({"y": x * 2, "key": jax.random.split(jax.random.key(0))[1], "x": x})
    assert bits(jax.jit(jnp.sin).lower(y).compile()(y)) == bits(jax.jit(jnp.sin)(x * 2))
