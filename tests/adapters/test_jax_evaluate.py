"""Functions that JAX traces, run equation by equation: the same bits in any budget, effects once, nothing left over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute import _adapter
from recompute._flight import running
from recompute.testing import check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from jax.extend import core  # noqa: E402  # after importorskip

from recompute_jax import _evaluate, adapter, evaluate, op_by_op  # noqa: E402
from recompute_jax._jaxpr import flatten  # noqa: E402
from recompute_jax._kernels import Kernel  # noqa: E402

jnp = jax.numpy
lax = jax.lax


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """JAX's adapter whether or not the package is installed."""
    before = dict(_adapter._registered)
    for cls in (jax.Array, jax.core.Tracer, jax.ref.Ref):
        rc.register(cls, adapter)
    yield
    _adapter._registered.clear()
    _adapter._registered.update(before)
    _adapter.kinds.clear()


@pytest.fixture
def cache() -> Iterator[rc.Cache]:
    with rc.Cache() as cache:
        yield cache


def bits(tree: Any) -> list[Any]:
    """All there is to know of each array in a tree."""
    return [adapter.fingerprint(jnp.asarray(each)) for each in jax.tree.leaves(tree)]


def content(tree: Any) -> list[Any]:
    """The same without weak types, which JAX keeps track of loosely in the body of a scan."""
    strong = lambda each: each if jnp.issubdtype(each.dtype, jax.dtypes.prng_key) else jnp.array(each, each.dtype)
    return bits(jax.tree.map(strong, tree))


def plainly(fn: Callable[..., Any], *args: Any) -> Any:
    """Equation by equation without a cache: `jax.core.eval_jaxpr`, with calls replaced by what they call."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    results = interpreted(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def interpreted(jaxpr: Any, consts: Any, *args: Any) -> list[Any]:
    """A jaxpr without calls in the end goes to JAX's own interpreter, one equation at a time."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = equation.params.get({"jit": "jaxpr", "remat2": "jaxpr"}.get(name, "call_jaxpr"))
        if name in ("jit", "remat2", "custom_jvp_call", "custom_vjp_call", "closed_call"):
            inner, inner_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            values = [each.val if isinstance(each, core.Literal) else known[each] for each in equation.invars]
            results = interpreted(inner, inner_consts, *values)
        else:
            free = list(dict.fromkeys(each for each in equation.invars if not isinstance(each, core.Literal)))
            info = jaxpr.debug_info.with_unknown_names()
            one = core.Jaxpr((), free, equation.outvars, [equation], equation.effects, info)
            results = jax.core.eval_jaxpr(one, (), *[known[each] for each in free])
        known.update(zip(equation.outvars, results, strict=True))
    return [each.val if isinstance(each, core.Literal) else known[each] for each in jaxpr.outvars]


# Functions made of random steps


@jax.custom_jvp
def curve(x: Any) -> Any:
    return jnp.tanh(x) + x


curve.defjvp(lambda primals, tangents: (curve(*primals), tangents[0] * 2))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))


