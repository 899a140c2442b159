"""JAX's arrays as the cache sees them: immutable, shared only as whole objects, on one device or spread over several.

What an array takes is told by the device. The cache deletes nothing: a reference is dropped, and the memory is free
once no other reference is left. What the program deletes, or donates to a jitted function, is made again. Two arrays
are aliases if they are one object, which is what JAX returns where an operation has nothing to do; key arrays are
aliases if they have their words in common. `device_put` to the device where an array lies already makes another object
of the same memory: that counts twice. Time that JAX spends on tracing and compiling inside an operation is not what the
operation costs.

Pools are named after devices. Memory of the host is the pool "cpu", like that of NumPy's arrays. With several CPU
devices in one process (XLA's `--xla_force_host_platform_device_count`) these are "cpu:0", "cpu:1", ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax._src.literals import TypedNdArray  # there is no public way to make an array of weak type
from jax.extend import source_info_util

import recompute as rc
from recompute.extend import running, spend_elsewhere
from recompute_jax._program.jaxpr import INTERNAL


@lru_cache(1000)  # it is asked for each array
def pool_of(sharding: Any) -> str:
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


def default_pool() -> str:
    """Of what JAX makes of no array. Another one in a block `with jax.default_device(...)`."""
    config: Any = jax.config
    device = config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return pool_of(jax.sharding.SingleDeviceSharding(device))


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
    here = next((operand for operand in operands if isinstance(operand, jax.Array)), None)
    pool = default_pool() if here is None else pool_of(here.sharding)
    asked = _ASKED.search(text)
    return bool(cache.release_memory(max(1, nbytes, int(asked[1]) if asked else 0), pool))


_EVENTS: Final = frozenset(
    {
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    }
)


def _discount(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:
        spend_elsewhere(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_discount)


class Outline(rc.adapters.Outline):
    """What is known of an array without its memory: also what it is to those who trace a function of it."""

    __slots__ = ("aval", "sharding")

    def __init__(self, value: Any) -> None:
        super().__init__(type(value), value.shape, value.dtype)
        self.aval: Any = value.aval
        self.sharding: Any = value.sharding if value.committed else None

    @property
    def weak_type(self) -> bool:
        return self.aval.weak_type  # type: ignore[no-any-return]  # JAX has no types for it


class _Packed(NamedTuple):
    """What an array is beyond its bits."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Any
    committed: bool
    keys: Any
    """Whose keys these are the words of; None: they are numbers."""


