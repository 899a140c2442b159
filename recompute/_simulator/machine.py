"""What a program is replayed with: placeholders for its values, and the settings of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recompute._adapters.adapter import Adapter, register
from recompute.extend import Settings


class Placeholder:
    """Stands in for a value: memory of a size, on a device, that aliases share."""

    __slots__ = ("__weakref__", "device", "owner", "size")

    def __init__(self, size: int, device: str, owner: Placeholder | None) -> None:
        self.size = size
        self.device = device
        self.owner = owner  # None: itself


class _PlaceholderAdapter(Adapter):
    name = "placeholder"

    def nbytes(self, value: Any) -> int:
        return int(value.size)

    def buffer(self, value: Any) -> object:
        return value.owner or value

    def watch(self, value: Any) -> object:
        return value.owner or value

    def device(self, value: Any) -> str:
        return str(value.device)

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return (value.size, value.device, value.owner is not None), ()

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        size, device, shared = head
        return Placeholder(size, device, Placeholder(size, device, None) if shared else None)


register(Placeholder, _PlaceholderAdapter())


def engine_options(effort: float = 0.0) -> Settings:
    """As the library has it, but told how much room each operation asked for when it was recorded."""
    return Settings(room=_recorded_room, warns=False, effort=effort, waits=True, internal=True)


def _recorded_room(function: Any) -> tuple[Sequence[tuple[str, int]], bool]:
    return function.room, function.call.sure
