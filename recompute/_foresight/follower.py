"""Following a script while the program runs: what it says is advice, and the engine decides as ever if it is wrong.

Before an operation runs for the first time, it is looked up in the script, what the script runs again before it is
brought back, and what is not needed for the time being is put in a queue. Memory that runs short takes from this queue:
no search, no scores. An operation that the script does not know is let pass; after too many of them the script is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from recompute._foresight.calls import Call, call_of
from recompute._foresight.script import Script
from recompute.extend import EVICTED, Node, Pool

_AHEAD: Final = 64
"""Operations of the script that the program may leave out at once."""

_UNKNOWN: Final = -2
"""The place of an operation of this round that the script does not have."""

_BEHIND: Final = 8
"""Operations just done, of which an unknown one may be a repetition."""

_LOST: Final = 12.0
"""Unknown operations, of which each known one makes a tenth forgotten, after which the script is lost."""


class Follower:
    """One round of a program, beside the script that was made of an earlier one. It is the engine's `Advice`."""

    def __init__(self, script: Script, bring: Callable[[Node], float]) -> None:
        self.script = script
        self.place = 0
        """Of the operation that the script has next."""
        self.unknown = 0
        """Operations that it did not have."""
        self.lost = ""
        """Why it is followed no more."""
        self._bring = bring
        self._again: dict[int, float] = {}  # operation -> seconds that it took when it ran again
        self._acted = 0  # acts in front of that operation that were done already
        self._nodes: list[Node | None] = [None] * len(script.calls)
        self._places: dict[Node | None, int] = {}
        self._free = bytearray(len(script.values))  # storage -> not needed for the time being
        self._queue: deque[int] = deque()  # such storages, the first one first
        self._misses = 0.0
        self._last: Node | None = None
        self._ahead: tuple[Node, int, int] | None = None  # an unknown operation, where it may be, and what it is else

    def begins(self, operation: Node) -> None:
        """An operation is about to run for the first time: without the lock."""
        if self.lost:
            return
        script, place, last = self.script, self.place, self._last
        if last is not None and last.size != script.sizes[place - 1] and last.storage is last:
            self._miss(f"{last.name} made {last.size} bytes, not {script.sizes[place - 1]} as before")
        call = call_of(operation, self._places)
        while place < len(script.calls) and script.calls[place] is None:  # what a function did in the cache
            place += 1
        if place >= len(script.calls) or (script.calls[place] != call and not self._fits(operation, call, place)):
            found = self._find(operation, call, place)
            if found < 0:
                return
            place = found
        elif self._ahead is not None:
            self._deny()
        if self._misses:
            self._misses *= 0.9
        self._nodes[place] = operation
        self._places[operation] = place
        while self.place < place:  # left out
            self._act(self.place)
            self.place += 1
            self._acted = 0
        self._act(place)
        self.place = place + 1
        self._acted = 0
        self._last = operation
        for act, storage, _ in script.acts[place + 1]:  # what it takes for the last time can go as soon as it has run
            if act != "free" or storage in script.makes[place]:
                break
            self._let_go(storage)
            self._acted += 1

    def _fits(self, operation: Node, call: Call, place: int) -> bool:
        """Whether it is what the script has next, but for arguments that were unknown: these are known from now on."""
        expected = self.script.calls[place]
        if expected is None or _UNKNOWN not in call or len(call) != len(expected) or call[0] != expected[0]:
            return False
        pairs = list(zip(call[1:], expected[1:], strict=True))
        if any(mine not in (other, _UNKNOWN) or other == -1 != mine for mine, other in pairs):
            return False
        for (mine, other), argument in zip(pairs, operation.arguments, strict=True):
            if mine == _UNKNOWN and isinstance(other, int):
                self._places[argument.operation] = other
                self._nodes[other] = argument.operation
        return True

    def _find(self, operation: Node, call: Call, place: int) -> int:
        """Where in the script an operation is that does not come next in it; -1: nowhere, or that is not sure yet.

        It is further ahead if it takes what was made just now, or if the one after it is there, too.
        """
        calls, ahead = self.script.calls, self._ahead
        self._miss(f"{operation.name} is not what came next before")
        self._last = None
        if ahead is not None and ahead[1] + 1 < len(calls) and calls[ahead[1] + 1] == call:
            self._nodes[ahead[1]], self._ahead = ahead[0], None
            return ahead[1] + 1
        self._deny()
        twice = next((at for at in range(place - 1, max(-1, place - 1 - _BEHIND), -1) if calls[at] == call), _UNKNOWN)
        self._places[operation] = twice  # then what takes either of them takes that one
        if twice >= 0:
            self._nodes[twice] = operation
        window = range(place, min(len(calls), place + _AHEAD))
        there = next((at for at in window if calls[at] == call), -1)
        if there < 0:
            there = next((at for at in window if self._fits(operation, call, at)), -1)
        if there < 0:
            return -1
        if any(isinstance(one, int) and one >= place - _BEHIND for one in call[1:]):
            return there
        self._places[operation] = there
        self._ahead = operation, there, twice
        return -1

    def _deny(self) -> None:
        """The last one was new."""
        if self._ahead is not None:
            operation, _, self._places[operation] = self._ahead
            self._ahead = None

    def wants(self, value: Node) -> None:
        """An evicted value is about to be got: do what the script does before that, if it knows of it."""
        place = self._places.get(value.operation)
        if self.lost or place is None or place < 0 or self.place >= len(self.script.acts):
            return
        acts = self.script.acts[self.place]
        for number in range(self._acted, len(acts)):
            act, which, outputs = acts[number]
            operation = self._nodes[place]
            if act == "get" and which == place and operation is not None and operation.outputs[outputs[0]] is value:
                self._act(self.place, number + 1)
                self._acted = number + 1
                return

    def costs(self) -> list[float | None]:
        """Seconds that another run of each operation would take, as this round has it; None: it was not run.

        What ran again is known; others take longer than the first time by the same ratio.
        """
        once = sum([node.c0 for place in self._again if (node := self._nodes[place]) is not None])
        ratio = sum(self._again.values()) / once if once else 1.0
        return [
            None if node is None else self._again.get(place, ratio * node.c0) for place, node in enumerate(self._nodes)
        ]

    def _act(self, place: int, until: int | None = None) -> None:
        """Do what the script does before an operation, or the first so many acts of that."""
        acts = self.script.acts[place]
        if len(acts) == self._acted:
            return
        for act, which, outputs in acts[self._acted : until]:
            if self.lost:
                return
            if act == "free":
                self._let_go(which)
            elif act == "again":
                self._run_again(which, outputs)

    def _let_go(self, storage: int) -> None:
        self._free[storage] = 1
        self._queue.append(storage)

    def _run_again(self, place: int, wanted: tuple[int, ...]) -> None:
        made = self.script.makes[place]
        operation = self._nodes[place]
        if operation is not None:
            outputs = operation.outputs
            for output in wanted:
                value = outputs[output] if output < len(outputs) else None
                if value is not None and value.payload is EVICTED:
                    try:
                        self._again[place] = self._bring(value)
                    except Exception as error:  # whoever needs it will hear of it; BudgetError is one
                        self.lost = f"{operation.name} could not run again: {type(error).__name__}"
                        return
        for output in wanted:
            self._free[made[output]] = 0  # not before: a copy that is there still may make room

    @property
    def planned(self) -> float:
        """Seconds that the script has repeated by now."""
        return self.script.spent[min(self.place, len(self.script.spent) - 1)]

    def _miss(self, why: str) -> None:
        self.unknown += 1
        self._misses += 1.0
        if self._misses > _LOST:
            self.lost = why

    # What the engine asks, under its lock

    def victims(self, pool: Pool, size: int) -> list[Node]:
        """Storages that are not needed for the time being, until `size` more bytes fit or there are no more."""
        short = pool.used - pool.departing + size - pool.limit
        found: list[Node] = []
        aside: list[int] = []
        queue = self._queue
        while queue and short > 0:
            number = queue.popleft()
            storage = self._storage(number)
            if storage is None or not self._free[number] or not storage.resident or storage.pool is not pool:
                continue
            if storage.locks:
                aside.append(number)
                continue
            if storage not in found:
                found.append(storage)
                short -= storage.size
        queue.extendleft(reversed(aside))
        return found

    def keeps(self, storage: Node) -> bool:
        """Whether a storage that nobody refers to any more will be needed to make something again."""
        if self.lost:
            return False
        for value in storage.values:
            place = self._places.get(value.operation)
            operation = None if place is None or place < 0 else self._nodes[place]
            if place is not None and operation is not None:
                outputs = operation.outputs
                made = self.script.makes[place]
                number = outputs.index(value) if value in outputs else -1
                if 0 <= number < len(made) and not self._free[made[number]]:
                    return True
        return False

    def _storage(self, number: int) -> Node | None:
        """The storage of the engine that one of the script is now."""
        for place, output in self.script.values[number]:
            operation = self._nodes[place]
            if operation is not None and output < len(operation.outputs):
                value = operation.outputs[output]
                if value is not None and value.payload is not EVICTED:
                    return value.storage
        return None
