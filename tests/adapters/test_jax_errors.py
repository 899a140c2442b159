"""What is refused or fails with JAX: one line that names the place and what to do, and the cache as it was."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.testing import check_invariants

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

from _jax_oracle import bits  # noqa: E402  # after importorskip

import recompute_jax  # noqa: E402  # after importorskip
from recompute_jax import budget, evaluate, op_by_op, remat  # noqa: E402  # after importorskip

jnp = jax.numpy
lax = jax.lax
HERE = "test_jax_errors.py"


pytestmark = pytest.mark.usefixtures("registered_jax")


@pytest.fixture
def cache() -> Iterator[rc.Cache]:
    """A cache with one value in it, which is all that it has in the end."""
    with rc.Cache() as cache:
        value = rc.ap(jnp.arange, 5.0)
        yield cache
        gc.collect()  # what was raised has the frames, and these what was in them
        assert value.get().tolist() == [0, 1, 2, 3, 4]
        assert cache.stats().used == 20
        check_invariants(cache, [value])


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


def notes(caught: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """The notes that are not JAX's; one line each."""
    found = [note for note in getattr(caught.value, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in note]
    assert not any("\n" in note for note in found)
    return found


def leaked(under: Callable[..., Any], *args: Any) -> Any:
    """A traced value that has left the function that was traced."""
    out: list[Any] = []

    def leaking(x: Any) -> Any:
        out.append(jnp.sin(x) * 2)
        return x

    under(leaking)(*args)
    return out[0]


# Traced values


@pytest.mark.parametrize(
    "use", [rc.array, rc.pure, lambda x: rc.ap(jnp.sin, x), lambda x: recompute_jax.ap(jnp.sin, x)]
)
@pytest.mark.parametrize("under", [jax.jit, jax.grad, jax.vmap])
def test_traced_values_are_refused(cache: rc.Cache, use: Any, under: Any) -> None:
    """No traced value gets into the cache, and the message names what to do."""

    def leak(x: Any) -> Any:
        use(x)
        return x

    with pytest.raises(TypeError, match="evaluate around all of it, as in"):
        under(leak)(jnp.ones(3) if under is not jax.grad else 1.0)
    with jax.checking_leaks(), pytest.raises(TypeError, match="a traced value"):
        jax.jit(leak)(jnp.ones(4))


@pytest.mark.parametrize(("under", "argument"), [(jax.jit, 1.0), (jax.vmap, np.ones(2, "float32")), (jax.grad, 1.0)])
def test_traced_values_that_got_away(cache: rc.Cache, under: Any, argument: Any) -> None:
    """So is one that left its function; the message says where it was made, as far as JAX knows."""
    x = leaked(under, argument)
    made = rf", made at .*{HERE}:\d+" if under is not jax.grad else ""
    with pytest.raises(TypeError, match=rf"^a traced value \(float32\[\]{made}.*\) cannot be cached"):
        rc.pure(x)
    with pytest.raises(TypeError, match=rf"^args\[1\]\['w'\] of add.*: a traced value \(float32\[\]{made}"):
        evaluate(jnp.add, 1.0, {"w": x})
    with pytest.raises(TypeError, match=r"traced value"):
        recompute_jax.ap(lambda: x)


def test_traced_values_that_a_function_knows(cache: rc.Cache) -> None:
    """A function that uses a traced value from around it, alive or not, is refused, with the equation and its line."""
    message = rf"^<lambda> \(.*{HERE}:\d+\) uses a traced value \(float32\[\]\).* in add \(.*{HERE}:\d+.*\).*argument"
    x = leaked(jax.jit, 1.0)
    with pytest.raises(TypeError, match=message):
        evaluate(lambda y: x + y, 1.0)
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda x: evaluate(lambda y: x + y, 1.0))(1.0)
    with pytest.raises(TypeError, match=r"^args\[0\] of sin .*recompute_jax\.remat there"):
        jax.jit(lambda x: evaluate(jnp.sin, x))(1.0)
    ones = jnp.ones(3)
    assert bits(jax.jit(lambda x: x + evaluate(jnp.sin, ones))(1.0)) == bits(1.0 + jnp.sin(ones))


