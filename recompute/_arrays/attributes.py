"""The attributes of a wrapped array: what is known without its content, its views, and coercions, which need it.

A coercion makes a plain array, a number, a text or a copy of the content.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, Self, TypeVar

from recompute._adapters.adapter import kinds
from recompute._adapters.arrays import ArrayAdapter, Outline
from recompute._arrays.operate import call, operate
from recompute._arrays.sharing import Sharer, link, memory_of
from recompute._arrays.writes import change
from recompute._budget import format_bytes
from recompute.extend import EVICTED

Wrapped = TypeVar("Wrapped", bound="Attributes")


class Attributes(Sharer):
    """An array as far as its attributes go. To set one refers to a new version of the array, as all changes do."""

    __slots__ = ()
    _reads_outline = True

    # What is known without the content

    def _outline(self) -> Any:
        """The array itself while it is there, else what is known of it: shape, dtype, strides."""
        value = self._node
        payload = value.payload
        if payload is not EVICTED:
            return payload
        remains = value.remains
        return super().get() if remains is None or remains.outline is None else remains.outline

    @property
    def _type(self) -> type:
        known = self._outline()
        return known.cls if isinstance(known, Outline) else type(known)

    @property
    def _adapter(self) -> ArrayAdapter:
        adapter = kinds[self._type].array
        assert adapter is not None
        return adapter

    @property
    def shape(self) -> tuple[int, ...]:
        return self._outline().shape  # type: ignore[no-any-return]  # of an array of any library

    @shape.setter
    def shape(self, shape: int | tuple[int, ...]) -> None:
        args = (self, shape)
        self._look_like(call(type(self), self.cache, _of_shape, args, {}, sys._getframe(1)))

    @property
    def dtype(self) -> Any:
        return self._outline().dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        args = (self, dtype)
        self._look_like(call(type(self), self.cache, _of_dtype, args, {}, sys._getframe(1)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self._outline().size  # type: ignore[no-any-return]

    @property
    def itemsize(self) -> int:
        return self._outline().dtype.itemsize  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        return self._outline().nbytes  # type: ignore[no-any-return]

    @property
    def strides(self) -> tuple[int, ...]:
        return self._outline().strides  # type: ignore[no-any-return]

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("len() of an array without dimensions")
        return shape[0]

    def __repr__(self) -> str:
        """What it is, without its content: showing it must not recompute anything."""
        value = self._node
        what = "source" if value.operation is None else value.operation.name
        state = "pinned" if value.pinned else "resident" if self.resident else "evicted"
        return f"<RecomputableArray {self.dtype} {self.shape}, {what}: {state}, {format_bytes(self.nbytes)}>"

    # Views

    @property
    def T(self) -> Self:
        """The transpose. Of an evicted array an evicted one: nothing is recomputed until its content is needed."""
        if self._node.payload is EVICTED:
            return self._evicted_view("T", lambda axes: axes[::-1], sys._getframe(1))
        return attribute_of(self, "T", sys._getframe(1))

    @property
    def mT(self) -> Self:
        """The transpose of the last two axes; as lazy as `T`."""
        if self._node.payload is EVICTED and self.ndim > 1:
            return self._evicted_view("mT", lambda axes: (*axes[:-2], axes[-1], axes[-2]), sys._getframe(1))
        return attribute_of(self, "mT", sys._getframe(1))

    @property
    def real(self) -> Self:
        return attribute_of(self, "real", sys._getframe(1))

    @real.setter
    def real(self, part: Any) -> None:
        change(self, _set_real, (part,), {}, sys._getframe(1))

    @property
    def imag(self) -> Self:
        return attribute_of(self, "imag", sys._getframe(1))

    @imag.setter
    def imag(self, part: Any) -> None:
        change(self, _set_imag, (part,), {}, sys._getframe(1))

    def _evicted_view(self, name: str, order: Callable[[tuple[int, ...]], tuple[int, ...]], caller: FrameType) -> Self:
        """An attribute of an evicted array that is a view with its axes in another order."""
        value = self._node
        known = None if value.remains is None else value.remains.outline
        if known is None:
            return attribute_of(self, name, caller)
        strides = None if known.strides is None else order(known.strides)
        outline = Outline(known.cls, order(known.shape), known.dtype, strides)
        view = self.cache.extend.view(self, _getter(name), outline, caller)
        if view is None:
            return attribute_of(self, name, caller)
        link(view, (self,), ())
        return view

    # Changes

    def _become(self, other: Any) -> Self:
        """Refer to another value; `other` takes the old one with it."""
        self.cache.extend.exchange(self, other)
        return self

    def _look_like(self, view: Self) -> None:
        """Refer to a view of itself: the memory stays, and who shares it."""
        memory, node = memory_of(view), view._node
        origin = None if memory is None else view._origin
        try:
            self._become(view)
        finally:
            if memory is not None and self._node is node:  # an interrupt may come meanwhile, but not in these lines
                self._origin = origin
                view._memory = None


def attribute_of(array: Wrapped, name: str, caller: FrameType) -> Wrapped:
    """What its library has by this name, as an operation."""
    value = array._node
    return operate(  # type: ignore[no-any-return]  # so it is, mostly
        type(array), array.cache, _getter(name), (value,), (value,), caller, 1, (array,)
    )


@lru_cache
def _getter(name: str) -> Callable[[Any], Any]:
    def get(array: Any) -> Any:
        return getattr(array, name)

    get.__qualname__ = name
    return get


def _of_shape(array: Any, shape: Any) -> Any:
    """The same memory, or an error: unlike `reshape`, setting a shape never copies."""
    view = array.view()
    view.shape = shape
    return view


def _of_dtype(array: Any, dtype: Any) -> Any:
    view = array.view()
    view.dtype = dtype
    return view


def _set_real(array: Any, part: Any) -> None:
    array.real = part


def _set_imag(array: Any, part: Any) -> None:
    array.imag = part


class Coercions(Attributes):
    """An array that can be had plain: each time is counted, and recomputes the array if need be."""

    __slots__ = ()

    def get(self) -> Any:
        """The plain array, read-only or a copy; recomputed, with whatever that takes, if it was evicted."""
        payload = super().get()
        self.cache.extend.count_coercion()
        return self._adapter.result(payload)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        plain = self.get()
        if not hasattr(plain, "__array_interface__"):  # no array of NumPy's: its library makes one, or refuses to
            return plain.__array__(dtype, copy=copy)
        constant = self._adapter.constant(plain)
        if not constant and not hasattr(plain, "__array_finalize__"):  # a record alone, which is no array
            plain = self._adapter.result(plain.__array__())
        other = dtype is not None and dtype != plain.dtype
        if copy is False and (other or constant):
            raise ValueError(f"a {type(plain).__name__} of {plain.dtype} cannot be given as {dtype} without a copy")
        if constant:
            return plain.__array__() if dtype is None else plain.__array__(dtype)
        if other:
            return plain.astype(dtype)
        return self._adapter.copy(plain) if copy else plain

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        given = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        options = {name: option for name, option in given.items() if option is not None}  # older libraries lack some
        plain = self.get()
        try:
            return plain.__dlpack__(**options)
        except BufferError:  # to a consumer that knows no read-only arrays only a copy can be given
            if copy is False:
                raise
            return self._adapter.copy(plain).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return super().get().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> Any:
        if not hasattr(self._type, "__cuda_array_interface__"):
            raise AttributeError("__cuda_array_interface__")
        return self.get().__cuda_array_interface__

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __index__(self) -> int:
        return operator.index(self.get())

    def __bytes__(self) -> bytes:
        return bytes(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, specification: str) -> str:
        return format(self.get(), specification)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        from recompute._arrays.namespace import array

        return array, (self.get(),)
