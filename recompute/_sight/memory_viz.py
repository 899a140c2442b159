"""Export in the form of PyTorch's memory snapshots: allocations and their ends, with the line that made each.

It is a dict as `torch.cuda.memory._snapshot()` gives it, as JSON instead of a pickle: `torch.cuda._memory_viz` reads it
after `json.load`, and makes a page of it (`trace_plot`). Addresses are made up: values lie in one segment a device,
where they fit best. Each value has the category of its line, by which the page colours it: there are ten colours, so
the lines with most bytes have their own, and the others share one. One category must be "unknown".
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from recompute._sight.recording import RecordedRun, arriving
from recompute._traces.program import file_and_line
from recompute.events import Evicted, Forgotten, LetGo, TakenBack

_COLOURS: Final = 10
_START: Final = 1 << 32
_OTHERS: Final = "other lines"


def memory_viz(recording: RecordedRun) -> Iterator[str]:
    """The document, in pieces. O(events x log of values in memory)."""
    unit = recording.program.unit * 1e6
    names = list(dict.fromkeys(recording.devices.values())) or ["cpu"]
    spaces = {name: _Space() for name in names}
    traces: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    devices, places = recording.devices, recording.places
    categories = _categories(recording, places)
    here: dict[int, tuple[int, int]] = {}  # storage in memory -> address, bytes
    held: dict[int, list[tuple[int, int]]] = {}  # evicted, but held outside

    def tell(action: str, storage: int, block: tuple[int, int], time: float) -> None:
        place = places.get(storage, ("?", ""))
        traces[devices.get(storage, names[0])].append(
            {
                "action": action,
                "addr": block[0],
                "size": block[1],
                "stream": 0,
                "time_us": round(time * unit),
                "frames": [_frame(*place)],
                "category": categories.get(place, _OTHERS),
            }
        )

    def free(storage: int, block: tuple[int, int], time: float) -> None:
        spaces[devices.get(storage, names[0])].free(block)
        tell("free_requested", storage, block, time)
        tell("free_completed", storage, block, time)

    for trace in traces.values():
        trace.append(
            {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 0, "frames": [], "category": "unknown"}
        )
    for event in recording.events:
        for storage, size in arriving(event):
            if size and storage not in here:
                block = here[storage] = spaces[devices[storage]].take(size)
                tell("alloc", storage, block, event.time)
        if isinstance(event, Evicted | Forgotten) and event.storage in here:
            block = here.pop(event.storage)
            if isinstance(event, Evicted) and event.held:
                held.setdefault(event.storage, []).append(block)
            else:
                free(event.storage, block, event.time)
        elif isinstance(event, LetGo) and held.get(event.storage):
            free(event.storage, held[event.storage].pop(0), event.time)
        elif isinstance(event, TakenBack) and held.get(event.storage):
            free(event.storage, held[event.storage].pop(), event.time)
    alive = [(storage, *block) for storage, block in here.items()]
    alive += [(storage, *block) for storage, blocks in held.items() for block in blocks]
    segments = [
        _segment(number, spaces[name], [block for block in alive if devices[block[0]] == name], places)
        for number, name in enumerate(names)
        if spaces[name].end > _START
    ]
    yield json.dumps({"segments": segments, "device_traces": list(traces.values()), "devices": names})
    yield "\n"


def _categories(recording: RecordedRun, places: dict[int, tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The category of the values that a function makes at a place."""
    most: Counter[tuple[str, str]] = Counter()
    for event in recording.events:
        for storage, size in arriving(event):
            most[places[storage]] += size
    named = [place for place, _ in most.most_common() if place[1] or place[0] != "a source"][: _COLOURS - 2]
    categories = {(function, line): f"{function}, {line}" if line else function for function, line in named}
    return {**categories, ("a source", ""): "unknown"}


def _frame(function: str, place: str) -> dict[str, Any]:
    file, line = file_and_line(place)
    return {"filename": file or "unknown", "line": line, "name": function}


class _Space:
    """Addresses: a block goes to the smallest hole that it fits into. O(log n) a block, and moving short lists."""

    def __init__(self) -> None:
        self.end = _START
        """Of what was ever in use."""
        self._by_size: list[tuple[int, int]] = []  # (bytes, address) of the holes
        self._starts: dict[int, int] = {}  # address of a hole -> bytes
        self._ends: dict[int, int] = {}  # end of a hole -> its address

    def take(self, size: int) -> tuple[int, int]:
        """Address and bytes of a new block."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            address, self.end = self.end, self.end + size
            return address, size
        whole, address = self._by_size[at]
        self._fill(address, whole)
        if whole > size:
            self._dig(address + size, whole - size)
        return address, size

    def free(self, block: tuple[int, int]) -> None:
        address, size = block
        before = self._ends.get(address)
        if before is not None:
            size += self._starts[before]
            self._fill(before, self._starts[before])
            address = before
        behind = self._starts.get(address + size)
        if behind is not None:
            self._fill(address + size, behind)
            size += behind
        self._dig(address, size)

    def holes(self) -> list[tuple[int, int]]:
        """Address and bytes of each."""
        return sorted(self._starts.items())

    def _dig(self, address: int, size: int) -> None:
        insort(self._by_size, (size, address))
        self._starts[address] = size
        self._ends[address + size] = address

    def _fill(self, address: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, address))]
        del self._starts[address], self._ends[address + size]


def _segment(
    device: int, space: _Space, alive: list[tuple[int, int, int]], places: dict[int, tuple[str, str]]
) -> dict[str, Any]:
    """All memory of a device, and what is in it at the end."""
    blocks: list[dict[str, Any]] = [
        {
            "address": address,
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": [_frame(*places.get(storage, ("?", "")))],
        }
        for storage, address, size in alive
    ]
    blocks += [
        {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
        for address, size in space.holes()
    ]
    used = sum(size for _, _, size in alive)
    return {
        "device": device,
        "address": _START,
        "total_size": space.end - _START,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "frames": [],
        "blocks": sorted(blocks, key=lambda block: block["address"]),
    }
