"""Two problems that a newcomer may try first, solved with this library and with the usual alternatives.

All solutions of a problem give the same numbers. Memory is the growth of the process's resident memory, temporary
arrays included; each way runs in its own process. A third problem, the frames of a film, is in
[a cache of calls](memoize.md).

`python benchmarks/first_hour.py` writes docs/results/first_hour.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from _common import arguments, facts, page, publish, section
from _ways import Chain, Taken, all_ways, taken

import recompute as rc

BUDGET = 40_000_000

# A hidden Markov model: posteriors of many sequences, read backwards through all forward messages

STEPS, SEQUENCES, STATES = 1_500, 200, 100
RANDOM = np.random.default_rng(0)
TRANSITION = RANDOM.dirichlet(np.ones(STATES), STATES)
EMISSION = RANDOM.dirichlet(np.ones(20), STATES)
SEEN = RANDOM.integers(20, size=(STEPS, SEQUENCES))
START = np.full((SEQUENCES, STATES), 1 / STATES)


def forward(message: Any, step: int) -> Any:
    following = (message @ TRANSITION) * EMISSION[:, SEEN[step]].T
    return following / following.sum(1, keepdims=True)


def posteriors(get: Callable[[int], Any]) -> float:
    """Read the messages from the last one to the first, and join them with those of the backward pass."""
    back, total = np.ones((SEQUENCES, STATES)), np.zeros(STATES)
    for step in reversed(range(STEPS)):
        joint = get(step) * back
        total += (joint / joint.sum(1, keepdims=True)).sum(0)
        back = (back * EMISSION[:, SEEN[step]].T) @ TRANSITION.T
        back /= back.sum(1, keepdims=True)
    return float(total @ np.arange(STATES))


MESSAGES = Chain(START, STEPS, forward, posteriors)
EVERY = 40


# A sweep of settings: three stages; the outermost loop is over the settings of the last one

SIDE = 1_000


def load(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(SIDE, SIDE))


def smooth(table: Any, width: int) -> Any:
    for _ in range(4 * width):
        table = (table + np.roll(table, 1, 0) + np.roll(table, 1, 1)) / 3
    return table


def scale(table: Any, power: int) -> Any:
    return np.sign(table) * np.abs(table) ** (1 + power / 4)


def score(table: Any, threshold: float) -> float:
    return float((table > threshold).mean())


SETTINGS = [(threshold, power, width) for threshold in (0.0, 0.1, 0.2, 0.3) for power in range(6) for width in range(6)]


def sweep(remember: Callable[[Callable[..., Any]], Callable[..., Any]]) -> float:
    data = remember(load)
    smoothed = remember(lambda width: smooth(data(0), width))
    scaled = remember(lambda width, power: scale(smoothed(width), power))
    return sum(score(scaled(width, power), threshold) for threshold, power, width in SETTINGS)


def sweep_joblib() -> float:
    import joblib

    with tempfile.TemporaryDirectory() as folder:
        memory = joblib.Memory(folder, verbose=0)
        data, smoothed, scaled = memory.cache(load), memory.cache(smooth), memory.cache(scale)
        return sum(score(scaled(smoothed(data(0), width), power), threshold) for threshold, power, width in SETTINGS)


def sweep_recompute() -> float:
    data, smoothed, scaled = rc.memoize(load), rc.memoize(smooth), rc.memoize(scale)
    with rc.Cache(BUDGET):
        return sum(
            score(scaled(smoothed(data(0), width), power).get(), threshold) for threshold, power, width in SETTINGS
        )


PROBLEMS: dict[str, dict[str, Callable[[], float]]] = {
    f"A hidden Markov model: {STEPS:,} messages of {8 * SEQUENCES * STATES // 1000} kB, read backwards": {
        "a list: everything kept": MESSAGES.kept,
        f"every {EVERY}th message kept by hand": lambda: MESSAGES.by_hand(EVERY),
        "`joblib.Memory`, files": MESSAGES.in_files,
        "`rc.ap`, 40 MB": lambda: MESSAGES.cached(BUDGET)[0],
    },
    f"A sweep of {len(SETTINGS)} settings over a table of 8 MB, with 42 intermediate tables": {
        "nothing remembered": lambda: sweep(lambda function: function),
        "`functools.cache`: everything kept": lambda: sweep(cache),
        "`functools.lru_cache`, entries for 40 MB": lambda: sweep(lru_cache(maxsize=2)),
        "`joblib.Memory`, files": sweep_joblib,
        "`rc.memoize`, 40 MB": sweep_recompute,
    },
}


def measure(problem: str, way: str) -> Taken:
    return taken(PROBLEMS[problem][way])


def main() -> None:
    options = arguments(__doc__).parse_args()
    machine = facts("joblib")
    parts = []
    for problem, ways in PROBLEMS.items():
        lines = [(way, *one.times) for way, one in all_ways(ways, partial(measure, problem)).items()]
        parts.append(section(problem, "", "way | CPU time | elapsed | memory", lines))
    publish(options.into, "first_hour", page("The first hour", __doc__, *parts, machine=machine))


if __name__ == "__main__":
    main()
