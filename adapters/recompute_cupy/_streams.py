"""Streams and transfers: operations on any stream see each other's work in the order in which they were launched.

An operation runs again on the stream that is current then, which need not be the one on which its arguments were made,
nor the one that will read its result. So an operation makes its stream wait for whatever operations have launched on
other streams: on the device, by events, never on the host. Operations on several streams are correct for it, and do
not overlap. With one stream, the ordinary case, there is nothing to wait for, and nothing is recorded.

The same order makes it safe that the memory of an evicted value is given out again: CuPy's pool gives it to the stream
on which it was allocated, and the next operation there waits for those that read it elsewhere. Two threads that run
operations on two streams of one device at the same time are beyond this: an operation in flight may be given memory
that the other thread's, launched meanwhile, still reads.

Bytes go to the host and come back by pinned memory, on a stream of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no types, or not here
import numpy as np

from recompute_cupy import _devices


class Streams:
    """The streams on which operations have launched work that may not be done yet."""

    def __init__(self) -> None:
        self._busy: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # device -> address -> stream, kept alive

    def note(self, device: int) -> None:
        """Something was launched on the current stream of the device."""
        stream = cupy.cuda.get_current_stream(device)
        self._busy[device][stream.ptr] = stream

    def join(self, device: int) -> None:
        """Let the current stream of the device wait for what was launched on the others, and note it."""
        stream = cupy.cuda.get_current_stream(device)
        busy = self._busy[device]
        for address in [key for key in tuple(busy) if key != stream.ptr]:
            other = busy.pop(address, None)  # first, since its thread may note it again at any time
            if other is not None and not other.done:
                busy[address] = other
                with cupy.cuda.Device(device):
                    event = cupy.cuda.Event(disable_timing=True)
                    event.record(other)
                    stream.wait_event(event)
        busy[stream.ptr] = stream


streams: Final = Streams()


def join(device: int | None = None) -> None:
    """Let the current stream wait, on the device, for all that operations have launched on its other streams.

    For a program that reads what `get` gave on another stream than the one on which it may have been recomputed.
    `device`: a number; None: the current one. Does not block. Without a driver there is nothing to wait for.
    """
    if _devices.seen():
        streams.join(_devices.current() if device is None else device)


_transferring: Final[dict[int, Any]] = {}


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
        stream = _transferring.get(device) or _transferring.setdefault(device, cupy.cuda.Stream(non_blocking=True))
        stream.wait_event(before)
        cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, stream.ptr)
        stream.synchronize()
