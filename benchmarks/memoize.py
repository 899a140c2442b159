"""Calls remembered within a memory budget: frames of a film, smoothed over time, and asked for in several passes.

A program creates 120 frames of 2.1 MB, smooths each, averages it with its neighbours, and compares it with the average:
360 values, 755 MB in all. It reads the results forwards, at 20 places, and backwards, with a budget of 100 MB for
results. All ways give the same numbers. Memory is the growth of the process's resident memory, the functions' temporary
arrays included; each way runs in its own process. The guide is [a cache of calls](../memoize.md).

`python benchmarks/memoize.py` writes docs/results/memoize.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
from _common import arguments, facts, markdown, page, publish
from _ways import Taken, all_ways, counts, note_files, taken

import recompute as rc

FRAMES = 120
SHAPE = (512, 512)
BYTES = 8 * SHAPE[0] * SHAPE[1]
BUDGET = 100_000_000

Remember = Callable[[Callable[..., Any]], Callable[..., Any]]


def load(number: int) -> Any:
    """A frame: moving waves and noise. Expensive."""
    counts["computed"] += 1
    rows, columns = np.indices(SHAPE)
    noise = np.random.default_rng(number).normal(size=SHAPE)
    return np.sin(rows / 9 + number / 3) * np.cos(columns / 7 - number / 5) + noise / 4


def smooth(frame: Any) -> Any:
    """A frame, smoothed in space. Expensive, too."""
    counts["computed"] += 1
    for _ in range(6):
        frame = (
            frame + np.roll(frame, 1, 0) + np.roll(frame, -1, 0) + np.roll(frame, 1, 1) + np.roll(frame, -1, 1)
        ) / 5
    return frame


def average(*frames: Any) -> Any:
    """Cheap."""
    counts["computed"] += 1
    return sum(frames) / len(frames)


def near(number: int) -> range:
    return range(max(0, number - 2), min(FRAMES, number + 3))


def passes(score: Callable[[int], float]) -> list[float]:
    """What is asked for: all frames, those that stand out with their neighbours, and all backwards."""
    scores = [score(number) for number in range(FRAMES)]
    for number in sorted(range(FRAMES), key=scores.__getitem__)[-20:]:
        scores += [score(other) for other in near(number)]
    return scores + [score(number) for number in reversed(range(FRAMES))]


def plain(remember: Remember) -> list[float]:
    """Functions of numbers that call each other, each remembered in some way."""

    @remember
    def frame(number: int) -> Any:
        return load(number)

    @remember
    def smoothed(number: int) -> Any:
        return smooth(frame(number))

    @remember
    def background(number: int) -> Any:
        return average(*[smoothed(other) for other in near(number)])

    return passes(lambda number: float(np.abs(smoothed(number) - background(number)).mean()))


def memoized() -> list[float]:
    """`rc.memoize`: the same functions, which take Recomputables."""
    frame, smoothed, background = rc.memoize(load), rc.memoize(smooth), rc.memoize(average)
    with rc.Cache(BUDGET):

        def score(number: int) -> float:
            here = smoothed(frame(number))
            around = background(*[smoothed(frame(other)) for other in near(number)])
            return float(np.abs(here.get() - around.get()).mean())

        return passes(score)


def all_first() -> list[float]:
    """`rc.ap`: all values made before the first is asked for."""
    with rc.Cache(BUDGET):
        smoothed = [rc.ap(smooth, rc.ap(load, number)) for number in range(FRAMES)]
        around = [rc.ap(average, *[smoothed[other] for other in near(number)]) for number in range(FRAMES)]
        return passes(lambda number: float(np.abs(smoothed[number].get() - around[number].get()).mean()))


def of_cachetools() -> list[float]:
    import cachetools

    shared: Any = cachetools.LRUCache(BUDGET, getsizeof=lambda value: value.nbytes)

    def remember(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        return cachetools.cached(shared, key=lambda number: (name, number))(function)  # type: ignore[no-any-return]

    return plain(remember)


def of_cachey() -> list[float]:
    import cachey

    shared: Any = cachey.Cache(BUDGET)
    return plain(lambda function: shared.memoize(function))  # type: ignore[no-any-return]


def of_joblib() -> list[float]:
    import joblib

    with tempfile.TemporaryDirectory() as folder:
        memory = joblib.Memory(folder, verbose=0)
        scores = plain(memory.cache)
        note_files(folder)
        return scores


def of_diskcache() -> list[float]:
    import diskcache

    with tempfile.TemporaryDirectory() as folder, diskcache.Cache(folder, size_limit=10**11) as store:
        scores = plain(lambda function: store.memoize(name=function.__name__)(function))  # type: ignore[no-any-return]
        note_files(folder)
        return scores


WAYS: dict[str, Callable[[], list[float]]] = {
    "nothing remembered": lambda: plain(lambda function: function),
    "`functools.cache`: everything kept": lambda: plain(cache),
    "`functools.lru_cache`, entries for the budget": lambda: plain(lru_cache(maxsize=BUDGET // BYTES // 3)),
    "`cachetools.LRUCache`, bytes": of_cachetools,
    "`cachey`, bytes": of_cachey,
    "`joblib.Memory`: everything in files": of_joblib,
    "`diskcache`: everything in files": of_diskcache,
    "`rc.ap`, all values made first": all_first,
    "`rc.memoize`": memoized,
}


def measure(way: str) -> Taken:
    load(0), smooth(load(0))
    counts.clear()
    return taken(lambda: float(np.sum(WAYS[way]())))


def main() -> None:
    options = arguments(__doc__).parse_args()
    machine = facts("cachetools", "cachey", "joblib", "diskcache")
    lines = [(way, *one.times, one.written, f"{one.computed:,}") for way, one in all_ways(WAYS, measure).items()]
    table = markdown("way | CPU time | elapsed | memory | on disk | calls computed", lines)
    publish(options.into, "memoize", page("A cache of calls, measured", __doc__, table, machine=machine))


if __name__ == "__main__":
    main()
