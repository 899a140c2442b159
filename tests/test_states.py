"""The machine by itself: no thread, no clock, no function; a model of sets and sums as the oracle."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recompute._engine import states
from recompute._engine.graph import Operation, Storage, Value, remains_of
from recompute._engine.machine import Machine, WrongMove, check, kind_of
from recompute._engine.neighbours import NoNeighbours
from recompute._engine.pool import Pool
from recompute._engine.states import COMING, EVICTED, FORGOTTEN, IN_MEMORY, LOST, NAMES, NEXT, RESIDENT
from recompute._policy.formulas import Dtr
from recompute._policy.search import Exact, candidates

STATES = range(len(NAMES))


class Neighbours(NoNeighbours):
    """Notes which storages it was told are lost."""

    def __init__(self) -> None:
        super().__init__(lambda storage: None)
        self.active = True
        self.lost: set[Storage] = set()

    def evicted(self, storage: Storage) -> None:
        assert storage not in self.lost
        self.lost.add(storage)

    def restored(self, storage: Storage) -> None:
        self.lost.discard(storage)

    def restart(self, evicted: Any) -> None:
        self.lost = set(evicted)


def made() -> tuple[Machine, Pool, Neighbours]:
    neighbours = Neighbours()
    return Machine(neighbours), Pool("cpu", candidates(Exact(), Dtr(), neighbours), 1000), neighbours


def storage_of(number: int, size: int, pool: Pool) -> Storage:
    storage, value = Storage(number), Value()
    storage.pool, storage.size, storage.values = pool, size, (value,)
    value.storage, value.operation, value.payload = storage, Operation(str, (), ()), number
    return storage


def in_state(machine: Machine, pool: Pool, state: int) -> Storage:
    """A storage that has come to a state by allowed moves."""
    ways: dict[int, list[int]] = {COMING: []}
    todo = [COMING]
    for reached in todo:
        for following in sorted(NEXT[reached]):
            if following not in ways:
                ways[following] = [*ways[reached], following]
                todo.append(following)
    storage = storage_of(1, 10, pool)
    for way in ways[state]:
        machine.move(storage, way)
    return storage


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_what_the_table_allows_is_done_and_all_else_refused(before: int, after: int) -> None:
    """Every pair of states: the move is made, and counted, or nothing has changed."""
    machine, pool, neighbours = made()
    storage = in_state(machine, pool, before)
    if after in NEXT[before]:
        machine.move(storage, after)
        assert storage.state == after
        assert pool.used == (10 if IN_MEMORY[after] else 0)
        assert (storage.slot >= 0) == IN_MEMORY[after]
        assert (storage in neighbours.lost) == LOST[after]
    else:
        counted = (pool.used, pool.fixed, pool.sources, pool.movable, storage.slot)
        with pytest.raises(WrongMove, match=f"{NAMES[before]} to {NAMES[after]}"):
            machine.move(storage, after)
        assert (storage.state, pool.used, pool.fixed, pool.sources, pool.movable, storage.slot) == (before, *counted)
    check([storage], [pool], machine)


def test_the_table_is_complete() -> None:
    """Each state has a name, a meaning and a row; nothing leads on from the last one, and to each something leads."""
    assert len(NAMES) == len(states.MEANINGS) == len(NEXT) == len(IN_MEMORY) == len(EVICTED) == len(LOST)
    assert NEXT[FORGOTTEN] == frozenset()
    assert {state for following in NEXT for state in following} == set(STATES)
    assert not any(IN_MEMORY[state] and EVICTED[state] for state in STATES)
    assert all(EVICTED[state] for state in STATES if LOST[state])


def test_the_docs_have_the_table() -> None:
    """The page that shows the states shows those of the table."""
    page = (Path(__file__).parents[1] / "docs" / "code-tour.md").read_text()
    shown = page.split("table() -->\n")[1].split("<!-- end of the states -->")[0]
    assert shown == states.table()


class Storages(RuleBasedStateMachine):
    """Storages that move, are locked, pinned, resized, and counted again."""

    def __init__(self) -> None:
        super().__init__()
        self.machine, self.pool, self.neighbours = made()
        self.storages: list[Storage] = []
        self.locks: dict[Storage, int] = {}
        self.pins: dict[Storage, int] = {}
        self.reserved: list[int] = []

    @rule(size=st.integers(0, 50), source=st.booleans())
    def enter(self, size: int, source: bool) -> None:
        storage = storage_of(len(self.storages) + 1, 0, self.pool)
        (value,) = storage.values
        if source:
            value.operation = None
            remains_of(value).movable = True
        self.machine.enter(storage, self.pool, size, 0, 0.0)
        self.storages.append(storage)

    def _one(self, number: int) -> Storage:
        return self.storages[number % len(self.storages)]

    @precondition(lambda self: self.storages)
    @rule(number=st.integers(0, 100), state=st.sampled_from(list(STATES)))
    def move(self, number: int, state: int) -> None:
        storage = self._one(number)
        free = not self.locks.get(storage) and not self.pins.get(storage)
        if IN_MEMORY[state] and state != kind_of(storage):
            return  # what lives on it decides which
        if state in NEXT[storage.state] and (free or IN_MEMORY[state]):
            (value,) = storage.values
            value.payload = storage.number if IN_MEMORY[state] else states  # anything but what it was
            self.machine.move(storage, state)

    @precondition(lambda self: self.storages)
    @rule(number=st.integers(0, 100))
    def lock(self, number: int) -> None:
        storage = self._one(number)
        if IN_MEMORY[storage.state]:
            self.machine.lock(storage)
            self.locks[storage] = self.locks.get(storage, 0) + 1

    @precondition(lambda self: any(self.locks.values()))
    @rule(number=st.integers(0, 100))
    def unlock(self, number: int) -> None:
        locked = [storage for storage, count in self.locks.items() if count]
        storage = locked[number % len(locked)]
        self.machine.unlock(storage)
        self.locks[storage] -= 1

    @precondition(lambda self: self.storages)
    @rule(number=st.integers(0, 100))
    def pin_or_unpin(self, number: int) -> None:
        storage = self._one(number)
        if self.pins.get(storage):
            self.machine.unpin(storage)
            self.pins[storage] = 0
        elif IN_MEMORY[storage.state]:
            self.machine.pin(storage)
            self.pins[storage] = 1

    @precondition(lambda self: self.storages)
    @rule(number=st.integers(0, 100), size=st.integers(0, 60))
    def resize(self, number: int, size: int) -> None:
        storage = self._one(number)
        if IN_MEMORY[storage.state]:
            self.machine.resize(storage, size, self.pins.get(storage, 0))

    @rule(size=st.integers(0, 50))
    def reserve(self, size: int) -> None:
        self.machine.reserve(self.pool, size)
        self.reserved.append(size)

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        self.machine.give_back(self.pool, self.reserved.pop())

    @invariant()
    def the_sums_are_those_of_the_model(self) -> None:
        resident = [storage for storage in self.storages if IN_MEMORY[storage.state]]
        locked = [storage for storage in resident if self.locks.get(storage) or self.pins.get(storage)]
        reserved = sum(self.reserved)
        pool = self.pool
        assert pool.used == sum(storage.size for storage in resident) + reserved
        assert pool.fixed == sum(storage.size for storage in locked) + reserved
        assert pool.pinned == sum(storage.size for storage, pins in self.pins.items() if pins)
        assert pool.movable == sum(storage.size for storage in resident if storage.state != RESIDENT)
        assert pool.peak >= pool.used
        assert pool.overshoot == max(0, pool.peak - 1000)
        assert self.neighbours.lost == {storage for storage in self.storages if LOST[storage.state]}
        assert {candidate for candidate in pool.candidates if not candidate.locks} == {
            storage for storage in resident if storage not in locked and (storage.size or storage.slot >= 0)
        }


TestStorages = Storages.TestCase
TestStorages.settings = settings(deadline=None)
