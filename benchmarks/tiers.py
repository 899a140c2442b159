"""Recomputing evicted values, moving them to a slower tier, or doing whichever is cheaper.

The simulated figures are the same on every machine. Those of the disk are wall time, the least of several runs, and
depend on the machine. It takes about three minutes on two cores.

    python benchmarks/tiers.py TRACES_FOLDER [--only simulated|disk] [--into docs/results]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from _common import arguments, facts, page, publish, say, section
from _ways import fastest

import recompute as rc
from recompute.planners import PlanError, plan, smallest, verify
from recompute.simulator import Run, baseline, simulate
from recompute.traces import Program, read

POINTS: Final = (
    *(("unet", 0.3), ("resnet32", 0.3), ("resnet32", 0.1), ("transformer", 0.3), ("transformer", 0.1)),
    ("treelstm", 0.1),
)
TIERS: Final = ("12GB/s", "50GB/s", "12GB/s,overlap", "50GB/s,overlap")
KNOWN: Final = {
    ("unet", 0.3): (1.44, 1.34, 1.20, 1.02),
    ("resnet32", 0.3): (1.18, 1.18, 1.15, 1.06),
    ("resnet32", 0.1): (None, 1.60, 2.03, 1.10),
    ("transformer", 0.3): (1.11, 1.11, 1.08, 1.04),
    ("transformer", 0.1): (1.66, 1.38, 1.27, 1.08),
    ("treelstm", 0.1): (1.17, 1.04, 1.00, 1.00),
}
"""What a prototype reached with both."""

LEAST: Final = {"unet": 0.24, "resnet32": 0.08, "transformer": 0.07, "treelstm": 0.02}
"""The smallest budgets known with moving only, where sources move."""

LEAST_TIER: Final = "25GB/s"
LIMIT: Final = 20.0


EFFORT: Final = 0.3

# Simulated


BLOCKING: Final = """\
Overheads on training iterations that the DTR authors recorded. Each cell: recomputing only / moving only (the least
recently used first) / both (what a prototype reached with both). An asterisk marks figures more than 0.005 above the
prototype, or more than 1 % above the better of the first two. "Blocks" means that a transfer stops the compute.
"Overlaps" means that transfers share one link and run next to the compute, which gives a lower bound. Sources move,
too."""


def simulated(folder: Path) -> Iterator[str]:
    programs = {name: read(folder / f"{name}.jsonl") for name in dict.fromkeys(name for name, _ in POINTS)}
    peaks = {name: baseline(program) for name, program in programs.items()}

    def replay(name: str, budget: float, **options: Any) -> Run:
        return simulate(programs[name], of_peak=budget, peak=peaks[name], limit=LIMIT, **options)

    lines = []
    for name, budget in POINTS:
        alone = replay(name, budget)
        cells = []
        for tier, known in zip(TIERS, KNOWN[name, budget], strict=True):
            moving = replay(name, budget, policy="lru", tier=f"{tier},always")
            both = replay(name, budget, tier=tier)
            cells.append(f"{_cell(alone)} / {_cell(moving)} / {_judged(alone, moving, both, known)}")
            say(f"{name} {budget} {tier}: {cells[-1]}")
        lines.append((name, str(budget), *cells))
    head = " | budget | blocks, 12 GB/s | blocks, 50 GB/s | overlaps, 12 GB/s | overlaps, 50 GB/s"
    yield section("Simulated", BLOCKING, head, lines)
    lines = []
    for name, program in programs.items():
        kinds: list[dict[str, Any]] = [{}, {"policy": "lru", "tier": f"{LEAST_TIER},always"}, {"tier": LEAST_TIER}]
        found = [_smallest(program, peaks[name], options) for options in kinds]
        say(f"{name}: smallest budgets {found}")
        lines.append((name, *[f"{share:.2f}" for share in (*found, LEAST[name])]))
    what = (
        f"The smallest share of the peak, in steps of 0.01, at which a run finishes with an overhead of at most "
        f"{LIMIT:.0f}. Transfers run at 25 GB/s and stop the compute."
    )
    head = " | recomputing only | moving only | both | known before, moving only"
    yield section("The smallest budget", what, head, lines)


def planned(folder: Path) -> str:
    lines = []
    for name, share in POINTS:
        program = read(folder / f"{name}.jsonl")
        cells = []
        for tier in ({}, {"tier": "12GB/s"}, {"tier": "50GB/s"}):
            try:
                found = plan(program, of_peak=share, effort=EFFORT, **tier)
            except PlanError:
                cells.append("none")
                continue
            verify(program, found)
            cells.append(f"{found.overhead:.2f}" + (f" ({found.fetches:,} fetches)" if tier else ""))
        say(f"{name} {share}, planned: {cells}")
        lines.append((name, str(share), *cells))
    what = (
        f"The overhead of plans (`planners.plan(..., tier=...)`, effort {EFFORT:g}) that fetch evicted results or "
        "recompute them. Sources stay in memory, and transfers stop the compute."
    )
    return section("With the future known", what, " | budget | no tier | 12 GB/s | 50 GB/s", lines)


def _smallest(program: Program, peak: dict[str, int], options: dict[str, Any]) -> float:
    """By bisection, in hundredths."""

    def fits(share: int) -> bool:
        return simulate(program, of_peak=share / 100, peak=peak, limit=LIMIT, **options).status == "ok"

    return smallest(fits, 0, 100) / 100


def _judged(alone: Run, moving: Run, both: Run, known: float | None) -> str:
    better = min((run.overhead for run in (alone, moving) if run.overhead is not None), default=LIMIT)
    missed = both.overhead is None or both.overhead > 1.01 * better
    if known is not None:
        missed = missed or both.overhead is None or both.overhead > known + 0.005
    return f"{_cell(both)}{'*' * missed} ({'fails' if known is None else f'{known:.2f}'})"


def _cell(run: Run) -> str:
    return run.status if run.overhead is None else f"{run.overhead:.2f}"


# On a disk

FILES: Final = 24
LINES: Final = 40_000
EPOCHS: Final = 3
STEPS: Final = 64
ELEMENTS: Final = 500_000
ROUNDS: Final = 3


def parse(path: Path) -> Any:
    """A file of numbers in text: expensive."""
    return np.array(path.read_text().split(), dtype=float).reshape(LINES, -1)


def features(table: Any, power: int) -> Any:
    """Of the size of the table: cheap."""
    scaled = (table - table.mean(axis=0)) / table.std(axis=0)
    return scaled**power


def fit(paths: list[Path]) -> float:
    """Some passes over features of parsed files."""
    tables = [rc.ap(parse, path) for path in paths]
    parts = [rc.ap(features, table, power) for table in tables for power in (1, 2, 3)]
    weights = np.zeros(8)
    for _ in range(EPOCHS):
        for part in parts:
            x = part.get()
            weights += 1e-6 * x.T @ (1.0 - x @ weights)
    return float(weights.sum())


def step(x: Any) -> Any:
    return np.tanh(np.sin(x) + 0.5 * np.cos(3 * x))


def chain(_: list[Path]) -> float:
    """Forwards through many states, then backwards: each is needed again, the newest first."""
    states = [rc.pure(np.linspace(0.0, 1.0, ELEMENTS))]
    for _step in range(STEPS):
        states.append(rc.ap(step, states[-1]))
    adjoint = np.ones(ELEMENTS)
    for state in reversed(states):
        adjoint *= 1.0 - 0.001 * state.get() ** 2
    return float(adjoint.sum())


def timed(program: Callable[[list[Path]], float], paths: list[Path], **options: Any) -> tuple[float, float, str]:
    """The least seconds of several runs, the result, and the megabytes that were moved."""
    seconds, result, stats = fastest(lambda: program(paths), partial(rc.Cache, **options), ROUNDS)
    written, read = (sum(getattr(tier, name) for tier in stats.tiers) / 1e6 for name in ("written", "read"))
    return seconds, result, f" ({written:.0f}, {read:.0f} MB)" if stats.tiers else ""


def on_disk() -> str:
    lines = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        paths = [Path(folder) / f"{number}.txt" for number in range(FILES)]
        random = np.random.default_rng(0)
        for path in paths:
            np.savetxt(path, random.normal(size=(LINES, 8)), fmt="%.6g")
        for program, budget in ((fit, "48MB"), (chain, "32MB")):
            whole = timed(program, paths)
            again = timed(program, paths, budget=budget)
            for words, bandwidth in (("200 MB/s", "200MB"), ("full speed", None)):
                disk = rc.Disk(folder=folder, bandwidth=bandwidth)
                runs = [again, timed(program, paths, budget=budget, policy="lru", tiers=[replace(disk, always=True)])]
                runs += [
                    timed(program, paths, budget=budget, tiers=[tier]) for tier in (disk, replace(disk, ahead=True))
                ]
                assert {result for _, result, _ in runs} == {whole[1]}
                cells = [f"{seconds / whole[0]:.2f}{moved}" for seconds, _, moved in runs]
                say(f"{program.__name__} {words}: {cells}")
                lines.append((program.__name__, words, *cells))
    what = f"""\
Wall time of a program under a budget, divided by its time without one; the least of {ROUNDS} runs. `fit` parses files
and makes several passes over features of them; `chain` goes through many states and back. "Both" moves what is
expensive to compute; "ahead" does so in a thread, before the room is needed. In parentheses: megabytes written and
read."""
    return section("On a disk", what, " | disk | recomputing only | moving only | both | both, ahead", lines)


def main() -> None:
    parser = arguments(__doc__, traces=True)
    parser.add_argument("--only", choices=("simulated", "disk"), help="print only these, and write nothing")
    options = parser.parse_args()
    machine = facts()
    parts: list[str] = []
    if options.only != "disk":
        parts += [*simulated(options.traces), planned(options.traces)]
    if options.only != "simulated":
        parts.append(on_disk())
    text = page("Tiers", __doc__, *parts, machine=machine)
    publish(None if options.only else options.into, "tiers", text)


if __name__ == "__main__":
    main()
