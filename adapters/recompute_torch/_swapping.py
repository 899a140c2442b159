"""The memory of a storage as the cache sees it: what is evicted is swapped out of the storage, and back in.

Tensors stay the ordinary ones that they are. A `torch.UntypedStorage` whose memory is gone has a size and no bytes
until a repeated run makes them again, or a tier gives them back; whoever refers to it, the graph of autograd too, sees
them come back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch

import recompute as rc
from recompute_torch._memory import Memory, Storage, device_name, storage_of
from recompute_torch._packing import bytes_of, new_storage
from recompute_torch._timing import timer


class _Gone(torch.Tensor):
    """A tensor without memory, whose storage says how large it is and raises an error if somebody wants to write."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    __torch_dispatch__: Any = None  # nobody calls an operator on it, but torch wants to know that it has one


def gone(nbytes: int, device: torch.device) -> Storage:
    """What takes the place of bytes that are evicted: views can be made of it, but there is nothing to read."""
    tensor = torch.Tensor._make_wrapper_subclass(_Gone, (nbytes,), dtype=torch.uint8, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return storage_of(tensor)


class MemoryAdapter(rc.Adapter):
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
        outer: Any = None if value.outer is None else value.outer()
        if outer is not None:
            outer._swap_data_ptr_(gone(value.nbytes, outer.device))

    def outlive(self, value: Memory) -> bool:
        """The bytes stay when the outer storage goes."""
        return value.keep()

    def restored(self, remains: ref[Storage], value: Memory) -> None:
        """Puts the bytes into the outer storage, if there still is one."""
        value.fill(remains)

    def pack(self, value: Memory) -> tuple[Any, Sequence[Any]]:
        """The bytes of the storage that has them. Raises Lost if that has gone."""
        storage = value.storage
        return (storage.device, value.nbytes, value.tiny, value.own is not None), [bytes_of(storage)]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Memory:
        """Memory that no tensor of the program has yet."""
        device, nbytes, tiny, kept = head
        memory = Memory(device_name(device), nbytes, None, new_storage(nbytes, device, load), tiny)
        memory.kept = kept
        return memory

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        """Two events around an operation on a GPU."""
        return timer(device)

    def signature(self, value: Memory) -> Hashable:
        return value.nbytes

    def sample(self, value: Memory) -> None:
        """Nothing: where the bytes are may change, and whoever writes to them is seen."""

    def fingerprint(self, value: Memory) -> bytes:
        """A digest of the bytes; those of a GPU are fetched for it."""
        return blake2b(bytes(value.storage.cpu().tolist()), digest_size=16).digest()
