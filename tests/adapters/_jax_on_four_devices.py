"""Tests for a process with four CPU devices; test_jax_devices.py runs them in one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _jax_oracle import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed import unpacked

import recompute as rc
from recompute.testing import check_adapter, check_invariants
from recompute_jax import adapter, ap, budget, evaluate, op_by_op

DEVICES = jax.devices()
MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))
ROWS, COLUMNS, EVERYWHERE = (NamedSharding(MESH, spec) for spec in (P("i"), P(None, "i"), P()))


pytestmark = pytest.mark.usefixtures("registered_jax")


@pytest.fixture
def x() -> Any:
    """256 bytes, of which each device has 64."""
    return jax.device_put(jnp.arange(64.0).reshape(8, 8), ROWS)


def used(cache: rc.Cache) -> dict[str, int]:
    return {pool.device: pool.used for pool in cache.stats().pools if pool.used}


def used_at_most(block: budget) -> int:
    """Bytes on each device."""
    return max(pool.peak for pool in block.stats().pools if pool.device == "cpu:0-3")


def where(tree: Any) -> list[Any]:
    return [(leaf.sharding, leaf.committed) for leaf in jax.tree.leaves(tree)]


def test_what_is_made_of_nothing_gets_room_where_it_will_be() -> None:
    """An operation without arguments whose size is known makes room on the default device, and nowhere else."""

    @op_by_op
    def total(x: Any) -> Any:
        return (x + jnp.ones((50,)) + jax.lax.iota("float32", 50)).sum()

    for device in DEVICES[:2]:
        with rc.Cache(1000) as cache, jax.default_device(device):
            total(jnp.zeros(50))
        assert [pool.device for pool in cache.stats().pools] == [f"cpu:{device.id}"]


def test_arrays_count_where_they_lie() -> None:
    """On one device, or on each of several, whose budget is that of each."""
    assert adapter.devices() == [f"cpu:{number}" for number in range(4)]
    numbers = jnp.arange(100.0)
    with rc.Cache({"cpu:0-3": 1000, "cpu:1": 1000}) as cache:
        split, whole = (rc.pure(jax.device_put(numbers, row)) for row in (ROWS, EVERYWHERE))
        here = rc.pure(jax.device_put(numbers[:10], DEVICES[1]))
        keys = rc.pure(jax.device_put(jax.random.split(jax.random.key(0), 8), ROWS))
        assert used(cache) == {"cpu:0-3": 100 + 400 + 16, "cpu:1": 40}
        made = [rc.ap(jnp.add, split, number) for number in range(20)]
        (pool,) = [pool for pool in cache.stats().pools if pool.device == "cpu:0-3"]
        assert pool.overshoot <= 100  # the first one's size was not known
        assert pool.peak <= 1000 + pool.overshoot
        assert [float(value.get()[1]) for value in made] == [1.0 + number for number in range(20)]
        check_invariants(cache, [split, whole, here, keys, *made])
    gap = jax.sharding.Mesh([DEVICES[0], DEVICES[2]], ("i",))
    assert adapter.device(jax.device_put(jnp.ones(4), NamedSharding(gap, P("i")))) == "cpu:0+2"


@pytest.mark.parametrize("sharding", [ROWS, COLUMNS, EVERYWHERE, DEVICES[2]])
def test_conformance(sharding: Any) -> None:
    """Arrays on several devices, or committed to one, keep what an adapter promises."""
    makes = [lambda dtype=dtype: jax.device_put(jnp.ones((8, 4), dtype), sharding) for dtype in ("float32", "int8")]
    check_adapter(adapter, makes, view=lambda array: array[...])


def spread(a: Any) -> Any:
    """Moves about: split by rows, then by columns, multiplied with what all devices have, on each device, and back."""
    by_columns = jax.lax.with_sharding_constraint(jnp.sin(a), COLUMNS)
    summed = jax.shard_map(lambda part: jax.lax.psum(part * 2, "i"), mesh=MESH, in_specs=P("i", None), out_specs=P())
    jitted = jax.jit(jnp.cos, out_shardings=EVERYWHERE)
    return by_columns @ a, summed(a), jitted(a) + 1, a.sum(), jax.random.normal(jax.random.key(1), (8, 8)) + a


def test_spread_computations_are_recomputed(x: Any) -> None:
    """Results lie where those of the function do, with the same bits, and do so again when they were evicted."""
    expected = jax.jit(spread)(x)
    with rc.Cache() as cache:
        found = op_by_op(spread, recomputable=True)(x)
        before = [value.get() for value in found]
        for one, other in zip(before, expected, strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
            assert jnp.allclose(one, other, rtol=1e-5)
        places, content = where(before), bits(before)
        del before, one
        cache.release_memory(device="cpu:0-3")
        assert not any(value.resident for value in found)
        assert used(cache) == {"cpu:0-3": 64}
        again = [value.get() for value in found]
        assert (where(again), bits(again)) == (places, content)
        check_invariants(cache, found)


def test_budget_of_each_device(x: Any) -> None:
    """A chain of split arrays runs within few bytes on each device, but for the first time a size is met."""

    def backwards(a: Any) -> Any:
        return sum([jnp.sin(a + number) for number in range(10)][::-1])

    evaluated = op_by_op(backwards)
    with rc.Cache() as cache:
        expected = evaluated(x)
        assert used(cache) == {"cpu:0-3": 64}  # the result, held by the caller
    with rc.Cache({"cpu:0-3": 64 * 6}) as cache:
        found = evaluated(x)
        stats = cache.stats()
    assert stats.rematerializations > 0
    assert stats.overshoot <= 64
    assert stats.peak <= 64 * 6 + stats.overshoot
    assert (where(found), bits(found)) == (where(expected), bits(expected))


def test_explicit_meshes(x: Any) -> None:
    """With shardings in types too; also when an argument is evicted, and outside `jax.set_mesh`."""
    y = jax.device_put(x, NamedSharding(EXPLICIT, P("i", None)))
    with rc.Cache() as cache:
        with jax.set_mesh(EXPLICIT):
            argument = rc.ap(jnp.sin, rc.pure(y))
            argument.evict()
            found = op_by_op(lambda a: (a * 2) @ a.T.sum(0), recomputable=True)(argument)
            expected = jax.jit(lambda a: (a * 2) @ a.T.sum(0))(argument.get())
        assert found.get().aval == expected.aval
        cache.release_memory(device="cpu:0-3")
        assert not found.resident
        assert found.get().aval == expected.aval
        assert jnp.allclose(found.get(), expected, rtol=1e-5)


def test_committed_and_default_devices() -> None:
    """Results stay on the device of their arguments, or on what was the default one, wherever they are recomputed."""
    x = jnp.arange(8.0)
    function = op_by_op(lambda a: (jnp.sin(a) + jnp.arange(8.0), jnp.ones(3)), recomputable=True)
    with rc.Cache() as cache:
        with jax.default_device(DEVICES[2]):
            there = function(x)
        here = function(x)
        committed = function(jax.device_put(x, DEVICES[3]))
        found = [*there, *here, *committed]
        places = where([value.get() for value in found])
        assert [next(iter(value.get().devices())).id for value in found] == [2, 2, 0, 0, 3, 0]
        for device in adapter.devices():
            cache.release_memory(device=device)
        assert not any(value.resident for value in found)
        with jax.default_device(DEVICES[1]):
            assert where([value.get() for value in found]) == places
        assert "cpu:1" not in used(cache)


def test_moves_between_devices() -> None:
    """`device_put` in a function takes room where it puts, in the budget there."""
    x = jnp.arange(100.0)
    away = op_by_op(lambda a: jax.device_put(jnp.sin(a), DEVICES[3]) * 2, recomputable=True)
    with rc.Cache({"cpu:0": 4000, "cpu:3": 1000}) as cache:
        made = [away(x + number) for number in range(4)]
        (pool,) = [pool for pool in cache.stats().pools if pool.device == "cpu:3"]
        assert pool.peak <= 1000 + pool.overshoot
        assert pool.overshoot <= 400  # the first one's
        for number, value in enumerate(made):
            assert value.get().devices() == {DEVICES[3]}
            assert bits(value.get()) == bits(jax.device_put(jnp.sin(x + number), DEVICES[3]) * 2)


def test_trees_and_scans(x: Any) -> None:
    """`ap` of trees, and scans step by step, keep what is split as it is."""

    def steps(a: Any) -> Any:
        return jax.lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry), a, jnp.ones((5, 8, 8)))

    with rc.Cache() as cache:
        total, parts = ap(lambda tree: (tree["a"].sum(), {"b": tree["a"] * 2}), {"a": rc.pure(x)})
        assert parts["b"].evict()
        assert parts["b"].get().sharding == x.sharding
        assert float(total.get()) == 2016.0
        last, rows = op_by_op(steps, recomputable=True, unroll_scans=True)(x)
        assert last.get().sharding.is_equivalent_to(ROWS, 2)
        cache.release_memory(device="cpu:0-3")
        assert jnp.allclose(rows.get(), steps(x)[1], rtol=1e-5)


def test_shard_map_in_a_block(x: Any) -> None:
    """It is one operation, which takes values of the block; so is its part in a gradient. Both are recomputed."""
    over_rows = partial(jax.shard_map, mesh=MESH, in_specs=P("i"), out_specs=P("i"))

    def loss(a: Any) -> Any:
        scale = jnp.sin(a[0])
        for _ in range(6):
            a = over_rows(lambda part: jnp.tanh(part * jax.lax.psum(part.sum(), "i") + scale))(a)
        return over_rows(lambda part: part**2)(a).sum()

    expected = jax.value_and_grad(loss)(x)
    with budget() as block:
        jax.value_and_grad(loss)(x)
        peak = used_at_most(block)
    with budget({"cpu:0-3": peak * 3 // 4}) as block:
        found = block.get(jax.value_and_grad(loss)(x))
    stats = block.stats()
    assert stats.rematerializations > 0
    assert used_at_most(block) <= peak * 3 // 4 + stats.overshoot
    for one, other in zip(found, expected, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert jnp.allclose(one, other, rtol=1e-5)


def test_devices_that_do_not_go_together() -> None:
    """Operands on two devices are JAX's error, with the place in the function."""
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        evaluate(lambda x, y: x + y, jax.device_put(1.0, DEVICES[1]), jax.device_put(1.0, DEVICES[2]))
    assert any(f"add ({__file__}:" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("sharding", [ROWS, COLUMNS, EVERYWHERE, DEVICES[2]])
def test_arrays_come_back_to_where_they_were(sharding: Any) -> None:
    """From their bytes: numbers and keys, on several devices or on one, committed or made there by default."""
    makes = [
        lambda: jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding),
        lambda: jax.device_put(jax.random.split(jax.random.key(0), (8, 8)), sharding),
    ]
    for make in makes:
        array, back = make(), unpacked(make())
        assert where(back) == where(array)
        assert (back.aval, bits(back)) == (array.aval, bits(array))
    with jax.default_device(DEVICES[3]):
        array = jnp.arange(3.0) * 2
    assert where(unpacked(array)) == where(array) == [(array.sharding, False)]
