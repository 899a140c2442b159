"""Devices by number: which is current, how large it is, how to work on it. Without a driver there is none to ask."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no types, or not here


def seen() -> bool:
    """Whether there is a GPU. Asked once: without one, arrays can only lie over memory of others."""
    return cupy.cuda.is_available()  # type: ignore[no-any-return]  # CuPy has no types


def current() -> int:
    """The device that CuPy uses now."""
    return cupy.cuda.runtime.getDevice() if seen() else 0


def on(device: int) -> AbstractContextManager[Any]:
    """A block in which the device is the current one."""
    return cupy.cuda.Device(device) if seen() else nullcontext()


def memory(device: int) -> tuple[int, int]:
    """Bytes that are free on the device, and all of them. Raises RuntimeError where no such device is seen."""
    with cupy.cuda.Device(device):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(free), int(total)


def name(device: int) -> str:
    """The pool of the cache that counts what lies on the device."""
    return f"cuda:{device}"


def number(device: str) -> int:
    """The device that a pool of the cache counts for."""
    return int(device.removeprefix("cuda:"))
