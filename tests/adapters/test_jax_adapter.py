"""JAX's arrays in the cache: sizes, aliases, devices, keys, weak types, and array code on wrapped ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import recompute as rc
from lib.array_programs import check_array_programs
from recompute.testing import ManualClock, check_adapter, check_arrays, check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")


import recompute_jax  # noqa: E402  # after importorskip
from recompute_jax import JaxAdapter, adapter  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "int4", "complex64"]
SHAPES = [(), (3,), (0, 2), (4, 5)]


pytestmark = pytest.mark.usefixtures("registered_jax")


@pytest.fixture
def cache() -> Iterator[rc.Cache]:
    with rc.Cache() as cache:
        yield cache


def made(shape: tuple[int, ...], dtype: str) -> Any:
    return (jnp.arange(int(np.prod(shape))).reshape(shape) % 5).astype(dtype)


def test_an_array_stays_the_same_under_its_other_name(cache: rc.Cache) -> None:
    """`y = x; x += 1` leaves y alone: JAX's arrays never change."""
    x = rc.array(made((3,), "float32"))
    y = x
    x += 1
    assert x.get().tolist() == [1, 2, 3]
    assert y.get().tolist() == [0, 1, 2]


def same(x: Any) -> Any:
    """The very same object, as JAX returns it where there is nothing to do."""
    return x[...] if x.ndim else lax.stop_gradient(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conformance(dtype: str) -> None:
    """Arrays of each dtype, scalars and empty ones among them, keep what an adapter promises."""
    check_adapter(adapter, [lambda shape=shape: made(shape, dtype) + made((), dtype) for shape in SHAPES], view=same)


def test_conformance_of_keys() -> None:
    """So do keys, alone and many, and arrays of booleans and of weak type."""
    keys = [lambda: jax.random.fold_in(jax.random.key(1), 2), lambda: jax.random.split(jax.random.key(3), 4)]
    check_adapter(adapter, keys, view=same)
    check_adapter(adapter, [lambda: jnp.array([True, False]), lambda: jnp.asarray(2.5) * 1], view=same)
    check_adapter(adapter, [lambda: jax.random.split(jax.random.key(0, impl="rbg"), 2)], view=same)


def test_array_programs() -> None:
    """Random lines of array code do to wrapped arrays what they do to plain ones, weak types and errors included."""
    dtypes = ["float32", "int32", "bool", "complex64", "int8", "uint8", "float16", "bfloat16"]
    check_array_programs(adapter, programs=10, length=6, dtypes=dtypes)


class Forgetful(JaxAdapter):
    """Knows nothing of the dtype of an evicted array."""

    def outline(self, value: Any) -> rc.adapters.Outline:
        return super().outline(value.astype("int32"))


class Blunt(JaxAdapter):
    """Gives callers something else than what is cached."""

    def result(self, value: Any) -> Any:
        return jnp.zeros_like(value)


class Loose(JaxAdapter):
    """Keeps a copy of arrays that are wrapped."""

    def source(self, value: Any) -> Any:
        return jnp.array(value, copy=True)


class Plain(JaxAdapter):
    """Makes new memory of the right shape only."""

    def empty(self, outline: rc.adapters.Outline) -> Any:
        return jnp.empty(outline.shape)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Forgetful, "the outline's dtype is int32, not int8"),
        (Blunt, "what callers get is not equal"),
        (Loose, "a wrapped array is copied"),
        (Plain, "new memory is"),
    ],
)
def test_wrong_adapters_are_found(wrong: type[JaxAdapter], message: str) -> None:
    """The kit finds what an adapter of arrays that cannot change does wrong."""
    with pytest.raises(AssertionError, match=message):
        check_arrays(wrong(), dtypes=["int8"])


@pytest.mark.parametrize(
    "alias",
    [
        lax.stop_gradient,
        lambda x: lax.convert_element_type(x, x.dtype),
        lambda x: x[:],
        jax.device_put,
        lambda x: x.reshape(x.shape),
        jnp.asarray,
    ],
)
def test_aliases_count_once(cache: rc.Cache, alias: Any) -> None:
    """An output that is an input has no memory of its own, and goes with it."""
    x = rc.ap(jnp.arange, 10.0)
    y = rc.ap(alias, x)
    assert cache.stats().used == 40
    assert y.number == x.number
    assert x.evict()
    assert not y.resident
    assert cache.stats().used == 0
    assert y.get().tolist() == list(range(10))
    check_invariants(cache, [x, y])


def test_key_and_its_words_are_aliases(cache: rc.Cache) -> None:
    """A key array keeps its words, so the two count once."""
    words = rc.ap(lambda: jnp.arange(8, dtype="uint32").reshape(4, 2))
    keys = rc.ap(jax.random.wrap_key_data, words)
    again = rc.ap(jax.random.key_data, keys)
    assert cache.stats().used == 32
    assert words.number == keys.number == again.number