class JaxAdapter(rc.adapters.ArrayAdapter):
    """`jax.Array`: numbers and keys. A traced value is refused."""

    name = "jax"

    def serves(self, cls: type) -> bool:
        """Arrays, and what could be mistaken for one: traced values and refs, which are refused later."""
        return issubclass(cls, (jax.Array, jax.core.Tracer, jax.ref.Ref))

    def nbytes(self, value: Any) -> int:
        """Bytes on the device; of an array on several, those on each of them."""
        words = _words(value)
        try:
            size: int = words.on_device_size_in_bytes()
        except jax.errors.JaxRuntimeError:
            if not value.is_deleted():
                raise
            raise RuntimeError(
                f"the memory of an array ({value.dtype}{list(value.shape)}) is gone: it was deleted, or donated to a "
                "jitted function; cache a copy, or do not donate it"
            ) from None
        sharding = words.sharding
        return size if sharding.num_devices == 1 else size // max(1, len(sharding.addressable_devices))

    def buffer(self, value: Any) -> object:
        """The array itself; of a key array that of its words."""
        return _words(value)

    def watch(self, value: Any) -> object:
        """The same: a NumPy view of an array keeps the array."""
        return _words(value)

    def device(self, value: Any) -> str:
        """Such as "cpu" or "cuda:0"; of an array on several devices "cuda:0-3", whose budget is that of each one."""
        _words(value)
        return pool_of(value.sharding)

    def destroyed(self, value: Any) -> str | None:
        """Its type, for an array that was deleted or donated."""
        if not _words(value).is_deleted():
            return None
        return f"a {value.dtype}{list(value.shape)}, was deleted, or donated to a jitted function"

    def enter(self, value: Any) -> tuple[int, object | None]:
        return self.nbytes(value), _words(value)

    def signature(self, value: Any) -> Hashable:
        """Shape, dtype and where it lies. No content: to read it, the host would have to wait."""
        _words(value)
        return value.shape, value.dtype, value.sharding

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of dtype, weak type, shape and every bit, for which the host waits.

        None for an array that lies partly in other processes.
        """
        if not value.is_fully_addressable:
            return None
        words = _words(value)
        head = f"jax {value.dtype} {value.shape} {words.weak_type}"
        bits = np.ascontiguousarray(np.asarray(words)).reshape(-1).view(np.uint8)
        return blake2b(head.encode() + bits.tobytes(), digest_size=16).digest()

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """The bits, on the host, for which the host waits; on a CPU they are not copied.

        Raises ValueError for an array that lies partly in other processes, RuntimeError for one that was deleted.
        """
        if not value.is_fully_addressable:
            raise ValueError("an array lies partly in other processes")
        words = _words(value)
        keys = None if words is value else jax.random.key_impl(value)
        bits = np.ascontiguousarray(np.asarray(words)).reshape(-1).view(np.uint8)
        return _Packed(words.shape, words.dtype, words.weak_type, words.sharding, words.committed, keys), [bits]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        """On the devices where it was; on a CPU the very memory that is filled."""
        memory = _aligned(head.dtype.itemsize * prod(head.shape))
        load(memory)
        words = memory.view(head.dtype).reshape(head.shape)
        with jax.core.eval_context():
            if head.weak_type:  # as JAX itself does when it unpickles
                words = TypedNdArray(words, jax.core.ShapedArray(words.shape, words.dtype, weak_type=True))
            with jax.enable_x64(True), jax.default_device(next(iter(head.sharding.device_set))):
                array = jax.device_put(words, head.sharding if head.committed else None)
            return array if head.keys is None else jax.random.wrap_key_data(array, impl=head.keys)

    def outline(self, value: Any) -> rc.adapters.Outline:
        return Outline(value)

    def empty(self, outline: rc.adapters.Outline) -> Any:
        return jax.numpy.empty(outline.shape, outline.dtype)

    def copy(self, value: Any) -> Any:
        """The array itself: what would write to a copy makes a new array anyway."""
        return value

    def place(self, value: Any) -> Hashable | None:
        """An array is all of its memory."""
        return (value.dtype, value.shape)

    def repeated(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Out of whatever JAX traces now: a `get` in there recomputes a value."""
        with jax.core.eval_context():
            return function(*args, **kwargs)

    def check(self, value: Any) -> None:
        """No traced value, and no ref."""
        _words(value)

    def namespace(self) -> Any:
        return jax.numpy

    def devices(self) -> list[str]:
        """The pools of single devices that this process sees, of all platforms."""
        pool_names = []
        for platform in dict.fromkeys(["cpu", jax.default_backend()]):
            try:
                devices = jax.local_devices(backend=platform)
            except RuntimeError:  # not all backends are there
                continue
            one = platform == "cpu" and len(devices) == 1
            pool_names += ["cpu"] if one else [f"{label(device)}:{device.id}" for device in devices]
        return pool_names

    def free_memory(self, device: str) -> int | None:
        """What the device's allocator may still take; of several devices the least. None: it does not say (CPU)."""
        platform, _, numbers = device.partition(":")
        ids: set[int] = set()
        for run in numbers.split("+") if numbers else ["0"]:
            first, _, last = run.partition("-")
            if not first.isdecimal() or (last and not last.isdecimal()):
                return None
            ids.update(range(int(first), int(last or first) + 1))
        rooms = []
        for one in jax.local_devices():
            if label(one) == platform and one.id in ids:
                stats = one.memory_stats() or {}
                if "bytes_limit" not in stats:
                    return None
                rooms.append(max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
        return min(rooms, default=None)


def _words(value: Any) -> Any:
    """What has the memory: the array, or the words of a key array (the very array that it keeps).

    Raises TypeError for what has no memory of its own, or changes.
    """
    keys = _has_words.get(type(value))
    if keys is None:
        refuse(value)
        keys = _has_words[type(value)] = bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))
    return value._base_array if keys else value


for folder in INTERNAL[1:]:
    source_info_util.register_exclusion(folder)  # the places that JAX names are in the code of users


def _aligned(nbytes: int) -> Any:
    """Memory that an array on a CPU can have without a copy."""
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + nbytes]


_ALIGNED: Final = 64  # bytes, for XLA

_has_words: Final[dict[type, bool]] = {}
"""Classes of arrays -> whether they are of keys."""


def refuse(value: Any) -> None:
    """Raise TypeError for what is an array to JAX, but not in memory."""
    if isinstance(value, jax.ref.Ref):
        raise TypeError("a mutable array (jax.ref) cannot be cached, since what is written to it cannot be recomputed")
    if isinstance(value, jax.core.Tracer):
        if hasattr(value, "handle"):
            raise TypeError(
                "a value of a recompute_jax.budget block cannot be cached a second time: use the block, or rc.ap and "
                "recompute_jax.evaluate, not both; block.get(x) is a plain array, which can be"
            )
        origin = getattr(value, "_line_info", getattr(value, "source_info", None))  # not all have one
        place = "" if origin is None else source_info_util.summarize(origin)
        what = f"{value.dtype}{list(value.shape)}{place and ', made at '}{place}"
        raise TypeError(
            f"a traced value ({what}) cannot be cached: inside jax.jit, grad, vmap, scan and the like there are no "
            "values yet; use recompute_jax.remat there, or recompute_jax.evaluate around all of it, as in "
            "evaluate(jax.grad(f), x)"
        )


adapter: Final = JaxAdapter()