# Functions that cannot be traced


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: x if x[0] > 0 else -x, jax.errors.TracerBoolConversionError),
        (lambda x: x[x > 0], jax.errors.NonConcreteBooleanIndexError),
        (lambda x: jnp.nonzero(x), jax.errors.ConcretizationTypeError),
        (lambda x: range(3)[x.astype(int)[0]], jax.errors.TracerIntegerConversionError),
        (lambda x: np.sin(x), jax.errors.TracerArrayConversionError),
    ],
)
def test_functions_of_values(cache: rc.Cache, function: Any, error: type[Exception]) -> None:
    """Python code that asks for a value has JAX's error, with the line that asks, and what to do instead."""
    with pytest.raises(error) as caught:
        evaluate(function, jnp.ones(3))
    (note,) = notes(caught)
    line = line_of(function)
    assert note.startswith(f"at {__file__}:{line} (<lambda>), while recompute_jax traced <lambda> ({__file__}:{line})")
    assert "jnp.where" in note
    assert "static_argnums" in note


def test_functions_that_raise(cache: rc.Cache) -> None:
    """What a function raises while it is traced passes through, with the line that raised it."""

    def inner(x: Any) -> Any:
        raise KeyError("weights")

    def outer(x: Any) -> Any:
        return jax.jit(inner)(x) + 1

    with pytest.raises(KeyError, match="weights") as caught:
        evaluate(outer, 1.0)
    first = line_of(inner)
    assert notes(caught) == [
        f"at {__file__}:{first + 1} (inner), while recompute_jax traced outer ({__file__}:{first + 3})"
    ]


def test_callbacks_that_raise(cache: rc.Cache, caplog: pytest.LogCaptureFixture) -> None:
    """So does what a host function raises while an equation runs; the note names the equation."""

    def broken(x: Any) -> Any:
        raise ValueError("broken")

    shape = jax.ShapeDtypeStruct((), "float32")
    for callback in (jax.pure_callback, jax.experimental.io_callback):
        with pytest.raises(jax.errors.JaxRuntimeError, match="broken") as caught:
            evaluate(lambda x: callback(broken, shape, x), 1.0)  # noqa: B023  # it is called at once
        assert any(f"in {callback.__name__} ({__file__}:" in note for note in notes(caught))
    caplog.clear()  # JAX has logged the exception, whose frames have the arguments


# Arguments


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (lambda: rc.pure({"a": 1}), "it is a Recomputable of a dict, not of an array; pass a tree"),
        (lambda: jax.ShapeDtypeStruct((3,), "float32"), "it is a ShapeDtypeStruct, which has no content"),
    ],
)
def test_arguments_that_are_no_arrays(cache: rc.Cache, argument: Any, message: str) -> None:
    """The message names the argument by its place in the tree of all."""
    with pytest.raises(TypeError, match=rf"^args\[0\]\['x'\]\[1\] of <lambda> \({__file__}:\d+\): {message}"):
        evaluate(lambda tree, n: tree, {"x": [1.0, argument()]}, 2)
    with pytest.raises(TypeError, match=rf"^kwargs\['x'\] of <lambda> .*: {message}"):
        op_by_op(lambda n, *, x: x, static_argnums=0)("static", x=argument())


def test_what_jax_does_not_take(cache: rc.Cache) -> None:
    """Other types have JAX's message; arrays that were deleted have one that says so."""
    with pytest.raises(TypeError, match="Error interpreting argument"):
        evaluate(lambda x: x, "text")
    gone = jnp.ones(3)
    gone.delete()
    for use in (lambda: evaluate(jnp.sin, gone), lambda: rc.pure(gone), lambda: rc.ap(lambda: gone)):
        with pytest.raises(
            RuntimeError, match=r"memory of an array \(float32\[3\]\) is gone: it was deleted, or donated"
        ):
            use()


# Refs


