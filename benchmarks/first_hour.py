"""Two problems that a newcomer may try first, in several ways: a hidden Markov model and a sweep of settings.

Each way runs in its own process, so that the peak of the process's memory is its own, too. The third problem, the
frames of a film, is in `memoize.py`.

    python benchmarks/first_hour.py                   all ways, as docs/results/first_hour.md
    python benchmarks/first_hour.py --way sweep cache one way, as JSON
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from _common import facts

import recompute as rc

PAGE = Path(__file__).parents[1] / "docs" / "results" / "first_hour.md"
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


def hmm_list() -> float:
    messages = [START]
    for step in range(STEPS):
        messages.append(forward(messages[-1], step))
    return posteriors(lambda step: messages.pop())


def hmm_checkpoints() -> float:
    every = 40
    kept, message = {}, START
    for step in range(STEPS):
        if step % every == 0:
            kept[step] = message
        message = forward(message, step)
    segment: dict[int, Any] = {}

    def get(step: int) -> Any:
        if step not in segment:
            first = step - step % every
            message = kept.pop(first)
            for number in range(first, step + 1):
                message = segment[number] = forward(message, number)
        return segment.pop(step)

    return posteriors(get)


def hmm_joblib() -> float:
    import joblib

    with tempfile.TemporaryDirectory() as folder:
        stored = joblib.Memory(folder, verbose=0).cache(forward)
        references, message = [], START
        for step in range(STEPS):
            references.append(stored.call_and_shelve(message, step))
            message = references[-1].get()
        return posteriors(lambda step: references.pop().get())


def hmm_recompute() -> float:
    with rc.Cache(BUDGET):
        messages = [rc.pure(START)]
        for step in range(STEPS):
            messages.append(rc.ap(forward, messages[-1], step))
        return posteriors(lambda step: messages.pop().get())


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


WAYS: dict[str, dict[str, tuple[str, Callable[[], float]]]] = {
    "hmm": {
        "list": ("a list: everything kept", hmm_list),
        "checkpoints": ("every 40th message kept by hand", hmm_checkpoints),
        "joblib": ("`joblib.Memory`, files", hmm_joblib),
        "recompute": ("`rc.ap`, 40 MB", hmm_recompute),
    },
    "sweep": {
        "none": ("nothing remembered", lambda: sweep(lambda function: function)),
        "cache": ("`functools.cache`: everything kept", lambda: sweep(cache)),
        "lru_cache": ("`functools.lru_cache`, entries for 40 MB", lambda: sweep(lru_cache(maxsize=2))),
        "joblib": ("`joblib.Memory`, files", sweep_joblib),
        "recompute": ("`rc.memoize`, 40 MB", sweep_recompute),
    },
}
TITLES = {
    "hmm": f"A hidden Markov model: {STEPS:,} messages of {8 * SEQUENCES * STATES // 1000} kB, read backwards",
    "sweep": f"A sweep of {len(SETTINGS)} settings over a table of 8 MB, with 42 intermediate tables",
}


def measure(problem: str, way: str) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = perf_counter(), process_time()
    result = WAYS[problem][way][1]()
    return {
        "seconds": perf_counter() - start,
        "processor": process_time() - busy,
        "memory": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "result": result,
    }


def page() -> str:
    lines = [
        "# The first hour",
        "",
        "Two problems that a newcomer may try first, solved with this library and with the usual alternatives. All",
        "solutions of a problem give the same numbers. Memory is the growth of the process's resident memory,",
        "temporary arrays included. Measured by `python benchmarks/first_hour.py`. A third problem, the frames of a",
        "film, is in [a cache of calls](memoize.md).",
    ]
    for problem, ways in WAYS.items():
        lines += [
            "",
            f"## {TITLES[problem]}",
            "",
            "| way | CPU time | elapsed | memory |",
            "| --- | ---: | ---: | ---: |",
        ]
        results = set()
        for way, (name, _) in ways.items():
            told = subprocess.run(
                [sys.executable, __file__, "--way", problem, way], stdout=subprocess.PIPE, check=True
            ).stdout
            found = json.loads(told)
            print(problem, way, found, file=sys.stderr)
            results.add(found["result"])
            lines.append(
                f"| {name} | {found['processor']:.1f} s | {found['seconds']:.1f} s | {found['memory'] / 1e6:,.0f} MB |"
            )
        assert len(results) == 1, f"the ways differ: {results}"
    lines += ["", "| | |", "| --- | --- |", *[f"| {name} | {value} |" for name, value in facts().items()]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", nargs=2, metavar=("PROBLEM", "WAY"), help="one way, in this process")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(*options.way)))
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
