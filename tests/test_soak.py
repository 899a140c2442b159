"""A soak: long programs of four shapes through the public surface, in which nothing may fail, be wrong or grow.

SOAK says how many operations there are in all: 20,000 in a plain run, a million in CI, as many as you like by hand:

    SOAK=10_000_000 LONGEST_TEST=36000 python -m pytest -m "" -s tests/test_soak.py

The last prints how long each shape took; no test depends on it.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any, Final

import pytest

import recompute as rc
from lib.vectors import Vector, vector
from recompute.testing import check_invariants

SMALL: Final = 20_000
OPERATIONS: Final = int(os.environ.get("SOAK") or SMALL)
SHARE: Final = OPERATIONS // 4
"""Of each shape."""

ROUND: Final = 100
"""Operations between two looks at what is true at any time, some more or less."""

LOOKS: Final = 16
"""At the memory that is in use."""

STEADY: Final = 500
"""Objects of the library that there may be more at the end than in the first quarter, but for what is alive."""

KEPT: Final = 200_000
"""Operations that the library remembers, to see whether a program repeats."""

BLOCKS: Final = 12
"""Allocations for each of them, at most."""

pytestmark = [pytest.mark.slow] if OPERATIONS > SMALL else []


class Memory:
    """What is in use at looks that are spread over a run: objects of the library, and whatever Python has allocated."""

    def __init__(self) -> None:
        self.objects: list[int] = []
        self.blocks: list[int] = []
        self.done: list[int] = []
        """Operations before each look."""

    def look(self, done: int) -> None:
        gc.collect()
        self.objects.append(sum(type(tracked).__module__.startswith("recompute") for tracked in gc.get_objects()))
        self.blocks.append(sys.getallocatedblocks())
        self.done.append(done)

    def __str__(self) -> str:
        objects, blocks = self.objects, self.blocks
        return f"objects {objects[0]:,} to {objects[-1]:,}, blocks {blocks[0]:,} to {blocks[-1]:,}"

    def is_flat(self) -> None:
        """From the first quarter to the last one nothing has grown, beside what is remembered of `KEPT` operations."""
        quarter = len(self.done) // 4
        assert max(self.objects[-quarter:]) <= max(self.objects[:quarter]) + STEADY, self.objects
        learnt = min(KEPT, self.done[-1]) - min(KEPT, self.done[0])
        assert min(self.blocks[-quarter:]) <= max(self.blocks[:quarter]) + 10 * STEADY + BLOCKS * learnt, self.blocks


class Soak:
    """One cache with default settings, and a program that goes on until its share of operations is done."""

    def __init__(self, budget: int, largest: int) -> None:
        self.budget, self.largest = budget, largest
        self.cache = rc.Cache(budget)
        self.memory = Memory()

    def rounds(self, alive: list[Any]) -> Iterator[int]:
        """The numbers of rounds; after each it is seen that the budget was kept. `alive`: what the program refers to.

        At the end the figures are printed: operations a second, and what was in use at the first look and at the last.
        """
        began, number = process_time(), 0
        with self.cache:
            while (done := self.cache.stats().operations) < SHARE:
                if done * LOOKS >= len(self.memory.done) * SHARE and number:
                    check_invariants(self.cache, alive)
                    self.memory.look(done)
                yield number
                self.keeps_its_budget()
                number += 1
            self.cache.next_iteration(last=True)
            check_invariants(self.cache, alive)
        taken = process_time() - began
        print(f"\n{done:,} operations, {done / taken:,.0f} a second of the processor; {self.cache!r}; {self.memory}")
        self.memory.is_flat()

    def keeps_its_budget(self) -> None:
        stats = self.cache.stats()
        assert stats.peak <= self.budget + stats.overshoot
        assert stats.overshoot <= self.largest
        assert not stats.foresight.startswith("ended"), stats.foresight


@contextmanager
def silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No warning, but that the cache repeats much, and nothing in the log above that."""
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", rc.ThrashWarning)
        yield
    assert not [record for record in caplog.records if "repeat" not in record.getMessage()]


@pytest.fixture(autouse=True)
def _silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with silence(caplog):
        yield


def block(before: bytes, number: int) -> bytes:
    """A kilobyte that depends on all that was before it."""
    return (int.from_bytes(before[:8], "little") * 31 + number).to_bytes(16, "little")[:8] * 120


SIZE: Final = sys.getsizeof(block(b"", 0))


