"""Operations whose function costs next to nothing, so that nearly all the time is the library's; seconds for each."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

import recompute as rc
from recompute.testing import ManualClock

Step = Callable[[Any], Any]

SIZE: Final = 1_000
"""Bytes of each value of a full cache, as declared."""


def trivial(value: int) -> int:
    return value + 1


def closure() -> Step:
    """The same with a number that it closes over."""
    one = 1
    return lambda value: value + one


class Adder:
    """The same as a method of an object."""

    def __init__(self) -> None:
        self.one = 1

    def add(self, value: int) -> int:
        return value + self.one


class Node:
    """The floor: a tracked operation with nothing but its function, its arguments and its value."""

    __slots__ = ("arguments", "function", "value")
    arguments: tuple[Node, ...]
    value: Any

    def __init__(self, function: Callable[..., Any], *arguments: Node) -> None:
        self.function = function
        self.arguments = arguments
        self.value = function(*[argument.value for argument in arguments])


class Source(Node):
    """A node that was given its value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def bare(step: Step, start: Any, count: int) -> float:
    """A call of the function alone."""
    value = start
    began = perf_counter()
    for _ in range(count):
        value = step(value)
    return (perf_counter() - began) / count


def floor(count: int) -> float:
    """A minimal node."""
    node: Node = Source(0)
    began = perf_counter()
    for _ in range(count):
        node = Node(trivial, node)
    seconds = (perf_counter() - began) / count
    while node.arguments if type(node) is Node else ():  # from the end: dropping a deep chain of them recurses
        node = node.arguments[0]
    return seconds


def kept(count: int, budget: str | None = None, step: Step = trivial) -> float:
    """A chain with every value kept."""
    with rc.Cache(budget):
        value = rc.pure(0)
        values = [value]
        began = perf_counter()
        for _ in range(count):
            value = rc.ap(step, value)
            values.append(value)
        return (perf_counter() - began) / count


def last_kept(count: int, cache: rc.Cache) -> float:
    """A chain with only the last value kept: each step also releases the one before it, which is evicted.

    What the cache does at its end, such as to complete a trace, is included.
    """
    began = perf_counter()
    with cache:
        value = rc.pure(0)
        for _ in range(count):
            value = rc.ap(trivial, value)
    return (perf_counter() - began) / count


def get_resident(count: int, trace: Path | None = None) -> float:
    """`get` of a value that is in memory."""
    with rc.Cache(trace=trace):
        value = rc.ap(trivial, rc.pure(0))
        began = perf_counter()
        for _ in range(count):
            pass
        empty = perf_counter() - began
        began = perf_counter()
        for _ in range(count):
            value.get()
        return (perf_counter() - began - empty) / count


def away_and_back(depth: int) -> tuple[float, float, float]:
    """Along a chain: evict each value; one `get` of the last one, which brings all back; drop the whole chain."""
    with rc.Cache():
        value = rc.pure(0)
        values = []
        for _ in range(depth):
            value = rc.ap(trivial, value)
            values.append(value)
        began = perf_counter()
        for member in values:
            member.evict()
        evicted = perf_counter()
        result = value.get()
        back = perf_counter()
        assert result == depth
        del member, values
        dropping = perf_counter()
        del value
        return (evicted - began) / depth, (back - evicted) / depth, (perf_counter() - dropping) / depth


def evicting(count: int, steps: int) -> float:
    """`count` live values of unequal cost fill the budget; each of so many more operations evicts one."""
    clock, draw = ManualClock(), random.Random(0)
    costs = iter([10 ** draw.uniform(-4, -1) for _ in range(count + steps + 1)])

    def work(_: Any) -> int:
        clock.advance(next(costs))
        return 0

    with rc.Cache(SIZE * count, clock=clock) as cache:
        source = rc.pure(None)
        values = [rc.ap(work, source, nbytes=SIZE) for _ in range(count)]
        values.append(rc.ap(work, source, nbytes=SIZE))  # the first search builds what the others use
        gc.collect()
        began = perf_counter()
        for _ in range(steps):
            values.append(rc.ap(work, source, nbytes=SIZE))
        seconds = (perf_counter() - began) / steps
        assert cache.stats().evictions >= steps
        return seconds


def evicting_arrays(steps: int) -> float:
    """A chain of NumPy arrays of 8 kB, 20 of which fit: each operation copies one, and evicts one."""
    with rc.Cache(20 * 8_000) as cache:
        values = [rc.pure(np.ones(1_000))]
        gc.collect()
        began = perf_counter()
        for _ in range(steps):
            values.append(rc.ap(np.copy, values[-1]))
        seconds = (perf_counter() - began) / steps
        assert cache.stats().evictions >= steps - 20
        return seconds


def bookkeeping(count: int) -> float:
    """Bytes that a tracked operation takes besides its value: what the interpreter allocates, by tracemalloc."""
    constant = 10**9
    always = lambda _: constant
    values: list[Any] = [None] * count
    with rc.Cache():
        value = rc.pure(0)
        gc.collect()
        tracemalloc.start()
        for number in range(count):
            values[number] = value = rc.ap(always, value)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return size / count
