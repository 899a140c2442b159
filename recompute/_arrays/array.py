"""`RecomputableArray`: an array that may be dropped and recomputed, on which array code runs unchanged.

Here: its elements, its operators, what its library calls, and the objects that hang on it: methods, `x.flat`, `x.at`.
Below it: _attributes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

from recompute._adapters.adapter import kinds
from recompute._arrays.attributes import Coercions, attribute_of
from recompute._arrays.dispatch import MUTATING_METHODS, ONE_ARRAY, TO_PYTHON, WRITERS, array_function, array_ufunc
from recompute._arrays.operate import CONSTANTS, SCALARS, call, operate
from recompute._arrays.sharing import memory_of
from recompute._arrays.writes import change, is_changeable, is_fixed, is_item, is_plain, library_writes, shares
from recompute._recomputable import Recomputable

_SLOTS: Final = frozenset({"_engine", "_node", "_memory", "_origin"})


def _binary(function: Callable[..., Any], *, reflected: bool = False) -> Callable[[RecomputableArray, Any], Any]:
    """An operator of two operands. Two arrays, or an array and a number, take the hot path: benchmarks/arrays.py."""

    def apply(self: RecomputableArray, other: Any) -> Any:
        cls = type(other)
        value = self._node
        if cls in SCALARS:
            positional = (other, value) if reflected else (value, other)
            return operate(RecomputableArray, self.cache, function, positional, (value,), sys._getframe(1))
        if cls is RecomputableArray:
            cache, second = self.cache, other._node
            adapter = kinds[type(value.payload)].adapter
            if other.cache is cache and kinds[type(second.payload)].adapter is adapter and adapter.arrays:
                pair = (second, value) if reflected else (value, second)
                return operate(RecomputableArray, cache, function, pair, pair, sys._getframe(1))
        elif _defers_to(cls):
            return NotImplemented
        args = (other, self) if reflected else (self, other)
        return call(RecomputableArray, self.cache, function, args, {}, sys._getframe(1))

    return apply


def _unary(function: Callable[..., Any]) -> Callable[[RecomputableArray], Any]:
    def apply(self: RecomputableArray) -> Any:
        value = self._node
        return operate(RecomputableArray, self.cache, function, (value,), (value,), sys._getframe(1))

    return apply


def _in_place(function: Callable[..., Any]) -> Callable[[RecomputableArray, Any], Any]:
    """An operator that changes its left operand: here a new version of it.

    What cannot be changed leaves it to Python, which takes the operator that makes another value.
    """

    def apply(self: RecomputableArray, other: Any) -> Any:
        if _defers_to(type(other)) or not is_changeable(self._type, self.dtype):
            return NotImplemented
        return change(self, function, (other,), {}, sys._getframe(1))

    return apply


def _defers_to(cls: type) -> bool:
    """Whether a type that is no array has operators of its own for arrays, as the boxes of autograd libraries do."""
    return hasattr(cls, "__array_priority__") and not issubclass(cls, Recomputable) and not kinds[cls].array


class RecomputableArray(Coercions):
    """An array of NumPy, CuPy, JAX or another library, as a `Recomputable`; made by `rc.array`.

    Operators, indexing, methods, and the functions of its library give `RecomputableArray`s; `shape`, `dtype` and the
    like never recompute. What changes an array in place (`x += 1`, `x[0] = 1`, `x.sort()`, `out=x`) makes a new version
    to which `x` refers from then on. Views share memory with `x`, as in NumPy: a write through one of them is seen by
    all; what was computed before does not see it. Coercions (`get`, `np.asarray`, `float`, `bool`, `print`) recompute
    if need be, are counted in the stats, and give read-only arrays, or copies where the library has no such thing.
    """

    __slots__ = ()
    __array_priority__: ClassVar[float] = 90.0  # above arrays, below the boxes of autograd
    __hash__ = None  # type: ignore[assignment]  # as arrays: == compares elements

    @classmethod
    def _class_of_results(cls, payload: Any) -> type[Recomputable[Any]]:
        return cls if kinds[type(payload)].array else Recomputable

    # Elements

    @property
    def flat(self) -> Flat:
        """The elements in C order, to be read and written."""
        return Flat(self)

    @flat.setter
    def flat(self, content: Any) -> None:
        change(self, _set_all, (content,), {}, sys._getframe(1))

    def __getitem__(self, key: Any) -> Any:
        value = self._node
        cls = type(key)
        if cls is int or (cls is slice and is_fixed(key)) or (cls is tuple and all(map(is_fixed, key))):
            caller = sys._getframe(1)
            return operate(RecomputableArray, self.cache, operator.getitem, (value, key), (value,), caller, 1, (self,))
        return call(RecomputableArray, self.cache, operator.getitem, (self, key), {}, sys._getframe(1))

    def __setitem__(self, key: Any, content: Any) -> None:
        caller = sys._getframe(1)
        if type(content) is RecomputableArray and is_item(self, key, content, caller):
            return  # the end of `x[key] += y`, which has changed it already
        change(self, operator.setitem, (key, content), {}, caller)

    def __delitem__(self, key: Any) -> None:
        """As the library has it: an error that says so."""
        change(self, operator.delitem, (key,), {}, sys._getframe(1))

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over an array without dimensions")
        return (self[index] for index in range(self.shape[0]))

    def __contains__(self, element: Any) -> bool:
        args = (self, element)
        return bool(call(RecomputableArray, self.cache, operator.contains, args, {}, sys._getframe(1)))

    @property
    def at(self) -> At:
        """`x.at[i].set(y)` and the like, of a library that has them: the array with some elements replaced."""
        if not hasattr(self._type, "at"):
            raise AttributeError(f"{self._type.__name__} has no attribute 'at'")
        return At(self)

    # Operators

    __add__, __radd__, __iadd__ = _binary(operator.add), _binary(operator.add, reflected=True), _in_place(operator.iadd)
    __sub__, __rsub__, __isub__ = _binary(operator.sub), _binary(operator.sub, reflected=True), _in_place(operator.isub)
    __mul__, __rmul__, __imul__ = _binary(operator.mul), _binary(operator.mul, reflected=True), _in_place(operator.imul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, reflected=True)
    __itruediv__ = _in_place(operator.itruediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, reflected=True)
    __ifloordiv__ = _in_place(operator.ifloordiv)
    __mod__, __rmod__, __imod__ = _binary(operator.mod), _binary(operator.mod, reflected=True), _in_place(operator.imod)
    __pow__, __rpow__, __ipow__ = _binary(operator.pow), _binary(operator.pow, reflected=True), _in_place(operator.ipow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _binary(operator.matmul, reflected=True)
    __imatmul__ = _in_place(operator.imatmul)
    __and__, __rand__, __iand__ = (
        _binary(operator.and_),
        _binary(operator.and_, reflected=True),
        _in_place(operator.iand),
    )
    __or__, __ror__, __ior__ = _binary(operator.or_), _binary(operator.or_, reflected=True), _in_place(operator.ior)
    __xor__, __rxor__, __ixor__ = _binary(operator.xor), _binary(operator.xor, reflected=True), _in_place(operator.ixor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _binary(operator.lshift, reflected=True)
    __ilshift__ = _in_place(operator.ilshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _binary(operator.rshift, reflected=True)
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
        return call(RecomputableArray, self.cache, divmod, (self, other), {}, sys._getframe(1))

    def __rdivmod__(self, other: Any) -> Any:
        if _defers_to(type(other)):
            return NotImplemented
        return call(RecomputableArray, self.cache, divmod, (other, self), {}, sys._getframe(1))

    def __round__(self, digits: int | None = None) -> Any:
        args = (self,) if digits is None else (self, digits)
        return call(RecomputableArray, self.cache, round, args, {}, sys._getframe(1))

    def detach(self) -> RecomputableArray:
        """As that of any Recomputable; a view shares its memory with no other array any more."""
        memory = memory_of(self)
        if memory is not None and self._origin is None:
            memory = None  # it is no view
        try:
            super().detach()
        finally:
            if memory is not None and self._node.operation is None:
                self._memory = None  # first: an interrupt may come meanwhile, and at the next call
                memory.leave(self)
        return self

    # Functions and methods of the array's library

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **keywords: Any) -> Any:
        if any(_defers_to(type(argument)) for argument in args):
            return NotImplemented
        return array_ufunc(self, ufunc, method, args, keywords, sys._getframe(1))

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not all(issubclass(cls, Recomputable) or kinds[cls].array for cls in types):
            return NotImplemented
        return array_function(self, function, args, dict(keywords), sys._getframe(1))

    def to_device(self, device: Any, /, *, stream: Any = None) -> Any:
        """On another device of its library, as the array API standard has it."""
        function = getattr(self._type, "to_device", None)
        if function is None:
            raise AttributeError(f"{self._type.__name__} has no attribute 'to_device'")
        keywords = {} if stream is None else {"stream": stream}
        return call(RecomputableArray, self.cache, function, (self, device), keywords, sys._getframe(1))

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        from recompute._arrays.namespace import namespace

        return namespace(self._adapter.namespace())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _SLOTS:  # it was interrupted before it was complete, or has none
            raise AttributeError(name)
        cls = self._type
        attribute = getattr(cls, name, None)
        if attribute is None and is_plain(cls, self.dtype):  # a subclass may have more than its class shows
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, nor has the {cls.__name__} in it")
        if callable(attribute) and not isinstance(attribute, type):
            return Method(self, name, attribute)
        return attribute_of(self, name, sys._getframe(1))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._type) if not name.startswith("__"))})

    def __copy__(self) -> RecomputableArray:
        return again(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputableArray:
        return again(self)


def again(array: Recomputable[Any]) -> RecomputableArray:
    """Another reference to the same value: what one of them becomes, the other does not."""
    return RecomputableArray(array.cache, array._node)


def _set_all(array: Any, content: Any) -> None:
    array.flat = content


class At:
    """`array.at[key]`, whose methods are operations on the array, the key and what else they take."""

    __slots__ = ("_array", "_keys")

    def __init__(self, array: RecomputableArray, *keys: Any) -> None:
        self._array = array
        self._keys = keys

    def __getitem__(self, key: Any) -> At:
        return At(self._array, *self._keys, key)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **keywords: Any) -> Any:
            array, keys = self._array, self._keys
            return call(type(array), array.cache, _at, (array, keys, name, *args), keywords, sys._getframe(1))

        return method


def _at(array: Any, keys: tuple[Any, ...], name: str, *args: Any, **keywords: Any) -> Any:
    place = array.at
    for key in keys:
        place = place[key]
    return getattr(place, name)(*args, **keywords)


class Method:
    """A method of the wrapped array, to be called."""

    __slots__ = ("_array", "_function", "_name")

    def __init__(self, array: RecomputableArray, name: str, function: Callable[..., Any]) -> None:
        self._array = array
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        array, name, caller = self._array, self._name, sys._getframe(1)
        if name in ONE_ARRAY and not keywords and all(type(argument) in CONSTANTS for argument in args):
            value = array._node
            return operate(type(array), array.cache, self._function, (value, *args), (value,), caller, 1, (array,))
        if name in WRITERS or name in TO_PYTHON:
            return getattr(array.get(), name)(*args, **keywords)
        if name == "setflags":
            raise TypeError("a cached array stays as it is; change a copy: np.array(x)")
        changes = name in MUTATING_METHODS or (name == "byteswap" and (keywords.get("inplace") or any(args)))
        if changes and library_writes(array._type, array.dtype):
            if name == "resize":
                if shares(array) is not None:
                    raise ValueError("cannot resize an array that shares its memory with another one; use np.resize")
                if keywords.get("refcheck"):  # the default; but a call with names refers to the array once more
                    del keywords["refcheck"]
            change(array, self._function, args, keywords, caller)
            return array if name == "byteswap" else None
        function: Callable[..., Any] = self._function
        if len(args) > 1 or keywords.get("out") is not None:  # `out` may be among the arguments without a name
            return array_function(array, function, (array, *args), keywords, caller)
        return call(type(array), array.cache, function, (array, *args), keywords, caller)

    @property
    def __name__(self) -> str:
        return self._name

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # that of the method
        return self._function.__doc__

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._array!r}>"


class Flat:
    """The elements of an array in C order: what `x.flat` is."""

    __slots__ = ("_array",)

    def __init__(self, array: RecomputableArray) -> None:
        self._array = array

    def __getitem__(self, key: Any) -> Any:
        array = self._array
        return call(type(array), array.cache, _get_flat, (array, key), {}, sys._getframe(1))

    def __setitem__(self, key: Any, content: Any) -> None:
        array = self._array
        change(array, _set_flat, (key, content), {}, sys._getframe(1))

    def __len__(self) -> int:
        return self._array.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.reshape(-1))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._array.reshape(-1).__array__(dtype, copy)


def _get_flat(array: Any, key: Any) -> Any:
    return array.flat[key]


def _set_flat(array: Any, key: Any, content: Any) -> None:
    array.flat[key] = content
