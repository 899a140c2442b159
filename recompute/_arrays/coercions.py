"""Coercions of a wrapped array: what needs its content, and makes a plain array, a number, a text or a copy of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from recompute._arrays.attributes import Attributes


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
        from recompute._arrays.wrap import array

        return array, (self.get(),)
