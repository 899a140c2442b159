"""The memory of a storage as the cache sees it: what is evicted is swapped out of the storage, and back in.

Tensors stay the ordinary ones that they are. A `torch.UntypedStorage` whose memory is gone has a size and no bytes
until a repeated run makes them again; whoever refers to it, the graph of autograd too, sees them come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from hashlib import blake2b
from operator import call
from typing import Any, Final, TypeVar
from weakref import ref

import torch

import recompute as rc
from recompute_torch._timing import timer

Storage = torch.UntypedStorage

T = TypeVar("T")

storage_of: Final = torch._C.TensorBase.untyped_storage
"""The storage of a tensor, past whatever stands before this method while a block is open."""


class _Gone(torch.Tensor):
    """A tensor without memory, whose storage says how large it is and raises an error if somebody wants to write."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    __torch_dispatch__: Any = None  # nobody calls an operator on it, but torch wants to know that it has one


def gone(nbytes: int, device: torch.device) -> Storage:
    """What takes the place of bytes that are evicted: views can be made of it, but there is nothing to read."""
    tensor = torch.Tensor._make_wrapper_subclass(_Gone, (nbytes,), dtype=torch.uint8, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return storage_of(tensor)


def at_once(*steps: partial[Any]) -> None:
    """Do one after the other what has no code in Python: no exception comes up in between, of a signal or a tracer.

    Between two statements one can: a handler of signals runs where a tracer does, before any line. Of two storages
    that have the same bytes one is to let go of them, and if nobody knows which, both do or none.
    """
    deque(map(call, steps), 0)


class Lost(RuntimeError):
    """Bytes went with the last tensor that had them, in the middle of a request that needs them: to be asked again.

    The cache knows by then that the tensor has gone, and makes the bytes anew.
    """


class Memory:
    """The bytes of one storage. While `own` is None they lie in the `outer` one, which tensors of the program share.

    What an operation made is in the outer storage alone, and goes when that goes. A source is needed beyond: its bytes
    belong to `own`, and the outer storage points to them.
    """

    __slots__ = ("device", "nbytes", "outer", "own", "tiny")

    def __init__(
        self, device: str, nbytes: int, outer: ref[Storage] | None, own: Storage | None, tiny: bool = False
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self.outer = outer  # None: no tensor of the program has it
        self.own = own
        self.tiny = tiny  # it is not worth an eviction, and code that is no operator may read it: numbers, lengths

    @property
    def storage(self) -> Storage:
        """Where the bytes are."""
        if self.own is not None:
            return self.own
        storage = None if self.outer is None else self.outer()
        if storage is None:
            raise Lost("the memory of a tensor is gone, and so is the tensor")
        return storage

    def keep(self) -> bool:
        """From now on the bytes stay when the outer storage goes; False if that has gone, and they with it."""
        outer: Any = None if self.outer is None else self.outer()
        if self.own is None and outer is not None:
            alias: Any = torch._C._construct_storage_from_data_pointer(outer.data_ptr(), outer.device, outer.nbytes())
            at_once(partial(outer._swap_data_ptr_, alias), partial(setattr, self, "own", alias))
        return self.own is not None

    def give_back(self, *further: partial[Any]) -> None:
        """Leave the bytes to the outer storage; `further` steps, if any, are part of it: see `at_once`."""
        outer: Any = None if self.outer is None else self.outer()
        steps: list[partial[Any]] = []
        if self.own is not None and outer is not None:
            steps = [partial(outer._swap_data_ptr_, self.own), partial(setattr, self, "own", None)]
        at_once(*steps, *further)

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes on {self.device}>"


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
        outer: Any = remains()
        own = value.own
        if outer is not None and own is not None:
            at_once(
                partial(outer._swap_data_ptr_, own),
                partial(setattr, value, "outer", remains),
                partial(setattr, value, "own", None),
            )

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


def device_name(device: torch.device) -> str:
    """The pool of a device: "cpu", "cuda:0"."""
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def new_memory(storage: Any) -> Memory:
    """Memory that no tensor of the program has, with the bytes of a storage."""
    return Memory(device_name(storage.device), storage.nbytes(), None, storage)


def foreign(storage: Any) -> bool:
    """Whether the bytes belong to others, such as an array of NumPy, who may write to them at any time.

    What another process shares is taken to be left alone: that is how the workers of a DataLoader send batches.
    """
    return not storage.resizable() and not storage.is_shared()


def same(one: Any, other: Any) -> bool:
    """Whether two storages of one size have the same bytes."""

    def equal() -> bool:
        pair = [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in (one, other)]
        return torch.equal(*pair)

    return quietly(equal)


def copy(storage: Any) -> Any:
    """The same bytes once more."""
    return quietly(lambda: Storage(storage.nbytes(), device=storage.device).copy_(storage))


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


rc.register(Memory, MemoryAdapter())
