"""`rc.namespace`: every function of the array API standard, with wrapped arrays as results."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from lib.array_code import BLANKS, fill
from lib.array_programs import difference, evict_some, letters
from lib.programs import Program
from lib.strategies import array_programs
from recompute.testing import ManualClock
from recompute.testing.arrays import serving

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_numpy import adapter  # noqa: E402  # after importorskip

UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_invert ceil conj cos cosh exp expm1 floor imag isfinite isinf isnan "
    "log log1p log2 log10 logical_not negative positive real reciprocal round sign signbit sin sinh sqrt tan tanh trunc"
).split()
BINARY = (
    "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide equal "
    "floor_divide greater greater_equal hypot less less_equal logaddexp logical_and logical_or logical_xor maximum "
    "minimum multiply nextafter not_equal pow remainder subtract"
).split()
STATISTICS = "max mean min prod std sum var all any".split()

CALLS: dict[str, tuple[str, ...]] = {
    **{name: (f"xp.{name}(a)",) for name in UNARY},
    **{name: (f"xp.{name}(a, b)", f"xp.{name}(a, {{number}})", f"xp.{name}({{number}}, a)") for name in BINARY},
    **{name: (f"xp.{name}(a)", f"xp.{name}(a, axis={{axes}}{{keep}})") for name in STATISTICS},
    "square": ("xp.square(a.real)",),
    "clip": ("xp.clip(a, b, c)", "xp.clip(a, min={number})", "xp.clip(a, {number}, {number})"),
    # Creation
    "asarray": ("xp.asarray([1, 2, 3])", "xp.asarray([[1.5], [2]], dtype={dtype})", "xp.asarray(a)", "xp.asarray(2)"),
    "arange": ("xp.arange(5)", "xp.arange(1.5, 4, 0.5)", "xp.arange(5, dtype={dtype})"),
    "empty": ("xp.empty((2, 3)).shape", "xp.empty(3, dtype={dtype}).dtype"),
    "empty_like": ("xp.empty_like(a).shape", "xp.empty_like(a, dtype={dtype}).dtype"),
    "eye": ("xp.eye(3)", "xp.eye(2, 3, k={small}, dtype={dtype})"),
    "from_dlpack": ("xp.from_dlpack(a)", "xp.from_dlpack(new('float64', (3,), 2))"),
    "full": ("xp.full((2, 3), {number})", "xp.full(3, 2, dtype={dtype})"),
    "full_like": ("xp.full_like(a, 1)", "xp.full_like(a, 1, dtype={dtype})"),
    "linspace": ("xp.linspace(0, 1, 5)", "xp.linspace(0, 1, 5, endpoint=False, dtype={dtype})"),
    "meshgrid": ("xp.meshgrid(a, b)", "xp.meshgrid(a, indexing='ij')"),
    "ones": ("xp.ones((2, 3))", "xp.ones((), dtype={dtype})"),
    "ones_like": ("xp.ones_like(a)", "xp.ones_like(a, dtype={dtype})"),
    "tril": ("xp.tril(a)", "xp.tril(a, k={small})"),
    "triu": ("xp.triu(a)", "xp.triu(a, k={small})"),
    "zeros": ("xp.zeros((2, 3))", "xp.zeros(0, dtype={dtype})"),
    "zeros_like": ("xp.zeros_like(a)", "xp.zeros_like(a, dtype={dtype})"),
    # Dtypes
    "astype": ("xp.astype(a, {dtype})", "xp.astype(a, {dtype}, copy=False)"),
    "can_cast": ("xp.can_cast({dtype}, {dtype})",),
    "finfo": ("float(xp.finfo(xp.float32).eps)", "xp.finfo(xp.complex128).bits"),
    "iinfo": ("xp.iinfo(xp.int8).max",),
    "isdtype": ("xp.isdtype(a.dtype, 'real floating')", "xp.isdtype(xp.int8, ('bool', 'integral'))"),
    "result_type": ("xp.result_type(a, b)", "xp.result_type(a, xp.float32, 1)"),
    # Shapes
    "broadcast_arrays": ("xp.broadcast_arrays(a, b)",),
    "broadcast_shapes": ("xp.broadcast_shapes(a.shape, b.shape)",),
    "broadcast_to": ("xp.broadcast_to(a, (2, 2, 3))", "xp.broadcast_to(a, b.shape)"),
    "concat": ("xp.concat((a, b))", "xp.concat([a, a], axis={axes})"),
    "expand_dims": ("xp.expand_dims(a, axis={axis})",),
    "flip": ("xp.flip(a)", "xp.flip(a, axis={axes})"),
    "moveaxis": ("xp.moveaxis(a, 0, -1)",),
    "permute_dims": ("xp.permute_dims(a, (1, 0))", "xp.permute_dims(a, tuple(range(a.ndim))[::-1])"),
    "repeat": ("xp.repeat(a, {count})", "xp.repeat(a, {sizes}, axis={axis})"),
    "reshape": ("xp.reshape(a, {shape})", "xp.reshape(a, (-1,), copy=True)"),
    "roll": ("xp.roll(a, {small})", "xp.roll(a, (1, 2), axis=(0, -1))"),
    "squeeze": ("xp.squeeze(a, axis={axis})",),
    "stack": ("xp.stack([a, a], axis={axis})", "xp.stack((a, b))"),
    "tile": ("xp.tile(a, (2, 1))",),
    "unstack": ("xp.unstack(a)", "xp.unstack(a, axis={axis})"),
    # Elements
    "take": ("xp.take(a, xp.asarray([0, -1]), axis={axis})", "xp.take(a, b, axis=0)"),
    "take_along_axis": ("xp.take_along_axis(a, xp.argsort(a, axis={axis}), axis={axis})",),
    "argmax": ("xp.argmax(a)", "xp.argmax(a, axis={axis}{keep})"),
    "argmin": ("xp.argmin(a)", "xp.argmin(a, axis={axis}{keep})"),
    "argsort": ("xp.argsort(a)", "xp.argsort(a, axis={axis}, stable=True)"),
    "sort": ("xp.sort(a)", "xp.sort(a, axis={axis}, stable=True)"),
    "nonzero": ("xp.nonzero(a)",),
    "count_nonzero": ("xp.count_nonzero(a)", "xp.count_nonzero(a, axis={axes}{keep})"),
    "searchsorted": ("xp.searchsorted(xp.sort(a), b)", "xp.searchsorted(a, b, side='right')"),
    "where": ("xp.where(a > 0, a, b)", "xp.where(a > 0, {number}, b)"),
    "unique_all": ("xp.unique_all(a)",),
    "unique_counts": ("xp.unique_counts(a)",),
    "unique_inverse": ("xp.unique_inverse(a)",),
    "unique_values": ("xp.unique_values(a)",),
    "isin": ("xp.isin(a, b)", "xp.isin(a, {number}, invert=True)"),
    # Along axes
    "cumulative_sum": ("xp.cumulative_sum(a, axis={axis})", "xp.cumulative_sum(a, axis=0, include_initial=True)"),
    "cumulative_prod": ("xp.cumulative_prod(a, axis={axis})", "xp.cumulative_prod(a, axis=0, dtype={dtype})"),
    "diff": ("xp.diff(a, axis={axis})", "xp.diff(a, n={count}, append=a)"),
    # Products
    "matmul": ("xp.matmul(a, b)", "xp.matmul(a, a)"),
    "matrix_transpose": ("xp.matrix_transpose(a)",),
    "tensordot": ("xp.tensordot(a, b, axes={count})", "xp.tensordot(a, a, axes=((0,), (0,)))"),
    "vecdot": ("xp.vecdot(a, b)", "xp.vecdot(a, a, axis=0)"),
}
SQUARE = "a @ xp.matrix_transpose(a) + 3 * xp.eye(a.shape[0])"
LINALG: dict[str, tuple[str, ...]] = {
    **{
        name: (f"xp.linalg.{name}(a)", f"xp.linalg.{name}({SQUARE})")
        for name in "cholesky det diagonal eigh eigvalsh inv matrix_norm matrix_rank pinv qr slogdet svd".split()
    },
    "svdvals": ("xp.linalg.svdvals(a)",),
    "cross": ("xp.linalg.cross(a, b)", "xp.linalg.cross(a, a, axis={axis})"),
    "matmul": ("xp.linalg.matmul(a, b)",),
    "matrix_power": (f"xp.linalg.matrix_power({SQUARE}, {{small}})",),
    "matrix_transpose": ("xp.linalg.matrix_transpose(a)",),
    "outer": ("xp.linalg.outer(a, b)",),
    "solve": (f"xp.linalg.solve({SQUARE}, a)",),
    "tensordot": ("xp.linalg.tensordot(a, b, axes={count})",),
    "trace": ("xp.linalg.trace(a, offset={small})", "xp.linalg.trace(a, dtype={dtype})"),
    "vecdot": ("xp.linalg.vecdot(a, b)",),
    "vector_norm": ("xp.linalg.vector_norm(a, axis={axes}{keep})", "xp.linalg.vector_norm(a, ord={small})"),
}
FFT: dict[str, tuple[str, ...]] = {
    **{
        name: (f"xp.fft.{name}(a)", f"xp.fft.{name}(a, axis={{axis}}, norm='forward')")
        for name in "fft ifft rfft irfft hfft ihfft".split()
    },
    **{
        name: (f"xp.fft.{name}(a)", f"xp.fft.{name}(a, axes=(0,), norm='ortho')")
        for name in "fftn ifftn rfftn irfftn".split()
    },
    "fftfreq": ("xp.fft.fftfreq(4)", "xp.fft.fftfreq(5, d=0.5)"),
    "rfftfreq": ("xp.fft.rfftfreq(4)", "xp.fft.rfftfreq(5, d=0.5)"),
    "fftshift": ("xp.fft.fftshift(a)", "xp.fft.fftshift(a, axes={axis})"),
    "ifftshift": ("xp.fft.ifftshift(a)",),
}
EVERY = {**CALLS, **{f"linalg.{k}": v for k, v in LINALG.items()}, **{f"fft.{k}": v for k, v in FFT.items()}}
NO_ARRAYS = set("broadcast_shapes can_cast empty empty_like finfo iinfo isdtype result_type linalg.matrix_rank".split())


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with serving(adapter):
        yield


def test_the_list_is_the_standards() -> None:
    """Every function of the standard is called here, and nothing else."""
    strict = pytest.importorskip("array_api_strict", reason="the standard's list comes from array_api_strict")

    def functions(module: ModuleType) -> set[str]:
        names = {name for name in module.__all__ if not name.startswith("_") and "flags" not in name.lower()}
        return {name for name in names if inspect.isfunction(getattr(module, name))}

    assert functions(strict) == set(CALLS)
    assert functions(strict.linalg) == set(LINALG)
    assert functions(strict.fft) == set(FFT)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=max(5, settings().max_examples // 8))
@given(data=st.data())
def test_functions(name: str, data: st.DataObject) -> None:
    """Each function gives what NumPy gives, wrapped, with or without budget and evictions."""
    program = data.draw(array_programs(most=3, lines={name: EVERY[name]}))
    budget = data.draw(st.sampled_from([None, None, 200]))
    evict = evict_some(Random(0)) if data.draw(st.booleans()) else None
    wrong = difference(program, adapter, rc.Cache(budget, clock=ManualClock()), after=evict)
    assert wrong is None, wrong


@pytest.mark.parametrize("name", EVERY)
def test_functions_can_succeed(name: str) -> None:
    """The calls above are not all errors, and give wrapped arrays."""
    xp = rc.namespace(np)
    random = Random(0)
    found = set()
    with rc.Cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for template in EVERY[name] * 30:
            code = fill(template, random.choice)
            shape = random.choice([(3, 3), (3,), (1, 3)])
            plain = np.arange(1, 1 + np.prod(shape)).reshape(shape)
            plain = plain.astype(random.choice(["float64", "int64", "bool", "complex128"]))
            scope: dict[str, Any] = {letter: xp.asarray(plain) for letter in letters(code)}
            try:
                result = eval(code, {**scope, "xp": xp, "new": lambda *_: np.ones(3)})
            except (TypeError, ValueError, IndexError):  # LinAlgError is a ValueError
                continue
            while isinstance(result, (tuple, list)):
                result = result[0]
            found.add(type(result))
    assert found
    assert found == {rc.RecomputableArray} or name in NO_ARRAYS


def test_the_blanks_exist() -> None:
    """Every blank in the calls is one of the language, and every line is code."""
    random = Random(1)
    for templates in EVERY.values():
        for template in templates:
            code = fill(template, random.choice)
            assert "{" not in code
            assert set(letters(code)) <= set("abc")
    assert "dtype" in BLANKS


# The namespace as an object


def test_constants_and_dtypes_are_the_librarys() -> None:
    """What is no function is the library's own."""
    xp = rc.namespace(np)
    assert (xp.pi, xp.e, xp.inf, xp.newaxis) == (np.pi, np.e, np.inf, None)
    assert xp.float32 is np.float32
    assert xp.bool is np.bool
    assert xp.__array_api_version__ == np.__array_api_version__
    assert xp.__array_namespace_info__().capabilities() == np.__array_namespace_info__().capabilities()


