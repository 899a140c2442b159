"""Budgets of `remat`: more bytes never cost more, and where a policy of `jax.checkpoint` fits, it does no worse."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute import BudgetError

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._program.jaxpr import flatten  # noqa: E402  # after importorskip
from recompute_jax._program.segments import flops, subjaxprs  # noqa: E402  # after importorskip
from recompute_jax._remat.candidates import Candidates, Planning  # noqa: E402  # after importorskip
from recompute_jax._remat.ladder import Ladder  # noqa: E402  # after importorskip
from recompute_jax._remat.report import Trial  # noqa: E402  # after importorskip
from recompute_jax._remat.schedules import Argument, look  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax

MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
POLICIES = "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
WORSE = 1.02
Wrap = Callable[[Any], Any]


def compiled(function: Any, args: Any) -> Trial:
    """Temporaries and FLOPs; the bodies of scans count once."""
    closed = jax.make_jaxpr(function)(*args)
    assert not closed.consts
    return look("", closed, [Argument()] * len(closed.in_avals), MEMORY)


@cache
def sequence(kinds: str) -> Any:
    """The gradient of a chain of layers, a kind for each letter."""

    def loss(w: Any, x: Any) -> Any:
        first = x
        for kind in kinds:
            if kind == "t":
                x = jnp.tanh(x @ w)
            elif kind == "s":
                x = x + jnp.sin(x) * 0.5
            elif kind == "f":
                x = x * 0.5 + first
            else:
                x = x + jnp.exp(-((x @ w @ w.T) ** 2))
        return (x**2).mean()

    return jax.grad(loss)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)  # each plans twice, and compiles up to eight programs for each plan
@given(kinds=st.text("tsfe", min_size=3, max_size=9), one=st.floats(0.3, 1.0), two=st.floats(0.3, 1.0))
def test_more_bytes_never_cost_more(kinds: str, one: float, two: float) -> None:
    """Of two budgets the larger has a plan if the smaller has, at no higher planned cost, nor more compiled FLOPs."""
    args = jnp.eye(16) * 0.9, jnp.ones((128, 16))
    small, large = sorted((one, two))
    try:
        dearer = remat(sequence(kinds), of_peak=small, effort=0.1).plan(*args)
    except BudgetError:
        return
    cheaper = remat(sequence(kinds), of_peak=large, effort=0.1).plan(*args)
    assert cheaper.overhead <= dearer.overhead
    flops = [
        next(trial.flops for trial in plan.trials if trial.compiled == plan.compiled) for plan in (cheaper, dearer)
    ]
    assert flops[0] <= WORSE * flops[1]


@settings(max_examples=10, deadline=None)
@given(kinds=st.text("tsfe", min_size=3, max_size=9))
def test_plans_of_the_series_are_worth_their_bytes(kinds: str) -> None:
    """By rising cost, each plan for little memory dearer than the others, and each needs less than the one before."""
    args = jnp.eye(16) * 0.9, jnp.ones((128, 16))
    flat = flatten(jax.make_jaxpr(sequence(kinds))(*args))
    ladder = Ladder(Candidates(flat, Planning(kinds, "branch")), 0.02)
    plans = [*ladder.common, *ladder.scarce]
    assert plans[0].overhead == 1
    assert all(one.overhead < two.overhead for one, two in pairwise(plans))
    for part in ladder.common, ladder.scarce:
        assert all(one.plan.peak > two.plan.peak for one, two in pairwise(part))


def plain_scan(wrap: Wrap) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        return (lax.scan(wrap(layer), x, weights)[0] ** 2).mean()

    return jax.grad(loss)


def unrolled_scan(wrap: Wrap) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        return (lax.scan(wrap(layer), x, weights, unroll=2)[0] ** 2).mean()

    return jax.grad(loss)


def layers(wrap: Wrap) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        for number in range(8):
            x = wrap(layer)(x, jax.tree.map(lambda leaf, at=number: leaf[at], weights))[0]
        return (x**2).mean()

    return jax.grad(loss)


def layer(x: Any, weights: Any) -> Any:
    up, down = weights
    centred = x - x.mean(-1, keepdims=True)
    return x + jax.nn.gelu(centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) @ up) @ down, None


def weights_and_x() -> Any:
    one, two, three = jax.random.split(jax.random.key(0), 3)
    up, down = jax.random.normal(one, (8, 32, 128)), jax.random.normal(two, (8, 128, 32))
    return (up / 6, down / 12), jax.random.normal(three, (256, 32))


def products(jaxpr: Any) -> float:
    """FLOPs of the products of matrices in it, of every step of scans."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = sum(map(products, subjaxprs(eqn)), 0.0) * eqn.params.get("length", 1)
        total += inner if inner else flops(eqn) if eqn.primitive.name == "dot_general" else 0.0
    return total


