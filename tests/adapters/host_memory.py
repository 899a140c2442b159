"""Real CuPy arrays over the memory of the host: all but kernels works on them, where there is no GPU."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final, TypeVar

import cupy
import numpy as np

from recompute_cupy._adapter import CupyAdapter

P = TypeVar("P", "HostPool", "ExactPool")

UNIT: Final = 512  # bytes: what CuPy's pool rounds up to


def on_host(array: Any) -> Any:
    """A CuPy array over a copy of a NumPy array."""
    whole = np.array(array, order="C")
    memory = cupy.cuda.UnownedMemory(whole.ctypes.data, whole.nbytes, whole, 0)
    return cupy.ndarray(whole.shape, whole.dtype, cupy.cuda.MemoryPointer(memory, 0))


def seen(array: Any) -> np.ndarray[Any, Any]:
    """The same memory as a NumPy array, to read and to write."""
    memory = array.data.mem
    if not array.size:
        return np.empty(array.shape, array.dtype)
    return np.ndarray(
        array.shape,
        array.dtype,
        (ctypes.c_char * memory.size).from_address(memory.ptr),
        array.data.ptr - memory.ptr,
        array.strides,
    )


class HostAdapter(CupyAdapter):
    """CuPy's adapter, but what a GPU would copy is copied by the host."""

    def fetch(self, value: Any) -> np.ndarray[Any, Any]:
        return seen(value).copy()

    def copy(self, value: Any) -> Any:
        copy = self.empty(self.outline(value))
        seen(copy)[...] = seen(value)
        return copy

    def take(self, device: int, address: int, nbytes: int) -> Any:
        return ctypes.string_at(address, nbytes)

    def give(self, device: int, address: int, nbytes: int, load: Callable[[Any], None]) -> None:
        load((ctypes.c_char * nbytes).from_address(address))


class _Block:
    """Given back when nobody refers to it any more."""

    def __init__(self, pool: HostPool, start: int, stop: int) -> None:
        self.pool, self.start, self.stop = pool, start, stop

    def __del__(self) -> None:
        self.pool.returned.append((self.start, self.stop))  # and no more: this may run at any time


class HostPool:
    """A memory pool as CuPy's, over host memory: the first hole that fits, free blocks are kept for the next request.

    Blocks are neither moved nor split, and a request is refused when no hole and no free block is large enough, or when
    it would take more than the limit. Used by several threads.
    """

    def __init__(self, capacity: int) -> None:
        self._memory = np.zeros(capacity, np.uint8)
        self._holes = [(0, capacity)]
        self._free: list[tuple[int, int]] = []
        self._lock = Lock()
        self._limit = 0
        self._used = 0
        self.returned: deque[tuple[int, int]] = deque()
        self.refused = 0
        self.given_back = 0  # how often free blocks were

    def malloc(self, size: int) -> Any:
        size = -(-size // UNIT) * UNIT
        if not size:
            return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)
        with self._lock:
            self._collect()
            start, stop = self._reuse(size) or self._carve(size)
            self._used += stop - start
        block = _Block(self, start, stop)
        memory = cupy.cuda.UnownedMemory(self._memory.ctypes.data + start, stop - start, block, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def free_all_blocks(self) -> None:
        with self._lock:
            self._collect()
            self.given_back += 1
            holes: list[tuple[int, int]] = []
            for start, stop in sorted(self._holes + self._free):
                if holes and holes[-1][1] == start:
                    start, _ = holes.pop()
                holes.append((start, stop))
            self._holes, self._free = holes, []

    def set_limit(self, size: int) -> None:
        self._limit = size

    def get_limit(self) -> int:
        return self._limit

    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._used

    def total_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._used + self._kept()

    def _collect(self) -> None:
        while self.returned:
            start, stop = self.returned.popleft()
            self._used -= stop - start
            self._free.append((start, stop))

    def _kept(self) -> int:
        return sum(stop - start for start, stop in self._free)

    def _reuse(self, size: int) -> tuple[int, int] | None:
        for block in self._free:
            if block[1] - block[0] == size:
                self._free.remove(block)
                return block
        return None

    def _carve(self, size: int) -> tuple[int, int]:
        total = self._used + self._kept()
        if not self._limit or total + size <= self._limit:
            for number, (start, stop) in enumerate(self._holes):
                if stop - start >= size:
                    self._holes[number : number + 1] = [(start + size, stop)] if start + size < stop else []
                    return start, start + size
        self.refused += 1
        raise cupy.cuda.memory.OutOfMemoryError(size, total, self._limit)


class ExactPool:
    """Gives as many bytes of host memory as it is asked for."""

    def malloc(self, size: int) -> Any:
        whole = np.empty(size, np.uint8)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(whole.ctypes.data, size, whole, 0), 0)


@contextmanager
def allocating(pool: P) -> Iterator[P]:
    """CuPy allocates from this pool."""
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(pool.malloc)
    try:
        yield pool
    finally:
        cupy.cuda.set_allocator(before)


def full(size: int, number: float) -> Any:
    """As many numbers, written by the host."""
    array = cupy.empty(size)
    seen(array)[...] = number
    return array


def count(size: int) -> Any:
    """0, 1, 2, ... written by the host."""
    array = cupy.empty(size)
    seen(array)[...] = np.arange(size)
    return array


def add(one: Any, other: Any) -> Any:
    """The sum, made by the host."""
    total = cupy.empty(np.broadcast_shapes(one.shape, other.shape), one.dtype)
    seen(total)[...] = seen(one) + seen(other)
    return total
