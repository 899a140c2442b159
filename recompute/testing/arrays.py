"""`check_arrays`: the promises of an adapter of arrays beyond those of other adapters, for each dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import inf, nan, prod
from random import Random
from struct import unpack
from typing import Any, Final, Literal

from recompute._adapters.arrays import ArrayAdapter
from recompute.testing.conformance import registered

Layout = Literal["C", "F", "reversed", "strided", "broadcast", "scalar"]

DTYPES: Final = (
    *("float64", "int64", "bool", "float32", "complex128", "int8", "uint8", "float16", "complex64", "int32", "uint64"),
    *("uint16",),
)
LAYOUTS: Final[tuple[Layout, ...]] = ("C", "F", "reversed", "strided", "broadcast", "scalar")


def check_arrays(adapter: ArrayAdapter, *, dtypes: Sequence[str] = DTYPES) -> None:
    """Raise AssertionError, and say what is wrong, if `adapter` breaks a promise of `recompute.adapters.ArrayAdapter`.

    `dtypes` are names of dtypes in the library's namespace; each is tried in every layout, in a few shapes.
    """
    with serving(adapter):
        for dtype in dtypes:
            for layout in LAYOUTS:
                for shape in ((2, 3), (3,), (), (0, 2)):
                    _check_array(adapter, dtype, shape, layout)


def _check_array(adapter: ArrayAdapter, dtype: str, shape: tuple[int, ...], layout: str) -> None:
    """The promises of `ArrayAdapter` beyond those of `Adapter`, for one array."""
    xp = adapter.namespace()
    who = f"{adapter!r}, {layout} {dtype} {shape}"
    x = new(xp, dtype, shape, 2, layout)
    content = adapter.fingerprint(x)
    outline = adapter.outline(x)
    for name in ("shape", "dtype", "ndim", "size", "nbytes"):
        expected, told = getattr(x, name), getattr(outline, name)
        assert told == expected, f"{who}: the outline's {name} is {told}, not {expected}"
    assert outline.cls is type(x), f"{who}: the outline is that of a {outline.cls.__name__}"
    copy = adapter.copy(x)
    same = adapter.fingerprint(copy) == content and type(copy) is type(x)
    assert same, f"{who}: a copy is not equal"
    source = adapter.source(x)
    assert adapter.fingerprint(source) == content, f"{who}: what is kept of a wrapped array is not equal to it"
    shared = adapter.buffer(source) is adapter.buffer(x)
    assert shared, f"{who}: a wrapped array is copied, though nothing was said of that"
    snapshot = adapter.snapshot(x)
    assert adapter.fingerprint(snapshot) == content, f"{who}: a snapshot is not equal"
    result = adapter.result(source)
    assert adapter.fingerprint(result) == content, f"{who}: what callers get is not equal"
    if _overwritten(result):
        assert adapter.fingerprint(source) == content, f"{who}: a caller can change a cached array through what he gets"
    if adapter.constant(x):
        assert not _overwritten(x), f"{who}: a constant was changed"
        return
    made = adapter.empty(outline)
    assert geometry(made) == geometry(copy), f"{who}: new memory is {geometry(made)}, but a copy is {geometry(copy)}"
    if not can_be_written(adapter):
        return
    assert adapter.buffer(copy) is not adapter.buffer(x), f"{who}: a copy shares memory with the original"
    if shape and 0 not in shape:
        assert _overwritten(copy), f"{who}: a copy cannot be written to"
        assert _overwritten(made), f"{who}: new memory cannot be written to"
        assert adapter.fingerprint(x) == content, f"{who}: what is written to a copy is seen in the original"
    if _overwritten(x):
        assert adapter.fingerprint(snapshot) == content, f"{who}: what is written to an array is seen in its snapshot"


def can_be_written(adapter: ArrayAdapter) -> bool:
    """Whether arrays of the library can be written to at all."""
    return _overwritten(adapter.namespace().zeros(1))


def _overwritten(x: Any) -> bool:
    """Whether an array could be changed; it is now."""
    try:
        x[...] = x == 0
    except Exception:  # each library has its own for read-only arrays, and for those that can never be written to
        return False
    return True


_PAYLOADS: Final = unpack("<2d", bytes.fromhex("0000dec0ad0bf87f000000000000f8ff"))  # NaNs unlike the usual one
_SPECIAL: Final = (0.0, nan, -0.0, inf, 1.0, -inf, _PAYLOADS[0], 5e-324, -1.5, 65504.0, _PAYLOADS[1], 1e-8, 1.7e308)


def numbers(dtype: str, count: int, seed: int) -> list[Any]:
    """That many numbers of a dtype, always the same for one seed."""
    kind = dtype.rstrip("0123456789")
    if kind == "complex":
        parts = numbers("float64" if dtype == "complex128" else "float32", 2 * count, seed)
        return [complex(*parts[2 * number : 2 * number + 2]) for number in range(count)]
    if kind == "bool":
        return [(number * (seed + 1) + seed // 2) % 3 > 0 for number in range(count)]
    if seed == 0:
        return [number + 1 if kind != "float" else number + 1.0 for number in range(count)]
    if seed == 1 and kind == "float":
        special = _SPECIAL if dtype == "float64" else _SPECIAL[:-1]
        return [special[number % len(special)] for number in range(count)]
    if seed == 1:
        bits = int(dtype.removeprefix(kind))
        ends = (0, 2**bits - 1, 1, 2) if kind == "uint" else (0, -(2 ** (bits - 1)), -1, 2 ** (bits - 1) - 1, 1)
        return [ends[number % len(ends)] for number in range(count)]
    random = Random(seed)
    if kind == "float":
        return [random.uniform(-2, 2) for _ in range(count)]
    return [random.randint(0 if kind == "uint" else -4, 4) for _ in range(count)]


def new(xp: Any, dtype: str, shape: tuple[int, ...], seed: int = 0, layout: str = "C") -> Any:
    """A plain array of the library."""

    def contiguous(shape: tuple[int, ...]) -> Any:
        return xp.asarray(numbers(dtype, prod(shape), seed), dtype=getattr(xp, dtype)).reshape(shape)

    if layout == "F" and len(shape) > 1:
        return contiguous(shape[::-1]).T
    if layout == "reversed" and shape:
        return contiguous(shape)[(slice(None, None, -1),) * len(shape)]
    if layout == "strided" and shape:
        return contiguous((*shape[:-1], 2 * shape[-1]))[..., ::2]
    if layout == "broadcast" and shape and shape[0] > 1 and 0 not in shape:
        return xp.broadcast_to(contiguous(shape[1:]), shape)
    return contiguous(())[()] if layout == "scalar" and not shape else contiguous(shape)


def geometry(outline: Any) -> tuple[Any, ...]:
    """Dtype, shape, and bytes from one element to the next along the axes where there is one."""
    shape, strides = outline.shape, getattr(outline, "strides", None)
    if strides is not None and 0 not in shape:
        strides = tuple([step for step, length in zip(strides, shape, strict=True) if length > 1])
    return str(outline.dtype), shape, strides if 0 not in shape else None


def serving(adapter: ArrayAdapter) -> AbstractContextManager[None]:
    """The adapter serves the arrays and scalars of its library for a while."""
    one = adapter.namespace().asarray([1.0])
    classes = {base for cls in (type(one), type(one[0])) for base in cls.__mro__}
    return registered(adapter, *(cls for cls in classes if cls.__module__ != "builtins" and adapter.serves(cls)))
