"""Arrays on a GPU as the cache sees them: views share a memory object, costs are told by events.

What is counted is the memory object's size. CuPy's pool gives memory in multiples of 512 bytes, so a small array counts
as 512. Nothing is read-only: CuPy has no such flag.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from sys import getrefcount
from time import perf_counter
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no types, or not here
import numpy as np

import recompute as rc
from recompute_cupy import _devices
from recompute_cupy._streams import give, streams, take
from recompute_numpy import adapter as on_host

_BLOCK: Final = 512  # bytes: CuPy's pool rounds up to multiples of it

CUDAError: Final = cupy.cuda.runtime.CUDARuntimeError


class Memory(cupy.cuda.UnownedMemory):  # type: ignore[misc]  # CuPy has no types
    """Memory of a pool that takes weak references, which CuPy's own does not: the installed allocator gives these."""

    __slots__ = ("__weakref__",)


class Outline(rc.adapters.Outline):
    """What is known of an array without its memory; the device, too."""

    __slots__ = ("device",)

    def __init__(self, value: Any) -> None:
        super().__init__(type(value), value.shape, value.dtype, value.strides)
        self.device: int = value.data.device_id


class _Layout(NamedTuple):
    """How an array lies in the memory from its first byte to its last."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    start: int
    """Where in it the first element is."""
    nbytes: int
    device: int


class CupyAdapter(rc.adapters.ArrayAdapter):
    """Arrays of any subclass. Their memory is `array.data.mem`, which all views of it share."""

    name = "cupy"

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id: reached only through a result

    def serves(self, cls: type) -> bool:
        """Arrays; a stream, a kernel or a sparse matrix is a plain object."""
        return issubclass(cls, cupy.ndarray)

    def nbytes(self, value: Any) -> int:
        """Bytes of the memory, all of it for an array that alone keeps it alive, else of the array at most.

        The array's own bytes count as the pool would give them, in blocks of 512.
        """
        whole: int = value.data.mem.size
        return whole if _alone(value) else min(whole, -(-value.nbytes // _BLOCK) * _BLOCK)

    def buffer(self, value: Any) -> object:
        """The memory object: the same one for all views."""
        return value.data.mem

    def watch(self, value: Any) -> object:
        """What lives as long as the memory, if that lives through the value alone; else the value itself.

        That is the memory object where the installed allocator made it. CuPy's own take no weak references: for them
        it is the array that owns the memory, which every view refers to, but for those of `as_strided`.
        """
        alone = _alone(value)
        last = _last(value)
        return last if alone or self._kept.get(id(last)) is last else value

    def device(self, value: Any) -> str:
        return _devices.name(value.data.device_id)

    def freeze(self, value: Any) -> None:
        """Nothing is frozen. Remembers whether the memory lives through the value alone, and the stream that made it.

        `watch` asks for the former after the caller may have taken further views of the same memory.
        """
        if _alone(value):
            last = _last(value)
            self._kept[id(last)] = last
        if _devices.seen():
            streams.note(value.data.device_id)

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        """By two events on the current stream of the device, which first waits for other operations' (`_streams`).

        What a function launches on streams of its own is seen as far as the current one waits for it.
        """
        if not _devices.seen():
            return None
        number = _devices.number(device)
        streams.join(number)
        launched = perf_counter()
        with cupy.cuda.Device(number):
            stream = cupy.cuda.get_current_stream()
            start = cupy.cuda.Event()
            start.record(stream)

        def done() -> Callable[[], float | None]:
            on_host = perf_counter() - launched
            with cupy.cuda.Device(number):
                end = cupy.cuda.Event()
                end.record(stream)

            def seconds() -> float | None:
                try:
                    return cupy.cuda.get_elapsed_time(start, end) / 1000 if end.done else None
                except CUDAError:  # of a kernel: it surfaces where the program next waits, and not here
                    return on_host

            return seconds

        return done

    def outline(self, value: Any) -> rc.adapters.Outline:
        return Outline(value)

    def empty(self, outline: rc.adapters.Outline) -> Any:
        """Memory on the same device, whose axes lie in the same order; contiguous."""
        strides = outline.strides or [0] * outline.ndim
        order = sorted(range(outline.ndim), key=lambda axis: -abs(strides[axis]))
        with _devices.on(getattr(outline, "device", _devices.current())):
            whole = cupy.empty([outline.shape[axis] for axis in order], outline.dtype)
        return whole.transpose([order.index(axis) for axis in range(outline.ndim)])

    def copy(self, value: Any) -> Any:
        """On the same device, with the same order of axes."""
        with _devices.on(value.data.device_id):
            if _devices.seen():
                streams.join(value.data.device_id)
            return value.copy(order="K")

    def result(self, value: Any) -> Any:
        """A copy: CuPy has no read-only arrays."""
        return self.copy(value)

    def namespace(self) -> Any:
        return cupy

    def signature(self, value: Any) -> Hashable:
        """Shape, dtype and device. No content: to read it, the host would have to wait."""
        return value.shape, value.dtype, value.data.device_id

    def fingerprint(self, value: Any) -> bytes | None:
        """NumPy's digest of a copy on the host, for which the host waits."""
        content = on_host.fingerprint(self.fetch(value))
        cls = type(value)
        return content and blake2b(f"{cls.__module__}.{cls.__qualname__}".encode() + content, digest_size=16).digest()

    def fetch(self, value: Any) -> np.ndarray[Any, Any]:
        """A copy on the host, for which the host waits."""
        if _devices.seen():
            streams.join(value.data.device_id)
        return cupy.asnumpy(value)  # type: ignore[no-any-return]  # CuPy has no types

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """The memory of an array from its first byte to its last, on the host, for which the host waits.

        Raises TypeError for a subclass, and BufferError for an array with gaps in memory that others hold, too.
        """
        if type(value) is not cupy.ndarray:
            raise TypeError(f"a {type(value).__qualname__} is more than the bytes of its memory")
        start, nbytes = _extent(value)
        if nbytes > self.nbytes(value):
            raise BufferError(
                f"an array of {value.nbytes} bytes lies in {nbytes}, which others hold, too; use a copy of it"
            )
        device = value.data.device_id
        layout = _Layout(value.shape, value.strides, value.dtype, start, nbytes, device)
        return layout, [self.take(device, value.data.ptr - start, nbytes)] if nbytes else []

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        """On the same device, with the same strides."""
        with _devices.on(head.device):
            memory = cupy.cuda.alloc(head.nbytes)
            if head.nbytes:
                self.give(head.device, memory.ptr, head.nbytes, load)
            return cupy.ndarray(head.shape, head.dtype, memory + head.start, head.strides)

    def take(self, device: int, address: int, nbytes: int) -> Any:
        """Bytes of a device, in pinned memory of the host."""
        return take(device, address, nbytes)

    def give(self, device: int, address: int, nbytes: int, load: Callable[[Any], None]) -> None:
        """Fill memory of a device with what `load` gives, by pinned memory of the host."""
        give(device, address, nbytes, load)

    def devices(self) -> list[str]:
        """All that CUDA shows; none without a driver."""
        try:
            return [_devices.name(number) for number in range(cupy.cuda.runtime.getDeviceCount())]
        except CUDAError:
            return []

    def free_memory(self, device: str) -> int | None:
        """What CUDA says is free; free blocks in CuPy's pool are not. None without a driver, or such a device."""
        try:
            return _devices.memory(_devices.number(device))[0]
        except (CUDAError, ValueError):
            return None


