"""Newton's method on a small network: products with the Hessian, a gradient of a gradient, within a memory budget.

Newton-CG (Dembo and Steihaug, 1983; here that of SciPy) solves for each step a linear system with the Hessian, by
conjugate gradients: it asks for products of the Hessian with vectors, never for the matrix. HIPS autograd gives them by
differentiating the gradient (Pearlmutter, 1994). What is kept for that are the activations of the network, those of its
gradient, and those of the gradient's gradient. Nothing here says which of them may go: the data is wrapped by
`rc.array`, and the cache decides. Every step is the same to the last bit.

    python docs/examples/newton.py --table --picture newton.png
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any, Final

import autograd.numpy as np
import numpy
from autograd import make_hvp
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

import recompute as rc
import recompute_autograd  # noqa: F401  # autograd learns of wrapped arrays
from _budgets import Taken, compare, counted, parser, table, tracing
from _report import machine, show, write
from recompute.events import Event
from recompute.pictures import residency, save
from recompute.policies import PolicyName

Vector = NDArray[numpy.float64]
Array = Any
"""Of NumPy, or wrapped by `rc.array`, or what autograd makes of either."""

HIDDEN: Final = (128,) * 4
DECAY: Final = 1e-4  # weight of the squared weights in the loss
TEST: Final = 297  # digits that the fit does not see
BUDGETS: Final = (0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2)


# The network


def predict(sizes: Sequence[int], weights: Array, images: Array) -> Array:
    """The score of each class for each image: (images, classes). `weights`: those of all layers, in one vector."""
    *hidden, last = matrices(sizes, weights)
    activations = images
    for matrix in hidden:
        activations = np.tanh(activations @ matrix)
    return activations @ last


def matrices(sizes: Sequence[int], weights: Array) -> list[Array]:
    """Cut from the vector."""
    found, start = [], 0
    for shape in pairwise(sizes):
        end = start + shape[0] * shape[1]
        found.append(weights[start:end].reshape(shape))
        start = end
    return found


def loss(sizes: Sequence[int], images: Array, labels: Array, weights: Array) -> Array:
    """Mean cross-entropy with the labels, (images, classes) of 0 and 1, and a little of the squared weights."""
    scores = predict(sizes, weights, images)
    scores = scores - np.max(scores, axis=1, keepdims=True)
    entropy = np.log(np.sum(np.exp(scores), axis=1)) - np.sum(scores * labels, axis=1)
    return np.mean(entropy) + DECAY / 2 * np.sum(weights * weights)


class Objective:
    """What SciPy asks for: the loss, its gradient, products with its Hessian; of plain vectors, as plain vectors."""

    def __init__(self, function: Callable[[Array], Array], wrap: Callable[[Vector], Array]) -> None:
        self.function = function
        self.wrap = wrap
        self.products = 0
        self.watch: Callable[[], None] = lambda: None  # called before a product
        self._at: Vector | None = None
        self._kept: Any = None  # a function from vector to product, and the gradient

    def value(self, weights: Vector) -> float:
        return float(self.function(self.wrap(weights)))

    def gradient(self, weights: Vector) -> Vector:
        self._differentiate(weights)
        return numpy.asarray(self._kept[1])

    def product(self, weights: Vector, vector: Vector) -> Vector:
        """The Hessian at `weights` times `vector`."""
        self._differentiate(weights)
        self.products += 1
        self.watch()
        return numpy.asarray(self._kept[0](self.wrap(vector)))

    def _differentiate(self, weights: Vector) -> None:
        """Once for each point: all products there share what is kept for them."""
        if self._at is None or not numpy.array_equal(self._at, weights):
            self._at = self._kept = None  # let go of the last point first
            self._kept = make_hvp(self.function)(self.wrap(weights))
            self._at = weights.copy()


# Real data


@dataclass(frozen=True)
class Problem:
    """Digits of 8 by 8 pixels to learn from and, apart from them, to test with."""

    sizes: tuple[int, ...]
    """Of the layers: the pixels and a constant, the hidden ones, the classes."""
    images: Vector
    labels: Vector
    test_images: Vector
    test_classes: NDArray[numpy.intp]

    def start(self) -> Vector:
        random = numpy.random.default_rng(0)
        return numpy.concatenate(
            [random.normal(0, rows**-0.5, rows * columns) for rows, columns in pairwise(self.sizes)]
        )

    def accuracy(self, weights: Vector) -> float:
        """The share of the test images whose class is found."""
        found = predict(self.sizes, weights, self.test_images).argmax(1)
        return float((found == self.test_classes).mean())


def load(hidden: Sequence[int] = HIDDEN, count: int | None = None) -> Problem:
    """The handwritten digits that come with scikit-learn, 1,500 to learn from; `count`: fewer."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    images = numpy.hstack([images / 16, numpy.ones((len(images), 1))])
    order = numpy.random.default_rng(0).permutation(len(images))
    learn, test = order[TEST:][:count], order[:TEST]
    sizes = (images.shape[1], *hidden, 10)
    return Problem(sizes, images[learn], numpy.eye(10)[classes[learn]], images[test], classes[test])


# Running it


