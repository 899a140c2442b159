"""What reads the memory of tensors without an operator, and so behind the back of every mode.

While a block is open, a few functions of torch are preceded by ones that make sure that there is something to read: in
every thread, in hooks of autograd, and in code that has switched the modes off. Afterwards they are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from recompute.extend import node_of
from recompute_torch._memory import storage_of, storage_or_none
from recompute_torch._recipe import tensors
from recompute_torch._storages import Handle, Storages
from recompute_torch._threads import Surroundings

Prepare = Callable[[Handle, torch.Tensor, bool, ExitStack], Callable[[Any], None] | None]
"""Of a tensor, whether it is the first argument: done before a function runs; what it gives is done with the result."""


def _preceded(prepare: Prepare, function: Callable[..., Any]) -> Any:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as until:
            afterwards = []
            for number, tensor in enumerate(tensors([*args, *kwargs.values()])):
                handle = handle_of(tensor)
                if handle is not None:
                    afterwards.append(prepare(handle, tensor, number == 0, until))
            if prepare is _move:
                until.enter_context(torch._C._DisableTorchDispatch())
            result = function(*args, **kwargs)
            for finish in afterwards:
                if finish is not None:
                    finish(result)
            return result

    return guarded


def _stay(handle: Handle, tensor: torch.Tensor, first: bool, until: ExitStack) -> None:
    until.enter_context(handle.tracker.staying(node_of(handle)))


def _hand_out(handle: Handle, tensor: torch.Tensor, first: bool, until: ExitStack) -> None:
    if not handle.tracker.taken_here(handle):  # else the memory stays where it is until the operator is over
        handle.tracker.hand_out(storage_of(tensor))
        handle.tracker.holders.hand_out(storage_of(tensor))


def _lend(handle: Handle, tensor: torch.Tensor, first: bool, until: ExitStack) -> Callable[[Any], None] | None:
    tracker = handle.tracker
    if tracker.taken_here(handle):
        return partial(tracker.lend, tensor)
    tracker.forget([tensor])
    tracker.holders.hand_out(storage_of(tensor))
    return None


def _move(handle: Handle, tensor: torch.Tensor, first: bool, until: ExitStack) -> None:
    handle.tracker.forget([tensor])


def _write(handle: Handle, tensor: torch.Tensor, first: bool, until: ExitStack) -> None:
    if first:
        handle.tracker.own([tensor])
    _stay(handle, tensor, first, until)
    if first:
        handle.tracker.wrote([tensor])


def handle_of(tensor: torch.Tensor) -> Handle | None:
    """What a tensor's storage has to do with a block; None: nothing."""
    return getattr(storage_or_none(tensor), "_recompute", None)


def _trackers() -> list[Storages]:
    """Of the blocks in which this thread takes part."""
    modes = (getattr(mode, "_tracker", None) for mode in _get_current_dispatch_mode_stack())
    return [tracker for tracker in modes if isinstance(tracker, Storages) and not tracker.closed]


def _told(tell: Callable[[Storages], None], function: Callable[..., Any]) -> Any:
    """A function before which the trackers of a thread are told."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for tracker in _trackers():
            tell(tracker)
        return function(*args, **kwargs)

    return guarded


def _refuse(tracker: Storages) -> None:
    raise RuntimeError(
        "a CUDA graph cannot be captured inside of a budget block: it would write to memory that is evicted "
        "later; capture it before the block, where it can also be replayed"
    )


GUARDS: Final = Surroundings(
    # They are done with the memory when they return.
    (torch.Tensor, ("__repr__", "__format__", "new_tensor", "tolist"), partial(_preceded, _stay)),
    (torch, ("as_tensor", "asarray", "tensor", "tensor_split"), partial(_preceded, _stay)),
    # They say where the memory is: there it stays from then on.
    (torch.Tensor, ("data_ptr",), partial(_preceded, _hand_out)),
    # They return what others can write to.
    (torch.Tensor, ("__dlpack__", "numpy", "untyped_storage"), partial(_preceded, _lend)),
    (torch, ("to_dlpack",), partial(_preceded, _lend)),
    (torch.utils.dlpack, ("to_dlpack",), partial(_preceded, _lend)),
    # They give a storage other memory, with the same content, by operators that are not to be tracked.
    (torch.Tensor, ("share_memory_",), partial(_preceded, _move)),
    (torch.UntypedStorage, ("_share_fd_cpu_", "_share_filename_cpu_"), partial(_preceded, _move)),
    # They write to the memory of their first argument, and read that of the others.
    (torch.Tensor, ("apply_", "map2_", "map_"), partial(_preceded, _write)),
    # They record addresses of memory, and later write to memory at these.
    (torch.cuda.graph, ("__enter__",), partial(_told, _refuse)),
    (torch.cuda.CUDAGraph, ("capture_begin",), partial(_told, _refuse)),
    # Nothing is to be made again from what it writes over: there is no telling what that is.
    (torch.cuda.CUDAGraph, ("replay",), partial(_told, Storages.commit)),
)
"""What stands before functions while a block is open."""
