"""Pools named after devices, what is free there, and what to do when nothing is.

Memory of the host is the pool "cpu", like that of NumPy's arrays. With several CPU devices in one process (XLA's
`--xla_force_host_platform_device_count`) these are "cpu:0", "cpu:1", ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import jax

import recompute as rc
from recompute.extend import running

_MOST: Final = 1000  # shardings that are remembered


class _Pools(dict[Any, str]):
    """Sharding -> pool; resolved on first sight."""

    def __missing__(self, sharding: Any) -> str:
        if len(self) > _MOST:
            self.clear()
        pool = self[sharding] = _pool(sharding)
        return pool


pools: Final = _Pools()


def _pool(sharding: Any) -> str:
    """The device of an array, or all of them; "cpu" for one that a GPU's program keeps in host memory."""
    kind = sharding.memory_kind
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    platform = label(devices[0])
    if platform != "cpu" and kind is not None and kind.endswith("host"):
        return "cpu"
    if len(devices) == 1 and platform == "cpu" and len(jax.devices("cpu")) == 1:
        return "cpu"
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] == device.id - 1:
            runs[-1][1:] = [device.id]
        else:
            runs.append([device.id])
    return f"{platform}:{'+'.join('-'.join(map(str, run)) for run in runs)}"


def spread(pool: str) -> bool:
    """Whether it is a pool of several devices."""
    return "-" in pool or "+" in pool


def label(device: Any) -> str:
    """The platform as people call it: "cpu", "cuda", "tpu"."""
    return str(device).partition(":")[0].lower()


def names() -> list[str]:
    """The pools of single devices that this process sees."""
    found = []
    for platform in dict.fromkeys(["cpu", jax.default_backend()]):
        try:
            devices = jax.local_devices(backend=platform)
        except RuntimeError:  # not all backends are there
            continue
        one = platform == "cpu" and len(devices) == 1
        found += ["cpu"] if one else [f"{label(device)}:{device.id}" for device in devices]
    return found


def free(pool: str) -> int | None:
    """Free bytes: the limit of JAX's allocator less what is in use; of several devices the least. None: unknown."""
    platform, _, numbers = pool.partition(":")
    ids: set[int] = set()
    for run in numbers.split("+") if numbers else ["0"]:
        first, _, last = run.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        ids.update(range(int(first), int(last or first) + 1))
    rooms = []
    for device in jax.local_devices():
        if label(device) == platform and device.id in ids:
            stats = device.memory_stats() or {}
            if "bytes_limit" not in stats:
                return None
            rooms.append(max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return min(rooms, default=None)


OUT_OF_MEMORY: Final = (jax.errors.JaxRuntimeError, ValueError)
"""What JAX raises then, among other things: the latter if it has run the same before, and so takes its short cut."""

_ASKED: Final = re.compile(r"allocat\w* (\d+) ?bytes")


def make_room(error: Exception, operands: Iterable[Any], nbytes: int) -> bool:
    """Whether `error` says that the device of the operands is out of memory, and the cache could free some of its own.

    As much as the device was asked for, or `nbytes` if the error does not say. The cache is that of the operation that
    runs, or the current one.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "Out of memory" not in text:
        return False
    frame = running()
    cache: Any = rc.current_cache() if frame is None else frame.engine.cache
    here = next((each for each in operands if isinstance(each, jax.Array)), None)
    pool = pools[jax.numpy.zeros(()).sharding if here is None else here.sharding]
    asked = _ASKED.search(text)
    return bool(cache.release_memory(max(1, nbytes, int(asked[1]) if asked else 0), pool))