def fit(problem: Problem, iterations: int, *, wrapped: bool = True) -> tuple[list[Vector], int]:
    """The weights after each iteration of Newton-CG, and how many products with a Hessian that took.

    With wrapped arrays, in the current cache; their memory is free again at the end.
    """
    wrap: Callable[[Vector], Array] = rc.array if wrapped else lambda array: array
    objective = Objective(partial(loss, problem.sizes, wrap(problem.images), wrap(problem.labels)), wrap)
    found: list[Vector] = []
    minimize(
        objective.value,
        problem.start(),
        method="Newton-CG",
        jac=objective.gradient,
        hessp=objective.product,
        callback=lambda weights: found.append(weights.copy()),
        options={"maxiter": iterations},
    )
    return found, objective.products


@dataclass(frozen=True, kw_only=True)
class Run(Taken):
    """What one way of running it took, and what it gave."""

    iterates: list[str]
    """A digest of the weights after each iteration."""
    products: int
    traced: int
    """The most that was allocated at once, by tracemalloc: temporary arrays and recipes included."""


def run(
    problem: Problem, iterations: int, budget: int | None = None, policy: PolicyName = "needed", *, repeats: int = 1
) -> Run:
    """With wrapped arrays: for the time, then once more (which is slower) for the memory."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = process_time()
        with rc.Cache(budget, policy=policy) as cache:
            found, products = fit(problem, iterations)
        seconds.append(process_time() - start)
    stats = cache.stats()
    gc.collect()
    with rc.Cache(budget, policy=policy), tracing() as traced:
        again, _ = fit(problem, iterations)
    if digests(again) != digests(found):
        raise AssertionError("two runs within one budget differ")
    return Run(
        budget=budget,
        policy=policy,
        seconds=min(seconds),
        traced=traced[0],
        iterates=digests(found),
        products=products,
        **counted(stats),
    )


def run_plain(problem: Problem, iterations: int, *, repeats: int = 1) -> Run:
    """The same without the wrapper."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = process_time()
        found, products = fit(problem, iterations, wrapped=False)
        seconds.append(process_time() - start)
    gc.collect()
    with tracing() as traced:
        fit(problem, iterations, wrapped=False)
    return Run(seconds=min(seconds), traced=traced[0], iterates=digests(found), products=products)


def digests(iterates: Sequence[Vector]) -> list[str]:
    return [blake2b(iterate.tobytes(), digest_size=16).hexdigest() for iterate in iterates]


# The script


def draw(problem: Problem, budget: int, share: float, path: str | Path) -> Path:
    """What was in memory when, for a gradient and three products with the Hessian. Raises ImportError, BudgetError."""
    events: list[Event] = []
    marks: list[tuple[float, str]] = []

    def mark() -> None:
        stats = cache.stats()
        marks.append((stats.model_time + stats.remat_time, "Hessian times a vector"))

    with rc.Cache(budget) as cache:
        cache.subscribe(events.append)
        function = partial(loss, problem.sizes, rc.array(problem.images), rc.array(problem.labels))
        objective = Objective(function, rc.array)
        objective.watch = mark
        weights = problem.start()
        vector = objective.gradient(weights)
        for _ in range(3):
            vector = objective.product(weights, vector)
    title = f"A gradient, and products with the Hessian, in {share:.0%} of the memory"
    return save(residency(events, title=title, budget=budget, least=0.01, marks=marks), path)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser("Newton-CG on a small network, within a memory budget.", share=0.3, repeats=2)
    add = asked.add_argument
    add(
        "--patience",
        type=float,
        default=10,
        metavar="X",
        help="no smaller budgets for a policy that took X times as long; 10",
    )
    add("--iterations", type=int, default=6, metavar="N", help="iterations of Newton's method; default %(default)s")
    add(
        "--hidden",
        type=int,
        nargs="+",
        default=[*HIDDEN],
        metavar="N",
        help="units of each layer; default 128 four times",
    )
    add("--samples", type=int, metavar="N", help="how many digits to learn from; default 1,500, all but the test set")
    options = asked.parse_args(arguments)
    if min(options.iterations, *options.hidden, 1 if options.samples is None else options.samples) < 1:
        asked.error("there is at least one iteration, one unit in a layer, and one digit")
    problem = load(options.hidden, options.samples)
    found, _ = fit(problem, options.iterations, wrapped=False)
    plain_loss = partial(loss, problem.sizes, problem.images, problem.labels)
    print(f"{len(problem.images):,} digits, {len(problem.start()):,} weights in {len(problem.sizes) - 1} layers")
    for number, weights in enumerate([problem.start(), *found]):
        right = problem.accuracy(weights)
        print(f"iteration {number:>2}: loss {float(plain_loss(weights)):.4f}, {right:.1%} of the test digits right")

    def wrapped(budget: int | None, policy: PolicyName, _: object) -> Run:
        return run(problem, options.iterations, budget, policy, repeats=options.repeats)

    plain_arrays = partial(run_plain, problem, options.iterations, repeats=options.repeats)
    runs = compare(plain_arrays, wrapped, options.budget, BUDGETS if options.table else (), options.patience)
    free = runs[1]
    same = [run.iterates == free.iterates for run in runs]
    print(f"{free.products} products with Hessians, {free.operations:,} operations")
    print(table(runs, [run.traced for run in runs], same, places=1))
    if options.json:
        runs_as_data = [asdict(run) for run in runs]
        write({"machine": machine("numpy"), "sizes": problem.sizes, "runs": runs_as_data}, options.json)
    if options.picture:
        show(lambda: draw(problem, int(options.budget * free.peak), options.budget, options.picture))
    return 0 if len(runs) > 2 and all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
