"""A device that is out of memory: the cache lets go of what it can, and the operator is tried again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch

from recompute import extend
from recompute_torch._memory import device_name

_ASKED: Final = re.compile(r"ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def try_again(error: RuntimeError, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What `function` returns once the cache has evicted enough; twice as much each time.

    Raises `error` if there is no cache to ask, or if nothing more can be evicted.
    """
    frame = extend.running()
    if frame is None:
        raise error
    device = device_name(next((each.device for each in args if isinstance(each, torch.Tensor)), torch.device("cpu")))
    asked = _ASKED.search(str(error))
    wanted = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 2**20
    while frame.engine.cache.release_memory(max(1, wanted), device):
        try:
            return function(*args, **kwargs)
        except RuntimeError as again:
            if not out_of_memory(again):
                raise
        wanted *= 2
    try:
        raise error
    finally:
        del error  # it refers to this frame, which refers to the arguments
