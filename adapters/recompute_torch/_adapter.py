"""Tensors as values of `rc.ap`: bytes of storages, views as aliases, devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any, Final

import torch

import recompute as rc
from recompute_torch._memory import device_name, storage_of
from recompute_torch._timing import timer


class TorchAdapter(rc.Adapter):
    """Dense tensors by their storages; those without one (sparse, nested) by their elements, never shared."""

    name = "torch"

    def serves(self, cls: type) -> bool:
        """Tensors and storages; modules and the like are plain objects."""
        return issubclass(cls, (torch.Tensor, torch.UntypedStorage))

    def nbytes(self, value: Any) -> int:
        """Bytes of the whole storage, which a view keeps alive."""
        storage = _storage(value)
        return int(value.nbytes if storage is None else storage.nbytes())

    def buffer(self, value: Any) -> object:
        """The storage, which all views share."""
        storage = _storage(value)
        return storage if storage is not None else value

    def watch(self, value: Any) -> object:
        """The storage: it lives as long as the memory."""
        return self.buffer(value)

    def device(self, value: Any) -> str:
        return device_name(value.device)

    def signature(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return value.shape, value.dtype, value.device, value.layout
        return value.nbytes(), value.device

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of the elements in order; those of a GPU are fetched. None for tensors without storage."""
        if not isinstance(value, torch.Tensor) or _storage(value) is None:
            return None
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        content = blake2b(f"{tuple(plain.shape)} {plain.dtype}".encode(), digest_size=16)
        content.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return content.digest()

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        """Two events around an operation on a GPU."""
        return timer(device)

    def devices(self) -> list[str]:
        return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]

    def free_memory(self, device: str) -> int | None:
        """What CUDA says is free; blocks that torch keeps for later are not."""
        return torch.cuda.mem_get_info(torch.device(device))[0] if device.startswith("cuda") else None


def _storage(value: Any) -> Any:
    """The storage of a tensor; None: it has none."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return storage_of(value)
    except (NotImplementedError, RuntimeError):
        return None


adapter: Final = TorchAdapter()
