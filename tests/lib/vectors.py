"""Vectors: a value type with views and devices, small enough to see through, for tests that need no framework."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from recompute._adapters.adapter import Adapter, register

ITEM = 8  # bytes that a number counts


class Buffer:
    """The memory that vectors share."""

    __slots__ = ("__weakref__", "device", "numbers", "slack")

    def __init__(self, numbers: tuple[int, ...], device: str = "cpu", slack: int = 0) -> None:
        self.numbers = numbers
        self.device = device
        self.slack = slack  # bytes counted beyond the numbers


class Vector:
    """A window on a buffer. Two vectors with the same buffer are aliases."""

    __slots__ = ("__weakref__", "buffer", "start", "stop")

    def __init__(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> None:
        self.buffer = buffer
        self.start = start
        self.stop = len(buffer.numbers) if stop is None else stop

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.buffer.numbers[self.start : self.stop]

    def view(self, start: int, stop: int | None = None) -> Vector:
        """A part of it, in the same buffer."""
        stop = len(self) if stop is None else min(stop, len(self))
        return Vector(self.buffer, self.start + min(start, len(self)), self.start + stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vector):
            return NotImplemented
        return self.numbers == other.numbers and self.buffer.device == other.buffer.device

    __hash__ = None  # type: ignore[assignment]  # like an array

    def __repr__(self) -> str:
        return f"Vector{self.numbers}@{self.buffer.device}"


def vector(*numbers: int, device: str = "cpu", slack: int = 0) -> Vector:
    """A vector with a buffer of its own."""
    return Vector(Buffer(numbers, device, slack))


class VectorAdapter(Adapter):
    """How the cache sees vectors: by their buffers."""

    name = "vector"

    def serves(self, cls: type) -> bool:
        return issubclass(cls, Vector)

    def nbytes(self, value: Any) -> int:
        return ITEM * len(value.buffer.numbers) + int(value.buffer.slack)

    def buffer(self, value: Any) -> object:
        return value.buffer

    def watch(self, value: Any) -> object:
        return value.buffer

    def device(self, value: Any) -> str:
        return str(value.buffer.device)

    def signature(self, value: Any) -> Hashable:
        return Vector, value.buffer.device, len(value.buffer.numbers), len(value)

    def fingerprint(self, value: Any) -> bytes:
        return repr(value).encode()

    def devices(self) -> list[str]:
        return ["cpu", "gpu:0"]


register(Vector, VectorAdapter())
