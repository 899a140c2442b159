"""HIPS autograd over wrapped arrays: the derivatives of plain arrays, to the last bit, whatever is evicted."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from lib.strategies import POLICIES, RELEASES
from recompute.events import Event, Performed
from recompute.testing import ManualClock, check_invariants
from recompute.testing.arrays import serving

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
autograd = pytest.importorskip("autograd", reason="the extra 'autograd' is not installed")

import autograd.numpy as anp  # noqa: E402  # after importorskip
from autograd import (  # noqa: E402
    elementwise_grad,
    grad,
    hessian,
    hessian_vector_product,
    jacobian,
    make_ggnvp,
    make_hvp,
    make_jvp,
    make_vjp,
    value_and_grad,
)
from autograd.builtins import dict as boxed_dict  # noqa: E402
from autograd.builtins import list as boxed_list  # noqa: E402
from autograd.extend import vspace  # noqa: E402
from autograd.misc import flatten  # noqa: E402
from autograd.misc.optimizers import adam, rmsprop, sgd  # noqa: E402
from autograd.test_util import check_grads, check_vjp  # noqa: E402

from recompute_autograd import RecomputableVSpace  # noqa: E402
from recompute_numpy import adapter  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with serving(adapter):
        yield


def array(*shape: int, seed: int = 0, kind: str = "float64") -> Any:
    rng = np.random.default_rng(seed)
    plain = rng.normal(size=shape)
    return (plain + 1j * rng.normal(size=shape)).astype(kind) if kind[0] == "c" else plain.astype(kind)


def mlp(w: Any, x: Any) -> Any:
    """Two layers."""
    return anp.sum(anp.tanh(anp.dot(anp.tanh(anp.dot(x, w[:, :3])), w[1:, :3]) + w[0, :3]) ** 2)


def spd(a: Any) -> Any:
    return anp.dot(a, a.T) + 2 * anp.eye(3)


def total(function: Callable[..., Any]) -> Callable[..., Any]:
    """A number made of all results of a function, each weighted."""

    def weighted(*args: Any) -> Any:
        result = function(*args)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        return sum(anp.sum(anp.abs(anp.sin(part + 0.3)) ** 2 * (1 + number)) for number, part in enumerate(parts))

    return weighted


def unrolled(w: Any, x: Any) -> Any:
    """A recurrent network: the same weights at every step."""
    h = anp.zeros(3)
    for step in range(6):
        h = anp.tanh(anp.dot(w[:3, :3], h) + x[step % 4, :3])
    return anp.sum(h**2)


class Case(NamedTuple):
    """A derivative: an operator of autograd, a function, and its arguments."""

    derivative: Callable[..., Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]


A, B, V, C = array(4, 4), array(4, 4, seed=1), array(3, seed=2), array(3, 3, seed=3)
Z = array(3, 3, seed=4, kind="complex128")
FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "sum": (lambda x: anp.sum(x, axis=0), A),
    "mean, var, std": (lambda x: (anp.mean(x, axis=1), anp.var(x), anp.std(x, axis=0)), A),
    "prod, cumsum": (lambda x: (anp.prod(x, axis=0), anp.cumsum(x, axis=1)), A),
    "max, min": (lambda x: (anp.max(x, axis=0), anp.min(x)), A),
    "maximum, minimum": (lambda x: (anp.maximum(x, 0.1), anp.minimum(x[0], x[1])), A),
    "exp, log": (lambda x: (anp.exp(x), anp.log(x**2 + 1), anp.expm1(x), anp.log1p(x**2)), A),
    "trigonometric": (lambda x: (anp.sin(x), anp.cos(x), anp.tan(x / 3), anp.arctan2(x, 2.0)), A),
    "hyperbolic": (lambda x: (anp.sinh(x), anp.cosh(x), anp.tanh(x), anp.arcsinh(x)), A),
    "powers": (lambda x: (x**3, 2.0**x, anp.sqrt(x**2 + 1), anp.square(x), abs(x)), A),
    "arithmetic": (lambda x: (x + 1, 2 - x, x * x, x / (x**2 + 1), -x, x % 0.7, 1 / (x**2 + 1)), A),
    "logaddexp": (lambda x: anp.logaddexp(x[0], x[1]), A),
    "where": (lambda x: anp.where(x > 0, x**2, anp.exp(x)), A),
    "clip": (lambda x: anp.clip(x, -0.5, 0.5) * x, A),
    "sort": (lambda x: anp.sort(x) * anp.arange(3.0), V),
    "partition": (lambda x: anp.partition(x, 1) ** 2, V),
    "an order": (lambda x: x[anp.argsort(x)] * anp.arange(3.0), V),
    "indexing": (lambda x: (x[0], x[1:, ::2], x[..., None], x[-1, -1] ** 2), A),
    "fancy indexing": (lambda x: (x[[0, 0, 2]], x[[0, 1], [1, 1]] ** 2), A),
    "masks": (lambda x: x[x > 0] ** 2, A),
    "reshape, transpose": (lambda x: (x.reshape(2, 8) ** 2, x.T * 2, anp.swapaxes(x, 0, 1), anp.moveaxis(x, 0, 1)), A),
    "ravel, squeeze": (lambda x: (x.ravel() ** 2, anp.squeeze(x[None]), anp.expand_dims(x, 1), x.flatten()), A),
    "concatenate, stack": (
        lambda x: (anp.concatenate([x, x * 2], axis=1), anp.stack([x, x**2]), anp.vstack([x, x])),
        A,
    ),
    "split": (lambda x: anp.split(x, 2, axis=1)[1] ** 2, A),
    "repeat, tile": (lambda x: (anp.repeat(x, 2, axis=0), anp.tile(x, (2, 1))), A),
    "roll, flip, rot90": (lambda x: (anp.roll(x, 1, axis=0) * x, anp.flipud(x) * x, anp.rot90(x)), A),
    "diag, triu, trace": (lambda x: (anp.diag(x), anp.triu(x), anp.tril(x), anp.trace(x)), C),
    "dot": (lambda x: (anp.dot(x, x.T), x @ x.T, anp.inner(x, x), anp.outer(x[0], x[1])), A),
    "batched matmul": (lambda x: anp.matmul(anp.stack([x, x * 2]), x.T), A),
    "einsum": (lambda x: (anp.einsum("ij,kj->ik", x, x), anp.einsum("ij->j", x), anp.einsum("ij,jk,k", x, x, x[0])), A),
    "tensordot, kron": (lambda x: (anp.tensordot(x, x, axes=([0], [0])), anp.kron(x[:2, :2], x)), A),
    "norm": (lambda x: (anp.linalg.norm(x), anp.linalg.norm(x, axis=0), anp.linalg.norm(x, "fro")), A),
    "inv, solve": (lambda x: (anp.linalg.inv(spd(x)), anp.linalg.solve(spd(x), x)), C),
    "det": (lambda x: (anp.linalg.det(spd(x)), anp.linalg.slogdet(spd(x))[1]), C),
    "cholesky": (lambda x: anp.linalg.cholesky(spd(x)), C),
    "eigh": (lambda x: anp.dot(*anp.linalg.eigh(spd(x))), C),
    "eig": (lambda x: anp.linalg.eig(spd(x))[0], C),
    "svd": (lambda x: anp.dot(anp.dot(*anp.linalg.svd(x, full_matrices=False)[:2]), x), A),
    "svdvals": (lambda x: anp.linalg.svd(x, compute_uv=False), A),
    "pinv": (lambda x: anp.linalg.pinv(x), A),
    "fft": (lambda x: anp.fft.fft(x), A),
    "ifft": (lambda x: anp.fft.ifft(x, axis=0), A),
    "rfft, irfft": (lambda x: (anp.fft.rfft(x), anp.fft.irfft(anp.fft.rfft(x) * 2)), A),
    "fft2, fftn": (lambda x: (anp.fft.fft2(x), anp.fft.fftn(x), anp.fft.fftshift(x)), A),
    "complex": (lambda z: (anp.real(z) ** 2, anp.imag(z) * 3, anp.conj(z) * z, anp.abs(z), anp.angle(z)), Z),
    "complex products": (lambda z: (anp.dot(z, z), anp.exp(z) * z, anp.linalg.inv(z)), Z),
    "float32": (lambda x: (anp.tanh(x) * 2, anp.dot(x, x.T)), A.astype("float32")),
    "empty": (lambda x: (x * 2, anp.sum(x, axis=0)), np.zeros((0, 3))),
    "a number": (lambda x: anp.sin(x) ** 2 + x, np.array(0.5)),
    "pad": (lambda x: anp.pad(x, ((1, 0), (0, 2)), "constant"), A),
    "diff": (lambda x: anp.diff(x, axis=1) ** 2, A),
    "nan_to_num": (lambda x: anp.nan_to_num(x / (x > 0)), A),
    "containers": (lambda x: boxed_list([x, x * 2])[1] + boxed_dict(a=x)["a"], A),
}
CASES: dict[str, Case] = {
    **{f"grad of {name}": Case(grad, total(function), (x,)) for name, (function, x) in FUNCTIONS.items()},
    "grad of a network": Case(grad, mlp, (A, B)),
    "grad of a recurrent network": Case(grad, unrolled, (A, B)),
    "grad, second argument": Case(lambda f: grad(f, 1), mlp, (A, B.copy())),
    "grad, both arguments": Case(lambda f: grad(f, (0, 1)), mlp, (A, B)),
    "value and grad": Case(value_and_grad, mlp, (A, B)),
    "elementwise grad": Case(elementwise_grad, anp.tanh, (A,)),
    "third derivative": Case(lambda f: elementwise_grad(elementwise_grad(elementwise_grad(f))), anp.tanh, (A,)),
    "grad of grad": Case(lambda f: grad(lambda *args: anp.sum(grad(f)(*args) ** 2)), mlp, (A, B)),
    "Hessian": Case(hessian, lambda w, x: anp.sum(anp.tanh(anp.dot(x, w)) ** 2), (C[:, :2], C)),
    "Hessian of a determinant": Case(hessian, lambda x: anp.linalg.det(spd(x)), (C,)),
    "Hessian-vector product": Case(
        lambda f: lambda x, y, v: hessian_vector_product(f)(x, y, v), mlp, (A, B, array(4, 4, seed=5))
    ),
    "make_hvp": Case(lambda f: lambda x, y, v: make_hvp(f)(x, y)[0](v), mlp, (A, B, array(4, 4, seed=5))),
    "make_ggnvp": Case(lambda f: lambda x, v: make_ggnvp(f)(x)(v), anp.tanh, (V, V * 2)),
    "Jacobian": Case(jacobian, lambda x: anp.tanh(anp.dot(x, x.T)), (A,)),
    "Jacobian of svd": Case(jacobian, lambda x: anp.linalg.svd(x, compute_uv=False), (A,)),
    "Jacobian of fft": Case(jacobian, lambda x: anp.abs(anp.fft.fft(x)), (V,)),
    "forward mode": Case(
        lambda f: lambda x, v: make_jvp(f)(x)(v), lambda x: anp.exp(anp.dot(x, x.T)) + anp.sum(x[0] ** 2), (A, B)
    ),
    "reverse mode": Case(lambda f: lambda x, g: make_vjp(f)(x)[0](g), lambda x: anp.sin(x) * anp.cos(x), (A, B)),
    "grad of a tree": Case(
        lambda f: lambda x, y: grad(f)({"w": [x, (y,)]}),
        lambda tree: anp.sum(anp.tanh(tree["w"][0]) * tree["w"][1][0]),
        (A, B),
    ),
}


def leaves(result: Any) -> list[Any]:
    if isinstance(result, dict):
        result = [result[key] for key in sorted(result)]
    if isinstance(result, (list, tuple)):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def compare(expected: Any, actual: Any, *, stacked: bool = False) -> None:
    """Wrapped results hold what plain ones are, to the last bit; autograd's `stack` gives plain ones."""
    expected, actual = leaves(expected), leaves(actual)
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert isinstance(other, np.ndarray if stacked else rc.RecomputableArray)
        plain = np.asarray(other)
        assert (one.dtype, one.shape) == (plain.dtype, plain.shape)
        assert adapter.fingerprint(np.asarray(one)) == adapter.fingerprint(np.asarray(plain))


