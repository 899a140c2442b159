"""Long chains read backwards in a tenth of their memory: what the cache adds to checkpoints placed by hand.

A hidden Markov model of 1,000 states over 5,000 steps: filtered forwards, then three paths sampled backwards, in one
pass over the 8 kB messages. Three ways in turns, by CPU time: all messages kept, one kept in eleven and the others
recomputed segment by segment, and the cache. Then a chain of 3,000 values of 8 kB, forwards and backwards, within the
same share of its memory. Its functions do nothing, so all the time is the library's. Last, eight threads in one cache,
each with its own chain.

    python benchmarks/backwards.py [--quick]
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy is imported: processor time of one thread

from collections.abc import Callable  # noqa: E402
from math import isqrt  # noqa: E402
from threading import Thread  # noqa: E402
from time import perf_counter, process_time  # noqa: E402
from typing import Any  # noqa: E402

import _operations as operations  # noqa: E402
import numpy as np  # noqa: E402
from _common import MICRO, Report, in_turns, main, say  # noqa: E402
from _ways import Chain  # noqa: E402

import recompute as rc  # noqa: E402
from recompute import _form  # noqa: E402

STATES = 1_000
SHARE = 10
"""The memory is this part of all messages."""


class Model:
    """A hidden Markov model, and three samples of its paths."""

    def __init__(self, steps: int) -> None:
        draw = np.random.default_rng(0)
        self.steps = steps
        self.transition = draw.dirichlet(np.ones(STATES), STATES)
        self.seen = draw.random((steps, STATES))  # how likely what was seen is, by step and state
        self.start = np.full(STATES, 1 / STATES)

    def forward(self, message: Any, step: int) -> Any:
        following = (message @ self.transition) * self.seen[step]
        return following / following.sum()

    def sample(self, get: Callable[[int], Any]) -> list[list[int]]:
        """Three paths, from the last step to the first. `get(step)`: its message, asked for once, backwards."""
        draw = np.random.default_rng(1)
        paths: list[list[int]] = [[], [], []]
        for step in reversed(range(self.steps)):
            message = get(step)
            for path in paths:
                likely = np.cumsum(message * self.transition[:, path[-1]] if path else message)
                path.append(int(np.searchsorted(likely, draw.random() * likely[-1])))
        return paths


def distance(steps: int) -> int:
    """Between checkpoints, so that these and one segment are together a tenth of all messages."""
    room = steps // SHARE
    return next(n for n in range(2, isqrt(steps) + room) if steps // n + n <= room)


def timed(work: Callable[[], Any]) -> float:
    began = process_time()
    work()
    return process_time() - began


def unit(_: Any) -> Any:
    return bytes(8_000)


def there_and_back(length: int) -> tuple[float, int]:
    """Seconds and runs of a chain read backwards in a tenth of its memory."""
    with rc.Cache(8_033 * (length // SHARE)) as cache:
        began = process_time()
        values = [rc.ap(unit, 0)]
        for _ in range(length - 1):
            values.append(rc.ap(unit, values[-1]))
        while values:
            values.pop().get()
        seconds = process_time() - began
        stats = cache.stats()
    return seconds, stats.operations + stats.rematerializations


def in_threads(count: int, length: int) -> float:
    """Operations a second (by the clock on the wall) of chains in one cache, one a thread."""
    with rc.Cache("1 GB") as cache:

        def chain() -> None:
            with cache:
                value = rc.pure(0)
                for _ in range(length):
                    value = rc.ap(operations.trivial, value)

        threads = [Thread(target=chain) for _ in range(count)]
        began = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count * length / (perf_counter() - began)


def measure(quick: bool) -> Report:
    steps, repetitions = (500, 1) if quick else (5_000, 3)
    report = Report("Chains read backwards", f"In a tenth of their memory; the core is {_form.name()}.")
    model = Model(steps)
    chain = Chain(model.start, steps, model.forward, model.sample)
    every, budget = distance(steps), 8 * STATES * (steps // SHARE)
    expected = chain.kept()
    assert chain.by_hand(every) == expected
    found, stats = chain.cached(budget)
    assert found == expected
    say(f"{steps:,} steps of {STATES:,} states")
    ways: dict[str, Callable[[], Any]] = {
        "all messages kept": chain.kept,
        "checkpoints by hand": lambda: chain.by_hand(every),
        "the cache": lambda: chain.cached(budget),
    }
    times = in_turns({name: (lambda work=work: timed(work)) for name, work in ways.items()}, repetitions)
    for name, seconds in times.items():
        report.row(f"a step of the model: {name}", [taken / steps / MICRO for taken in seconds])
    report.row("recomputations by the cache", [stats.rematerializations / steps], "per step")
    report.row("peak of the cache", [stats.peak / 1e6], "MB", f"of {steps * STATES * 8 / 1e6:.3g}")
    ratio = min(times["the cache"]) / min(times["checkpoints by hand"])
    report.target("the model, compared with checkpoints by hand", 1.25, ratio, "times the CPU time")

    length = 300 if quick else 3_000
    say(f"{length:,} values there and back")
    floor = min(operations.floor(20_000) - operations.bare(operations.trivial, 0, 20_000) for _ in range(5))
    bare = min(operations.bare(unit, 0, 20_000) for _ in range(5))
    seconds, runs = min(there_and_back(length) for _ in range(repetitions))
    added = (seconds - runs * bare) / runs / floor
    report.row("forwards and backwards: added to each run", [added], "floors", f"{runs:,} runs")
    report.target("forwards and backwards", 40, added, "floors a run")

    length = 2_000 if quick else 20_000
    say("threads")
    rates = {
        count: sorted(in_threads(count, length // count) for _ in range(2 * repetitions + 1))[repetitions]
        for count in (1, 8)
    }
    for count, rate in rates.items():
        report.row(f"{count} thread{'s' * (count > 1)} in one cache", [rate], "operations a second")
    report.target("throughput of one thread / of eight", 1.0, rates[1] / rates[8], "times")
    return report


if __name__ == "__main__":
    main(measure, __doc__)
