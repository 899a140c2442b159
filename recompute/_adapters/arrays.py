"""What the array wrapper asks of an adapter beyond `Adapter`: outlines, copies, and what is safe to hand out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from recompute._adapters.adapter import Adapter
from recompute._adapters.remembering import SMALL, unchanged


class Outline:
    """What is known of an array without its memory."""

    __slots__ = ("cls", "dtype", "shape", "strides")

    def __init__(self, cls: type, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> None:
        self.cls = cls
        self.shape = shape
        self.dtype = dtype
        self.strides = strides  # bytes; None: the library does not say

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize  # type: ignore[no-any-return]  # the dtype is the library's

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __repr__(self) -> str:
        return f"<outline of a {self.cls.__name__}: {self.dtype} {self.shape}>"


class ArrayAdapter(Adapter):
    """An adapter whose values are arrays: `rc.array` wraps them, and array code runs on them unchanged."""

    arrays = True

    def outline(self, value: Any) -> Outline:
        """What remains known of the array while it is evicted."""
        return Outline(type(value), value.shape, value.dtype, getattr(value, "strides", None))

    def empty(self, outline: Outline) -> Any:
        """A new array of that shape, dtype and order of axes in memory; whatever in it."""
        raise NotImplementedError

    def copy(self, value: Any) -> Any:
        """The same content in memory of its own that may be written to, with the same order of axes."""
        raise NotImplementedError

    def clone(self, value: Any) -> Any:
        """As `copy`, but as far from element to element: what is a view of the array is a view of its clone, too."""
        return self.copy(value)

    def source(self, value: Any) -> Any:
        """What the cache keeps of an array that a caller wraps: never a copy; read-only, if that is possible."""
        return value

    def result(self, value: Any) -> Any:
        """What a caller gets of a cached array: nothing through which he could change it by accident."""
        return value

    def snapshot(self, value: Any) -> Any:
        """What the cache keeps of a plain array that meets a wrapped one: a copy, unless it cannot change."""
        return self.copy(value)

    def place(self, value: Any) -> Hashable | None:
        """Where in its memory an array lies, and how; None: a plain array is a source anew each time that it is met.

        Two arrays of one buffer and one place are the same array, of which one source is enough (see `same`).
        """
        return None

    def same(self, value: Any, kept: Any) -> bool:
        """Whether an array has, to the last bit, the content that a snapshot of it has."""
        if value is kept and self.snapshot(value) is value:
            return True
        digest = self.fingerprint(value)
        return digest is not None and digest == self.fingerprint(kept)

    def remember(self, value: Any) -> Callable[[], Any] | None:
        """Of a small array a copy, of another one samples."""
        if self.constant(value):
            return None
        if self.nbytes(value) > SMALL:
            return unchanged(value, self.sample)
        kept = self.snapshot(value)
        return None if kept is value else partial(self.copy, kept)

    def sample(self, value: Any) -> Hashable | None:
        """Nothing: an array on a device is not looked at."""
        return None

    def compact(self, value: Any) -> Callable[[], Any] | None:
        """How to make a plain array that meets a wrapped one again, if that takes less than to keep a copy of it.

        Such as an array of zeros, of which autodiff libraries make many; None: no such way is seen.
        """
        return None

    def repeated(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function for a repeated run, so that it does not say again what the first one has said."""
        return function(*args, **kwargs)

    def constant(self, value: Any) -> bool:
        """Whether the value cannot change: then it is no source when it meets an array, but a constant."""
        return self.buffer(value) is None

    def check(self, value: Any) -> None:
        """Raise TypeError, and say what to do, for an array that cannot be wrapped."""

    def namespace(self) -> Any:
        """The module with the library's functions on arrays."""
        raise NotImplementedError
