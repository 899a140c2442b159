"""Following a script while the program runs: what it says is advice, and the engine decides as ever if it is wrong.

Before an operation runs for the first time, what the script runs again before it is brought back, and what is not
needed for the time being is put in a queue. Memory that runs short takes from this queue: no search, no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from recompute import extend
from recompute._foresight.script import Alignment, Script
from recompute._foresight.spare import Spare
from recompute.extend import EVICTED, Operation, Pool, Storage, Value

_LOST: Final = 6.0
"""Operations that did not come next, of which each one that did makes a twentieth forgotten, after which it is lost."""

_MORE: Final = 1000
"""Operations that did not come next, besides as many as the script has, after which it is lost, whichever they are."""


class Follower:
    """One round of a program, beside the script that was made of an earlier one. It is the engine's `Advice`."""

    def __init__(
        self,
        script: Script,
        bring: Callable[[Value], float],
        resident: Iterable[Storage],
        wanted: Callable[[Storage], bool] = lambda storage: False,
    ) -> None:
        self.script = script
        self.lost = ""
        """Why it is followed no more."""
        self._bring = bring
        self._alignment = alignment = Alignment(script)
        self._spare = Spare(script, alignment, resident, wanted)
        self._place = 0  # the operation of the script before which everything was done
        self._acted = 0  # acts in front of that one that were done already
        self._again: dict[int, float] = {}  # operation -> seconds that it took when it ran again
        self._misses = 0.0
        self._others = 0  # operations that made something of another size
        self._last: Operation | None = None  # the operation before, if it was the one that came next

    @property
    def differs(self) -> bool:
        """Whether the round is another one so far: an operation did not come next, or made something else."""
        return self._alignment.unknown > 0 or self._others > 0

    @property
    def planned(self) -> float:
        """Seconds that the script has repeated by now."""
        return self.script.spent[min(self._place, len(self.script.spent) - 1)]

    def begins(self, operation: Operation) -> None:
        """An operation is about to run for the first time: without the lock."""
        if self.lost:
            return
        script, last = self.script, self._last
        if last is not None:
            for storage in script.outlives[self._place - 1]:
                self._spare.outlive(storage)
        made = None if last is None else _own_storage(last)
        if last is not None and made is not None and made.size != script.sizes[self._place - 1]:
            self._others += 1
            self._miss(f"{last.name} made {made.size} bytes, not {script.sizes[self._place - 1]} as before")
        place = self._alignment.find(operation)
        if place < 0:
            self._last = None
            if self._alignment.places[operation] < 0:
                self._miss(f"{operation.name} is not what came next before")
            elif self._alignment.unknown > _MORE + len(script.calls):
                self.lost = "the round is much longer than before"
            return
        if self._misses:
            self._misses *= 0.95
        for storage in script.makes[place]:
            self._spare.need(storage)
        if place < self._place:  # it comes late
            self._last = None
            return
        while self._place < place:  # left out
            self._act(self._place)
            self._place += 1
            self._acted = 0
        self._act(place)
        self._place = place + 1
        self._acted = 0
        self._last = operation
        for act, storage, _ in script.acts[place + 1]:  # what it takes for the last time can go as soon as it has run
            if act != "free" or storage in script.makes[place]:
                break
            self._spare.let_go(storage)
            self._acted += 1

    def _miss(self, why: str) -> None:
        self._misses += 1.0
        if self._misses > _LOST:
            self.lost = why

    def wants(self, value: Value) -> None:
        """An evicted value is about to be got: do what the script does before that, if it knows of it."""
        place = self._alignment.places.get(value.operation)
        if self.lost or place is None or place < 0 or self._place >= len(self.script.acts):
            return
        operation = self._alignment.nodes[place]
        if operation is None or value not in operation.outputs:
            return
        got = ("get", place, (operation.outputs.index(value),))
        acts = self.script.acts[self._place]
        if got in acts[self._acted :]:
            until = acts.index(got, self._acted) + 1
            self._act(self._place, until)
            self._acted = until

    def costs(self) -> list[float | None]:
        """Seconds that another run of each operation would take, as this round has it; None: it was not run.

        What ran again is known; others take longer than the first time by the same ratio.
        """
        nodes = self._alignment.nodes
        once = sum([node.c0 for place in self._again if (node := nodes[place]) is not None])
        ratio = sum(self._again.values()) / once if once else 1.0
        return [None if node is None else self._again.get(place, ratio * node.c0) for place, node in enumerate(nodes)]

    def _act(self, place: int, until: int | None = None) -> None:
        """Do what the script does before an operation, or the first so many acts of that."""
        acts = self.script.acts[place]
        if len(acts) == self._acted:
            return
        for act, which, outputs in acts[self._acted : until]:
            if self.lost:
                return
            if act == "free":
                self._spare.let_go(which)
            elif act == "again":
                self._run_again(which, outputs)

    def _run_again(self, place: int, wanted: tuple[int, ...]) -> None:
        made = self.script.makes[place]
        operation = self._alignment.nodes[place]
        if operation is not None:
            outputs = operation.outputs
            for output in wanted:
                value = outputs[output] if output < len(outputs) else None
                if value is not None and value.payload is EVICTED and not self._brought(place, value):
                    return
        for output in wanted:
            self._spare.need(made[output])  # not before: a copy that is there still may make room

    def _brought(self, place: int, value: Value) -> bool:
        """Whether a value could be made again; if not, the program will learn why: BudgetError is one reason."""
        for last in (False, False, True):  # its arguments may have been dropped meanwhile, and another try succeeds
            try:
                self._again[place] = self._bring(value)
                return True
            except Exception as error:
                if extend.is_interrupt(error):
                    raise
                if last:
                    what = "a source" if value.operation is None else value.operation.name
                    self.lost = f"{what} could not run again: {type(error).__name__}"
        return False

    # What the engine asks, under its lock

    def victims(self, pool: Pool, size: int) -> list[Storage]:
        """Storages to evict until `size` more bytes fit: what is not needed for the time being, or is needed last."""
        return self._spare.victims(pool, size, self._place)

    def keeps(self, storage: Storage) -> bool:
        """Whether a storage without references will be needed to make something again."""
        return not self.lost and self._spare.keeps(storage)


def _own_storage(operation: Operation) -> Storage | None:
    """What it made, if that is one value on memory of its own."""
    outputs = operation.outputs
    storage = outputs[0].storage if len(outputs) == 1 and outputs[0] is not None else None
    return storage if storage is not None and storage.number == operation.number else None
