"""Generated programs that are recorded while they run, with what really happened noted beside."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

import recompute as rc
from recompute import testing
from recompute._engine.frames import running

Step = tuple[str, int, int]
"""("call", size, seeds of the arguments) or ("get" | "evict" | "drop" | "pin", value, 0)."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(1, 60), st.integers(0, 1 << 16)),
        st.tuples(st.sampled_from(["get", "get", "evict", "drop", "hold", "let go"]), st.integers(0, 30), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)


@dataclass
class Truth:
    """What the functions of a program saw while they ran."""

    asked: list[tuple[int, int | None]] = field(default_factory=list)
    """(number of the operation that ran, that of the operation for which it ran; None: the program)."""
    peak: int = 0
    used: int = 0


def record(steps: list[Step], path: Path, budget: int | None = 320) -> Truth:
    """Run a program under a budget and record it."""
    truth = Truth()
    clock = testing.ManualClock()
    made = 0

    def work(number: int, size: int, *arguments: object) -> bytearray:
        clock.advance(1.0 + number % 3)
        stack = running.frame().stack
        under = stack[-2].operation if len(stack) > 1 else None
        truth.asked.append((number, None if under is None else under.positional[0]))
        return bytearray(size)

    values: list[rc.Recomputable[bytearray] | None] = []
    held: list[bytearray] = []
    with rc.Cache(budget, clock=clock, trace=path) as cache:
        values.append(rc.pure(bytearray(10)))
        for kind, number, seed in steps:
            at = number % len(values)
            value = values[at]
            if kind == "call":
                there = [one for one in values if one is not None]
                taken = there[-1 - seed % 3 :: -2][:2] if seed % 5 else []
                values.append(rc.ap(work, made, number, *taken, nbytes=number))
                made += 1
            elif value is None:
                pass
            elif kind == "get":
                value.get()
            elif kind == "hold":
                held[:] = [value.get()]
            elif kind == "evict":
                value.evict()
            elif kind == "drop":
                values[at] = None
            if kind == "let go":
                held.clear()
            value = there = taken = None  # type: ignore[assignment]  # or they would refer to what is dropped
        stats = cache.stats()
        truth.peak, truth.used = stats.peak, stats.used
        cache.flush()
    return truth