def scanned(x: Any, y: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = jnp.sin(carry) + row.sum() + y.sum()
        return carry, (carry * 2, row)

    return lax.scan(step, x, jnp.stack([x, x + 1, x * 2]))


STEPS: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y.sum(),
    lambda x, y: jnp.sin(x) * 2.0,
    lambda x, y: jax.jit(lambda a: jnp.cos(a) + a)(x),
    lambda x, y: jax.jit(lambda a, b: (b, a, jax.jit(jnp.exp)(a) * 0.1))(x, y),
    lambda x, y: jax.checkpoint(lambda a: jnp.sin(jnp.cos(a)))(x),
    lambda x, y: curve(x),
    lambda x, y: clipped(x),
    lambda x, y: lax.cond(y.sum() > 0, lambda a: a * 2, lambda a: a + 1, x),
    lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1],
    scanned,
    lambda x, y: lax.fori_loop(0, 3, lambda i, a: a + i, x),
    lambda x, y: lax.map(lambda a: a * 2, jnp.stack([x, x]))[0],
    lambda x, y: lax.sort((x.ravel(), x.ravel() * -1), num_keys=1),
    lambda x, y: tuple(jnp.split(jnp.concatenate([x.ravel(), y.ravel()]), [1])),
    lambda x, y: (lax.stop_gradient(x), x[...], jax.device_put(x), x.reshape(x.shape), x),
    lambda x, y: x.astype("bfloat16").astype("float32"),
    lambda x, y: (x > 0).astype("int8").sum() + x,
    lambda x, y: jnp.zeros((0, 2)).sum() + x,
    lambda x, y: jnp.concatenate([x.ravel()[:0], x.ravel()]),
    lambda x, y: (3.0, jnp.float32(2), x),
    lambda x, y: x.at[..., :1].set(y.sum()),
    lambda x, y: jax.random.normal(jax.random.key(3), x.shape) + x,
    lambda x, y: jax.vmap(lambda a: a - a.mean())(jnp.atleast_2d(x)),
    lambda x, y: jax.grad(lambda a: (curve(a) * clipped(a)).sum())(x),
    lambda x, y: jax.random.bits(jax.random.fold_in(jax.random.key(1), 3), x.shape, "uint8") + x,
    lambda x, y: (x + 1j).imag + x,
]


def program(numbers: list[tuple[int, int, int]], key: bool) -> Callable[..., Any]:
    """A function of one array and one key that takes these steps, each with two of the arrays made before."""

    def fn(x: Any, keys: Any) -> Any:
        alive = [x, x.ravel()]
        if key:
            keys = jax.random.split(keys, 3)
            alive.append(jax.random.uniform(keys[1], (3,)))
        for step, first, second in numbers:
            made = STEPS[step](alive[first % len(alive)], alive[second % len(alive)])
            alive += [jnp.asarray(each, "float32") for each in jax.tree.leaves(made)]
        return {"last": alive[-3:], "sum": sum(each.sum() for each in alive), "keys": keys, "first": alive[0]}

    return fn


numbers = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 30), st.integers(0, 30))


@settings(max_examples=12)
@given(
    st.lists(numbers, min_size=1, max_size=8),
    st.booleans(),
    st.floats(0.2, 1),
    st.integers(0, 2**32),
    st.sampled_from(["dtr", "lru", "random"]),
)
def test_random_functions(steps: Any, key: bool, fraction: float, seed: int, policy: str) -> None:
    """Any function gives the same bits as JAX's own interpreter, within any budget, whatever is evicted when."""
    fn = program(steps, key)
    args = jnp.linspace(-1, 2, 6).reshape(2, 3), jax.random.key(seed % 100)
    expected = bits(plainly(fn, *args))
    with rc.Cache() as cache:
        assert bits(evaluate(fn, *args)) == expected
        peak = cache.stats().peak
    random = Random(seed)
    run = Kernel.run

    def interfering(kernel: Any, payloads: Any) -> Any:
        frame = running.get()
        if frame is not None and random.random() < 0.2:
            frame.cache.release_memory(random.choice([None, 8]))  # type: ignore[attr-defined]
        return run(kernel, payloads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "run", interfering)
        budget = fraction * peak
        while True:
            try:
                with rc.Cache(budget, policy=policy) as cache:
                    x = rc.ap(lambda: args[0])
                    x.evict()
                    assert bits(evaluate(fn, x, args[1])) == expected
                    assert cache.stats().peak <= budget
                    check_invariants(cache, [x])
                break
            except rc.BudgetError:
                budget *= 1.5
    for unrolled in (rc.Cache(), rc.Cache(2 * budget, policy="random")):
        with unrolled:
            results = op_by_op(fn, unroll_scans=True, recomputable=True)(*args)
            again = bits(jax.tree.map(lambda each: each.get(), results))
            unrolled.release_memory()
            assert bits(jax.tree.map(lambda each: each.get(), results)) == again
            for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(plainly(fn, *args)), strict=True):
                if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                    np.testing.assert_allclose(one.get(), other, rtol=1e-4, atol=1e-5)


