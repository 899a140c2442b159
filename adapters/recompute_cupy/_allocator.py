"""An allocator that asks the cache for room: when the device is full, or a limit is reached, values are evicted.

So whatever CuPy allocates is covered, the temporaries inside its functions too, and the cache needs no budget of its
own. An eviction inside an allocation inside an operation is the normal case: the arguments of the operation are locked,
and evicting runs no function of the user's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no types, or not here

import recompute as rc
from recompute.extend import RLock, leave_in_steps
from recompute.text import parse_budget
from recompute_cupy import _devices
from recompute_cupy._adapter import Memory


class Pool(Protocol):
    """Where the memory comes from: what `install` uses of `cupy.cuda.MemoryPool`, on the current device."""

    def malloc(self, size: int) -> Any:
        """A `cupy.cuda.MemoryPointer` to that many bytes. Raises a MemoryError if there is no block for them."""

    def free_all_blocks(self) -> None:
        """Give free blocks back to the device."""

    def set_limit(self, size: int) -> None:
        """The most that the pool may take from the device, in bytes; 0: no limit."""

    def get_limit(self) -> int:
        """The limit; 0: none."""

    def used_bytes(self) -> int:
        """Bytes of the blocks in use."""

    def total_bytes(self) -> int:
        """Bytes of all blocks, in use and free."""


class DeviceMemoryError(rc.BudgetError, cupy.cuda.memory.OutOfMemoryError):  # type: ignore[misc]  # CuPy has no types
    """Nothing more can be evicted, and the memory of the device does not do.

    The message says how much was asked for and who holds the rest. The cache is as it was, apart from evictions.
    """

    def __init__(self, message: str) -> None:
        MemoryError.__init__(self, message)

    def __reduce__(self) -> tuple[type[DeviceMemoryError], tuple[Any, ...]]:
        return type(self), self.args


class Allocator:
    """What `install` put in place. As a context manager it is uninstalled at the end of the block."""

    def __init__(self, cache: rc.Cache, pool: Pool, fraction: float | None, limit: int | None) -> None:
        self.cache: Final = cache
        self.pool: Final = pool
        self._fraction = fraction
        self._limit = limit
        self._limits: dict[int, int] = {}  # of the pool, by device, before this one set them
        self._before: Any = cupy.cuda.get_allocator()
        self._room = RLock()  # one thread at a time makes room: others would take it
        self._making = False

    @property
    def installed(self) -> bool:
        """Whether CuPy allocates through it."""
        return _installed is self

    def malloc(self, size: int) -> Any:
        """What CuPy calls for every allocation: a pointer to `size` bytes on the current device.

        Raises DeviceMemoryError when even evicting all that can be evicted makes no block of that size. Cost: some
        microseconds; when memory is short, an attempt of the pool for each doubling of what is evicted.
        """
        device = _devices.current()
        if self.installed and device not in self._limits:
            self._set_limit(device)
        try:
            pointer = self.pool.malloc(size)
        except MemoryError as error:
            pointer = self._make_room(size, device, error)
        memory = pointer.mem
        known = Memory(memory.ptr, memory.size, memory, memory.device_id)
        return cupy.cuda.MemoryPointer(known, pointer.ptr - memory.ptr)

    def uninstall(self) -> None:
        """Put back the allocator and the limits that were there before; once more does nothing.

        Raises RuntimeError if another allocator was set since: put that one's predecessor back first.
        """
        global _installed
        with _installing:
            if not self.installed:
                return
            if cupy.cuda.get_allocator() == self.malloc:
                cupy.cuda.set_allocator(self._before)
            elif cupy.cuda.get_allocator() != self._before:
                raise RuntimeError(
                    "another allocator was set after recompute_cupy.install(); first set back the one it replaced"
                )
            for device, limit in self._limits.items():
                with _devices.on(device):
                    self.pool.set_limit(size=limit)
            _installed = None

    def __enter__(self) -> Allocator:
        return self

    def leaving(self) -> Iterable[Callable[[], object]]:
        """What ends the block: see `recompute.extend.leave_in_steps`."""
        return (self.uninstall,)

    __exit__ = leave_in_steps

    def _install(self) -> None:
        cupy.cuda.set_allocator(self.malloc)
        self._set_limit(_devices.current())

    def _set_limit(self, device: int) -> None:
        """Limit the pool on a device that is used for the first time."""
        with self._room:
            if device in self._limits:
                return
            limit = self._limit
            if limit is None and self._fraction is not None:
                limit = int(self._fraction * _devices.memory(device)[1])
            before = self.pool.get_limit()
            if limit is not None:
                self.pool.set_limit(size=limit)
            self._limits[device] = before

    def _make_room(self, size: int, device: int, error: MemoryError) -> Any:
        """A block for which the pool has no room. Raises DeviceMemoryError if there can be none.

        Free blocks that are given back must be asked of the device again, which takes milliseconds for each. So that
        comes first only if much is free, in pieces that are too small.
        """
        with self._room:
            total, most = self.pool.total_bytes(), self.pool.get_limit()
            scattered = total - self.pool.used_bytes() >= max(size, total // 4)
            nested = self._making or not self.installed  # someone who listens to evictions allocates; or uninstalled
            pointer = self._try(size) if scattered or nested else self._malloc(size)
            if pointer is not None:
                return pointer
            if nested:
                raise error
            if most and size > most:
                raise DeviceMemoryError(
                    f"{_amount(size)} were asked for on {_devices.name(device)}, more than the limit of "
                    f"{_amount(most)}; nothing was evicted for it; raise the limit, or do the operation in parts"
                ) from error
            self._making = True
            try:
                pointer = self._evict_for(size, min(size, max(1, total + size - most)) if most else size, device)
            finally:
                self._making = False
            if pointer is None:
                raise DeviceMemoryError(self._shortage(size, device)) from error
            return pointer

    def _evict_for(self, size: int, wanted: int, device: int) -> Any:
        """Evict so many bytes, and twice as much each time, until there is a block; None: nothing has helped."""
        reused = 2 if wanted == size else 0  # times that the block can only be one that a value had
        while self.cache.release_memory(wanted, _devices.name(device)):
            pointer = self._malloc(size) if reused > 0 else self._try(size)
            if pointer is not None:
                return pointer
            reused -= 1
            wanted *= 2
        pointer = self._try(size)
        if pointer is None:
            gc.collect()  # arrays in cycles, such as those in the frames of an exception
            pointer = self._try(size)
        return pointer

    def _malloc(self, size: int) -> Any:
        """A pointer, if there is a block now; else None."""
        try:
            return self.pool.malloc(size)
        except MemoryError:
            return None

    def _try(self, size: int) -> Any:
        """A pointer, if there is a block now or once free ones were given back; else None."""
        pointer = self._malloc(size)
        if pointer is None:
            self.pool.free_all_blocks()
            pointer = self._malloc(size)
        return pointer

    def _shortage(self, size: int, device: int) -> str:
        """Who holds what, when nothing can be evicted."""
        name = _devices.name(device)
        total, used, limit = self.pool.total_bytes(), self.pool.used_bytes(), self.pool.get_limit()
        pools = [pool for pool in self.cache.stats().pools if pool.device == name]
        counted = sum(pool.used for pool in pools)
        parts = [
            (sum(pool.sources for pool in pools), "in sources"),
            (sum(pool.pinned for pool in pools), "pinned"),
            (
                sum(pool.used - pool.sources - pool.pinned - pool.held for pool in pools),
                "locked by operations in flight or reserved for them",
            ),
            (sum(pool.held for pool in pools), "evicted but held by the caller"),
            (used - counted, "in temporaries and other arrays that the cache does not know"),
            (total - used, "free in blocks that are partly in use"),
            (limit - total, "free" if limit - total < size else "free in pieces that are too small"),
        ]
        taken = ", ".join(f"{_amount(part)} {what}" for part, what in parts if part > 0)
        return (
            f"{_amount(size)} were asked for on {name}, no block of that size can be made, and nothing more can be "
            f"evicted: {taken}; {f'the limit is {_amount(limit)}' if limit else 'there is no limit but the device'}; "
            "unpin, drop what get() returned, or do the operation in parts"
        )

    def __repr__(self) -> str:
        return f"<allocator of {self.cache!r}{'' if self.installed else ', not installed'}>"


_installed: Allocator | None = None
_installing: Final = RLock()


def install(
    cache: rc.Cache,
    fraction: float | None = 0.9,
    *,
    limit: int | str | None = None,
    pool: Pool | None = None,
) -> Allocator:
    """Let CuPy ask `cache` for room whenever the device is out of memory or a limit is reached.

    Parameters
    ----------
    cache
        The one whose values are evicted. Its budget may be unlimited: then memory alone decides.
    fraction
        Of each device's memory: the most that CuPy's pool may take. None: no limit but the device.
    limit
        The same in bytes, or text such as "8GB", instead of `fraction`.
    pool
        Where the memory comes from: CuPy's default pool, or another one with the same methods.

    Allocations go on as before while there is room. When there is none, free blocks of the pool are given back; if that
    is not enough, the cache evicts until a block of the size can be made. A request that is larger than the limit
    fails at once. The allocator is that of the whole process, for all devices and threads, but for blocks in
    `cupy.cuda.using_allocator`. `uninstall()`, or the end of a `with` block, restores what was there.

    Raises RuntimeError if one is installed already; ValueError inside of `cupy.cuda.using_allocator`.
    """
    global _installed
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction!r}")
    if limit is None and fraction is not None and not _devices.seen():
        raise RuntimeError("no CUDA device is seen of which to take a fraction; give limit= in bytes")
    most = None if limit is None else parse_budget(limit, of="the device's memory", what="limit")
    with _installing:
        if _installed is not None:
            raise RuntimeError(f"{_installed!r} is installed already; recompute_cupy.uninstall() it first")
        allocator = Allocator(cache, cupy.get_default_memory_pool() if pool is None else pool, fraction, most)
        _installed = allocator
        try:
            allocator._install()
        except BaseException:
            leave_in_steps(allocator)
            raise
    return allocator


def uninstall() -> None:
    """Put back the allocator and the limits that were there before `install`; does nothing if none is installed."""
    if _installed is not None:
        _installed.uninstall()


def _amount(size: int) -> str:
    return f"{size:,} bytes"