def test_counted_is_what_lives(cache: rc.Cache) -> None:
    """What the cache counts is what JAX's live arrays take, each buffer once."""
    gc.collect()
    before = {array.unsafe_buffer_pointer() for array in jax.live_arrays()}
    x = rc.ap(jnp.ones, (100, 10))
    values = [x, rc.ap(jnp.sin, x), rc.ap(lax.stop_gradient, x), rc.ap(jnp.sum, x)]
    live = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
    assert cache.stats().used == sum(size for pointer, size in live.items() if pointer not in before)
    values[1].evict()
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays() if array.unsafe_buffer_pointer() not in before) == 4004


def test_held_outside(cache: rc.Cache) -> None:
    """What a caller, or a NumPy array that looks at the memory, still holds is counted until it is let go."""
    x = rc.ap(jnp.arange, 1000.0)
    view = np.asarray(x.get())
    x.evict()
    assert cache.stats().held == 4000
    del view
    gc.collect()
    assert cache.stats().used == 0


def test_fingerprint_sees_all() -> None:
    """The digest differs with any bit, the sign of zero, the weak type, shape, dtype, and the words of keys."""
    values = [
        jnp.zeros(2),
        -jnp.zeros(2),
        jnp.zeros((1, 2)),
        jnp.zeros(2, "int32"),
        jnp.full(2, jnp.nan),
        jnp.asarray(0.0),
        jnp.zeros(()),
        jax.random.key(0),
        jax.random.key(1),
        jax.random.key(0, impl="rbg"),
    ]
    assert len({adapter.fingerprint(value) for value in values}) == len(values)


def test_verified_operations(cache: rc.Cache) -> None:
    """A function whose second run differs is found out."""
    with rc.Cache(verify=True):
        seeds = iter(range(9))
        x = rc.ap(lambda: jax.random.normal(jax.random.key(next(seeds)), (3,)))
        x.evict()
        with pytest.raises(rc.ImpureError):
            x.get()


def test_evicted_values_come_back_while_jax_traces(cache: rc.Cache) -> None:
    """A `get` in a traced function runs the operation as outside of it."""
    x = rc.ap(lambda x: jnp.cumsum(jax.jit(jnp.sin)(x)), rc.pure(jnp.arange(3.0)))
    expected = x.get().tolist()
    x.evict()
    with jax.checking_leaks():
        assert jax.jit(lambda y: y + x.get())(0.0).tolist() == expected
    assert x.get().tolist() == expected


def test_array_code(cache: rc.Cache) -> None:
    """Operators, methods, functions and coercions of wrapped arrays are JAX's."""
    plain = jnp.arange(6.0).reshape(2, 3)
    x = rc.array(plain)
    xp = rc.namespace(jnp)
    pairs = [
        (x @ x.T + 1, plain @ plain.T + 1),
        (plain + x, plain + plain),
        (2 - x, 2 - plain),
        (xp.sin(x), jnp.sin(plain)),
        (xp.stack([x, plain]), jnp.stack([plain, plain])),
        (xp.linalg.norm(x, axis=1), jnp.linalg.norm(plain, axis=1)),
        (x[:, xp.asarray([0, 2])], plain[:, jnp.asarray([0, 2])]),
        (x.sum(axis=0, keepdims=True), plain.sum(axis=0, keepdims=True)),
        (x.astype("int8"), plain.astype("int8")),
        (xp.where(x > 2, x, 0), jnp.where(plain > 2, plain, 0)),
        (xp.zeros(3), jnp.zeros(3)),
    ]
    for found, expected in pairs:
        assert isinstance(found, rc.RecomputableArray)
        found.evict()
        assert adapter.fingerprint(found.get()) == adapter.fingerprint(expected)
    assert float(x.sum()) == 15.0
    assert isinstance(np.asarray(x), np.ndarray)
    assert np.asarray(x, dtype="float64").tolist() == plain.tolist()
    assert np.array(x, copy=True).flags.writeable
    y = x
    y += 1
    assert y.get().tolist() == (plain + 1).tolist()
    with pytest.raises(TypeError, match=r"at\[idx\]"):
        x[0] = 1
    check_invariants(cache, [])


def test_at(cache: rc.Cache) -> None:
    """`x.at[i].set(y)` and its like are operations; index and content may be wrapped arrays."""
    plain = jnp.arange(6.0).reshape(2, 3)
    x, rows = rc.array(plain), rc.array(jnp.array([1, 0]))
    found = [
        x.at[0].set(x[1]),
        x.at[rows, 1].add(rows),
        x.at[:, 1:].multiply(2, mode="drop"),
        x.at[0, 0].get(),
        x.at[...].apply(jnp.sin),
    ]
    index = jnp.array([1, 0])
    expected = [
        plain.at[0].set(plain[1]),
        plain.at[index, 1].add(index),
        plain.at[:, 1:].multiply(2, mode="drop"),
        plain.at[0, 0].get(),
        plain.at[...].apply(jnp.sin),
    ]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, rc.RecomputableArray)
        assert one.evict()
        assert one.get().tolist() == other.tolist()
    assert found[0].at[0].set(0.0).get()[0].tolist() == [0, 0, 0]
    assert x.get().tolist() == plain.tolist()