@pytest.mark.parametrize(
    "model",
    [plain_scan, pytest.param(unrolled_scan, marks=pytest.mark.slow), pytest.param(layers, marks=pytest.mark.slow)],
    ids=lambda model: model.__name__,
)
def test_no_worse_than_the_policies_of_checkpoint(model: Any) -> None:
    """Where a policy fits, so does a plan, with at most 1.02 of its products; so the least is no larger than theirs."""
    args = weights_and_x()
    for policy in POLICIES:
        save = getattr(jax.checkpoint_policies, policy)
        rival = model(lambda f, save=save: jax.checkpoint(f, policy=save))
        budget = compiled(rival, args).compiled
        function = remat(model(lambda f: f), budget)
        assert function.plan(*args).compiled <= budget
        made = products(function.trace(*args).jaxpr.jaxpr)
        assert 0 < made <= WORSE * products(jax.make_jaxpr(rival)(*args).jaxpr)


@pytest.mark.slow
def test_one_look_at_a_large_function() -> None:
    """One plan of more than a thousand equations is compiled, where plain temporaries say what to expect."""

    def loss(weights: Any, x: Any) -> Any:
        for up, down in weights:
            x = layer(x, (up, down))[0]
        return (x**2).mean()

    (up, down), x = weights_and_x()
    plan = remat(jax.grad(loss), of_peak=0.4).plan([(up[0], down[0])] * 20, x)
    assert plan.compiled <= plan.budget
    assert [trial.what.split(",")[0].split(" for")[0] for trial in plan.trials] == ["the plain function", "planned"]


def test_one_look_where_a_branch_holds_one_value_more() -> None:
    """The first plan that is compiled fits, although XLA needs more for regions than their values take."""

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x**2).mean()

    args = [jnp.eye(32)] * 40, jnp.ones((256, 32))
    plan = remat(jax.value_and_grad(loss), of_peak=0.5).plan(*args)
    assert 0.9 * plan.budget <= plan.peak == plan.compiled <= plan.budget
    assert len(plan.trials) == 2


def test_what_will_not_fit_is_not_compiled() -> None:
    """Of a series, no plan is compiled that needs notably more than the budget by the planner's count."""

    def loss(w: Any, x: Any) -> Any:
        first, sums = lax.scan(lambda x, _: (jax.nn.gelu(x @ w) + x, jnp.sin(x).sum()), x, None, length=60)
        last, more = lax.scan(lambda x, _: (jax.nn.gelu(x @ w) + x, jnp.sin(x).sum()), first * 2, None, length=80)
        return (last**2).mean() + sums.sum() + more.sum()

    plan = remat(jax.value_and_grad(loss), of_peak=0.15).plan(jnp.eye(64), jnp.ones((32, 64)))
    planned = [trial.predicted for trial in plan.trials if trial.predicted is not None]
    assert planned
    assert max(planned) <= 1.05 * plan.budget


def summed(weights: Any, x: Any) -> Any:
    """A graph convolution: rows are gathered by edges, and summed where the edges end."""
    for weight in weights:
        x = jax.ops.segment_sum(jax.nn.relu(x @ weight)[SENDERS], RECEIVERS, 256)
    return (x**2).mean()


def convolved(weights: Any, x: Any) -> Any:
    """Images, a reduction window, and a sort."""
    images = x.reshape(4, 16, 16, 4)
    for weight in weights:
        kernel = weight.reshape(2, 2, 4, 16)[..., :4]
        images = jax.nn.relu(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=NHWC))
        images = lax.reduce_window(images, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return (jnp.sort(images.reshape(256, -1)) ** 2).mean()


def gathered(weights: Any, x: Any) -> Any:
    """Cumulative sums, rows by number, and a loop."""
    for weight in weights:
        x = lax.fori_loop(0, 3, lambda _, x, w=weight: jnp.tanh(jnp.cumsum(x, 0) @ w), x)[jnp.arange(256)[::-1]]
    return (x**2).mean()


NHWC = ("NHWC", "HWIO", "NHWC")
SENDERS, RECEIVERS = jax.random.randint(jax.random.key(1), (2, 1024), 0, 256)
TABLE = jax.random.normal(jax.random.key(9), (256, 16))


def offset(weights: Any, x: Any) -> Any:
    """Reads an array that is no argument."""
    for weight in weights:
        x = jnp.sin(x @ weight + TABLE)
    return (x**2).mean()


@pytest.mark.parametrize("fn", [summed, convolved, gathered, offset], ids=lambda function: function.__name__)
def test_the_compiled_function_needs_what_its_plan_says(fn: Any) -> None:
    """Whatever XLA makes of it: the temporaries of the compiled function are those of the plan, within its budget."""
    keys = jax.random.split(jax.random.key(0), 5)
    args = [jax.random.normal(key, (16, 16)) / 8 for key in keys[:4]], jax.random.normal(keys[4], (256, 16))
    gradient = jax.value_and_grad(fn)
    plain = jax.jit(gradient).lower(*args).compile().memory_analysis().temp_size_in_bytes
    planned = 0
    for share in (0.9, 0.7, 0.6, 0.55):
        function = remat(gradient, of_peak=share, compilations=4, effort=0.1)
        try:
            plan = function.plan(*args)
        except BudgetError:
            continue
        planned += 1
        assert plan.baseline == plain
        assert function.lower(*args).compile().memory_analysis().temp_size_in_bytes == plan.compiled <= plan.budget
    assert planned