def test_flattened_is_the_same_for_jax() -> None:
    """The flattened jaxpr is a jaxpr, and JAX's interpreter gives for it what it gives for the nested one."""
    fn = program([(3, 0, 0), (6, 1, 1), (23, 0, 1), (9, 0, 2), (14, 3, 3)], True)
    args = jnp.ones((2, 3)), jax.random.key(0)
    closed = jax.make_jaxpr(fn)(*args)
    flat = flatten(closed, inline_custom=True)
    info = closed.jaxpr.debug_info.with_unknown_names()
    jaxpr = core.Jaxpr(flat.constvars, flat.invars, flat.outvars, flat.equations, debug_info=info)
    assert bits(jax.core.eval_jaxpr(jaxpr, flat.consts, *args)) == bits(jax.tree.leaves(plainly(fn, *args)))
    bound = [var for equation in flat.equations for var in equation.outvars]
    assert len(set(bound)) == len(bound)
    assert not {"jit", "custom_jvp_call", "custom_vjp_call", "remat2"} & {
        each.primitive.name for each in flat.equations
    }
    for fn, name in ((curve, "custom_jvp_call"), (clipped, "custom_vjp_call")):
        kept = flatten(jax.make_jaxpr(fn)(1.0), inline_custom=False)
        assert [each.primitive.name for each in kept.equations] == [name]


# Training


def mlp(layers: int = 8, width: int = 32) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(each, (width, width)) / width**0.5 for each in keys]
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
    with rc.Cache() as cache:
        expected = bits(grad(*args))
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
    assert expected == bits(plainly(jax.value_and_grad(loss), *args))


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
        return (curve(jnp.sin(x)) * clipped(x) * jax.checkpoint(jnp.tanh)(x)).sum()

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
    """What 40 steps leave for the backward pass is recomputed from the carries, in a fraction of the memory."""
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
    with rc.Cache(rows + 100_000) as cache:
        assert bits(steps(*args)) == expected
        assert cache.stats().rematerializations > 0
        assert cache.stats().peak <= rows + 100_000
    assert rows + 100_000 < min(peak, at_once)


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
    with pytest.raises(TypeError, match="a Recomputable of a dict"):
        evaluate(lambda x: x, rc.pure({"a": 1}))
    with pytest.raises(TypeError, match="Error interpreting argument"):
        evaluate(lambda x: x, "text")


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
    assert all(type(each) is rc.RecomputableArray for each in found.values())
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


def test_traced_arguments_are_refused(cache: rc.Cache) -> None:
    """Inside jit there is nothing to evaluate, and the error says what to use there."""
    with pytest.raises(TypeError, match=r"recompute_jax\.remat there"):
        jax.jit(lambda x: evaluate(jnp.sin, x))(1.0)
    ones = jnp.ones(3)
    found = jax.jit(lambda x: x + evaluate(jnp.sin, ones))(1.0)
    assert bits(found) == bits(1.0 + jnp.sin(jnp.ones(3)))


def test_evicted_values_come_back_while_jax_traces(cache: rc.Cache) -> None:
    """A `get` inside a traced function computes; nothing of the trace gets into the cache."""
    y = op_by_op(lambda x: jnp.sin(x) * 2, recomputable=True)(jnp.ones(3))
    y.evict()
    with jax.checking_leaks():
        assert jax.jit(lambda x: x + y.get())(1.0).shape == (3,)
    assert not isinstance(y.get(), jax.core.Tracer)


def test_errors_name_the_place(cache: rc.Cache) -> None:
    """A budget that one equation does not fit into: the message says which, and in which line."""
    cache.budget = 10_000
    with pytest.raises(rc.BudgetError, match=r"dot_general \(.*test_jax_evaluate.py:\d+"):
        evaluate(lambda x: (x @ x.T).sum(), jnp.ones((60, 2)))
    assert cache.stats().overshoot == 0
    with pytest.raises(jax.errors.TracerBoolConversionError):
        evaluate(lambda x: x if x > 0 else -x, 1.0)


