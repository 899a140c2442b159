"""Transfers of bytes between a device and the host, by pinned memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no types, or not here
import numpy as np

from recompute_cupy._streams import streams

_streams: Final[dict[int, Any]] = {}


def take(device: int, address: int, nbytes: int) -> Any:
    """A copy of bytes of a device, for which the host waits."""
    host = _pinned(nbytes)
    _copy(device, host.ctypes.data, address, nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return host


def give(device: int, address: int, nbytes: int, load: Callable[[Any], None]) -> None:
    """Fill memory of a device with the bytes that `load` gives; the host waits until they are there."""
    host = _pinned(nbytes)
    load(host)
    _copy(device, address, host.ctypes.data, nbytes, cupy.cuda.runtime.memcpyHostToDevice)


def _pinned(nbytes: int) -> Any:
    """Memory of the host that a device reads and writes by itself; it goes back to CuPy's pool."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def _copy(device: int, to: int, source: int, nbytes: int, kind: int) -> None:
    """After all that operations have launched: it may be what made the bytes, or still reads what was there before."""
    with cupy.cuda.Device(device):
        streams.join(device)
        before = cupy.cuda.Event(disable_timing=True)
        before.record(cupy.cuda.get_current_stream())
        stream = _streams.get(device) or _streams.setdefault(device, cupy.cuda.Stream(non_blocking=True))
        stream.wait_event(before)
        cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, stream.ptr)
        stream.synchronize()