def differentiate(case: Case, cache: rc.Cache) -> Any:
    """The derivative by wrapped arrays."""
    with cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.derivative(case.function)(*map(rc.array, case.args))


def expected(case: Case) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.derivative(case.function)(*case.args)


def evict_after_each_operation(cache: rc.Cache, share: int = 1) -> None:
    """Evict, after every operation, one in `share` of the bytes that can be."""

    def listen(event: Event) -> None:
        if isinstance(event, Performed) and not event.again:
            cache.release_memory(None if share == 1 else max(1, event.used // share))

    cache.subscribe(listen)


def test_there_are_enough_cases() -> None:
    """At least thirty functions, and every operator of autograd that makes sense."""
    assert len(FUNCTIONS) >= 30
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_a_budget(case: Case) -> None:
    """Derivatives by wrapped arrays are those by plain arrays, bit by bit, and wrapped; nothing is left of them."""
    cache = rc.Cache()
    actual = differentiate(case, cache)
    compare(expected(case), actual, stacked=case.derivative in (jacobian, hessian))
    check_invariants(cache, [leaf for leaf in leaves(actual) if isinstance(leaf, rc.RecomputableArray)])
    assert cache.stats().rematerializations == 0
    del actual
    gc.collect()
    assert cache.stats().used == 0
    assert cache.stats().pools[0].candidates == 0


@pytest.mark.parametrize(
    "share", [pytest.param(1, id="everything"), pytest.param(2, id="every other", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_evicted_after_every_operation(case: Case, share: int) -> None:
    """The same, with what can be evicted after every operation evicted, and every repeated run verified."""
    cache = rc.Cache(verify=True, policy="random")
    evict_after_each_operation(cache, share)
    actual = differentiate(case, cache)
    compare(expected(case), actual, stacked=case.derivative in (jacobian, hessian))
    del actual
    gc.collect()
    assert cache.stats().used == 0


# Beyond single derivatives


def test_the_vector_space() -> None:
    """Vectors are arrays of the cache: zeros, ones, a basis, and sums that change no operand."""
    with rc.Cache() as cache:
        for kind in ("float64", "float32", "complex128"):
            x, plain = rc.array(array(2, 2, kind=kind)), array(2, 2, kind=kind)
            space, model = vspace(x), vspace(plain)
            assert isinstance(space, RecomputableVSpace)
            assert (model.size, model.ndim, model.shape, model.iscomplex) == (
                space.size, space.ndim, space.shape, space.iscomplex,
            )  # fmt: skip
            compare(model.zeros(), space.zeros())
            compare(model.ones(), space.ones())
            compare(list(model.standard_basis()), list(space.standard_basis()))
            compare(model.add(plain, plain), space.add(x, x))
            compare(model.mut_add(plain.copy(), plain), space.mut_add(x, x))
            compare(plain, x)
            compare(model.scalar_mul(plain, 2.0), space.scalar_mul(x, 2.0))
            compare(model.covector(plain), space.covector(x))
            assert float(np.real(model.inner_prod(plain, plain))) == float(np.real(space.inner_prod(x, x)))
            assert space.randn().shape == (2, 2)
            assert space.zeros().cache is cache
            assert space == vspace(x + 1)


def test_autograds_own_checks() -> None:
    """`check_grads` of autograd, by finite differences over wrapped arrays, in both modes and twice."""
    with rc.Cache():
        np.random.seed(0)
        check_grads(lambda x: anp.tanh(anp.dot(x, x.T)), modes=["fwd", "rev"], order=2)(rc.array(A))
        check_vjp(anp.sin, rc.array(A))


@pytest.mark.parametrize("optimizer", [sgd, rmsprop, adam])
@pytest.mark.parametrize("evict", [False, True])
def test_optimizers(optimizer: Callable[..., Any], evict: bool) -> None:
    """Autograd's optimizers train wrapped parameters to the same bits."""

    def loss(w: Any, step: int) -> Any:
        return mlp(w, B) + 0.01 * anp.sum(w**2)

    trained = optimizer(grad(loss), A.copy(), num_iters=3, step_size=0.05)
    cache = rc.Cache()
    if evict:
        evict_after_each_operation(cache)
    with cache:
        compare(trained, optimizer(grad(loss), rc.array(A), num_iters=3, step_size=0.05))


def test_flattened_trees() -> None:
    """`flatten` makes one vector of a tree of wrapped arrays, and the tree again."""
    with rc.Cache():
        vector, unflatten = flatten({"a": rc.array(A), "b": [rc.array(V)]})
        compare(flatten({"a": A, "b": [V]})[0], vector)
        compare(A, unflatten(vector)["a"])


def test_training_in_less_memory() -> None:
    """Steps of gradient descent within a budget that plain autograd exceeds: the same weights, never more memory."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(40, 8)), [rng.normal(size=(8, 8)) / 3 for _ in range(12)]

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = anp.tanh(anp.dot(x, weight))
        return anp.mean(x**2)

    def train(weights: Any, x: Any) -> Any:
        for _ in range(3):
            steps = grad(loss)(weights, x)
            weights = [(w - 0.1 * g) for w, g in zip(weights, steps, strict=True)]
            for weight in weights:
                if isinstance(weight, rc.Recomputable):
                    weight.detach()
        return weights

    expected = train(weights, x)
    peaks = []
    for budget in (None, 36_000):
        with rc.Cache(budget) as cache:
            compare(expected, train([rc.array(weight) for weight in weights], rc.array(x)))
            peaks.append(cache.stats().peak - cache.stats().overshoot)
    assert peaks[1] <= 36_000 < peaks[0] / 1.5


def test_wrapped_and_plain_arrays_together() -> None:
    """Data may be plain, parameters wrapped, and the other way round."""
    for x, y in ((rc.array(A), B), (A, rc.array(B)), (rc.array(A), rc.array(B))):
        result = grad(lambda x, y: anp.sum(anp.tanh(x * y)))(x, y)
        plain = result.get() if isinstance(result, rc.RecomputableArray) else result
        assert adapter.fingerprint(grad(lambda x, y: anp.sum(anp.tanh(x * y)))(A, B)) == adapter.fingerprint(plain)


def test_a_wrapped_array_can_be_closed_over() -> None:
    """Values that are no arguments are constants."""
    with rc.Cache():
        y = rc.array(B)
        compare(grad(lambda x: anp.sum(anp.tanh(x * B)))(A), grad(lambda x: anp.sum(anp.tanh(x * y)))(rc.array(A)))


def test_errors_are_autograds() -> None:
    """A function with more than one result, and an array of integers, cannot be differentiated."""
    with rc.Cache():
        with pytest.raises(TypeError, match="Grad only applies to real scalar-output functions"):
            grad(lambda x: x * 2)(rc.array(A))
        with pytest.raises(TypeError):
            grad(lambda x: anp.sum(x) * 1j)(rc.array(A))


# Properties

STEPS: dict[str, Callable[[Any], Any]] = {
    "sin": anp.sin,
    "tanh": anp.tanh,
    "square": lambda x: x**2,
    "exp": lambda x: anp.exp(-anp.abs(x)),
    "half": lambda x: x / 2 + 1,
    "product": lambda x: x * x[::-1],
    "transpose": lambda x: x.T,
    "dot": lambda x: anp.tanh(anp.dot(x, x)),
    "sort": lambda x: anp.reshape(anp.sort(anp.ravel(x)), (3, 3)),
    "where": lambda x: anp.where(x > 0.2, x, -x),
    "cumsum": lambda x: anp.cumsum(x, axis=1),
    "row": lambda x: x - x[0],
    "columns": lambda x: x[:, [2, 0, 0]],
    "mean": lambda x: x - anp.mean(x, axis=1, keepdims=True),
    "norm": lambda x: x / anp.sqrt(1 + anp.sum(x**2)),
    "halves": lambda x: anp.concatenate([x[1:], x[:1] * 2]),
    "fft": lambda x: anp.real(anp.fft.fft(x)),
    "solve": lambda x: anp.linalg.solve(anp.dot(x, x.T) + 3 * anp.eye(3), x),
    "eigh": lambda x: anp.linalg.eigh(anp.dot(x, x.T) + anp.diag(anp.arange(3.0)))[1] * x,
    "svd": lambda x: anp.outer(anp.linalg.svd(x, compute_uv=False), x[0]),
}


def pipeline(steps: list[str]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        for step in steps:
            x = STEPS[step](x)
        return anp.sum(x * anp.cos(x))

    return function


@pytest.mark.slow
@settings(max_examples=max(10, settings().max_examples // 3))
@given(
    st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=8),
    st.integers(0, 99),
    st.sampled_from([grad, value_and_grad, lambda f: make_hvp(f)]),
    st.one_of(st.none(), st.integers(600, 3000)),
    st.sampled_from(POLICIES),
    st.sampled_from(RELEASES),
    st.sampled_from([0, 1, 2]),
)
def test_random_functions(
    steps: list[str], seed: int, derivative: Any, budget: int | None, policy: str, release: Any, share: int
) -> None:
    """Gradients, and products with the Hessian, of random pipelines, within random budgets, with evictions."""
    x = array(3, 3, seed=seed)
    function = pipeline(steps)
    if derivative not in (grad, value_and_grad):
        case = Case(lambda f: lambda x: make_hvp(f)(x)[0](x * 0 + 1), function, (x,))
    else:
        case = Case(derivative, function, (x,))
    cache = rc.Cache(budget, policy=policy, release=release, clock=ManualClock())
    if share:
        evict_after_each_operation(cache, share)
    try:
        actual = differentiate(case, cache)
    except rc.BudgetError:
        assert budget is not None
    else:
        cache.budget = None
        compare(expected(case), actual, stacked=case.derivative in (jacobian, hessian))
        check_invariants(cache)
