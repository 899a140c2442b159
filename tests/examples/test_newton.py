"""The Newton example: its derivatives, that budgets change no bit of any step, and what memory it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from example_scripts import assert_refused, example
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
pytest.importorskip("autograd", reason="the extra 'autograd' is not installed")
pytest.importorskip("scipy", reason="the extra 'plan' is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

newton = example("newton")

RECIPES = 4_000_000  # bytes: recipes, books, autograd's graph, the vectors of SciPy, temporary arrays of this size
VECTORS = 3


@pytest.fixture(scope="module")
def problem() -> Any:
    """A network of two hidden layers, and 200 digits."""
    return newton.load((24, 24), 200)


@pytest.fixture(scope="module")
def expected(problem: Any) -> list[Any]:
    """The iterates of plain autograd, without the library."""
    return newton.fit(problem, 3, wrapped=False)[0]  # type: ignore[no-any-return]  # a script is Any


@pytest.fixture(scope="module")
def peak(problem: Any) -> int:
    """Bytes counted without a budget."""
    with rc.Cache() as cache:
        newton.fit(problem, 3)
    return cache.stats().peak


def objective(problem: Any, wrap: Any) -> Any:
    function = partial(newton.loss, problem.sizes, wrap(problem.images), wrap(problem.labels))
    return newton.Objective(function, wrap)


def directions(problem: Any) -> Any:
    return np.random.default_rng(1).normal(size=(VECTORS, len(problem.start())))


@pytest.fixture(scope="module")
def products(problem: Any, expected: list[Any]) -> dict[tuple[int, int], bytes]:
    """At each iterate the Hessian times each direction, by plain autograd."""
    plain = objective(problem, lambda array: array)
    return {
        (at, along): plain.product(weights, vector).tobytes()
        for at, weights in enumerate(expected)
        for along, vector in enumerate(directions(problem))
    }


def test_the_loss_is_that_of_scipy(problem: Any) -> None:
    """Cross-entropy by log_softmax, and the squared weights."""
    from scipy.special import log_softmax

    weights = problem.start()
    first, second, last = newton.matrices(problem.sizes, weights)
    scores = np.tanh(np.tanh(problem.images @ first) @ second) @ last
    other = -(log_softmax(scores, axis=1) * problem.labels).sum(1).mean() + newton.DECAY / 2 * weights @ weights
    found = newton.loss(problem.sizes, problem.images, problem.labels, weights)
    assert found == pytest.approx(other, rel=1e-12)


def test_products_are_differences_of_gradients(problem: Any, peak: int) -> None:
    """The derivative of the gradient along a vector, by central differences, within a budget; and symmetric."""
    weights = problem.start()
    one, other, _ = directions(problem)
    step = 1e-5
    with rc.Cache(peak // 2):
        within = objective(problem, rc.array)
        difference = within.gradient(weights + step * one) - within.gradient(weights - step * one)
        found = np.array(within.product(weights, one))
        np.testing.assert_allclose(found, difference / (2 * step), rtol=0, atol=1e-7)
        assert other @ found == pytest.approx(one @ within.product(weights, other), rel=1e-10)


@pytest.mark.parametrize("policy", ["needed", "dtr-eq", "lru"])
@pytest.mark.parametrize("share", [None, 0.7, 0.5])
def test_a_budget_changes_no_bit(
    problem: Any, expected: list[Any], peak: int, share: float | None, policy: str
) -> None:
    """Each iterate is that of plain autograd, and only a first output of unknown size exceeds the budget."""
    budget = None if share is None else int(share * peak)
    with rc.Cache(budget, policy=policy) as cache:
        found, _ = newton.fit(problem, 3)
    stats = cache.stats()
    assert newton.digests(found) == newton.digests(expected)
    assert stats.peak <= (peak if budget is None else budget + stats.overshoot)
    assert stats.overshoot <= problem.images.nbytes
    assert (stats.rematerializations > 0) is (budget is not None)
    assert stats.used == 0


@given(st.data())
def test_any_order_gives_the_same_products(
    problem: Any, expected: list[Any], products: dict[tuple[int, int], bytes], peak: int, data: st.DataObject
) -> None:
    """Points and vectors in any order, each as often as you like, within any budget: the bits of plain autograd."""
    wanted = data.draw(st.lists(st.sampled_from(sorted(products)), min_size=1, max_size=3))
    budget = int(data.draw(st.floats(0.5, 1)) * peak)
    vectors = directions(problem)
    with rc.Cache(budget) as cache:
        within = objective(problem, rc.array)
        for at, along in wanted:
            assert within.product(expected[at], vectors[along]).tobytes() == products[at, along]
    assert cache.stats().peak <= budget + cache.stats().overshoot


def test_nothing_leaves_the_cache_but_results(problem: Any) -> None:
    """Between data and results no array becomes a plain one: each loss, gradient and product is one coercion."""
    with rc.Cache() as cache:
        within = objective(problem, rc.array)
        weights = problem.start()
        within.value(weights)
        within.gradient(weights)
        for vector in directions(problem):
            within.product(weights, vector)
        assert cache.stats().coercions == 2 + VECTORS


def test_products_at_a_point_share_what_is_kept(problem: Any) -> None:
    """The gradient is differentiated once for each point: a further product takes fewer operations than the first."""
    with rc.Cache() as cache:
        within = objective(problem, rc.array)
        weights = problem.start()
        counts = []
        for vector in directions(problem):
            within.product(weights, vector)
            counts.append(cache.stats().operations)
    first, second, third = (after - before for before, after in zip([0, *counts], counts, strict=False))
    assert second == third < first


def test_it_learns(problem: Any, expected: list[Any]) -> None:
    """The loss falls with each iteration; after ten, most digits that it never saw are told apart."""
    loss = partial(newton.loss, problem.sizes, problem.images, problem.labels)
    losses = [loss(weights) for weights in [problem.start(), *expected]]
    assert losses == sorted(losses, reverse=True)
    found, _ = newton.fit(problem, 10, wrapped=False)
    assert problem.accuracy(found[-1]) > 0.8


@pytest.mark.slow
def test_less_memory_is_allocated() -> None:
    """The system sees the budget kept, but for the recipes, autograd's graph and temporary arrays."""
    problem = newton.load((64, 64), 1000)
    plain, free = newton.run_plain(problem, 1), newton.run(problem, 1)
    within = newton.run(problem, 1, free.peak // 2)
    assert plain.iterates == free.iterates == within.iterates
    assert within.peak <= within.budget + within.overshoot
    assert within.traced <= within.budget + within.overshoot + RECIPES
    assert within.traced < 0.7 * plain.traced


@pytest.mark.parametrize(
    "options", [["--budget", "0"], ["--iterations", "0"], ["--repeats", "0"], ["--hidden", "8", "0"]]
)
def test_options_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2, before any work."""
    assert_refused(newton, options, capsys)
