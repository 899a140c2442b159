"""What reads the memory of a tensor without an operator, and so behind the back of every mode.

While a block is open, a few methods of `torch.Tensor` are preceded by ones that see to it that there is something to
read: in every thread, in hooks of autograd, and in code that has switched the modes off. Afterwards they are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, Final

import torch

from recompute_torch._memory import storage_of

READS: Final = ("__repr__", "__format__", "tolist")
"""They are done with the memory when they return."""

HANDS_OUT: Final = ("__dlpack__", "data_ptr", "numpy", "share_memory_", "untyped_storage")
"""What they return refers to the memory, or writes to it: it stays from then on, and how it was made is forgotten."""

_lock: Final = Lock()
_open = 0
_before: Final[dict[str, Any]] = {}


def guard() -> None:
    """One block more is open."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            for name in (*READS, *HANDS_OUT):
                _before[name] = vars(torch.Tensor).get(name)
                setattr(torch.Tensor, name, _preceded(getattr(torch.Tensor, name), name in HANDS_OUT))


def unguard() -> None:
    """One block less is open."""
    global _open
    with _lock:
        _open -= 1
        if not _open:
            for name, before in _before.items():
                if before is None:  # it is inherited
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, before)


def _preceded(method: Callable[..., Any], hands_out: bool) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        handle = handle_of(self)
        if handle is None:
            return method(self, *args, **kwargs)
        if hands_out:
            handle.tracker.own([self])
            return method(self, *args, **kwargs)
        with handle.tracker.staying(handle):
            return method(self, *args, **kwargs)

    return guarded


def handle_of(tensor: torch.Tensor) -> Any:
    """What a tensor's storage has to do with a block; None: nothing."""
    try:
        return getattr(storage_of(tensor), "_recompute", None)
    except (NotImplementedError, RuntimeError):  # it has no such storage
        return None
