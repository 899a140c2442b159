"""`recompute_jax.remat`: the values of plain jit within a budget for temporaries, inside and outside of JAX's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.planners import Plan

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

import jax.numpy as jnp  # noqa: E402  # after importorskip
from jax import lax  # noqa: E402  # after importorskip

from recompute_jax import planned, remat  # noqa: E402  # after importorskip

QUICK: Any = {"compilations": 3, "effort": 0.1}
GATES = ("branch", "select", "barrier")


def chain(x: Any, w: Any, depth: int = 6) -> Any:
    """Tanh layers; the gradient keeps them all."""
    for _ in range(depth):
        x = jnp.tanh(x @ w) + 0.1 * x
    return (x**2).mean()


def shallow(x: Any, w: Any) -> Any:
    return chain(x, w, 3)


gradient = jax.value_and_grad(chain, argnums=(0, 1))
small = jax.value_and_grad(shallow, argnums=(0, 1))


@pytest.fixture(scope="module")
def arrays() -> tuple[Any, Any]:
    one, two = jax.random.split(jax.random.key(1))
    return jax.random.normal(one, (256, 64)), jax.random.normal(two, (64, 64)) / 8


@pytest.fixture(scope="module")
def within(arrays: tuple[Any, Any]) -> Any:
    """The gradient with a plan."""
    function = remat(gradient, of_peak=0.6, **QUICK)
    function.plan(*arrays)
    return function


def temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def assert_same(expected: Any, found: Any, tolerance: float = 2e-6) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert one.dtype == two.dtype
        assert one.weak_type == two.weak_type
        scale = max(1e-30, float(np.abs(np.asarray(one)).max(initial=0.0)))
        np.testing.assert_allclose(np.asarray(two), np.asarray(one), rtol=0, atol=tolerance * scale)


# --- Memory and values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["branch", "select"])
def test_memory_falls_and_values_stay(arrays: tuple[Any, Any], gate: Any) -> None:
    """The compiled temporaries are within the budget, and the results are those of plain jit."""
    plain = jax.jit(gradient).lower(*arrays).compile()
    function = remat(gradient, of_peak=0.5, gate=gate, **QUICK)
    compiled = function.lower(*arrays).compile()
    assert temporaries(compiled) <= 0.5 * temporaries(plain)
    assert_same(plain(*arrays), function(*arrays))


def test_a_share_of_everything_is_plain_jit(arrays: tuple[Any, Any]) -> None:
    """With 100 % the function is left as it is: the same program, bit for bit."""
    function = remat(gradient, of_peak=1.0, **QUICK)
    plan = function.plan(*arrays)
    assert plan.gate is None
    assert plan.overhead == 1.0
    plain = jax.jit(gradient)
    assert function.lower(*arrays).as_text().split("\n", 1)[1] == plain.lower(*arrays).as_text().split("\n", 1)[1]
    assert_same(plain(*arrays), function(*arrays), 0.0)


def test_bytes_as_text(arrays: tuple[Any, Any]) -> None:
    """A budget in bytes needs no compilation of the plain function."""
    plan = remat(gradient, "500 kB", **QUICK).plan(*arrays)
    assert plan.budget == 500_000
    assert plan.compiled <= 500_000
    assert plan.baseline is None
    assert plan.extra_flops > 0


def test_barriers_change_no_value(arrays: tuple[Any, Any]) -> None:
    """Where XLA keeps barriers they are the gate; XLA on CPU does not, so only the values are compared."""
    if jax.default_backend() == "cpu":
        with pytest.raises(rc.BudgetError, match="give at least"):
            remat(small, "100kB", gate="barrier", compilations=1)(*arrays)
    function = remat(gradient, "900kB", gate="barrier", **QUICK)
    assert_same(jax.jit(gradient)(*arrays), function(*arrays))


def test_convolutions() -> None:
    """Convolutions behind a gate are in the layout that is fast."""

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME"))
        return (x**2).mean()

    one, two = jax.random.split(jax.random.key(2))
    args = [kernel / 6 for kernel in jax.random.normal(one, (3, 4, 4, 3, 3))], jax.random.normal(two, (4, 4, 16, 16))
    assert_same(jax.jit(jax.grad(loss))(*args), remat(jax.grad(loss), of_peak=0.8, **QUICK)(*args))


# --- Together with JAX's own transformations --------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["branch", "select"])
def test_jit_of_remat(arrays: tuple[Any, Any], gate: Any) -> None:
    """Inside another jit the recomputation stays."""
    function = remat(gradient, "500kB", gate=gate, **QUICK)
    around = jax.jit(lambda x, w: function(x * 2, w))
    assert temporaries(around.lower(*arrays).compile()) <= 700_000
    assert_same(jax.jit(gradient)(arrays[0] * 2, arrays[1]), around(*arrays))


def test_remat_of_jit(arrays: tuple[Any, Any]) -> None:
    """A function that is jitted already is seen through."""
    function = remat(jax.jit(gradient), of_peak=0.6, gate="branch", **QUICK)
    plan = function.plan(*arrays)
    assert plan.gate == "branch"
    assert plan.extra_flops > 0
    assert plan.compiled <= plan.budget
    assert_same(jax.jit(gradient)(*arrays), function(*arrays))


@pytest.mark.parametrize("gate", GATES)
def test_vmap_of_remat(arrays: tuple[Any, Any], gate: Any) -> None:
    """Under vmap the planned equations are batched; the predicate of the gate is one for the whole batch."""
    x, w = arrays
    batch = jnp.stack([x, x + 1, x * 2])
    function = remat(gradient, "900kB" if gate == "barrier" else "700kB", gate=gate, **QUICK)
    expected = jax.jit(jax.vmap(gradient, in_axes=(0, None)))(batch, w)
    batched = jax.vmap(function, in_axes=(0, None))
    assert_same(expected, batched(batch, w))
    if gate == "branch":
        assert jax.jit(batched).lower(batch, w).as_text().count("stablehlo.case") > 3


@pytest.mark.parametrize("gate", GATES)
def test_grad_of_remat(arrays: tuple[Any, Any], gate: Any) -> None:
    """Under grad the budget is that of the gradient; gates pass tangents on, and none goes through the predicate."""
    squares = lambda x, w: (small(x, w)[1][1] ** 2).sum()
    function = remat(squares, "3MB" if gate == "barrier" else "720kB", gate=gate, **QUICK)
    expected = jax.jit(jax.value_and_grad(squares, argnums=(0, 1)))(*arrays)
    assert_same(expected, jax.value_and_grad(function, argnums=(0, 1))(*arrays), 1e-5)
    tangents = jax.jvp(function, arrays, arrays)
    assert_same(jax.jvp(jax.jit(squares), arrays, arrays), tangents, 1e-5)


def test_custom_derivatives_are_kept() -> None:
    """A custom rule inside is the rule that grad outside uses."""

    @jax.custom_jvp
    def odd(x: Any) -> Any:
        return jnp.sin(x)

    odd.defjvp(lambda primals, tangents: (odd(*primals), 7.0 * tangents[0]))
    function = remat(lambda x: odd(x).sum(), "1MB", **QUICK)
    np.testing.assert_array_equal(jax.grad(function)(jnp.ones(3)), 7.0 * np.ones(3))


def test_checkpoint_control_flow_and_keys_inside(arrays: tuple[Any, Any]) -> None:
    """jax.checkpoint, cond, while, scan, keys and integer results inside."""

    def loss(x: Any, w: Any, key: Any) -> Any:
        layer = jax.checkpoint(lambda x, key: jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.8, x.shape))
        for layer_key in jax.random.split(key, 4):
            x = layer(x, layer_key)
        x = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
        x = lax.fori_loop(0, 3, lambda _, x: x * 0.9, x)
        return (x**2).mean()

    both = lambda x, w, key: (jax.value_and_grad(loss)(x, w, key), jax.random.split(key), jnp.argmax(x))
    args = (*arrays, jax.random.key(3))
    (value, grad), keys, index = remat(both, of_peak=0.7, **QUICK)(*args)
    expected = jax.jit(both)(*args)
    assert_same(expected[0], (value, grad))
    assert (jax.random.key_data(keys) == jax.random.key_data(expected[1])).all()
    assert index == expected[2]


def test_effects_happen_once(arrays: tuple[Any, Any]) -> None:
    """What has side effects is never recomputed."""
    seen: list[float] = []

    def loss(x: Any, w: Any) -> Any:
        x = jnp.tanh(x @ w)
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return chain(x, w)

    jax.block_until_ready(remat(jax.grad(loss, 1), of_peak=0.85, **QUICK)(*arrays))
    jax.effects_barrier()
    assert len(seen) == 1


# --- As jit does ------------------------------------------------------------------------------------------------------


def test_static_keyword_and_nested_arguments(arrays: tuple[Any, Any]) -> None:
    """Static arguments, keyword arguments and pytrees are as under jit; each signature has a plan of its own."""
    calls: list[str] = []

    def step(params: dict[str, Any], x: Any, /, depth: int, *, scale: float = 1.0, mode: str = "sum") -> Any:
        calls.append(mode)
        value, grads = jax.value_and_grad(lambda p: chain(x, p["w"], depth) * scale)(params)
        return {"value": value, "grads": grads, "shape": x.shape[0]}

    x, w = arrays
    function = remat(step, "750kB", static_argnums=2, static_argnames=("mode",), **QUICK)
    plain = jax.jit(step, static_argnums=2, static_argnames=("mode",))
    for depth, mode in ((6, "sum"), (6, "mean")):
        options = {"scale": 2.0, "mode": mode}
        assert_same(plain({"w": w}, x, depth, **options), function({"w": w}, x, depth, **options))
    assert function({"w": w}, x[:128], 2)["shape"] == 128
    before = len(calls)
    function({"w": w}, x, 6, scale=3.0, mode="sum")
    assert len(calls) == before, "a known signature is not traced again"
    assert function.__name__ == "step"


def test_donation(arrays: tuple[Any, Any]) -> None:
    """A donated argument is gone."""
    x, w = jnp.array(arrays[0]), arrays[1]
    update = lambda x, w: x - jax.grad(chain)(x, w)
    function = remat(update, of_peak=0.7, donate_argnums=0, **QUICK)
    expected = jax.jit(update)(x, w)
    assert_same(expected, function(x, w))
    assert x.is_deleted()
    assert not w.is_deleted()


def test_results_that_are_arguments_and_constants() -> None:
    """Results may be arguments, constants, literals, the same twice, and of zero size."""
    table = np.arange(6.0, dtype=np.float32)
    mixed = lambda x: (x, x * 1, table + 0, 2.0, x[:0], (x, None))
    assert_same(jax.jit(mixed)(jnp.ones(3)), remat(mixed, "1kB", **QUICK)(jnp.ones(3)))
    assert remat(lambda: (), "1kB", **QUICK)() == ()


def test_closing_over_tracers(arrays: tuple[Any, Any]) -> None:
    """The function may use values of a jit around it; nothing of them is kept."""

    @jax.jit
    def around(x: Any, w: Any) -> Any:
        return remat(lambda x: jax.grad(chain)(x, w * 1.0), "500kB", **QUICK)(x)

    with jax.checking_leaks():
        found = around(*arrays)
    assert_same(jax.jit(jax.grad(chain))(*arrays), found)


def test_no_leak(arrays: tuple[Any, Any]) -> None:
    """No tracer survives planning."""
    with jax.checking_leaks():
        function = remat(small, of_peak=0.7, **QUICK)
        function(*arrays)
        function.plan(*arrays)


# --- Plans and errors -------------------------------------------------------------------------------------------------


def test_the_plan_prints(arrays: tuple[Any, Any], within: Any) -> None:
    """A plan says what is kept, what is recomputed, the memory, the FLOPs and each compilation."""
    plan = within.plan(*arrays)
    text = str(plan)
    parts = "budget", "predicted", "compiled", "FLOPs", "kept:", "recomputed:", "made 2 times", "test_jax_remat.py:"
    for part in parts:
        assert part in text
    assert "remat plan of chain" in repr(plan)
    assert plan is within.plan(jax.ShapeDtypeStruct((256, 64), "float32"), arrays[1]), "one plan a signature"
    assert plan.compiled == temporaries(within.lower(*arrays).compile())
    assert plan.trials[0].compiled == plan.baseline


def test_the_plan_can_be_drawn(arrays: tuple[Any, Any], within: Any) -> None:
    """Its events are those of the planned program."""
    plan = within.plan(*arrays)
    events = plan.events()
    assert max(event.used for event in events) == plan.predicted
    with pytest.raises(ValueError, match="left as it is"):
        remat(gradient, of_peak=1.0, **QUICK).plan(*arrays).events()


def test_plans_follow_the_protocol(arrays: tuple[Any, Any]) -> None:
    """The plan of a function has the figures of the latest plan; before there is one, it says so."""
    assert remat is planned
    function = planned(small, of_peak=0.7, **QUICK)
    assert isinstance(function.plan, Plan)
    assert str(function.plan) == "nothing is planned yet"
    with pytest.raises(AttributeError, match="nothing is planned yet: call the function"):
        function.plan.peak  # noqa: B018
    function(*arrays)
    plan = function.plan(*arrays)
    for one in (plan, function.plan):
        assert isinstance(one, Plan)
        assert (one.budget, one.peak, one.overhead) == (plan.budget, plan.compiled, plan.overhead)
        said = json.loads(one.to_json())
        assert {"name", "budget", "peak", "overhead"} <= said.keys()
        assert (said["name"], said["peak"]) == ("shallow", plan.peak)
        assert str(one) == str(plan)
    more = function.plan(arrays[0][:128], arrays[1])
    assert function.plan.budget == more.budget < plan.budget
    loss = planned(shallow, "500kB", **QUICK)
    jax.grad(loss)(*arrays)
    assert loss.plan.peak <= 500_000


def test_measured_costs(arrays: tuple[Any, Any]) -> None:
    """Segments are timed when asked; the results are the same."""
    function = remat(small, of_peak=0.7, costs="measured", **QUICK)
    assert_same(jax.jit(small)(*arrays), function(*arrays))


def test_an_impossible_budget_says_what_is_possible(arrays: tuple[Any, Any]) -> None:
    """The error names the least that was found, and that much works."""
    with pytest.raises(rc.BudgetError, match=r"shallow: .* give at least that") as caught:
        remat(small, "10kB", **QUICK)(*arrays)
    least = int(str(caught.value).split(" needs ")[1].split(" bytes")[0].replace(",", ""))
    plan = remat(small, least).plan(*arrays)
    assert plan.compiled <= least


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: remat(chain, "many"), ValueError, "not a size"),
        (lambda: remat(chain, "x%"), ValueError, "not a size"),
        (lambda: remat(chain, of_peak=0.0), ValueError, "share"),
        (lambda: remat(chain, -1), ValueError, "at least one byte"),
        (lambda: remat(chain, None), TypeError, "budget"),
        (lambda: remat(chain, "1MB", of_peak=0.5), TypeError, "of_peak=0.5"),
        (lambda: remat(chain, 0.4), ValueError, "of_peak=0.4"),  # type: ignore[arg-type]
        (lambda: remat(chain, "40%"), ValueError, "of_peak=0.4"),
        (lambda: remat(chain, of_peak="1MB"), ValueError, "bytes are the budget"),
        (lambda: remat(chain, "1MB", offload=True), TypeError, "takes no offload"),  # type: ignore[call-arg]
        (lambda: remat(chain, "1MB", tiers="disk"), ValueError, "'host' or None"),  # type: ignore[arg-type]
        (lambda: remat(chain, of_peak=0.5, gate="door"), ValueError, "unknown gate"),  # type: ignore[arg-type]
        (lambda: remat(chain, of_peak=0.5, costs="free"), ValueError, "costs"),  # type: ignore[arg-type]
        (lambda: remat(chain, of_peak=0.5, compilations=0), ValueError, "at least one"),
        (lambda: remat(chain, 2e9), ValueError, "for bytes give text"),
        (lambda: remat(chain, of_peak=np.float32(1.5)), ValueError, "share"),
        (lambda: remat(chain, of_peak=0.5, compilations=2.5), TypeError, "whole number"),  # type: ignore[arg-type]
        (lambda: remat(chain, of_peak=0.5, seed="a"), TypeError, "whole number"),  # type: ignore[arg-type]
        (lambda: remat(chain, of_peak=0.5, effort=float("nan")), ValueError, "effort"),
        (lambda: remat(chain, of_peak=0.5, effort="6"), TypeError, "effort"),  # type: ignore[arg-type]
        (lambda: remat(chain, of_peak=0.5, static_argnums=9), ValueError, "static_argnums"),
        (lambda: remat(3, of_peak=0.5), TypeError, "callable"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    """Wrong arguments are refused at once."""
    with pytest.raises(error, match=match):
        make()


def test_what_jit_refuses_is_refused(arrays: tuple[Any, Any]) -> None:
    """A leaked tracer, and a function whose control flow depends on values, raise JAX's own errors."""
    leaked: list[Any] = []
    jax.jit(lambda x: leaked.append(x))(arrays[0])
    with pytest.raises(jax.errors.UnexpectedTracerError):
        remat(chain, of_peak=0.5, **QUICK)(leaked[0], arrays[1])
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        remat(lambda x: x if x.sum() > 0 else -x, of_peak=0.5, **QUICK)(arrays[0])
    (note,) = [note for note in caught.value.__notes__ if "recompute_jax.planned" in note]
    assert "static_argnums" in note
