"""Arrays as the cache sees them: views share the memory of their owner, and results are read-only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from math import prod
from sys import getrefcount
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

import recompute as rc
from recompute.extend import Generators
from recompute_numpy._generators import generators

_SAMPLE: Final = 1_000  # elements of an object array that are looked at; more are extrapolated
_SAMPLES: Final = 64  # elements that are looked at to see whether an array has changed
_LOOKED_AT: Final = 1024  # bytes; of smaller arrays all of them are
_PART: Final = 1 << 20  # bytes that are compared at once
_LITTLE: Final = 1 << 16  # bytes that are copied to be compared, which is quicker
_FEW: Final = 100  # elements; smaller arrays are just copied
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_X87: Final = np.finfo(np.longdouble).nmant == 63  # a long double has ten bytes of number, the rest is padding


class _Layout(NamedTuple):
    """How an array lies in the memory from its first byte to its last."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    start: int
    """Where in it the first element is."""
    nbytes: int
    """Of that memory: fewer than the elements have where these overlap, more where there are gaps."""


class NumpyAdapter(rc.adapters.ArrayAdapter):
    """Arrays of any subclass, and NumPy's scalars. The memory of an array is the array at the end of its `.base`s."""

    name = "numpy"

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id: reached only through a result

    def serves(self, cls: type) -> bool:
        """Arrays and scalars; a dtype or a random generator is a plain object."""
        return issubclass(cls, (np.ndarray, np.generic))

    def generators(self) -> Generators:
        """Those of `numpy.random`."""
        return generators

    def nbytes(self, value: Any) -> int:
        """Bytes of the memory, all of it for a view that alone keeps it alive, else of the view at most.

        Object arrays add their distinct elements, estimated from about a thousand of them.
        """
        if value.dtype.hasobject:
            return _own_bytes(value) + _elements_bytes(np.asarray(value))
        return _own_bytes(value)

    def buffer(self, value: Any) -> object | None:
        """The array that owns the memory; None for a scalar, which cannot change."""
        if value.base is not None:
            value = _trace(value)[0]
        return value if isinstance(value, np.ndarray) else None

    def watch(self, value: Any) -> object | None:
        """The owner, if it is the value or lives through the value alone; else the value itself."""
        if value.base is None:
            return value if isinstance(value, np.ndarray) else None
        owner, references = _trace(value)
        kept: object = owner if references <= _ONE or self._owners.get(id(owner)) is owner else value
        return kept

    def freeze(self, value: Any) -> None:
        """Set the writeable flag to False, and remember whether the owner lives through the value alone.

        `watch` asks for that after the caller may have taken further views of the same memory.
        """
        value.setflags(write=False)
        if value.base is not None:
            owner, references = _trace(value)
            if references <= _ONE:
                owner.setflags(write=False)
                self._owners[id(owner)] = owner
            if isinstance(value, np.ma.MaskedArray):
                np.ma.getmask(value).setflags(write=False)

    def empty(self, outline: rc.adapters.Outline) -> Any:
        """Memory whose axes lie in the same order; contiguous."""
        if outline.strides is None:
            return np.empty(outline.shape, outline.dtype)
        strides = outline.strides
        order = sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))
        if order == sorted(order):  # mostly; no view, whose owner is looked for
            return np.empty(outline.shape, outline.dtype)
        return np.empty([outline.shape[axis] for axis in order], outline.dtype).transpose(np.argsort(order))

    def copy(self, value: Any) -> Any:
        """Writable, with the same order of axes; a scalar is a scalar, of which only a record can be written to."""
        if isinstance(value, np.void):
            return value.copy()
        return value.copy(order="K") if isinstance(value, np.ndarray) else value

    def clone(self, value: Any) -> Any:
        """With the same strides, and between the elements what lies there in the array itself."""
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray) or _is_dense(value):
            return self.copy(value)
        return _with_gaps(value)

    def source(self, value: Any) -> Any:
        """A read-only view: the array itself stays as its owner has it. A file mapped to memory is an array."""
        return self.result(value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    def result(self, value: Any) -> Any:
        """A read-only view, unless it is read-only already; of a record a copy."""
        if not value.flags.writeable or not isinstance(value, (np.ndarray, np.void)):
            return value
        if isinstance(value, np.void):
            return value.copy()
        view = value.view()
        view.setflags(write=False)
        return view

    def snapshot(self, value: Any) -> Any:
        """The array itself if neither it nor what it is a view of can be written to."""
        below = value
        while isinstance(below, np.ndarray) and not below.flags.writeable:
            below = below.base
        if below is None or isinstance(below, bytes):
            return value
        if 0 in value.strides:  # what `broadcast_to` made, of less memory than it has elements
            part = value[tuple([slice(None) if stride else slice(1) for stride in value.strides])]
            return np.broadcast_to(self.copy(part), value.shape, subok=True)
        return self.copy(value)

    def place(self, value: Any) -> Hashable | None:
        """Address, shape, strides and dtype; not of what may have more to it: subclasses, a dtype with metadata."""
        if type(value) is not np.ndarray or not value.size or _metadata(value.dtype):
            return None
        return value.ctypes.data, value.shape, value.strides, value.dtype

    def same(self, value: Any, kept: Any) -> bool:
        """Compares bytes, those between the elements, too: in parts of a megabyte, so without much memory."""
        if value.ctypes.data == kept.ctypes.data:
            return bool(value.strides == kept.strides and self.snapshot(value) is value)
        if value.strides != kept.strides or value.shape != kept.shape or value.dtype != kept.dtype:
            return super().same(value, kept)
        if not _is_dense(value):
            return super().same(value, kept)
        if value.nbytes <= _LITTLE:
            return bool(value.tobytes() == kept.tobytes())
        one, other = _memory(value)[0], _memory(kept)[0]
        return all(
            np.array_equal(one[start : start + _PART], other[start : start + _PART])
            for start in range(0, len(one), _PART)
        )

    def sample(self, value: Any) -> Hashable | None:
        """Some sixty elements, all of them if there are few, and the last one."""
        if not isinstance(value, np.ndarray) or value.dtype.hasobject or not value.size:
            return None
        value = value.view(np.ndarray)  # else a masked array is filled
        if value.nbytes <= _LOOKED_AT:
            return bytes(value.tobytes())
        if value.flags.c_contiguous:
            flat = value.reshape(-1)
            return flat[:: max(1, flat.size // _SAMPLES)].tobytes(), flat[-1:].tobytes()
        steps = [max(1, round(length / _SAMPLES ** (1 / value.ndim))) for length in value.shape]
        last = value[tuple([slice(-1, None)] * value.ndim)]
        return value[tuple([slice(None, None, step) for step in steps])].tobytes(), last.tobytes()

    @np.errstate(all="ignore")
    def repeated(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Division by zero and the like were warned of, or raised, under the error state of the first run."""
        return function(*args, **kwargs)

    def compact(self, value: Any) -> Callable[[], Any] | None:
        """Of equal elements, to the last bit."""
        if value.size < _FEW or type(value) is not np.ndarray or not value.flags.c_contiguous:
            return None
        bits = value.reshape(-1).view(_WORDS.get(value.dtype.itemsize, np.uint8))
        if value.dtype.itemsize not in _WORDS or bits[0] != bits[-1] or not (bits == bits[0]).all():
            return None
        shape, dtype, element = value.shape, value.dtype, value.reshape(-1)[:1].copy()
        return lambda: np.full(shape, element, dtype)

    def check(self, value: Any) -> None:
        """No arrays of Python objects: what happens to their elements cannot be seen."""
        if value.dtype.hasobject:
            raise TypeError(
                f"an array of Python objects ({value.dtype!r}) cannot be wrapped, since its elements may change; give "
                "it a numeric dtype, or use rc.pure and rc.ap"
            )

    def namespace(self) -> Any:
        return np

    def enter(self, value: Any) -> tuple[int, object | None]:
        """The same with one look at the chain of bases."""
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return super().enter(value) if isinstance(value, (np.ndarray, np.void)) else (value.nbytes, None)
        value.setflags(write=False)
        if value.base is None:
            return value.nbytes, value
        owner, references = _trace(value)
        if references > _ONE:
            return min(value.nbytes, owner.nbytes), owner
        owner.setflags(write=False)
        self._owners[id(owner)] = owner
        return owner.nbytes, owner

    def signature(self, value: Any) -> Hashable:
        """Shape and dtype; of a single integer or boolean the value, since it may be a size."""
        shape, dtype = value.shape, value.dtype
        return (shape, dtype) if shape or dtype.kind not in "biu" else (value.item(), dtype)

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of type, dtype, shape and every bit but padding: NaNs of different payload differ, so does -0.0.

        The attributes of a subclass, such as a unit, are content, and so is the metadata of a dtype; of a masked array
        the mask, the fill value, and whether the mask is hard. None if any of it, or an object array, holds something
        that cannot be checked.
        """
        cls = type(value)
        digest = blake2b(f"{cls.__module__}.{cls.__qualname__} {value.dtype!r} {value.shape}".encode(), digest_size=16)
        masked = isinstance(value, np.ma.MaskedArray)
        for part in _content(value.filled(0) if masked else np.asarray(value)):
            content = super().fingerprint(part.ravel().tolist()) if part.dtype.hasobject else _bytes(part)
            if content is None:
                return None
            digest.update(content)
        beside: list[Any] = []
        if metadata := _metadata(value.dtype):
            beside.append(metadata)
        if masked:
            digest.update(_bytes(np.ma.getmaskarray(value)))
            beside += [value.view(np.ma.MaskedArray).fill_value, value.hardmask]  # asked, an array notes its default
        elif not isinstance(value, np.memmap) and (attributes := getattr(value, "__dict__", None)):
            beside.append({name: part for name, part in attributes.items() if not _is_cached(cls, name)})
        if beside:
            own = super().fingerprint(beside)
            if own is None:
                return None
            digest.update(own)
        return digest.digest()

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """The memory of an array from its first byte to its last; scalars, objects and subclasses as pickle does it.

        Raises BufferError for an array with gaps in memory that others hold, too: it would come back larger than it is
        counted. And for one of objects or of a subclass that pickle would give back with another layout, or without
        its attributes.
        """
        if type(value) is not np.ndarray or value.dtype.hasobject or not value.itemsize:
            if isinstance(value, np.ndarray) and not _is_kept_by_pickle(value):
                raise BufferError(
                    f"a {type(value).__qualname__} like this would not come back as it is if it were pickled"
                )
            return super().pack(value)
        counted = self.nbytes(value)  # first: the memory is one more that holds it
        memory, start = _memory(value)
        if memory.nbytes > counted:
            raise BufferError(
                f"an array of {value.nbytes} bytes lies in {memory.nbytes}, which others hold, too; use a copy of it"
            )
        return _Layout(value.shape, value.strides, value.dtype, start, memory.nbytes), [memory]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        """Memory of its own, with the same strides, and with the same gaps if there were any."""
        if type(head) is not _Layout:
            return super().unpack(head, load)
        array = _empty(head)
        load(_memory(array)[0])
        return array


def _metadata(dtype: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """What is written beside a dtype and those of its fields, by field: neither its repr nor equality tells it."""
    found = {} if dtype.metadata is None else {path: dict(dtype.metadata)}
    for name in dtype.names or ():
        found |= _metadata(dtype[name], (*path, name))
    return found if dtype.subdtype is None else found | _metadata(dtype.base, (*path, "[]"))


def _is_cached(cls: type, name: str) -> bool:
    """Whether an attribute is cached: computed from the array."""
    return isinstance(getattr(cls, name, None), cached_property)


def _trace(value: Any) -> tuple[Any, int]:
    """The owner: the last array on the chain of bases; and the most references that anything on the chain has.

    `as_strided` puts an object of its own between two arrays. The walk itself adds to the references, always as many.
    """
    owner, most, base = value, 0, value.base
    while base is not None:
        references = getrefcount(base)
        if references > most:
            most = references
        if isinstance(base, np.ndarray):
            owner = base
        elif not isinstance(getattr(base, "base", None), np.ndarray):
            break
        base = base.base
    return owner, most


_ONE: Final = _trace(np.empty(1)[:])[1]  # what the walk sees of a base that nothing but its view refers to


def _is_dense(value: Any) -> bool:
    """Whether a copy in the same order of axes has the same strides."""
    if value.flags.c_contiguous or value.flags.f_contiguous:
        return bool(value.size) or type(value) is not np.ndarray
    distance = value.itemsize
    for step, length in sorted(zip(value.strides, value.shape, strict=True)):
        if length != 1:
            if step != distance:
                return False
            distance *= length
    return True


def _with_gaps(value: Any) -> Any:
    """A copy of the memory from the first to the last byte of an array, and the array in it."""
    if not value.size:
        return np.lib.stride_tricks.as_strided(np.empty(value.shape, value.dtype), value.shape, value.strides)
    memory, start = _memory(value)
    array: Any = np.ndarray(value.shape, value.dtype, memory.copy(), start, value.strides)
    return array if type(value) is np.ndarray else array.view(type(value))


def _memory(value: Any) -> tuple[Any, int]:
    """The memory from the first to the last byte of an array, and where in it the first element is. Not a copy."""
    if not value.size:
        return np.empty(0, np.uint8), 0
    ends = [(length - 1) * step for length, step in zip(value.shape, value.strides, strict=True)]
    lowest = tuple([slice(-1, None) if end < 0 else slice(1) for end in ends])
    first = value[(..., *lowest)].view(np.ndarray).reshape(1)
    below = -sum(end for end in ends if end < 0)
    above = sum(end for end in ends if end > 0) + value.itemsize
    return np.lib.stride_tricks.as_strided(first.view(np.uint8), (below + above,), (1,)), below


def _empty(layout: _Layout) -> Any:
    """An array of that layout, which owns its memory if such an array can."""
    shape, strides, dtype = layout.shape, layout.strides, layout.dtype
    if prod(shape) * dtype.itemsize == layout.nbytes:
        # Of two axes with one stride the one of length 1 is the inner one.
        order = [2 * step - (length == 1) for step, length in zip(strides, shape, strict=True)]
        array = np.empty_like(np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, order))
        if array.strides == strides:
            return array
    return np.ndarray(shape, dtype, np.empty(layout.nbytes, np.uint8), layout.start, strides)


def _loses_attributes(cls: Any) -> bool:
    """Whether pickle gives back arrays of a subclass without them. Those of NumPy's own are not the user's."""
    own = cls.__module__.partition(".")[0] == "numpy"
    return not own and (cls.__reduce__, cls.__reduce_ex__) == (np.ndarray.__reduce__, np.ndarray.__reduce_ex__)


def _is_kept_by_pickle(array: Any) -> bool:
    """Whether an array of objects, or of a subclass, comes back from pickle as it is."""
    order = array.flags.c_contiguous, array.flags.f_contiguous
    if not isinstance(array, np.ma.MaskedArray):
        return any(order) and not (getattr(array, "__dict__", None) and _loses_attributes(type(array)))
    mask = np.ma.getmask(array)  # pickle makes one where there is none, and a soft one
    there = mask is not np.ma.nomask and not array.hardmask
    return there and any(order) and order == (mask.flags.c_contiguous, mask.flags.f_contiguous)


def _own_bytes(value: Any) -> int:
    """Bytes of the array itself, references as such."""
    if value.base is None:
        return value.nbytes  # type: ignore[no-any-return]
    owner, references = _trace(value)
    size: int = owner.nbytes if references <= _ONE else min(value.nbytes, owner.nbytes)
    if isinstance(value, np.ma.MaskedArray):
        size += np.ma.getmask(value).nbytes
    return size


def _elements_bytes(array: Any) -> int:
    """Bytes of the distinct objects that an array refers to; about a thousand of them are looked at."""
    if array.dtype.names:
        return sum(_elements_bytes(array[name]) for name in array.dtype.names if array.dtype[name].hasobject)
    count: int = array.size
    chosen = range(0, count, max(1, count // _SAMPLE))
    elements = array.flat
    distinct = {id(element): element for element in [elements[index] for index in chosen]}
    seen = sum(rc.sizeof(element) for element in distinct.values() if element is not array)
    return seen * count // max(1, len(chosen))


def _content(array: Any) -> Iterator[Any]:
    """The fields of a structured array, each as an array: what lies between them is padding."""
    if array.dtype.names:
        for name in array.dtype.names:
            yield from _content(array[name])
    else:
        yield array


def _bytes(array: Any) -> Any:
    """The bits of an array without objects, in C order."""
    if not array.size or not array.dtype.itemsize:
        return b""
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if _X87 and array.dtype.char in "gG":
        bits = np.ascontiguousarray(bits.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10])
    return bits


adapter: Final = NumpyAdapter()