def test_what_is_known_of_an_evicted_array(cache: rc.Cache) -> None:
    """Shape, dtype and type; of a key array too."""
    x = rc.array(jnp.arange(6).reshape(2, 3)) * 1
    k = rc.array(jax.random.key(0)).reshape((1,))
    for array in (x, k):
        before = array.shape, array.dtype, array.ndim, array.nbytes, type(array.get())
        assert array.evict()
        assert (array.shape, array.dtype, array.ndim, array.nbytes) == before[:-1]
        assert not array.resident
        assert type(array.get()) is before[-1]
    weak = rc.array(jnp.asarray(2.0)) * 3
    weak.evict()
    assert weak.weak_type


def test_trees(cache: rc.Cache) -> None:
    """`ap` takes and gives trees, registered classes among them, each leaf evicted and recomputed alone."""

    @jax.tree_util.register_pytree_node_class
    class Point:
        def __init__(self, x: Any, y: Any) -> None:
            self.x, self.y = x, y

        def tree_flatten(self) -> Any:
            return (self.x, self.y), None

        @classmethod
        def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
            return cls(*leaves)

    def step(point: Any, *, by: Any) -> Any:
        return Point(point.x + by["x"], point.y * 2), {"sum": (point.x.sum(), None), "name": "step"}

    point = Point(rc.pure(jnp.ones(3)), jnp.arange(3.0))
    moved, facts = recompute_jax.ap(step, point, by={"x": rc.pure(jnp.ones(()))})
    assert isinstance(moved, Point)
    assert facts["sum"][1] is None
    assert facts["name"].get() == "step"
    assert moved.x.evict()
    assert moved.y.resident
    twice, _ = recompute_jax.lift(step)(moved, by={"x": moved.x})
    assert twice.x.get().tolist() == [4, 4, 4]
    assert twice.y.get().tolist() == [0, 4, 8]
    assert cache.stats().rematerializations == 1
    assert recompute_jax.ap(lambda x: {"none": None}, moved.x) == {"none": None}
    with pytest.raises(TypeError, match="function first"):
        recompute_jax.ap(3)
    assert recompute_jax.ap(jnp.cos, moved.x).get().shape == (3,)
    assert recompute_jax.ap(lambda: (jnp.ones(2),))[0].get().tolist() == [1, 1]
    arrays = recompute_jax.ap(lambda x: [x, x + 1], rc.array(jnp.ones(2)))
    assert [type(array) for array in arrays] == [rc.RecomputableArray] * 2
    check_invariants(cache, [moved.x, moved.y, twice.x, twice.y, *arrays])


def test_compilation_is_no_cost() -> None:
    """What JAX reports of tracing and compiling during an operation is no part of its cost."""
    seconds = iter([0.0, 7.0])

    def compiling() -> Any:
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 2.0)
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 4.0)
        jax.monitoring.record_event_duration_secs("/jax/other", 8.0)
        return jnp.zeros(3)

    compiling()
    with rc.Cache(clock=lambda: next(seconds)) as cache:
        events: list[Any] = []
        cache.subscribe(events.append)
        x = rc.ap(compiling)
        assert [event.cost for event in events] == [pytest.approx(1.0, abs=0.5)]  # zeros may have been compiled
        del x


def test_costs_of_functions_of_trees() -> None:
    """What a function costs is found out when it first runs on shapes, twice; then it costs that, however long it took.

    Functions that are jitted or differentiated are known by what they were made from.
    """
    clock, seconds, costs = ManualClock(), iter([500, 300, 9000, 0, 200, 400, 400]), []

    def function(tree: Any) -> Any:
        clock.advance(next(seconds))
        return tree["x"] * 2

    def other(tree: Any) -> Any:
        clock.advance(700)
        return tree["x"]

    with rc.Cache(clock=clock) as cache, jax.disable_jit():
        cache.subscribe(lambda event: costs.append(event.cost) if hasattr(event, "cost") else None)
        x, y = rc.pure(jnp.ones(3)), rc.pure(jnp.ones(4))
        for argument in (x, x, x, x, y, y, y):
            recompute_jax.ap(jax.jit(function), {"x": argument})
        recompute_jax.ap(jax.jit(other), {"x": x})
    # What JAX says that it compiled for is taken off, and that was real time.
    assert costs == pytest.approx([500, 300, 300, 300, 200, 400, 200, 700], abs=50)


def test_doctor() -> None:
    """Devices are named as pools; the CPU does not say what is free."""
    assert "cpu" in adapter.devices()
    assert adapter.free_memory("cpu") is None
    assert adapter.free_memory("cuda:0") is None
    assert adapter.free_memory("nonsense:x") is None
