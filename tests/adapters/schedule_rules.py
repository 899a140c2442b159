"""What a schedule must do, however it is found: the rules of the interface, and the least time, found by search."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from checkpoint_schedules import Copy, EndForward, EndReverse, Forward, Move, Reverse, StorageType

RAM, DISK, WORK, NONE = StorageType.RAM, StorageType.DISK, StorageType.WORK, StorageType.NONE


@dataclass
class Follower:
    """Does what a schedule says with a forward of `steps` steps, and checks each action against what is there.

    `complete`: restart data serve any later step. Otherwise they serve the steps of the action that stored them, as
    the documentation of `checkpoint_schedules` says.
    """

    steps: int
    sizes: Any
    complete: bool = False
    forward: int | None = 0
    """The step that the forward is at; None: working memory has no state."""
    reversed: int = 0
    working: set[int] = field(default_factory=set)
    """Steps whose adjoint dependencies are in working memory."""
    stored: dict[tuple[int, StorageType], tuple[range, set[int]]] = field(default_factory=dict)
    """Steps that restart data serve, and those with dependencies."""
    ran: int = 0
    alone: list[int] = field(default_factory=list)
    has_ended: bool = False

    def sweep(self, schedule: Any) -> None:
        """Until the adjoint is at step 0."""
        for action in schedule:
            self.do(action, schedule)
            assert self.forward in (None, schedule.n)
            assert self.reversed == schedule.r
            if isinstance(action, EndReverse):
                return
        raise AssertionError("the schedule ended before the adjoint")

    def do(self, action: Any, schedule: Any) -> None:
        if isinstance(action, Forward):
            self.advance(action, schedule)
        elif isinstance(action, Reverse):
            assert self.has_ended
            assert action.n1 == self.steps - self.reversed
            assert self.working.issuperset(range(action.n0, action.n1))
            assert action.n0 < action.n1
            self.reversed += action.n1 - action.n0
            if action.clear_adj_deps:
                self.working.clear()
        elif isinstance(action, (Copy, Move)):
            self.transfer(action)
        elif isinstance(action, EndForward):
            assert not self.has_ended
            assert self.forward == self.steps == schedule.max_n
            self.has_ended = True
        else:
            assert isinstance(action, EndReverse), f"an unknown action: {action!r}"
            assert self.reversed == self.steps
            if not schedule.is_exhausted:
                self.reversed = 0
        for where, limit in ((RAM, self.sizes.ram), (DISK, self.sizes.disk)):
            assert self.nbytes(where) <= limit
            assert self.nbytes(where) == schedule.used(where)
            assert not self.nbytes(where) or schedule.uses_storage_type(where)
        assert len(self.working) <= 1

    def advance(self, action: Any, schedule: Any) -> None:
        assert self.forward is not None
        assert action.n0 == self.forward < action.n1
        stop = action.n1
        if schedule.max_n is None:
            stop = min(stop, self.steps)
        assert stop <= self.steps - self.reversed
        self.working.clear()
        self.ran += stop - action.n0
        if action.write_adj_deps:
            assert stop == action.n0 + 1
        dependencies = set(range(action.n0, stop)) if action.write_adj_deps else set()
        if action.storage is WORK:
            assert not action.write_ics
            self.working |= dependencies
        else:
            assert action.storage in (RAM, DISK)
            assert action.write_ics or action.write_adj_deps
            assert (action.n0, action.storage) not in self.stored
            serves = range(action.n0, stop if action.write_ics else action.n0)
            self.stored[action.n0, action.storage] = (serves, dependencies)
        self.forward = stop
        if stop == self.steps and not self.has_ended:
            schedule.finalize(stop)

    def transfer(self, action: Any) -> None:
        where = action.n, action.from_storage
        serves, dependencies = self.stored[where]
        if isinstance(action, Move):
            del self.stored[where]
        if action.to_storage is NONE:
            return
        if action.to_storage in (RAM, DISK):
            assert (action.n, action.to_storage) not in self.stored
            self.stored[action.n, action.to_storage] = serves, dependencies
            return
        assert action.n < self.steps - self.reversed
        assert not self.working
        self.working |= dependencies
        self.forward = action.n if serves else None
        if serves and not self.complete:
            assert serves.stop >= self.steps - self.reversed

    def nbytes(self, where: StorageType) -> int:
        """Bytes of what is stored there."""
        state, deps = self.sizes.state, self.sizes.deps
        entries = [entry for (_, storage), entry in self.stored.items() if storage is where]
        return sum([state * bool(serves) + deps * len(dependencies) for serves, dependencies in entries])


def least_time(costs: Sequence[float], sizes: Any, prices: Any) -> float:
    """The least time of any sequence of single steps, stores, reads and drops that reverses all, by Dijkstra's search.

    A state: the step that the adjoint is at, that of the forward (-1: none), and what is stored.
    """
    size = {"state": sizes.state, "deps": sizes.deps}
    limit = {RAM: sizes.ram, DISK: sizes.disk}
    read = {("state", DISK): prices.read_state, ("deps", DISK): prices.read_deps}
    write = {("state", DISK): prices.write_state, ("deps", DISK): prices.write_deps}
    start: tuple[int, int, frozenset[tuple[int, str, StorageType]]] = (len(costs), 0, frozenset())
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    while queue:
        time, _, state = heapq.heappop(queue)
        stop, at, stored = state
        if not stop:
            return time
        if time > best[state]:
            continue
        below = frozenset(entry for entry in stored if entry[0] < stop - 1)
        after = [(0.0, (stop, at, stored - {entry})) for entry in stored]
        for step, kind, where in stored:
            if kind == "state":
                after.append((read.get((kind, where), 0.0), (stop, step, stored)))
            elif step == stop - 1:
                after.append((read.get((kind, where), 0.0), (step, -1, below)))
        if at == stop - 1:
            after.append((costs[at], (at, -1, below)))
        elif at >= 0:
            after.append((costs[at], (stop, at + 1, stored)))
            for where in (RAM, DISK):
                used = sum([size[kind] for _, kind, place in stored if place is where])
                for kind in size:
                    if (at, kind, where) not in stored and used + size[kind] <= limit[where]:
                        more = stored | {(at, kind, where)}
                        after.append((costs[at] + write.get((kind, where), 0.0), (stop, at + 1, more)))
        for taken, following in after:
            if time + taken < best.get(following, inf):
                best[following] = time + taken
                heapq.heappush(queue, (time + taken, len(best), following))
    raise AssertionError("nothing reverses this")