def test_functions_look_like_those_of_the_library() -> None:
    """Name, documentation and signature; each is made once."""
    xp = rc.namespace(np)
    assert xp.sum is xp.sum
    assert (xp.sum.__name__, xp.sum.__doc__) == ("sum", np.sum.__doc__)
    assert inspect.signature(xp.sum) == inspect.signature(np.sum)
    assert xp.empty.__name__ == "empty"
    assert dir(xp) == dir(np)
    assert repr(xp) == "<namespace of recomputable arrays over numpy>"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = xp.nothing


def test_there_is_one_namespace_of_a_library() -> None:
    """Asked twice, of a namespace, and of an array, it is the same one."""
    xp = rc.namespace(np)
    assert rc.namespace(np) is xp
    assert rc.namespace(xp) is xp
    assert rc.array(np.ones(3)).__array_namespace__() is xp
    assert rc.array(np.ones(3)).__array_namespace__(api_version="2024.12") is xp
    assert (rc.array(np.ones(3)) + 1).__array_namespace__() is xp


@pytest.mark.parametrize("given", [None, 3, np.ones(3), "numpy"])
def test_what_is_no_library(given: Any) -> None:
    """TypeError, with what to give."""
    with pytest.raises(TypeError, match="takes the module of an array library, such as numpy"):
        rc.namespace(given)


