"""How the cache sees tensors: as values of `rc.ap`, and as the memory of storages in a block.

In a block tensors stay the ordinary ones that they are. A `torch.UntypedStorage` whose memory is gone has a size and no
bytes until a repeated run makes them again, or a tier gives them back; all that refers to it, the graph of autograd
too, sees them come back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, Final, NamedTuple
from weakref import ref

import torch

import recompute as rc
from recompute_torch._memory import (
    Kept,
    Memory,
    Storage,
    bytes_of,
    device_name,
    new_storage,
    quietly,
    storage_of,
    storage_or_none,
    timer,
)
from recompute_torch._random import TorchGenerators, generators
from recompute_torch._recipe import Geometry, geometry_of, ordinary, tensor_on


class _Packed(NamedTuple):
    """What a tensor is beyond the bytes of its storage."""

    device: torch.device
    nbytes: int
    geometry: Geometry | None
    """None: it is the storage itself."""
    requires_grad: bool = False
    inference: bool = False
    """Whether it was made in inference mode."""


class TorchAdapter(rc.adapters.Adapter):
    """Dense tensors by their storages; those without one (sparse, nested) by what these lie in, never shared."""

    name = "torch"

    def serves(self, cls: type) -> bool:
        """Tensors and storages; modules and the like are plain objects."""
        return issubclass(cls, (torch.Tensor, torch.UntypedStorage))

    def generators(self) -> TorchGenerators:
        """Those that functions draw from."""
        return generators

    def nbytes(self, value: Any) -> int:
        """Bytes of the whole storage, which a view keeps alive."""
        storage = _storage(value)
        return _without_storage(value) if storage is None else int(storage.nbytes())

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

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """The bytes of the whole storage; what is more than bytes and geometry as torch pickles it.

        Raises ValueError for a tensor that has a gradient or is in a graph of autograd, which would be lost.
        """
        if isinstance(value, torch.Tensor) and (not value.is_leaf or value.grad is not None):
            raise ValueError("a tensor with a gradient, or in a graph of autograd, is more than its bytes")
        if isinstance(value, torch.UntypedStorage):
            return _Packed(value.device, value.nbytes(), None), [bytes_of(value)]
        if type(value) is not torch.Tensor or not ordinary(value) or vars(value) or value._backward_hooks:
            return super().pack(value)
        storage = storage_of(value)
        more = geometry_of(value), value.requires_grad, value.is_inference()
        return _Packed(value.device, storage.nbytes(), *more), [bytes_of(storage)]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        """On the device where it was, with a storage of its own."""
        if type(head) is not _Packed:
            return super().unpack(head, load)
        storage, geometry = new_storage(head.nbytes, head.device, load), head.geometry
        if geometry is None:
            return storage
        with torch.inference_mode(head.inference):
            tensor = quietly(lambda: tensor_on(storage, geometry))
        return tensor.requires_grad_() if head.requires_grad else tensor

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        """Two events around an operation on a GPU."""
        return timer(device)

    def devices(self) -> list[str]:
        return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]

    def remark(self) -> str:
        """Whether blocks can run below Python here, or why not."""
        from recompute_torch._native.build import status  # asked of the doctor alone

        return str(status())

    def free_memory(self, device: str) -> int | None:
        """What CUDA says is free; blocks that torch keeps for later are not."""
        return torch.cuda.mem_get_info(torch.device(device))[0] if device.startswith("cuda") else None


def _storage(value: Any) -> Any:
    """The storage of a tensor, or the value, which is one; None: it has none."""
    return storage_or_none(value) if isinstance(value, torch.Tensor) else value


def _without_storage(tensor: Any) -> int:
    """Bytes of a tensor that has no storage: torch takes a sparse one for as large as a dense one, or for neither."""
    if tensor.layout is torch.sparse_coo:
        entry = 8 * tensor.sparse_dim() + tensor.itemsize * prod(tensor.shape[tensor.sparse_dim() :])
        return int(entry * tensor._nnz())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return int(tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return int(tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes)
    return int(tensor.nbytes)


adapter: Final = TorchAdapter()


class _Gone(torch.Tensor):
    """A tensor without memory, whose storage says how large it is and raises an error where it is written to."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    __torch_dispatch__: Any = None  # no operator is called on it, but torch wants to know that it has one


def gone(nbytes: int, device: torch.device) -> Storage:
    """What takes the place of bytes that are evicted: views can be made of it, but there is nothing to read."""
    tensor = torch.Tensor._make_wrapper_subclass(_Gone, (nbytes,), dtype=torch.uint8, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return storage_of(tensor)


class MemoryAdapter(rc.adapters.Adapter):
    """Sizes and devices of memory, and how it leaves a storage and comes back."""

    name = "torch memory"

    def nbytes(self, value: Memory) -> int:
        """The bytes; none for what is too small to be worth an eviction."""
        return 0 if value.tiny else value.nbytes

    def buffer(self, value: Memory) -> Memory:
        """Itself: what an operation wrote in place is on the same memory as what was there before."""
        return value

    def device(self, value: Memory) -> str:
        return value.device

    def enter(self, value: Memory) -> tuple[int, Memory]:
        return 0 if value.tiny else value.nbytes, value

    def evicted(self, value: Memory) -> ref[Storage] | None:
        """The outer storage remains."""
        return value.outer

    def vacate(self, value: Memory) -> None:
        """Takes the bytes out of the outer storage."""
        value.leave(gone)

    def outlive(self, value: Memory) -> bool:
        """The bytes stay when the outer storage goes."""
        return value.keep()

    def restored(self, remains: ref[Storage], value: Memory) -> None:
        """Puts the bytes into the outer storage, if there still is one."""
        value.fill(remains)

    def pack(self, value: Memory) -> tuple[Any, Sequence[Any]]:
        """The bytes of the storage that has them. Raises Lost if that has gone."""
        storage = value.storage
        return (storage.device, value.nbytes, value.tiny), [bytes_of(storage)]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Memory:
        """Memory that no tensor of the program has yet."""
        device, nbytes, tiny = head
        return Kept(device_name(device), nbytes, None, new_storage(nbytes, device, load), tiny=tiny)

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        """Two events around an operation on a GPU."""
        return timer(device)

    def signature(self, value: Memory) -> Hashable:
        return value.nbytes

    def sample(self, value: Memory) -> None:
        """Nothing: where the bytes are may change, and writes to them are seen."""

    def fingerprint(self, value: Memory) -> bytes:
        """A digest of the bytes; those of a GPU are fetched for it."""
        return blake2b(bytes_of(value.storage.cpu()), digest_size=16).digest()


class KeptAdapter(MemoryAdapter):
    """The same for memory that stays."""

    name = "kept torch memory"
    outlives = True
