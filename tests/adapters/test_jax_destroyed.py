"""JAX's arrays that the program deletes, or donates to a jitted function: made again, not counted, or named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import EventLog, check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

import recompute_jax  # noqa: E402  # after importorskip

jnp = jax.numpy

pytestmark = pytest.mark.usefixtures("registered_jax")

eats = jax.jit(lambda x: x * 2, donate_argnums=0)


def delete(array: Any) -> None:
    array.delete()


def donate(array: Any) -> None:
    eats(array).block_until_ready()
    assert array.is_deleted()


@pytest.fixture(params=[delete, donate])
def destroy(request: pytest.FixtureRequest) -> Any:
    """Both ways."""
    return request.param


def test_made_again(destroy: Callable[[Any], None]) -> None:
    """What `get` returned is destroyed: it is not counted any more, and made again when somebody asks."""
    with rc.Cache() as cache, EventLog(cache) as log:
        x = rc.ap(jnp.arange, 100.0)
        got = x.get()
        destroy(got)
        assert cache.stats().used == 0
        assert not x.resident
        assert x.get().tolist() == list(range(100))
        assert cache.stats().used == 400
        assert [type(event).__name__ for event in log].count("Evicted") == 1
        check_invariants(cache, [x])
        assert got.is_deleted()


def test_without_a_look_at_the_books(destroy: Callable[[Any], None]) -> None:
    """The next `get` and the next operation see it themselves."""
    with rc.Cache() as cache:
        x = rc.ap(jnp.arange, 3.0)
        destroy(x.get())
        assert rc.ap(jnp.sum, x).get() == 3
        destroy(x.get())
        assert x.get().tolist() == [0, 1, 2]
        assert cache.stats().rematerializations == 2


def test_far_above(destroy: Callable[[Any], None]) -> None:
    """An evicted value is made from one that was destroyed, which comes back before it."""
    with rc.Cache() as cache:
        x = rc.ap(jnp.arange, 3.0)
        values = [x]
        for _ in range(3):
            values.append(rc.ap(jnp.add, values[-1], 1))
        destroy(x.get())
        for value in values[1:]:
            value.evict()
        assert values[-1].get().tolist() == [3, 4, 5]
        assert cache.stats().rematerializations == 4
        check_invariants(cache, values)


def test_held_and_destroyed(destroy: Callable[[Any], None]) -> None:
    """What was evicted while somebody held it counts until it is destroyed, and is not taken back after that."""
    with rc.Cache() as cache:
        x = rc.ap(jnp.arange, 100.0)
        got = x.get()
        x.evict()
        assert cache.stats().held == 400
        destroy(got)
        assert (cache.stats().held, cache.stats().used) == (0, 0)
        assert x.get().tolist() == list(range(100))
        assert cache.stats().recoveries == 0


def test_donated_by_an_operation() -> None:
    """A function may donate what it takes: others that take it find it again, also when all of them are repeated."""
    with rc.Cache() as cache:
        x = rc.ap(jnp.arange, 100.0)
        y = rc.ap(jnp.add, x, 1)
        z = rc.ap(eats, x)
        assert not x.resident
        assert cache.stats().used == 800
        for value in (y, z):
            value.evict()
        both = rc.ap(jnp.add, y, z)
        assert both.get().tolist() == [3 * number + 1 for number in range(100)]
        assert x.get().tolist() == list(range(100))
        check_invariants(cache, [x, y, z, both])


def test_room_for_others(destroy: Callable[[Any], None]) -> None:
    """What is destroyed leaves room for what did not fit beside it."""
    with rc.Cache(1000) as cache:
        x = rc.ap(jnp.arange, 200.0).pin()
        with pytest.raises(rc.BudgetError):
            rc.ap(jnp.ones, 100)
        destroy(x.get())
        y = rc.ap(jnp.ones, 100)
        assert (y.resident, x.resident, x.pinned) == (True, False, False)
        y.evict()
        assert x.get().tolist() == list(range(200))
        assert cache.stats().peak <= 1000 + cache.stats().overshoot


def test_a_source_is_named(destroy: Callable[[Any], None]) -> None:
    """Nothing makes a source again: it is not counted, and whoever needs it is told which one it was."""
    with rc.Cache() as cache:
        other = rc.pure(jnp.ones(2))
        array = jnp.arange(100.0)
        x = rc.pure(array)
        y = rc.ap(jnp.sum, x)
        destroy(array)
        (pool,) = cache.stats().pools
        assert (pool.used, pool.sources) == (12, 8)
        assert y.get() == 4950  # it is there
        y.evict()
        message = rf"source {x.number}, a float32\[100\], was deleted, or donated.* give the cache a copy"
        for need in (x.get, y.get, lambda: rc.ap(jnp.sin, x)):
            with pytest.raises(RuntimeError, match=message):
                need()
        assert other.get().tolist() == [1, 1]
        check_invariants(cache, [x, y, other])


def test_a_source_given_to_evaluate(destroy: Callable[[Any], None]) -> None:
    """The same op by op, with a Recomputable that the program has destroyed."""
    array = jnp.arange(4.0)
    with rc.Cache():
        x = rc.pure(array)
        made = rc.ap(jnp.cos, x)
        destroy(array)
        with pytest.raises(RuntimeError, match=r"source \d+, a float32\[4\], was deleted"):
            recompute_jax.evaluate(jnp.sin, x)
        expected = recompute_jax.evaluate(jnp.sin, made)
        destroy(made.get())
        with pytest.raises(RuntimeError, match=r"source \d+, a float32\[4\], was deleted"):
            recompute_jax.evaluate(jnp.sin, made)
        assert expected.shape == (4,)


def test_aliases_and_wrapped_arrays(destroy: Callable[[Any], None]) -> None:
    """All that shares the memory comes back; array code on wrapped arrays does not see that anything happened."""
    with rc.Cache() as cache:
        x = rc.ap(jnp.arange, 5.0)
        same = rc.ap(jax.lax.stop_gradient, x)
        destroy(x.get())
        assert same.get().tolist() == x.get().tolist() == [0, 1, 2, 3, 4]
        wrapped = rc.array(jnp.arange(5.0)) * 2
        destroy(wrapped.get())
        assert (wrapped + 1).get().tolist() == [1, 3, 5, 7, 9]
        assert wrapped.shape == (5,)
        check_invariants(cache, [x, same, wrapped])


def test_keys() -> None:
    """A key array has the memory of its words."""
    with rc.Cache() as cache:
        key = rc.ap(jax.random.key, 3)
        words = rc.ap(jax.random.key_data, key)
        expected = words.get().tolist()
        words.get().delete()
        assert cache.stats().used == 0
        assert jax.random.key_data(key.get()).tolist() == words.get().tolist() == expected


STEPS: Final = ("make", "add", "eat", "delete", "donate", "get", "evict", "hold", "drop", "pin", "look")


@example([("make", 0), ("add", 0), ("eat", 0), ("evict", 1), ("evict", 2), ("get", 1), ("get", 2)], None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=25), st.sampled_from([None, 120, 200]))
def test_programs(program: list[tuple[str, int]], budget: int | None) -> None:
    """Whatever is destroyed and evicted, each value is what it was, and only what lives is counted."""
    with rc.Cache(budget) as cache:
        values, expected, held = [rc.ap(jnp.arange, 10.0)], [list(range(10))], []
        for name, number in program:
            at = number % len(values)
            value = values[at]
            try:
                if name == "make":
                    values.append(rc.ap(jnp.full, 10, float(number)))
                    expected.append([number] * 10)
                elif name in ("add", "eat"):
                    values.append(rc.ap(eats if name == "eat" else jnp.add, value, *([] if name == "eat" else [1])))
                    expected.append([2 * element if name == "eat" else element + 1 for element in expected[at]])
                elif name in ("delete", "donate"):
                    (delete if name == "delete" else donate)(value.get())
                elif name == "get":
                    assert bool((value.get() == jnp.asarray(expected[at])).all())  # `tolist` may prevent a donation
                elif name == "hold":
                    held.append(value.get())
                elif name == "drop" and len(values) > 1:
                    del values[at], expected[at]
                elif name == "look":
                    held.clear()
                elif name in ("evict", "pin"):
                    getattr(value, name)()
            except rc.BudgetError:
                assert budget is not None
            value = None
            stats = cache.stats()
            assert budget is None or stats.peak <= budget + stats.overshoot
            assert not any(handle.resident and handle._node.payload.is_deleted() for handle in values)
            check_invariants(cache, values)
        for value in values:
            value.unpin()
        cache.budget = None
        for value, content in zip(values, expected, strict=True):
            assert value.get().tolist() == content
