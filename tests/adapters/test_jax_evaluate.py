"""Functions evaluated equation by equation: training, scans, arguments and results, effects, memory and costs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.testing import check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import bits, content, live, plainly  # noqa: E402  # after importorskip
from _jax_programs import Function, Step, bent, clipped  # noqa: E402  # after importorskip
from jax.extend import core  # noqa: E402  # after importorskip

from recompute_jax import evaluate, op_by_op  # noqa: E402  # after importorskip
from recompute_jax._eager import kernels  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax


pytestmark = pytest.mark.usefixtures("registered_jax")


@pytest.fixture
def cache() -> Iterator[rc.Cache]:
    with rc.Cache() as cache:
        yield cache


def test_flattened_is_the_same_for_jax() -> None:
    """The flattened jaxpr is a jaxpr, and JAX's interpreter gives for it what it gives for the nested one."""
    steps = Step("jit", 0, 1, (Step("custom vjp"),)), Step("grad"), Step("scan of", 0, 2, (Step("dot"),)), Step("same")
    fn = Function(steps)
    args = jnp.ones((2, 3)), {"more": [], "number": 2}, jax.random.key(0)
    closed = jax.make_jaxpr(fn)(*args)
    flat = flatten(closed, inline_custom=True)
    info = closed.jaxpr.debug_info.with_unknown_names()
    jaxpr = core.Jaxpr(flat.constvars, flat.invars, flat.outvars, flat.equations, debug_info=info)
    assert bits(jax.core.eval_jaxpr(jaxpr, flat.consts, *jax.tree.leaves(args))) == bits(plainly(fn, *args))
    bound = [var for equation in flat.equations for var in equation.outvars]
    assert len(set(bound)) == len(bound)
    assert not {"jit", "custom_jvp_call", "custom_vjp_call", "remat2"} & {
        equation.primitive.name for equation in flat.equations
    }
    for fn, name in ((bent, "custom_jvp_call"), (clipped, "custom_vjp_call")):
        kept = flatten(jax.make_jaxpr(fn)(1.0))
        assert [equation.primitive.name for equation in kept.equations] == [name]


# Training


def mlp(layers: int = 8, width: int = 32) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    return weights, jax.random.normal(jax.random.key(1), (256, width)), jax.random.key(2)


def loss(weights: Any, x: Any, key: Any) -> Any:
    for number, weight in enumerate(weights):
        x = jax.nn.gelu(x @ weight)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape), x / 0.9, 0)
    return (x**2).mean()


@pytest.fixture(scope="module")
def trained() -> tuple[Any, int, list[Any]]:
    args = mlp()
    grad = op_by_op(jax.value_and_grad(loss))
    expected = bits(plainly(jax.value_and_grad(loss), *args))
    with rc.Cache() as cache:
        assert bits(grad(*args)) == expected
        return grad, cache.stats().peak, expected


@pytest.mark.parametrize("fraction", [1.0, 0.8, 0.6, 0.5, 0.4])
def test_dropout_mlp(trained: tuple[Any, int, list[Any]], fraction: float) -> None:
    """The gradient of a network with dropout has the same bits at each budget, which is kept to the byte."""
    grad, peak, expected = trained
    args = mlp()
    with rc.Cache(int(fraction * peak)) as cache:
        assert bits(grad(*args)) == expected
        stats = cache.stats()
        assert stats.peak <= fraction * peak
        assert stats.overshoot == 0
        assert (stats.rematerializations > 0) == (fraction < 1)


