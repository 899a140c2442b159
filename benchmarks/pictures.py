"""Makes the pictures of docs/simulator.md: `python benchmarks/pictures.py TRACES_FOLDER`.

`recompute plot` draws them: each recorded program is replayed under policies and planned in advance; nothing here is
timed. The uniform chain is drawn from here, because no trace has it.
"""

from __future__ import annotations

import subprocess
import sys
from math import isqrt
from pathlib import Path
from typing import Final

from _common import ROOT, arguments, say

from recompute import pictures
from recompute._traces.chain import chain
from recompute.events import Event
from recompute.planners import plan
from recompute.simulator import baseline, simulate
from recompute.traces import read

NAMES: Final = ("unet", "resnet32", "transformer", "treelstm")
BUDGETS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS: Final = "16,32,64,128,256,512,1024"
LEGIBLE: Final = 0.3
"""Memory is drawn for this share of the peak at least: below, lines lie on the axis."""


def main() -> None:
    parser = arguments(__doc__, traces=True, into=ROOT / "docs" / "pictures")
    parser.add_argument("--time-limit", metavar="SECONDS", default="20", help="for each plan; default %(default)s")
    options = parser.parse_args()
    into, limit = options.into, ["--time-limit", options.time_limit]
    paths = [options.traces / f"{name}.jsonl" for name in NAMES]
    draw_chain(into)
    plot("chain", into / "chain.png", "--sizes", LENGTHS)
    plot("accesses", into / "accesses.png", *paths)
    for path in paths:
        share = least(path)
        plot("residency", into / f"residency-{path.stem}.png", path, "--budget", share)
        policies = ["--policy", "default,dtr-eq,lru", "--method", "own", *limit]
        plot("memory", into / f"memory-{path.stem}.png", path, "--budget", max(share, LEGIBLE), *policies)
    rounds = ["--iterations", "3", "--effort", str(float(options.time_limit) / 10)]
    plot("overhead", into / "overhead.png", *paths, "--method", "own,chen-sqrt,chen-greedy", *limit, *rounds)


def plot(kind: str, picture: Path, *given: object) -> None:
    """By the command."""
    say(f"{picture}")
    subprocess.run([sys.executable, "-m", "recompute", "plot", kind, *map(str, given), "--output", picture], check=True)


def least(path: Path) -> float:
    """The smallest of the budgets that the default policy survives."""
    program = read(path)
    peak = baseline(program)
    return next(share for share in BUDGETS if simulate(program, of_peak=share, peak=peak).overhead is not None)


def draw_chain(into: Path, n: int = 64) -> None:
    """When the values of the uniform chain were in memory, under the default policy and in the optimal plan."""
    program, budget = chain(n), 2 * isqrt(n)
    events: list[Event] = []
    run = simulate(program, budget, listener=events.append)
    best = plan(program, budget, "revolve")
    for name, how, overhead, drawn in (
        ("residency-chain", "default policy", run.overhead, events),
        ("residency-chain-revolve", "Revolve", best.overhead, pictures.plan_events(program, best)),
    ):
        title = f"chain of {n} steps in {budget} values, {how}, overhead {overhead or 0:.2f}"
        marks = pictures.moments(drawn, program.marks)
        figure = pictures.residency(drawn, title=title, budget=budget, marks=marks, unit="operations")
        pictures.save(figure, into / f"{name}.png")


if __name__ == "__main__":
    main()