def test_array_api_compat_finds_it() -> None:
    """Code that asks array_api_compat for the namespace gets one that wraps."""
    compat = pytest.importorskip("array_api_compat", reason="array_api_compat is not installed")
    x = rc.array(np.ones(3))
    assert compat.array_namespace(x) is rc.namespace(np)
    assert compat.is_array_api_obj(x)


def test_what_takes_no_array_is_an_operation() -> None:
    """`zeros` and the like belong to the current cache, can be evicted, and come back."""
    xp = rc.namespace(np)
    with rc.Cache(verify=True) as cache:
        for made in (xp.zeros(3), xp.arange(4), xp.linspace(0, 1, 5), xp.eye(2), xp.fft.fftfreq(4), xp.empty(3)):
            before = made.get().copy()
            assert made.cache is cache
            assert made.evict()
            assert made.get().tolist() == before.tolist()


def test_what_takes_a_plain_array_makes_a_source() -> None:
    """`asarray` and `from_dlpack` wrap what they are given; of wrapped arrays they are operations."""
    xp = rc.namespace(np)
    plain = np.arange(3.0)
    with rc.Cache():
        for x in (xp.asarray(plain), xp.from_dlpack(plain), xp.asanyarray(plain)):
            assert not x.evict()
            assert np.shares_memory(x.get(), plain)
        assert not xp.asarray([1, 2]).evict()
        x = xp.asarray(plain)
        pair = xp.asarray([x, x + 1])
        assert pair.evict()
        assert pair.tolist() == [[0, 1, 2], [1, 2, 3]]
        assert xp.asarray(x).number == x.number