def test_the_same_operation_in_rounds() -> None:
    """One function on one source, again and again: half of a round fits, and each value is the one of its number."""
    soak = Soak(ROUND * SIZE // 2, SIZE)
    with soak.cache:
        source = rc.pure(block(b"", 7))
    values: list[Any] = [source]
    for number in soak.rounds(values):
        values[1:] = [rc.ap(block, source, number + step) for step in range(ROUND)]
        for step in range(number % 7, ROUND, 20):
            assert values[1 + step].get() == block(block(b"", 7), number + step)


def test_a_chain_with_detach() -> None:
    """A state that is made from the one before it, and detached now and then; the last ones can be read."""
    soak = Soak(20 * SIZE, SIZE)
    plain = [block(b"", 1)]
    with soak.cache:
        states: list[Any] = [rc.pure(plain[0])]
    for number in soak.rounds(states):
        for step in range(ROUND):
            plain.append(block(plain[-1], number))
            state = rc.ap(block, states[-1], number)
            states.append(state.detach() if step % 8 == 0 else state)
            del state
            if len(states) > 40:
                del states[0], plain[0]
        for place in range(number % 5, len(states), 10):
            assert states[place].get() == plain[place]


def test_marked_iterations_that_are_read_backwards() -> None:
    """A chain in each iteration, in a quarter of its memory, read from its end."""
    soak = Soak(ROUND * SIZE // 4, SIZE)
    values: list[Any] = []
    for number in soak.rounds(values):
        plain = [block(b"", number)]
        with soak.cache.iteration():
            values.append(rc.pure(plain[0]))
            for step in range(ROUND):
                plain.append(block(plain[-1], step))
                values.append(rc.ap(block, values[-1], step))
            while values:
                assert values.pop().get() == plain.pop()


def total(*parts: Vector) -> Vector:
    """Ten numbers: the sums of what the parts have at each place."""
    rows = [(*part.numbers, *range(10))[:10] for part in parts]
    return vector(*[sum(place) % 97 for place in zip(*rows, strict=True)])


def tail(part: Vector) -> Vector:
    """A view of the argument."""
    return part.view(1)


def windows(part: Vector) -> tuple[Vector, Vector]:
    """Two views of one new buffer."""
    whole = total(part, part)
    return whole.view(0, 5), whole.view(3)


def pair(one: Vector, other: Vector) -> tuple[Vector, Vector]:
    """Two new buffers."""
    return total(one, other), total(other)


VECTOR: Final = 80
"""Bytes of one, as they are counted."""

FUNCTIONS: Final[tuple[tuple[Callable[..., Any], int, int], ...]] = (
    (total, 1, 1),
    (total, 2, 1),
    (total, 3, 1),
    (tail, 1, 1),
    (windows, 1, 2),
    (pair, 2, 2),
)
"""What is applied, to how many arguments, with how many outputs."""


class Graph:
    """Values of the cache, and beside each the plain one."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.plain = [vector(*range(number, number + 10)) for number in range(4)]
        self.values: list[Any] = [rc.pure(vector(*payload.numbers)) for payload in self.plain]
        self.pinned: Any = None

    def apply(self) -> None:
        function, arguments, outputs = self.draw.choice(FUNCTIONS)
        chosen = [self.draw.randrange(len(self.values)) for _ in range(arguments)]
        plain = function(*[self.plain[place] for place in chosen])
        value = rc.ap(function, *[self.values[place] for place in chosen], nout=outputs)
        self.plain += plain if outputs > 1 else [plain]
        self.values += value if outputs > 1 else [value]

    def get(self) -> None:
        place = self.draw.randrange(len(self.values))
        assert self.values[place].get().numbers == self.plain[place].numbers

    def evict(self) -> None:
        self.draw.choice(self.values).evict()

    def drop(self, most: int = 30) -> None:
        while len(self.values) > most:
            place = self.draw.randrange(len(self.values))
            del self.values[place], self.plain[place]

    def pin(self) -> None:
        """Another one than until now."""
        if self.pinned is not None:
            self.pinned.unpin()
        self.pinned = self.draw.choice(self.values).pin()

    def forget(self) -> None:
        """A few values without their history."""
        if self.pinned is not None:
            self.pinned.unpin()
            self.pinned = None
        self.drop(4)
        for place, value in enumerate(self.values):
            value.detach()
            assert value.get().numbers == self.plain[place].numbers


def test_a_random_graph() -> None:
    """Several arguments and outputs, views, evictions, pins, dropped values: each is what it is without the cache."""
    soak = Soak(20 * VECTOR, 2 * VECTOR)
    with soak.cache:
        graph = Graph(SHARE)
    steps = [graph.apply] * 12 + [graph.get] * 3 + [graph.evict] * 2 + [graph.drop] * 4 + [graph.pin]
    for _ in soak.rounds(graph.values):
        for _ in range(ROUND):
            graph.draw.choice(steps)()
        graph.forget()