def mutable(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


def test_refs_are_refused(cache: rc.Cache) -> None:
    """Mutable arrays are refused with the cure, but not those inside one operation."""
    with pytest.raises(NotImplementedError, match=rf"made by `new_ref` at {HERE}:\d+ .*x\.at"):
        evaluate(mutable, jnp.ones(3))
    with budget(), pytest.raises(NotImplementedError, match=r"made by `new_ref`.*x\.at"):
        mutable(jnp.ones(3))
    ref = jax.new_ref(jnp.ones(3))
    with pytest.raises(NotImplementedError, match="mutable array"):
        evaluate(lambda x: x + ref[...], jnp.ones(3))
    with pytest.raises(TypeError, match="mutable array"):
        rc.pure(ref)
    with pytest.raises(NotImplementedError, match=r"^args\[1\]\['r'\] of <lambda> .*mutable array.*an argument"):
        evaluate(lambda x, refs: x @ refs["r"][...], jnp.ones(3), {"r": ref})
    with pytest.raises(NotImplementedError, match=r"mutable array \(Ref{float32\[3\]}, an argument"):
        remat(lambda x, ref: x @ ref[...], of_peak=0.9)(jnp.ones(3), ref)
    inside = lambda x: lax.scan(lambda c, _: (mutable(c), None), x, None, length=3)[0]
    assert evaluate(inside, jnp.ones(3)).tolist() == [8, 8, 8]


# Memory


def test_budget_below_the_least(cache: rc.Cache) -> None:
    """An equation that the budget has no room for is named, with its line in the function."""
    cache.budget = 10_000
    with pytest.raises(rc.BudgetError, match=rf"dot_general \(.*{HERE}:\d+.*14.4 kB.*5.36 kB.*raise the budget"):
        evaluate(lambda x: (x @ x.T).sum(), jnp.ones((60, 2)))
    assert cache.stats().overshoot == 0
    cache.budget = None


@pytest.mark.parametrize("unroll_scans", [False, True])
def test_budget_below_the_least_inside_of_jax(cache: rc.Cache, unroll_scans: bool) -> None:
    """What JAX's own functions are made of is named with the line that calls them, and so is where it was evaluated."""
    mapped = lambda x: lax.map(jnp.sort, x) if unroll_scans else jnp.sort(x[0])
    cache.budget = 100_000  # room for x and one row, but not for it and what is sorted
    with pytest.raises(rc.BudgetError) as caught:
        op_by_op(mapped, unroll_scans=unroll_scans)(jnp.ones((2, 8000)))
    line = line_of(mapped)
    assert re.match(
        rf"\w+ \({__file__}:{line}:\d+ \(.*<lambda>\)\) \(created at {__file__}:{line + 3}\) needs", str(caught.value)
    )
    cache.budget = None


def test_recomputables_of_two_caches(cache: rc.Cache) -> None:
    """Arguments from two caches are refused with the cure."""
    x = rc.pure(jnp.ones(3))
    with rc.Cache():
        y = rc.pure(jnp.ones(3))
    with pytest.raises(ValueError, match="the arguments belong to two caches"):
        evaluate(jnp.add, x, y)


def test_device_out_of_memory(cache: rc.Cache) -> None:
    """An operation that no memory is enough for makes the cache release all it can; then the device's error passes."""
    kept = op_by_op(lambda x: x + 1, recomputable=True)(jnp.ones(1000))
    pinned = op_by_op(lambda x: x + 2, recomputable=True)(jnp.ones(1000)).pin()
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as caught:  # JAX has two classes for it
        evaluate(lambda: jnp.zeros(2**46))
    assert any("in broadcast_in_dim (" in note for note in notes(caught))
    assert not kept.resident
    assert pinned.resident
    assert bits(kept.get()) == bits(jnp.ones(1000) + 1)
    kept.evict()
    kept.get()
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        recompute_jax.ap(lambda x: jnp.zeros(2**46) + x, rc.pure(jnp.ones(())))
    assert not kept.resident
    del kept, pinned