def test_functions_of_the_namespace_are_arguments() -> None:
    """A function that takes a function gets the library's own, and calls it with plain arrays."""
    xp = rc.namespace(np)
    with rc.Cache() as cache:
        x = xp.asarray(np.arange(6.0).reshape(2, 3))
        before = cache.stats().operations
        sums = xp.apply_along_axis(xp.sum, 0, x)
        assert cache.stats().operations == before + 1
        assert sums.evict()
        assert sums.tolist() == [3, 5, 7]
        assert xp.apply_over_axes(xp.max, x, [0, 1]).tolist() == [[5]]


def test_readers_read_once(tmp_path: Any) -> None:
    """What comes from a file or an iterator is a source, not read again."""
    xp = rc.namespace(np)
    np.save(tmp_path / "x.npy", np.arange(3.0))
    with rc.Cache():
        for x in (xp.load(tmp_path / "x.npy"), xp.loadtxt(["0 1 2"]), xp.fromiter((i for i in range(3)), np.float64)):
            assert x.tolist() == [0, 1, 2]
            assert not x.evict()


def test_methods_of_ufuncs() -> None:
    """`reduce`, `accumulate`, `outer`, `reduceat` and `at` are there, for wrapped and for plain arguments."""
    xp = rc.namespace(np)
    with rc.Cache():
        x = xp.arange(4)
        for made in (
            xp.add.reduce(x),
            xp.add.accumulate(x),
            xp.multiply.outer(x, [1, 2]),
            xp.add.reduceat(x, [0, 2]),
            xp.add.reduce([1, 2]),
            xp.add(1, 2),
        ):
            assert isinstance(made, rc.RecomputableArray)
        assert xp.add.accumulate(x).tolist() == [0, 1, 3, 6]
        other = x + 0
        xp.add.at(other, [0, 0], 5)
        assert (other.tolist(), x.tolist()) == ([10, 1, 2, 3], [0, 1, 2, 3])
        assert xp.add(x, 1, other) is other
        fraction, whole = x / 2, x / 2
        assert xp.modf(x / 2, fraction, whole)[1] is whole
        assert whole.tolist() == [0, 0, 1, 1]
        assert fraction.tolist() == [0, 0.5, 0, 0.5]


@settings(max_examples=max(5, settings().max_examples // 2))
@given(array_programs(most=8, lines={"standard": tuple(call for calls in EVERY.values() for call in calls)}))
def test_programs_of_the_standard(program: Program) -> None:
    """Whole programs of the standard's functions, every other array evicted after every line."""
    wrong = difference(program, adapter, rc.Cache(verify=True, clock=ManualClock()), after=evict_some(Random(1)))
    assert wrong is None, wrong
