"""The memory of a storage: its bytes lie in the storage that tensors of the program share, or in one of their own.

How they move to a tier and back (those of a GPU by pinned memory, on a stream of their own), what an operation on a GPU
costs, and what is done if a device has no memory left.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from ctypes import c_ubyte
from functools import partial
from operator import call
from pickle import PickleBuffer
from typing import Any, Final, TypeVar
from weakref import ref

import torch

import recompute as rc
from recompute import extend

Storage = torch.UntypedStorage

T = TypeVar("T")

storage_below_modes: Final = torch._C.TensorBase.untyped_storage
"""The storage of a tensor, past whatever stands before this method while a block is open; with no mode in between."""


def storage_of(tensor: torch.Tensor) -> Storage:
    """The same, whatever modes there are, such as a default device: each would call what stands before the method."""
    with torch._C.DisableTorchFunction():
        return storage_below_modes(tensor)


def storage_or_none(value: Any) -> Storage | None:
    """The storage of a tensor; None: it is no tensor, or has none, as sparse ones do."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return storage_of(value)
    except (NotImplementedError, RuntimeError):
        return None


def uninterrupted(*steps: partial[Any]) -> None:
    """Do one after the other what has no code in Python: no exception comes up in between, of a signal or a tracer.

    Between two statements one can: a handler of signals runs where a tracer does, before any line. Of two storages
    that have the same bytes one is to give them up, and if it is not known which, both do or none.
    """
    deque(map(call, steps), 0)


class Lost(RuntimeError):
    """Bytes went with the last tensor that had them, in the middle of a request that needs them: to be asked again.

    The cache knows by then that the tensor has gone, and makes the bytes anew.
    """


