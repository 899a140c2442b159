"""Packing: values as buffers of bytes, and back, by pickle protocol 5 with out-of-band buffers.

Parts of a value whose adapters pack in a way of their own, such as the arrays in a list or a table, go that way. What
is unpickled is what this process has pickled: a stream that leaves it is unpickled only if it has the digest it had.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol

Load = Callable[[Any], None]
"""Fills writable memory with the next buffer of a packed value."""

_SMALL: Final = 4096
"""Bytes: a shorter stream stays in the process."""


class Packer(Protocol):
    """What an adapter can do."""

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """What is remembered of a value, and its bytes."""

    def unpack(self, head: Any, load: Load) -> Any:
        """The value."""


class Pickled(NamedTuple):
    """What is remembered of a value that was pickled."""

    stream: bytes
    """Or its digest, if it lies elsewhere."""
    length: int
    """Bytes of a stream that lies elsewhere."""
    outside: list[int | tuple[Packer, Any]]
    """What the stream refers to, in order: bytes of buffers, and parts with their packers."""


def pack(value: Any, packer_of: Callable[[Any], Packer | None]) -> tuple[Pickled, Sequence[Any]]:
    """What is remembered of a value, and its bytes. Raises whatever pickle raises, and packers.

    `packer_of(part)` packs a part of the value in its own way; None: pickle does.
    """
    file = BytesIO()
    pickler = _Pickler(file, value, packer_of)
    pickler.dump(value)
    outside: list[int | tuple[Packer, Any]] = []
    buffers: list[Any] = []
    for item in pickler.outside:
        if isinstance(item, pickle.PickleBuffer):
            raw = item.raw()
            outside.append(raw.nbytes)
            buffers.append(raw)
        else:
            packer, head, own = item
            outside.append((packer, head))
            buffers += own
    stream = file.getbuffer()
    if len(stream) <= _SMALL:
        return Pickled(bytes(stream), 0, outside), buffers
    return Pickled(_digest(stream), len(stream), outside), [stream, *buffers]


def unpack(head: Pickled, load: Load) -> Any:
    """The value. Raises ValueError if its stream is not the one that was packed."""
    file = BytesIO(bytes(head.length) if head.length else head.stream)
    if head.length:
        stream = file.getbuffer()
        load(stream)
        if _digest(stream) != head.stream:
            raise ValueError("a pickled value is not what was written")
    buffers: list[bytearray] = []
    parts: list[Any] = []
    for item in head.outside:
        if isinstance(item, int):
            buffers.append(bytearray(item))
            load(buffers[-1])
        else:
            packer, inner = item
            parts.append(packer.unpack(inner, load))
    return _Unpickler(file, buffers, parts).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: BytesIO, whole: Any, packer_of: Callable[[Any], Packer | None]) -> None:
        self.outside: list[Any] = []
        super().__init__(file, 5, buffer_callback=self.outside.append)
        self._whole = whole
        self._packer_of = packer_of
        self._parts = 0

    def reducer_override(self, part: Any) -> Any:
        packer = None if part is self._whole else self._packer_of(part)
        if packer is None:
            return NotImplemented
        self.outside.append((packer, *packer.pack(part)))
        self._parts += 1
        return part_of, (self._parts - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, buffers: list[bytearray], parts: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._parts = parts

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, part_of.__name__):
            return self._parts.__getitem__
        return super().find_class(module, name)


def part_of(number: int) -> Any:
    """Stands in a stream for what gives a part by its number."""
    raise NotImplementedError


def _digest(stream: memoryview) -> bytes:
    return blake2b(stream, digest_size=16).digest()