def test_agrees_with_jit() -> None:
    """Under jit the result is close, since XLA fuses."""
    args = mlp(2)
    with rc.Cache():
        for one, other in zip(
            jax.tree.leaves(evaluate(jax.grad(loss), *args)),
            jax.tree.leaves(jax.jit(jax.grad(loss))(*args)),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_derivatives_of_derivatives() -> None:
    """grad of grad, hessian, jvp of grad, vmap of grad: all are just functions."""

    def f(x: Any) -> Any:
        return (bent(jnp.sin(x)) * clipped(x) * jax.checkpoint(jnp.tanh)(x)).sum()

    x = jnp.linspace(-1, 1, 4)
    for fn in (
        jax.grad(lambda x: jax.grad(f)(x).sum()),
        jax.jacfwd(jax.grad(lambda x: (jnp.tanh(x) ** 3).sum())),
        jax.vmap(jax.grad(lambda x: jnp.sin(x) * x)),
    ):
        expected = bits(plainly(fn, x))
        with rc.Cache() as cache:
            assert bits(evaluate(fn, x)) == expected
        with rc.Cache(max(700, cache.stats().peak // 2)) as cache:
            assert bits(evaluate(fn, x)) == expected


def rollout(x: Any, weights: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = jnp.tanh(carry @ weights + row)
        return carry, carry.sum()

    last, sums = lax.scan(step, x, jnp.ones((40, *x.shape)))
    return (last**2).sum() + sums.mean()


def test_unrolled_scan_recomputes_its_carries() -> None:
    """What 40 steps leave for the backward pass is recomputed from the carries, in the memory that there is."""
    args = jnp.ones((16, 32)), jnp.eye(32)
    whole = op_by_op(jax.grad(rollout, argnums=1))
    steps = op_by_op(jax.grad(rollout, argnums=1), unroll_scans=True)
    with rc.Cache() as cache:
        np.testing.assert_allclose(whole(*args), jax.grad(rollout, argnums=1)(*args), rtol=1e-5)
        at_once = cache.stats().peak
    with rc.Cache() as cache:
        expected = bits(steps(*args))
    peak = cache.stats().peak
    rows = 40 * 16 * 32 * 4
    for budget in (rows + 100_000, rows + 50_000):
        with rc.Cache(budget) as cache:
            assert bits(steps(*args)) == expected
            stats = cache.stats()
        assert stats.rematerializations > 0
        assert stats.peak <= budget < min(peak, at_once)
        assert stats.overshoot == 0  # room is made for rows and stacks before they are there


def test_stacks_of_unrolled_scans() -> None:
    """What steps leave becomes one array when something else needs it; backwards, nested and of length 1 too."""

    def fn(x: Any) -> Any:
        def inner(carry: Any, row: Any) -> Any:
            return carry + row, carry

        def outer(carry: Any, row: Any) -> Any:
            carry, rows = lax.scan(inner, carry, row, reverse=True)
            return carry, (rows, rows.sum(), 3)

        last, (rows, sums, threes) = lax.scan(outer, 0.0, x)
        _, again = lax.scan(lambda c, row: (c, row * 2), None, rows)
        once = lax.scan(lambda c, _: (c + 1, c), 0, None, length=1)
        never = lax.scan(lambda c, row: (c + 1, row), 0, jnp.zeros((0, 2)))
        keys = lax.scan(lambda key, _: (jax.random.split(key)[0], key), jax.random.key(0), None, length=3)
        return last, rows, sums + rows.sum(), threes, again, once, never, keys

    x = jnp.arange(12.0).reshape(3, 4)
    with rc.Cache():
        assert content(op_by_op(fn, unroll_scans=True)(x)) == content(plainly(fn, x))
        assert jax.tree.structure(op_by_op(fn, unroll_scans=True)(x)) == jax.tree.structure(fn(x))


# Arguments and results


def test_arguments(cache: rc.Cache) -> None:
    """Trees, keywords, numbers, NumPy's arrays, Recomputables evicted or not, and what is static."""

    def fn(tree: Any, power: int, *rest: Any, mode: str, scale: Any = 2.0) -> Any:
        assert mode == "sum"
        assert isinstance(power, int)
        return {"a": tree["a"] ** power * scale, "rest": rest, "none": None}

    x = rc.ap(jnp.arange, 3.0)
    x.evict()
    f = op_by_op(fn, static_argnums=1, static_argnames="mode")
    found = f({"a": x}, 2, np.ones(2), 3, True, mode="sum", scale=rc.array(jnp.ones(())))
    expected = jax.jit(fn, static_argnums=1, static_argnames="mode")(
        {"a": jnp.arange(3.0)}, 2, np.ones(2), 3, True, mode="sum", scale=jnp.ones(())
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)
    sized = op_by_op(lambda x, n: jnp.full(n, x), static_argnums=1)
    assert bits(sized(2.0, 3)) == bits(sized(2.0, n=3)) == bits(jnp.full(3, jnp.asarray(2.0)))
    assert bits(op_by_op(fn, static_argnames=("power", "mode"))({"a": x}, 3, mode="sum")) == bits(
        {"a": jnp.arange(3.0) ** 3 * 2}
    )
    numpys = rc.pure(np.arange(3.0))
    assert evaluate(lambda x: x + 1, numpys).dtype == jnp.float32
    assert evaluate(lambda x: x + 1, rc.pure(2)).weak_type


def test_weak_types_survive(cache: rc.Cache) -> None:
    """An evicted array of weak type promotes as it would have."""
    weak = rc.ap(lambda x: x * 2, rc.pure(jnp.asarray(3.0)))
    assert weak.get().weak_type
    weak.evict()
    assert evaluate(lambda x: x * jnp.ones(2, "bfloat16"), weak).dtype == jnp.bfloat16
    array = rc.array(jnp.asarray(3.0)) * 2
    array.evict()
    assert evaluate(lambda x: x * jnp.ones(2, "bfloat16"), array.T).dtype == jnp.bfloat16


def test_results_that_can_be_evicted(cache: rc.Cache) -> None:
    """With `recomputable` results are wrapped arrays, on which array code runs; inputs among them are the inputs."""
    x = rc.array(jnp.arange(3.0))
    f = op_by_op(lambda x: {"y": jnp.sin(x), "x": x, "three": 3.0, "iota": jnp.arange(4)}, recomputable=True)
    found = f(x)
    assert all(type(value) is rc.RecomputableArray for value in found.values())
    assert found["x"].number == x.number
    assert found["y"].evict()
    assert found["iota"].evict()
    assert (found["y"] + 1).get().tolist() == (jnp.sin(jnp.arange(3.0)) + 1).tolist()
    assert found["three"].get() == 3
    x += 1
    assert found["x"].get().tolist() == [0, 1, 2]
    assert bits(evaluate(jnp.cos, found["y"])) == bits(jnp.cos(jnp.sin(jnp.arange(3.0))))
    check_invariants(cache, [*found.values(), x])


def test_the_cache_of_the_arguments_serves(cache: rc.Cache) -> None:
    """Recomputables bring their cache along; two caches are an error."""
    with rc.Cache() as other:
        x = rc.pure(jnp.ones(3))
    result = op_by_op(jnp.sin, recomputable=True)(x)
    assert result.cache is other
    with pytest.raises(ValueError, match="two caches"):
        evaluate(jnp.add, x, rc.pure(jnp.ones(3)))


def test_evicted_values_come_back_while_jax_traces(cache: rc.Cache) -> None:
    """A `get` inside a traced function computes; nothing of the trace gets into the cache."""
    y = op_by_op(lambda x: jnp.sin(x) * 2, recomputable=True)(jnp.ones(3))
    y.evict()
    with jax.checking_leaks():
        assert jax.jit(lambda x: x + y.get())(1.0).shape == (3,)
    assert not isinstance(y.get(), jax.core.Tracer)


# Effects


@pytest.mark.parametrize("unroll_scans", [False, True])
def test_effects_happen_once(cache: rc.Cache, unroll_scans: bool) -> None:
    """A callback with effects runs once, whatever is recomputed; what it returned is kept."""
    seen: list[float] = []

    def note(x: Any) -> Any:
        seen.append(float(x))
        return np.float32(len(seen))

    def fn(x: Any) -> Any:
        y = jnp.sin(x)
        count = jax.experimental.io_callback(note, jax.ShapeDtypeStruct((), "float32"), y.sum(), ordered=True)
        jax.debug.callback(lambda total: seen.append(float(total)), y.sum() * 2)
        x, _ = lax.scan(lambda c, _: (jax.debug.callback(seen.append, c[0]) or c, None), x, None, length=2)
        return y * count, x

    f = op_by_op(fn, recomputable=True, unroll_scans=unroll_scans)
    y, x = f(jnp.arange(3.0))
    jax.effects_barrier()
    before = len(seen)
    assert before == 4
    cache.release_memory()
    assert not y.resident
    assert bits(y.get()) == bits(jnp.sin(jnp.arange(3.0)))
    x.evict()
    x.get()
    jax.effects_barrier()
    assert len(seen) == before


def test_donation_is_overridden(cache: rc.Cache) -> None:
    """A jitted function that would eat its argument does not, inlined or not."""
    eats = jax.jit(lambda x: x * 2, donate_argnums=0)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.jit(lambda x: x * 3, donate_argnums=0, in_shardings=here)
    x = jnp.ones(3)
    assert evaluate(lambda x: (eats(x), placed(x), x), x)[2].tolist() == [1, 1, 1]
    assert not x.is_deleted()
    names = [equation.primitive.name for equation in flatten(jax.make_jaxpr(placed)(x), inline_custom=True).equations]
    assert names == ["jit"]


# Memory


def test_dead_values_are_dropped_at_their_last_use(cache: rc.Cache) -> None:
    """A chain takes two arrays at a time, as in JAX's interpreter, and arguments nobody needs are not taken."""

    def chain(x: Any, unused: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(x)
        return x

    f = op_by_op(chain)
    cache.release_memory()
    f(jnp.ones(250), jnp.ones(10_000))
    assert cache.stats().peak == 3000  # the argument, which is a source, and two more
    assert cache.stats().used == 0


def test_nothing_is_left_over(cache: rc.Cache) -> None:
    """As many arrays live as before, and as many bytes; prepared functions go with theirs."""
    args = mlp(1, 4)
    grad = jax.grad(loss)
    evaluate(grad, *args)
    before = live()
    for _ in range(3):
        evaluate(grad, *args)
    assert live() == before
    assert cache.stats().used == 0
    known = [jnp.ones(1000)]

    def fn(x: Any) -> Any:
        return lax.scan(lambda carry, _: (jnp.sin(carry) + known[0].sum(), None), x, None, length=3)[0] * known[0]

    prepared = len(kernels._programs)
    evaluate(fn, jnp.ones(1000))
    evaluate(fn, jnp.ones(1000))
    assert len(kernels._programs) == prepared + 1
    gone = weakref.ref(fn), weakref.ref(known.pop())
    del fn
    assert live() == before
    assert [reference() for reference in gone] == [None, None]
    assert len(kernels._programs) == prepared


def test_no_tracer_leaks() -> None:
    """Neither tracing nor some hundred operations, evicted and recomputed, keep a traced value alive."""
    args = mlp(4)
    with rc.Cache() as cache:
        expected = bits(evaluate(jax.grad(loss), *args))
    with jax.checking_leaks(), rc.Cache(cache.stats().peak * 6 // 10) as cache:
        assert bits(evaluate(jax.grad(loss), *args)) == expected
        assert cache.stats().rematerializations > 0


def test_prepared_once(cache: rc.Cache) -> None:
    """A second call with the same signature traces nothing; another signature is traced once."""
    traced = []

    def fn(x: Any, n: int = 1) -> Any:
        traced.append(n)
        return x * n

    f = op_by_op(fn, static_argnames="n")
    for _ in range(3):
        f(jnp.ones(3))
        f(rc.pure(jnp.ones(3)))
        f(jnp.ones(3), n=2)
        evaluate(fn, jnp.ones((3,)), 5)
    assert sorted(traced, key=str)[:2] == [1, 2]
    assert len(traced) == 3


# Costs


def test_costs_are_those_of_a_kind() -> None:
    """A kind of equation is timed once, compiled already; each operation of the kind costs that, unless measured."""
    costs: list[float] = []

    def fn(x: Any) -> Any:
        return lax.cumsum(jnp.cos(x) * 3.25, axis=1)

    x = jnp.ones((77, 3))
    f = op_by_op(fn)
    with rc.Cache(clock=lambda: 0.0) as cache:  # nothing is timed by it
        cache.subscribe(lambda event: costs.append(event.cost) if hasattr(event, "cost") else None)
        for _ in range(3):
            f(x)
        assert costs[:3] == costs[3:6] == costs[6:9]
        assert all(cost > 0 for cost in costs)
        for step in kernels.prepared(jax.jit(fn).trace(x).jaxpr).steps:
            cost = step.kernel._cost
            assert cost.first > cost.seconds == costs.pop(0)
        del costs[:]
        op_by_op(fn, measure=True)(x)
        assert costs == [0, 0, 0]


def test_long_operations_are_not_run_twice(cache: rc.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long when it first runs is timed when it runs next."""
    monkeypatch.setattr("recompute_jax._eager.kernels._LONG", 0.0)
    calls: list[int] = []

    def host(x: Any) -> Any:
        calls.append(1)
        return np.asarray(x) + 1

    f = op_by_op(partial(jax.pure_callback, host, jax.ShapeDtypeStruct((3,), "float32")))
    for number in range(1, 4):
        f(jnp.ones(3))
        assert len(calls) >= number
    assert len(calls) <= 4
