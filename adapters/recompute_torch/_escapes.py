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

from recompute.extend import RLock, node_of
from recompute_torch._memory import storage_of
from recompute_torch._recipe import tensors
from recompute_torch._storages import Handle, Storages

_lock: Final = RLock()
_open = 0
_before: Final[dict[tuple[Any, str], Any]] = {}


def guard() -> None:
    """One block more is open."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            for owner, names, surround in _SURROUNDED:
                for name in names:
                    _before[owner, name] = vars(owner).get(name)
                    setattr(owner, name, surround(getattr(owner, name)))


def unguard() -> None:
    """One block less is open."""
    global _open
    with _lock:
        _open -= 1
        if not _open:
            for (owner, name), before in _before.items():
                if before is None:  # it is inherited
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)


Prepare = Callable[[Handle, torch.Tensor, bool, ExitStack], Callable[[Any], None] | None]
"""Of a tensor, whether it is the first argument: done before a function runs; what it gives is done with the result."""


def _preceded(function: Callable[..., Any], prepare: Prepare) -> Any:
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
    try:
        return getattr(storage_of(tensor), "_recompute", None)
    except (NotImplementedError, RuntimeError):  # it has no such storage
        return None


def _trackers() -> list[Storages]:
    """Of the blocks in which this thread takes part."""
    modes = (getattr(mode, "_tracker", None) for mode in _get_current_dispatch_mode_stack())
    return [tracker for tracker in modes if isinstance(tracker, Storages) and not tracker.closed]


def _refused(function: Callable[..., Any]) -> Any:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _trackers():
            raise RuntimeError(
                "a CUDA graph cannot be captured inside of a budget block: it would write to memory that is evicted "
                "later; capture it before the block, where it can also be replayed"
            )
        return function(*args, **kwargs)

    return guarded


def _committed(function: Callable[..., Any]) -> Any:
    """Nothing is to be made again from what a replay writes over: there is no telling what that is."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for tracker in _trackers():
            tracker.commit()
        return function(*args, **kwargs)

    return guarded


_stays: Final = partial(_preceded, prepare=_stay)
_handed_out: Final = partial(_preceded, prepare=_hand_out)
_lent: Final = partial(_preceded, prepare=_lend)
_moved: Final = partial(_preceded, prepare=_move)
_written: Final = partial(_preceded, prepare=_write)

_SURROUNDED: Final[tuple[tuple[Any, tuple[str, ...], Callable[[Callable[..., Any]], Any]], ...]] = (
    # They are done with the memory when they return.
    (torch.Tensor, ("__repr__", "__format__", "new_tensor", "tolist"), _stays),
    (torch, ("as_tensor", "asarray", "tensor", "tensor_split"), _stays),
    # They say where the memory is: there it stays from then on.
    (torch.Tensor, ("data_ptr",), _handed_out),
    # They return what others can write to.
    (torch.Tensor, ("__dlpack__", "numpy", "untyped_storage"), _lent),
    (torch, ("to_dlpack",), _lent),
    (torch.utils.dlpack, ("to_dlpack",), _lent),
    # They give a storage other memory, with the same content, by operators that are not to be tracked.
    (torch.Tensor, ("share_memory_",), _moved),
    (torch.UntypedStorage, ("_share_fd_cpu_", "_share_filename_cpu_"), _moved),
    # They write to the memory of their first argument, and read that of the others.
    (torch.Tensor, ("apply_", "map2_", "map_"), _written),
    # They record addresses of memory, and later write to memory at these.
    (torch.cuda.graph, ("__enter__",), _refused),
    (torch.cuda.CUDAGraph, ("capture_begin",), _refused),
    (torch.cuda.CUDAGraph, ("replay",), _committed),
)
"""Owners, names, and what stands before the functions."""
