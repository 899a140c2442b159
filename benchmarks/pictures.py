"""Makes the pictures of the documentation: `python benchmarks/pictures.py TRACES_DIR docs/pictures`.

Each recorded program in the folder is replayed under policies and planned in advance; nothing here is timed. A picture
is written as PNG, and as SVG, too, where that is small.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

from recompute import pictures
from recompute._cli.arguments import COMPARED
from recompute._cli.plot import chain_points
from recompute._cli.points import floors, plan_all, points, replay_all
from recompute._engine.events import Event
from recompute._traces.chain import chain
from recompute.planners import plan
from recompute.simulator import Run, baseline, simulate
from recompute.traces import Program, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES: Final = ("unet", "resnet32", "transformer", "treelstm")
BUDGETS: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
PLANNERS: Final = ("own", "chen-sqrt", "chen-greedy")
LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1024)
LARGEST: Final = 80_000  # bytes of an SVG that is kept
LEGIBLE: Final = 0.3
LEAST: Final = 0.001  # of the peak: smaller values are no rows of the residency charts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", metavar="TRACES_DIR", type=Path, help="recorded programs, .jsonl or .jsonl.gz")
    parser.add_argument("into", metavar="FOLDER", type=Path, help="where the pictures go")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, default=20.0, help="for each plan; %(default)s")
    options = parser.parse_args()
    if not options.traces.is_dir():
        parser.error(f"there is no directory {options.traces}")
    paths = sorted([*options.traces.glob("*.jsonl"), *options.traces.glob("*.jsonl.gz")], key=_place)
    if not paths:
        parser.error(f"there are no traces in {options.traces}")
    options.into.mkdir(parents=True, exist_ok=True)
    draw_all([read(path) for path in paths], options.into, options.time_limit)


def draw_all(programs: Sequence[Program], into: Path, time_limit: float) -> None:
    """Every picture."""
    names = COMPARED.split(",")
    keep("chain", pictures.chain_cost(chain_points(LENGTHS, names)), into)
    draw_chain(into)
    runs = replay_all(programs, names, BUDGETS)
    keep("accesses", pictures.accesses(runs), into)
    for program in programs:
        draw_program(program, runs, into, time_limit)
    plans = plan_all(programs, [PLANNERS] * len(programs), BUDGETS, time_limit=time_limit)
    rounds = replay_all(programs, ["default"], BUDGETS, iterations=3, effort=time_limit / 10)
    runs += [run for run in rounds if run.iteration > 1]
    keep("overhead", pictures.overhead(points(runs, plans), floors=floors(programs)), into)


def draw_chain(into: Path, n: int = 64) -> None:
    """When the values of the uniform chain were in memory, under the default policy and in the optimal plan."""
    program, budget = chain(n), 2 * math.isqrt(n)
    events: list[Event] = []
    run = simulate(program, budget, listener=events.append)
    title = f"chain of {n} steps in {budget} values, default policy, overhead {run.overhead or 0:.2f}"
    draw_residency("residency-chain", program, events, budget, title, into, unit="operations")
    best = plan(program, budget, "revolve")
    title = f"chain of {n} steps in {budget} values, Revolve, overhead {best.overhead:.2f}"
    draw_residency(
        "residency-chain-revolve", program, pictures.plan_events(program, best), budget, title, into, unit="operations"
    )


def draw_program(program: Program, runs: Sequence[Run], into: Path, time_limit: float) -> None:
    """Residency and memory of one program under the least budget that the default policy survives.

    Memory is drawn for `LEGIBLE` of the peak at least: below, lines lie on the axis.
    """
    survived = [
        run.budget_ratio
        for run in runs
        if (run.trace, run.policy) == (program.name, "default") and run.overhead is not None
    ]
    if not survived:
        print(f"{program.name}: the default policy survives no budget")
        return
    name, share, peak = stem(program), min(survived), baseline(program)
    events: list[Event] = []
    run = simulate(program, of_peak=share, listener=events.append, peak=peak)
    title = f"{name} in {share:.0%} of its memory, default policy, {told(run)}"
    draw_residency(f"residency-{name}", program, events, run.budget_bytes, title, into, program.unit)

    share = max(share, LEGIBLE)
    tracks: dict[str, list[Event]] = {}
    for policy in ("default", "dtr-eq", "lru"):
        events = []
        run = simulate(program, of_peak=share, policy=policy, listener=events.append, peak=peak)
        tracks[f"{policy} ({told(run)})"] = events
    (best,) = plan_all([program], [["own"]], [share], time_limit=time_limit)
    if best.plan is not None:
        tracks[f"own (overhead {best.overhead:.2f})"] = pictures.plan_events(program, best.plan)
    whole: list[Event] = []
    simulate(program, 1 << 62, policy="none", listener=whole.append, peak=peak)
    figure = pictures.memory(
        tracks,
        budget=run.budget_bytes,
        whole=whole,
        title=f"{name} in {share:.0%} of its memory",
        marks={track: pictures.moments(events, program.marks) for track, events in tracks.items()},
        unit=program.unit,
    )
    keep(f"memory-{name}", figure, into)


def told(run: Run) -> str:
    return run.status if run.overhead is None else f"overhead {run.overhead:.2f}"


def draw_residency(
    name: str, program: Program, events: list[Event], budget: int, title: str, into: Path, unit: float | str
) -> None:
    marks = pictures.moments(events, program.marks)
    least = 0.0 if isinstance(unit, str) else LEAST  # all values of the chain are alike
    keep(name, pictures.residency(events, title=title, budget=budget, least=least, marks=marks, unit=unit), into)


def keep(name: str, figure: Figure, into: Path) -> None:
    """Write a picture, and say how large it is."""
    png, svg = pictures.save(figure, into / f"{name}.png"), pictures.save(figure, into / f"{name}.svg")
    sizes = f"{png.stat().st_size / 1000:.0f} kB"
    if svg.stat().st_size > LARGEST:
        svg.unlink()
    else:
        sizes += f", as SVG {svg.stat().st_size / 1000:.0f} kB"
    print(f"{perf_counter() - START:6.1f} s  {name}: {sizes}", flush=True)


def stem(program: Program) -> str:
    """The name of the trace without its endings."""
    return program.name.partition(".")[0]


def _place(path: Path) -> tuple[int, str]:
    """The traces of the paper first, in its order."""
    name = path.name.partition(".")[0]
    return (NAMES.index(name) if name in NAMES else len(NAMES), name)


START: Final = perf_counter()

if __name__ == "__main__":
    main()
