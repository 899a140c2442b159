"""The memory of a storage: its bytes lie in the storage that tensors of the program share, or in one of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any, Final, TypeVar
from weakref import ref

import torch

Storage = torch.UntypedStorage

T = TypeVar("T")

storage_of: Final = torch._C.TensorBase.untyped_storage
"""The storage of a tensor, past whatever stands before this method while a block is open."""


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

    __slots__ = ("device", "kept", "nbytes", "outer", "own", "tiny")

    def __init__(
        self, device: str, nbytes: int, outer: ref[Storage] | None, own: Storage | None, tiny: bool = False
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self.outer = outer  # None: no tensor of the program has it
        self.own = own
        self.kept = False  # the bytes come from a tier, and belong to `own` when the outer storage points to them, too
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
            alias = _alias(outer)
            at_once(partial(outer._swap_data_ptr_, alias), partial(setattr, self, "own", alias))
        return self.own is not None

    def fill(self, remains: ref[Storage]) -> None:
        """Give the bytes to the outer storage that has none, or let it point to them, if there still is one."""
        outer: Any = remains()
        if outer is None or self.own is None:
            return
        if self.kept:
            at_once(partial(outer._swap_data_ptr_, _alias(self.own)), partial(setattr, self, "outer", remains))
        else:
            at_once(
                partial(outer._swap_data_ptr_, self.own),
                partial(setattr, self, "outer", remains),
                partial(setattr, self, "own", None),
            )

    def give_back(self, *further: partial[Any]) -> None:
        """Leave the bytes to the outer storage; `further` steps, if any, are part of it: see `at_once`."""
        outer: Any = None if self.outer is None else self.outer()
        steps: list[partial[Any]] = []
        if self.own is not None and outer is not None:
            steps = [partial(outer._swap_data_ptr_, self.own), partial(setattr, self, "own", None)]
        at_once(*steps, *further)

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes on {self.device}>"


def _alias(storage: Storage) -> Any:
    """A storage that points to the bytes of another one."""
    make: Any = torch._C._construct_storage_from_data_pointer
    return make(storage.data_ptr(), storage.device, storage.nbytes())


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
