"""Programs that repeat, live: how much of a round is recomputed without foresight, with it, and by its plan.

    python benchmarks/foresight_live.py [--rounds 24] [--only NAME[,..]] [--into docs/results]

writes foresight_live.md: a transformer and a ResNet in `recompute_torch.budget`, the training of docs/training.md on
NumPy, and the posteriors of a hidden Markov model (docs/island.md), whose cost is counted in letters. One thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from _common import facts, say

import recompute as rc
import recompute_torch as rt

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "examples"))

from _torch_training import Task, resnet, transformer  # noqa: E402  # after the path
from _training_network import load  # noqa: E402
from _training_steps import Settings, train  # noqa: E402
from island import Chain, cut, posteriors  # noqa: E402
from recompute_demos.letters import random_model  # noqa: E402

LAST: Final = 6
"""Rounds at the end that are compared with the plan."""

Rounds = Callable[[int | None, bool, int], list[rc.Stats]]
"""The statistics after each round, of (budget, foresight, number of rounds)."""


@dataclass(frozen=True)
class Found:
    """One program at one budget."""

    name: str
    budget: str
    online: float
    ahead: float
    planned: float
    state: str


def torch_rounds(make: Callable[[], Task]) -> Rounds:
    def run(budget: int | None, foresight: bool, rounds: int) -> list[rc.Stats]:
        torch.manual_seed(0)
        task, found = make(), []
        with rt.budget(budget, foresight=foresight, native=False) as block:
            for _ in range(rounds):
                task.step()
                found.append(block.stats())
        return found

    return run


def numpy_rounds(budget: int | None, foresight: bool, rounds: int) -> list[rc.Stats]:
    settings = Settings(depth=16, batch=64, steps=rounds)
    cache = rc.Cache(budget, clock=process_time, foresight=foresight)
    found: list[rc.Stats] = []
    train(load()[0], settings, cache, told=lambda *_: found.append(cache.stats()))
    return found


def letters_rounds(budget: int | None, foresight: bool, rounds: int) -> list[rc.Stats]:
    letters = np.random.default_rng(0).integers(0, 27, 400)
    chain = Chain(random_model())
    cache = rc.Cache(budget, clock=chain.clock, foresight=foresight)
    found: list[rc.Stats] = []
    with cache:
        for _ in range(10 * rounds):  # they are short, and planning takes as long as ever
            with cache.iteration():
                for _ in posteriors(chain, cut(letters, 1)):
                    pass
            found.append(cache.stats())
    return found


PROGRAMS: Final[dict[str, tuple[Rounds, tuple[float, ...]]]] = {
    "transformer 6 x 384": (torch_rounds(lambda: transformer(8, 6, 384, 6, 64)), (0.3,)),
    "ResNet": (torch_rounds(lambda: resnet(8, 8, 12, 16)), (0.3,)),
    "NumPy training": (numpy_rounds, (0.3,)),
    "hidden Markov model": (letters_rounds, (0.05, 0.03)),
}


def shares(stats: list[rc.Stats]) -> list[float]:
    """Of each round: the seconds of repeated runs, for each second of first ones."""
    found = []
    for before, after in zip([None, *stats[:-1]], stats, strict=True):
        again = after.remat_time - (before.remat_time if before else 0.0)
        model = after.model_time - (before.model_time if before else 0.0)
        found.append(again / model if model else 0.0)
    return found


def measure(name: str, rounds: int) -> Iterator[Found]:
    """Each budget: a share of what a run without one has beyond its sources."""
    run, budgets = PROGRAMS[name]
    free = run(None, False, 2)[-1]
    fixed = sum(pool.sources for pool in free.pools)
    for share in budgets:
        say(f"{name}, {share:.0%}")
        budget = fixed + int(share * (free.peak - fixed))
        online = median(shares(run(budget, False, rounds))[-LAST:])
        stats = run(budget, True, rounds)
        state = stats[-1].foresight
        planned = float(state.rpartition(" ")[2]) - 1 if state.startswith("following") else float("nan")
        yield Found(name, f"{share:.0%}", online, median(shares(stats)[-LAST:]), planned, state)


HEAD: Final = f"""# Foresight, live

Programs that repeat, by `python benchmarks/foresight_live.py`: seconds of repeated runs for each second of first runs,
the median of the last {LAST} rounds. Marks: PyTorch's by the optimizer, the hidden Markov model's by
`cache.iteration()`; the rounds of the training on NumPy are found. Plans are made in the background meanwhile. A budget
is what is always there (parameters and what the optimizer remembers), and a share of what a run without a budget has
beyond that.

| program | budget | without foresight | with it | its plan says | measured / plan |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.ThrashWarning)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="of each program; default %(default)s")
    parser.add_argument("--only", metavar="NAME[,..]", default=",".join(PROGRAMS), help="programs; default all")
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=ROOT / "docs" / "results", help="of the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts()
    lines = [HEAD]
    with quiet():
        for name in options.only.split(","):
            for found in measure(name, options.rounds):
                ratio = found.ahead / found.planned if found.planned else float("nan")
                figures = [f"{value:.3f}" for value in (found.online, found.ahead, found.planned)]
                lines.append(f"| {found.name} | {found.budget} | {' | '.join(figures)} | {ratio:.2f} |\n")
    lines += ["\n## Machine\n\n", *[f"* {key}: {value}\n" for key, value in machine.items()]]
    (options.into / "foresight_live.md").write_text("".join(lines), encoding="utf-8")
    print("".join(lines))


if __name__ == "__main__":
    main()
