"""What a program is replayed with: placeholders for its values, and the settings of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recompute._adapters.adapter import Adapter, register
from recompute.extend import EngineOptions, ReleaseMode


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


def engine_options(published: bool, release: ReleaseMode, effort: float = 0.0) -> EngineOptions:
    """How the engine is set for a replay.

    As the library has it, but told how much room each operation asked for when it was recorded. `published`: as the DTR
    authors' simulator has it, too. There

    * the clock starts at one, and components are kept from the start (here they are joined at the first question);
    * evicted arguments come back in program order (here in an order that keeps the peak low);
    * locks are never let go of (here those that only wait are): who finds no candidate is out of memory;
    * nothing is forgotten: a value that can never be needed again stays in its component;
    * an operation that waits for evicted arguments is there already, so to those above it what it will make is evicted.
    """
    if not published:
        return EngineOptions(room=_recorded_room, warns=False, effort=effort, waits=True)
    return EngineOptions(
        room=_recorded_room,
        program_order=True,
        patient=False,
        remember_all=release != "banish",
        active=True,
        start=1.0,
        warns=False,
        expected_cost=_recorded_cost,
    )


def _recorded_room(function: Any) -> Sequence[tuple[str, int]]:
    room: Sequence[tuple[str, int]] = function.room
    return room


def _recorded_cost(function: Any) -> float:
    """Each storage that the function makes has its whole cost."""
    cost: float = function.call.cost * sum(where is None for _, _, where, _ in function.makes)
    return cost