def test_refs_are_refused(cache: rc.Cache) -> None:
    """Mutable arrays are refused with the cure, but not those inside one operation."""

    def mutable(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    with pytest.raises(NotImplementedError, match=r"made by `new_ref`.*x\.at"):
        evaluate(mutable, jnp.ones(3))
    ref = jax.new_ref(jnp.ones(3))
    with pytest.raises(NotImplementedError, match="mutable array"):
        evaluate(lambda x: x + ref[...], jnp.ones(3))
    inside = lambda x: lax.scan(lambda c, _: (mutable(c), None), x, None, length=3)[0]
    assert evaluate(inside, jnp.ones(3)).tolist() == [8, 8, 8]


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
        jax.debug.callback(lambda each: seen.append(float(each)), y.sum() * 2)
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
    names = [each.primitive.name for each in flatten(jax.make_jaxpr(placed)(x), inline_custom=True).equations]
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
    gc.collect()
    assert cache.stats().used == 0


def test_nothing_is_left_over(cache: rc.Cache) -> None:
    """Live arrays are as many as before, prepared functions go with theirs, and leaks of tracers are none."""
    args = mlp(1, 4)
    grad = jax.grad(loss)
    with jax.checking_leaks():
        evaluate(jax.grad(lambda x: jnp.sin(x) * jax.jit(jnp.cos)(x)), 1.0)
    evaluate(grad, *args)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        evaluate(grad, *args)
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert cache.stats().used == 0

    def fn(x: Any) -> Any:
        return jnp.sin(x) + 1

    prepared = len(_evaluate._programs)
    evaluate(fn, jnp.ones(5))
    evaluate(fn, jnp.ones(5))
    assert len(_evaluate._programs) == prepared + 1
    gone = weakref.ref(fn)
    del fn
    gc.collect()
    assert gone() is None
    assert len(_evaluate._programs) == prepared


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


def test_out_of_memory_makes_the_cache_release(cache: rc.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """RESOURCE_EXHAUSTED frees what the cache can do without and tries again; without anything to free it passes."""
    keep = op_by_op(lambda x: x + 1, recomputable=True)(jnp.ones(1000))
    f = op_by_op(jnp.sin)
    x = jnp.ones(3)
    f(x)
    step = next(iter(_evaluate._prepared(jax.jit(jnp.sin).trace(x).jaxpr, False, False).steps))

    class Short:
        multiple_results = False

        def bind(self, *values: Any, **params: Any) -> Any:
            if keep.resident:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return primitive.bind(*values, **params)

    primitive = step.kernel._primitive
    monkeypatch.setattr(step.kernel, "_primitive", Short())
    assert bits(f(x)) == bits(jnp.sin(x))
    assert not keep.resident
    keep.pin()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        f(x)


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
        assert all(each > 0 for each in costs)
        for step in _evaluate._prepared(jax.jit(fn).trace(x).jaxpr, False, False).steps:
            cost = step.kernel._cost
            assert cost.first > cost.seconds == costs.pop(0)
        del costs[:]
        op_by_op(fn, measure=True)(x)
        assert costs == [0, 0, 0]


def test_long_operations_are_not_run_twice(cache: rc.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long when it first runs is timed when it runs next."""
    monkeypatch.setattr("recompute_jax._kernels._LONG", 0.0)
    calls: list[int] = []

    def host(x: Any) -> Any:
        calls.append(1)
        return np.asarray(x) + 1

    f = op_by_op(partial(jax.pure_callback, host, jax.ShapeDtypeStruct((3,), "float32")))
    for number in range(1, 4):
        f(jnp.ones(3))
        assert len(calls) >= number
    assert len(calls) <= 4
