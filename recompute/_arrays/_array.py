"""`RecomputableArray`: an array that may be dropped and recomputed, on which array code runs unchanged."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any, ClassVar

from recompute._adapter import kinds
from recompute._array_adapter import ArrayAdapter, Outline
from recompute._arrays._dispatch import (
    Changed,
    array_function,
    array_ufunc,
    is_plain,
)
from recompute._arrays._operate import SCALARS, call, operate
from recompute._arrays._parts import At, Flat, Method
from recompute._budget import format_bytes
from recompute._cache import Cache
from recompute._graph import EVICTED, Operation, Value
from recompute._recomputable import Recomputable


def _binary(function: Callable[..., Any], reflected: bool = False) -> Callable[[RecomputableArray, Any], Any]:
    """An operator of two operands. Two arrays, or an array and a number, take the hot path: benchmarks/arrays.py."""

    def apply(self: RecomputableArray, other: Any) -> Any:
        cls = type(other)
        value = self._value
        if cls in SCALARS:
            positional = (other, value) if reflected else (value, other)
            return operate(RecomputableArray, self._cache, function, positional, (value,), sys._getframe(1))
        if cls is RecomputableArray:
            cache, second = self._cache, other._value
            adapter = kinds[type(value.payload)].adapter
            if other._cache is cache and kinds[type(second.payload)].adapter is adapter and adapter.arrays:
                pair = (second, value) if reflected else (value, second)
                return operate(RecomputableArray, cache, function, pair, pair, sys._getframe(1))
        elif _defers_to(cls):
            return NotImplemented
        args = (other, self) if reflected else (self, other)
        return call(RecomputableArray, self._cache, function, args, {}, sys._getframe(1))

    return apply


def _unary(function: Callable[..., Any]) -> Callable[[RecomputableArray], Any]:
    def apply(self: RecomputableArray) -> Any:
        value = self._value
        return operate(RecomputableArray, self._cache, function, (value,), (value,), sys._getframe(1))

    return apply


def _in_place(function: Callable[..., Any]) -> Callable[[RecomputableArray, Any], Any]:
    """An operator that changes its left operand: here a new version of it."""
    changed = Changed(function)

    def apply(self: RecomputableArray, other: Any) -> Any:
        if _defers_to(type(other)):
            return NotImplemented
        return self._become(call(RecomputableArray, self._cache, changed, (self, other), {}, sys._getframe(1)))

    return apply


def _defers_to(cls: type) -> bool:
    """Whether a type that is no array has operators of its own for arrays, as the boxes of autograd libraries do."""
    return hasattr(cls, "__array_priority__") and not issubclass(cls, Recomputable) and not kinds[cls].array


class RecomputableArray(Recomputable[Any]):
    """An array of NumPy, CuPy, JAX or another library, as a `Recomputable`; made by `rc.array`.

    Operators, indexing, methods, and the functions of its library give `RecomputableArray`s; `shape`, `dtype` and the
    like never recompute. What changes an array in place (`x += 1`, `x[0] = 1`, `x.sort()`, `out=x`) makes a new version
    to which `x` refers from then on: views and values made before do not see the change. Coercions (`get`,
    `np.asarray`, `float`, `bool`, `print`) recompute if need be, are counted in the stats, and give read-only arrays,
    or copies where the library has no such thing.
    """

    __slots__ = ()
    __array_priority__: ClassVar[float] = 90.0  # above arrays, below the boxes of autograd
    __hash__ = None  # type: ignore[assignment]  # as arrays: == compares elements

    @classmethod
    def _of(cls, cache: Cache, value: Value) -> Recomputable[Any]:
        payload = value.payload
        array = hasattr(value, "outline") if payload is EVICTED else kinds[type(payload)].array
        return cls(cache, value) if array else Recomputable(cache, value)

    @property
    def cache(self) -> Cache:
        """The cache it belongs to."""
        return self._cache

    # What is known without the content

    def _outline(self) -> Any:
        """The array itself while it is there, else what is known of it: shape, dtype, strides."""
        value = self._value
        payload = value.payload
        if payload is not EVICTED:
            return payload
        return value.outline if hasattr(value, "outline") else super().get()

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
        self._become(call(RecomputableArray, self._cache, _of_shape, args, {}, sys._getframe(1)))

    @property
    def dtype(self) -> Any:
        return self._outline().dtype

    @dtype.setter
    def dtype(self, dtype: Any) -> None:
        args = (self, dtype)
        self._become(call(RecomputableArray, self._cache, _of_dtype, args, {}, sys._getframe(1)))

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

    # Views

    @property
    def T(self) -> RecomputableArray:
        """The transpose. Of an evicted array an evicted one: nothing is recomputed until its content is needed."""
        if self._value.payload is EVICTED:
            return self._evicted_view("T", lambda axes: axes[::-1], sys._getframe(1))
        return _attribute(self, "T", sys._getframe(1))

    @property
    def mT(self) -> RecomputableArray:
        """The transpose of the last two axes; as lazy as `T`."""
        if self._value.payload is EVICTED and self.ndim > 1:
            return self._evicted_view("mT", lambda axes: (*axes[:-2], axes[-1], axes[-2]), sys._getframe(1))
        return _attribute(self, "mT", sys._getframe(1))

    @property
    def real(self) -> RecomputableArray:
        return _attribute(self, "real", sys._getframe(1))

    @real.setter
    def real(self, part: Any) -> None:
        self._change(_set_real, (self, part), sys._getframe(1))

    @property
    def imag(self) -> RecomputableArray:
        return _attribute(self, "imag", sys._getframe(1))

    @imag.setter
    def imag(self, part: Any) -> None:
        self._change(_set_imag, (self, part), sys._getframe(1))

    @property
    def flat(self) -> Flat:
        """The elements in C order, to be read and written."""
        return Flat(self)

    @flat.setter
    def flat(self, content: Any) -> None:
        args = (self, content)
        self._change(_set_all, args, sys._getframe(1))

    # Indexing

    def __getitem__(self, key: Any) -> Any:
        value = self._value
        cls = type(key)
        if cls is int or (cls is slice and _fixed(key)) or (cls is tuple and all(map(_fixed, key))):
            return operate(RecomputableArray, self._cache, operator.getitem, (value, key), (value,), sys._getframe(1))
        return call(RecomputableArray, self._cache, operator.getitem, (self, key), {}, sys._getframe(1))

    def __setitem__(self, key: Any, content: Any) -> None:
        args = (self, key, content)
        self._change(operator.setitem, args, sys._getframe(1))

    def __delitem__(self, key: Any) -> None:
        """As the library has it: an error that says so."""
        args = (self, key)
        self._change(operator.delitem, args, sys._getframe(1))

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over an array without dimensions")
        return (self[each] for each in range(self.shape[0]))

    def __contains__(self, element: Any) -> bool:
        args = (self, element)
        return bool(call(RecomputableArray, self._cache, operator.contains, args, {}, sys._getframe(1)))

    @property
    def at(self) -> At:
        """`x.at[i].set(y)` and the like, of a library that has them: the array with some elements replaced."""
        if not hasattr(self._type, "at"):
            raise AttributeError(f"{self._type.__name__} has no attribute 'at'")
        return At(self)

    # Operators

    __add__, __radd__, __iadd__ = _binary(operator.add), _binary(operator.add, True), _in_place(operator.iadd)
    __sub__, __rsub__, __isub__ = _binary(operator.sub), _binary(operator.sub, True), _in_place(operator.isub)
    __mul__, __rmul__, __imul__ = _binary(operator.mul), _binary(operator.mul, True), _in_place(operator.imul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, True)
    __itruediv__ = _in_place(operator.itruediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, True)
    __ifloordiv__ = _in_place(operator.ifloordiv)
    __mod__, __rmod__, __imod__ = _binary(operator.mod), _binary(operator.mod, True), _in_place(operator.imod)
    __pow__, __rpow__, __ipow__ = _binary(operator.pow), _binary(operator.pow, True), _in_place(operator.ipow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _binary(operator.matmul, True)
    __imatmul__ = _in_place(operator.imatmul)
    __and__, __rand__, __iand__ = _binary(operator.and_), _binary(operator.and_, True), _in_place(operator.iand)
    __or__, __ror__, __ior__ = _binary(operator.or_), _binary(operator.or_, True), _in_place(operator.ior)
    __xor__, __rxor__, __ixor__ = _binary(operator.xor), _binary(operator.xor, True), _in_place(operator.ixor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _binary(operator.lshift, True)
    __ilshift__ = _in_place(operator.ilshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _binary(operator.rshift, True)
    __irshift__ = _in_place(operator.irshift)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)

    def __divmod__(self, other: Any) -> Any:
        if _defers_to(type(other)):
            return NotImplemented
        return call(RecomputableArray, self._cache, divmod, (self, other), {}, sys._getframe(1))

    def __rdivmod__(self, other: Any) -> Any:
        if _defers_to(type(other)):
            return NotImplemented
        return call(RecomputableArray, self._cache, divmod, (other, self), {}, sys._getframe(1))

    def __round__(self, digits: int | None = None) -> Any:
        args = (self,) if digits is None else (self, digits)
        return call(RecomputableArray, self._cache, round, args, {}, sys._getframe(1))

    # Functions and methods of the array's library

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **keywords: Any) -> Any:
        if any(_defers_to(type(each)) for each in args):
            return NotImplemented
        return array_ufunc(self, ufunc, method, args, keywords, sys._getframe(1))

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not all(issubclass(each, RecomputableArray) or kinds[each].array for each in types):
            return NotImplemented
        return array_function(self, function, args, dict(keywords), sys._getframe(1))

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        from recompute._arrays._namespace import namespace

        return namespace(self._adapter.namespace())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls = self._type
        attribute = getattr(cls, name, None)
        if attribute is None and is_plain(cls, self.dtype):  # a subclass may have more than its class shows
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, nor has the {cls.__name__} in it")
        if callable(attribute) and not isinstance(attribute, type):
            return Method(self, name, attribute)
        return _attribute(self, name, sys._getframe(1))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(each for each in dir(self._type) if not each.startswith("__"))})

    # Coercion

    def get(self) -> Any:
        """The plain array, read-only or a copy; recomputed, with whatever that takes, if it was evicted."""
        payload = super().get()
        self._cache._coercions += 1
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

    def __dlpack__(self, **options: Any) -> Any:
        plain = self.get()
        try:
            return plain.__dlpack__(**options)
        except BufferError:  # to a consumer that knows no read-only arrays only a copy can be given
            if options.get("copy") is False:
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

    def __repr__(self) -> str:
        """What it is, without its content: showing it must not recompute anything."""
        value = self._value
        what = "source" if value.operation is None else value.operation.name
        state = "pinned" if value.pinned else "resident" if self.resident else "evicted"
        return f"<RecomputableArray {self.dtype} {self.shape}, {what}: {state}, {format_bytes(self.nbytes)}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        from recompute._arrays._wrap import array

        return array, (self.get(),)

    def __copy__(self) -> RecomputableArray:
        return again(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputableArray:
        return again(self)

    def _evicted_view(
        self, name: str, order: Callable[[tuple[int, ...]], tuple[int, ...]], caller: FrameType
    ) -> RecomputableArray:
        """An attribute of an evicted array that is a view with its axes in another order."""
        value = self._value
        known = getattr(value, "outline", None)
        operation = Operation(_getter(name), (value,), None, (value,), 1, None, caller.f_code, caller.f_lasti)
        view = None if known is None else self._cache._defer(operation)
        if view is None or known is None:
            return _attribute(self, name, caller)
        strides = None if known.strides is None else order(known.strides)
        view.outline = Outline(known.cls, order(known.shape), known.dtype, strides)
        return RecomputableArray(self._cache, view)

    def _change(self, function: Callable[..., Any], args: tuple[Any, ...], caller: FrameType) -> RecomputableArray:
        """Refer to a new version from now on: what `function` makes of a copy by changing it in place."""
        return self._become(call(RecomputableArray, self._cache, Changed(function), args, {}, caller))

    def _become(self, other: Any) -> RecomputableArray:
        """Refer to another value from now on; `other` takes the old one with it."""
        self._value, other._value = other._value, self._value
        return self


def again(array: Recomputable[Any]) -> RecomputableArray:
    """Another reference to the same value: what one of them becomes, the other does not."""
    with array._cache._noting:
        with array._cache._lock:
            array._value.refs += 1
        return RecomputableArray(array._cache, array._value)


def _attribute(array: RecomputableArray, name: str, caller: FrameType) -> RecomputableArray:
    value = array._value
    return operate(RecomputableArray, array._cache, _getter(name), (value,), (value,), caller)  # type: ignore[no-any-return]  # so it is, mostly


@lru_cache
def _getter(name: str) -> Callable[[Any], Any]:
    def get(array: Any) -> Any:
        return getattr(array, name)

    get.__qualname__ = name
    return get


def _fixed(part: Any) -> bool:
    """Whether a part of an index is a number, a slice of numbers, None or an ellipsis."""
    cls = type(part)
    if cls is slice:
        return _fixed(part.start) and _fixed(part.stop) and _fixed(part.step)
    return cls is int or part is None or part is ...


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


def _set_all(array: Any, content: Any) -> None:
    array.flat = content