_moving: Final[Any] = extend.RLock()
"""One thread at a time decides which of two storages has the bytes."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_moving._at_fork_reinit)  # another thread may have had it


class Memory:
    """The bytes of one storage. While `own` is None they lie in the `outer` one, which tensors of the program share.

    The result of an operation is in the outer storage alone, and goes when that goes. If it may be needed beyond, it is
    `Kept`: its bytes belong to `own`, and the outer storage points to them. Sources are kept, and results since memory
    was short, from which evicted values may be made.
    """

    __slots__ = ("device", "left", "nbytes", "outer", "own", "tiny")

    def __init__(
        self, device: str, nbytes: int, outer: ref[Storage] | None, own: Storage | None, *, tiny: bool = False
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self.outer = outer  # None: no tensor of the program has it
        self.own = own
        self.left = False  # it is on its way out, and the outer storage has no bytes any more
        self.tiny = tiny  # it is not worth an eviction, and code that is no operator may read it: numbers, lengths

    @property
    def storage(self) -> Storage:
        """Where the bytes are."""
        if self.own is not None:
            return self.own
        storage: Storage | None = self._outside()
        if storage is None:
            raise Lost("the memory of a tensor is gone, and so is the tensor")
        return storage

    def _outside(self) -> Any:
        """The outer storage; None: it has gone, or there was none."""
        return None if self.outer is None else self.outer()

    def keep(self) -> bool:
        """Let the bytes stay when the outer storage goes; False if that has gone, and they with it."""
        with _moving:
            outer = self._outside()
            if self.own is None and outer is not None and not self.left:
                alias = _alias(outer)
                uninterrupted(
                    partial(outer._swap_data_ptr_, alias),
                    partial(setattr, self, "own", alias),
                    partial(setattr, self, "__class__", Kept),
                )
            return self.own is not None

    def leave(self, gone: Callable[[int, torch.device], Any]) -> None:
        """Take the bytes out of the outer storage, which gets `gone(nbytes, device)` instead."""
        with _moving:
            outer = self._outside()
            if outer is not None:
                nothing = gone(self.nbytes, outer.device)
                uninterrupted(partial(outer._swap_data_ptr_, nothing), partial(setattr, self, "left", True))

    def fill(self, remains: ref[Storage]) -> None:
        """Let the outer storage that has no bytes point to these, if there still is one."""
        outer: Any = remains()
        if outer is not None and self.own is not None:
            uninterrupted(partial(outer._swap_data_ptr_, _alias(self.own)), partial(setattr, self, "outer", remains))

    def give_back(self, *further: partial[Any]) -> None:
        """Leave the bytes to the outer storage; `further` steps, if any, are part of it: see `uninterrupted`."""
        with _moving:
            outer = self._outside()
            steps: list[partial[Any]] = []
            if self.own is not None and outer is not None:
                if outer.data_ptr() == self.own.data_ptr():  # else it has got other bytes meanwhile
                    steps.append(partial(outer._swap_data_ptr_, self.own))
                steps += [partial(setattr, self, "own", None), partial(setattr, self, "__class__", Memory)]
            uninterrupted(*steps, *further)

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes on {self.device}>"


class Kept(Memory):
    """Bytes that stay when the outer storage goes."""

    __slots__ = ()


def _alias(storage: Storage) -> Any:
    """A storage that points to the bytes of another one."""
    make: Any = torch._C._construct_storage_from_data_pointer
    return make(storage.data_ptr(), storage.device, storage.nbytes())


def device_name(device: torch.device) -> str:
    """The pool of a device: "cpu", "cuda:0"."""
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def new_memory(storage: Any) -> Memory:
    """Memory that no tensor of the program has, with the bytes of a storage."""
    return Kept(device_name(storage.device), storage.nbytes(), None, storage)


def foreign(storage: Any) -> bool:
    """Whether the bytes belong to others, such as an array of NumPy, who may write to them at any time.

    What another process shares is taken to be left alone: that is how the workers of a DataLoader send batches.
    """
    return not storage.resizable() and not storage.is_shared()


def same(one: Any, other: Any) -> bool:
    """Whether two storages of one size have the same bytes."""
    return quietly(lambda: torch.equal(_bytes(one), _bytes(other)))


def copy(storage: Any) -> Any:
    """The same bytes once more."""
    return quietly(lambda: empty(storage.nbytes(), storage.device).copy_(storage))


def empty(nbytes: int, device: torch.device) -> Storage:
    """A new storage; if that cannot be allocated, the cache makes room for it."""
    return with_room(Storage, (nbytes,), {"device": device})


def quietly(function: Callable[[], T]) -> T:
    """Call it below autograd, autocast, functorch and every mode: what runs is the operator and nothing else.

    Not a context manager of Python's, in whose methods an interrupt could strike: torch would stay below autograd.
    """
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        return function()


_streams: Final[dict[torch.device, Any]] = {}


def bytes_of(storage: Storage) -> memoryview:
    """The bytes of a storage, which stays as long as they do; of one on a GPU a copy on the host.

    Raises ValueError where other processes have them, too, and for devices that are neither CPU nor CUDA.
    """
    if storage.device.type == "cuda":
        return _view(quietly(lambda: _on_host(storage)))
    if storage.device.type != "cpu" or storage.is_shared():
        raise ValueError(f"a storage on {storage.device} that others may have, too, cannot be moved")
    return _view(storage)


def new_storage(nbytes: int, device: torch.device, load: Callable[[Any], None]) -> Storage:
    """A storage of its own whose bytes `load` gives."""
    storage = quietly(lambda: empty(nbytes, device))
    if device.type == "cpu":
        load(_view(storage))
    else:
        host = quietly(lambda: _pinned(nbytes))
        load(_view(storage_of(host)))
        quietly(lambda: _copy(host, _bytes(storage)))
    return storage


def _view(storage: Storage) -> memoryview:
    """Memory on the host. NumPy's view would make the storage one that cannot be resized."""
    memory: Any = (c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage  # which lives as long as the view
    return PickleBuffer(memory).raw()


def _on_host(storage: Storage) -> Storage:
    torch.cuda.synchronize(storage.device)  # whichever stream has made the bytes
    host = _pinned(storage.nbytes())
    _copy(_bytes(storage), host)
    return storage_of(host)


def _copy(source: torch.Tensor, to: torch.Tensor) -> None:
    """On a stream that nothing else uses, after what was launched before; it is done when this returns."""
    device = source.device if source.is_cuda else to.device
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))  # the memory may have been that of another tensor until now
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
    stream.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def timer(device: str) -> Callable[[], Callable[[], float | None]] | None:
    """`Adapter.timer` for CUDA devices; None for others, whose operations are over when they return."""
    if not device.startswith("cuda"):
        return None
    stream = torch.cuda.current_stream(torch.device(device))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)

    def launched() -> Callable[[], float | None]:
        end.record(stream)
        return lambda: start.elapsed_time(end) / 1000 if end.query() else None

    return launched


_ASKED: Final = re.compile(r"ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_DEVICE: Final = re.compile(r"\bGPU (\d+)")
_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def with_room(
    function: Callable[..., T],
    args: Any,
    kwargs: dict[str, Any],
    *,
    cache: rc.Cache | None = None,
    again: Callable[..., T] | None = None,
) -> T:
    """What `function` returns. If an allocation fails, the cache evicts until the same, or `again`, succeeds.

    It is the cache of the operation that runs here, if none is given; twice as much is evicted each time. Raises the
    error if there is no cache to ask, or if nothing more can be evicted.
    """
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        frame = extend.running()
        if cache is None and frame is not None:
            cache = frame.engine.cache
        if cache is None or not _out_of_memory(error):
            raise
        text = str(error)
        place, asked = _DEVICE.search(text), _ASKED.search(text)
        device = f"cuda:{place[1]}" if place and isinstance(error, torch.OutOfMemoryError) else "cpu"
        wanted = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 2**20
        while cache.release_memory(max(1, wanted), device):
            try:
                return (again or function)(*args, **kwargs)
            except RuntimeError as another:
                if not _out_of_memory(another):
                    raise
            wanted *= 2
        raise


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