def _extent(value: Any) -> tuple[int, int]:
    """Where in the memory from the first to the last byte of an array its first element is, and how many these are."""
    if not value.size:
        return 0, 0
    ends = [(length - 1) * step for length, step in zip(value.shape, value.strides, strict=True)]
    below = -sum(end for end in ends if end < 0)
    return below, below + sum(end for end in ends if end > 0) + value.itemsize


def _last(value: Any) -> Any:
    """What takes weak references and lives as long as the memory: the memory, or the array at the end of the bases."""
    memory = value.data.mem
    if isinstance(memory, Memory):
        return memory
    base = value.base
    while base is not None:
        value, base = base, base.base
    return value


def _alone(value: Any) -> bool:
    """Whether nothing but the value, through the arrays that it is a view of, keeps the memory."""
    bases, pointers, memory = _tally(value)
    return bases <= _ONE[0] and pointers <= _ONE[1] and memory <= _ONE[2]


def _tally(value: Any) -> tuple[int, int, int]:
    """The most references to any base, to any pointer, and to the memory, without those that the value explains.

    A view refers to the array it was made of; each array refers to a pointer, which those of one address may share;
    each pointer refers to the memory. The look itself adds to the references, always as many.
    """
    pointers = [value.data]
    memory = pointers[0].mem
    bases = 0
    base = value.base
    while base is not None:
        bases = max(bases, getrefcount(base))
        pointers.append(base.data)
        base = base.base
    numbers = [id(pointer) for pointer in pointers]
    most = 0
    for number, references in zip(numbers, map(getrefcount, pointers), strict=True):
        most = max(most, references - 2 * numbers.count(number))
    return bases, most, getrefcount(memory) - len(set(numbers))


def _view() -> Any:
    """The only view of two bytes that are never looked at."""
    memory = cupy.cuda.UnownedMemory(_BLOCK, 2, None, 0)
    return cupy.ndarray(2, np.int8, cupy.cuda.MemoryPointer(memory, 0))[1:].view()


_ONE: Final = _tally(_view())  # what the look sees where nothing else keeps the memory

adapter: Final = CupyAdapter()
