"""The bytes of a storage on the way to a tier and back: those of a GPU by pinned memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_ubyte
from pickle import PickleBuffer
from typing import Any, Final

import torch

from recompute_torch._memory import Storage, quietly, storage_of

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
    storage = quietly(lambda: Storage(nbytes, device=device))
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
    with _beside(source.device if source.is_cuda else to.device):
        to.copy_(source, non_blocking=True)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """A stream that nothing else uses, after what was launched before; what it is given is done when the block ends."""
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))  # the memory may have been that of another tensor until now
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
