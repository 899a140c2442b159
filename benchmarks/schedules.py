"""Adjoint schedules: forward steps executed, compared with the optimum and the schedules of checkpoint_schedules.

A snapshot is the restart data of one step. The adjoint dependencies of a step are as large as a snapshot, or are never
stored ("restart data only"). Steps and modelled seconds are counted, the same on every machine. It takes about four
minutes.

    python benchmarks/schedules.py [--into docs/results] [--quick]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from _common import arguments, facts, markdown, page, publish, say, section
from checkpoint_schedules import (
    EndReverse,
    Forward,
    HRevolve,
    MixedCheckpointSchedule,
    Move,
    MultistageCheckpointSchedule,
    Reverse,
    StorageType,
    TwoLevelCheckpointSchedule,
)

from recompute_schedules import Schedule

LARGE: Final = 10**9
KNOWN: Final = {"mixed": (6.85, 3.92, 2.82, 2.13, 1.95, 1.93), "revolve": (7.28, 4.62, 3.74, 3.09, 2.94, None)}


def follow(schedule: Any, steps: int, seconds: Any = None) -> tuple[float, int, int, float]:
    """Seconds of all forward steps (one each, unless given), most stored in RAM and on the disk; transfers of the disk.

    Transfers are numbers of writes plus reads.
    """
    until = np.concatenate([[0.0], np.cumsum(np.ones(steps) if seconds is None else seconds)])
    total = 0.0
    stored = {StorageType.RAM: 0, StorageType.DISK: 0}
    most = dict(stored)
    transfers = 0
    for action in schedule:
        if isinstance(action, Forward):
            stop = min(action.n1, steps)
            total += until[stop] - until[action.n0]
            if action.storage in stored and (action.write_ics or action.write_adj_deps):
                stored[action.storage] += 1
                most[action.storage] = max(most[action.storage], stored[action.storage])
                transfers += action.storage is StorageType.DISK
            if action.n1 >= steps and schedule.max_n is None:
                schedule.finalize(steps)
        elif hasattr(action, "from_storage"):
            transfers += action.from_storage is StorageType.DISK and action.to_storage is StorageType.WORK
            if isinstance(action, Move):
                stored[action.from_storage] -= 1
                if action.to_storage in stored:
                    stored[action.to_storage] += 1
        elif isinstance(action, EndReverse):
            break
    return float(total), most[StorageType.RAM], most[StorageType.DISK], transfers


def steps_of(steps: int, slots: int, deps: int, known: bool = True) -> int:
    """Forward steps of our schedule."""
    schedule = Schedule(ram=slots, state_bytes=1, deps_bytes=deps, max_n=steps if known else None)
    return int(follow(schedule, steps)[0])


def known_length() -> Iterator[str]:
    columns = (5, 10, 20, 40, 60, 80)
    steps = {
        "`Schedule`": [steps_of(1000, slots, 1) for slots in columns],
        "`Schedule`, restart data only": [steps_of(1000, slots, LARGE) for slots in columns],
        "`MultistageCheckpointSchedule` (revolve)": [
            follow(MultistageCheckpointSchedule(1000, slots, 0), 1000)[0] for slots in columns
        ],
    }
    rows = [(name, *[f"{count / 1000:.3f}" for count in counts]) for name, counts in steps.items()]
    for name, known in KNOWN.items():
        rows.append((f"earlier figures, {name}", *["" if cell is None else str(cell) for cell in known]))
    what = "Forward steps executed per step, for 1,000 steps, by the number of snapshots."
    yield section("Known length", what, ("", *map(str, columns)), rows)
    lines = []
    for slots in (5, 10, 20, 40):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = follow(MixedCheckpointSchedule(250, slots, storage=StorageType.RAM), 250)[0]
        lines.append((str(slots), str(steps_of(250, slots, 1)), f"{theirs:.0f}"))
    yield "Without Numba, `MixedCheckpointSchedule` is slow, so here are forward steps for only 250 steps:"
    yield markdown(("snapshots", "`Schedule`", "`MixedCheckpointSchedule`"), lines)


def two_tiers() -> str:
    lines = []
    for ram, disk in ((2, 2), (3, 5), (5, 10)):
        say(f"two tiers, {ram} and {disk}")
        ours = Schedule(
            ram=ram, disk=disk, state_bytes=1, deps_bytes=LARGE, max_n=150, step_seconds=1.0, disk_bandwidth=1
        )
        theirs = HRevolve(150, ram, disk, uf=1, ub=1, wd=1, rd=1)
        cells = []
        for schedule in (ours, theirs):
            steps, _, _, transfers = follow(schedule, 150)
            cells.append(f"{steps + transfers:.0f} ({transfers})")
        lines.append((f"{ram}, {disk}", *cells))
    what = (
        "150 steps, restart data only. Total cost in forward steps; a write or a read costs as much as one step. In "
        "parentheses: the number of writes and reads."
    )
    return section("RAM and a disk", what, "in RAM, on disk | `Schedule` | `HRevolve`", lines)


def wang(steps: int, slots: int) -> float:
    """Forward steps of the dynamic rule of Wang, Moin and Iaccarino (2009), each stretch then reversed at best."""
    states = [(0, 10**9)]  # step, level
    for now in range(1, steps):
        if len(states) < slots:
            states.append((now, 0))
            continue
        higher = -1
        for number in range(slots - 1, 0, -1):
            if states[number][1] < higher:
                del states[number]
                states.append((now, 0))
                break
            higher = max(higher, states[number][1])
        else:
            level = states.pop()[1]
            states.append((now, level + 1))
    edges = [step for step, _ in states] + [steps]
    return steps + sum(
        steps_of(edges[number + 1] - edges[number], slots - number, LARGE) for number in range(len(states))
    )


def unknown_length(quick: bool) -> Iterator[str]:
    lengths = (10, 14, 30, 100, 300, 1000, 10_000, *(() if quick else (100_000,)))
    lines = []
    for slots in (5, 10, 20, 40, 80):
        cells = []
        for length in lengths:
            if length > 10_000 and slots not in (5, 80):
                cells.append("")
                continue
            start = perf_counter()
            ratios = [steps_of(length, slots, d, False) / steps_of(length, slots, d) for d in (1, LARGE)]
            cells.append(f"{ratios[0]:.3f} / {ratios[1]:.3f}")
            say(f"unknown length, {slots}, {length}: {cells[-1]} in {perf_counter() - start:.1f} s")
        lines.append((str(slots), *cells))
    what = (
        "Forward steps of the online schedule divided by those of the optimal schedule for the known length: with "
        "dependencies / with restart data only."
    )
    yield section("Unknown length", what, ("snapshots", *[f"{length:,}" for length in lengths]), lines)
    worst = []
    for slots in range(5, 21):
        ratios = {n: steps_of(n, slots, 1, False) / steps_of(n, slots, 1) for n in range(10, 41)}
        worst += [(ratio, slots, n) for n, ratio in ratios.items()]
    over = sorted(((slots, n, f"{ratio:.3f}") for ratio, slots, n in worst if ratio > 1.15))
    yield (
        f"For all lengths from 10 to 40 with 5 to 20 snapshots, the worst ratio is {max(worst)[0]:.3f}. Above 1.15 "
        f"are (snapshots, length, ratio): {', '.join(map(str, over))}. There the optimal schedule "
        "stores the dependencies of every step but the last, because it knows which step that is. An online schedule "
        "does not, so it needs restart data, and room for them."
    )
    lines = []
    for slots, length in ((5, 300), (10, 300), (20, 300), (10, 1000)):
        best = steps_of(length, slots, LARGE)
        two = TwoLevelCheckpointSchedule(max(2, length // slots), slots, binomial_storage=StorageType.RAM)
        steps, in_ram, on_disk, _ = follow(two, length)
        online = f"{steps_of(length, slots, LARGE, False) / best:.3f}"
        theirs = f"{steps / best:.3f} ({in_ram} + {on_disk})"
        lines.append((f"{slots}, {length}", online, f"{wang(length, slots) / best:.3f}", theirs))
    yield (
        "Other online schedules, restart data only, relative to the same optimum. In parentheses: the snapshots that "
        "they need in RAM + on disk."
    )
    rule = "rule of Wang, Moin and Iaccarino, as implemented in the benchmark"
    yield markdown(f"snapshots, steps | `Schedule` | {rule} | `TwoLevelCheckpointSchedule`", lines)


def unequal() -> str:
    steps = 400
    kinds = [np.ones(steps), np.linspace(1, 10, steps), np.where(np.arange(steps) % 50 < 10, 10.0, 1.0)]
    lines = []
    for slots in (5, 10, 20):
        cells = []
        for kind in kinds:
            seconds = (kind / kind.mean()).tolist()
            revolve = follow(MultistageCheckpointSchedule(steps, slots, 0), steps, seconds)[0]
            schedule = Schedule(ram=slots, state_bytes=1, deps_bytes=LARGE, max_n=steps, step_seconds=seconds)
            ours = follow(schedule, steps, seconds)[0]
            cells.append(f"{ours:.0f} / {revolve:.0f} = {ours / revolve:.3f}")
        say(f"unequal, {slots}: {cells}")
        lines.append((str(slots), *cells))
    what = (
        "Modelled seconds of all forward steps: `Schedule`, planned with the costs of the steps / revolve = ratio. 400 "
        "steps with a mean cost of 1 second, restart data only."
    )
    head = "snapshots | constant | ramp, 1 to 10 | bursts of 10 steps, 10 times as long"
    return section("Steps of unequal cost", what, head, lines)


def draw(path: Path) -> None:
    """A schedule of 60 steps: the forward and the adjoint over time, and what is in RAM and on the disk meanwhile."""
    from matplotlib.figure import Figure

    schedule = Schedule(ram=3, disk=4, state_bytes=1, deps_bytes=LARGE, max_n=60, step_seconds=1.0, disk_bandwidth=1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="forward steps executed", ylabel="step")
    colours = {StorageType.RAM: "#E69F00", StorageType.DISK: "#56B4E9"}
    since: dict[tuple[int, StorageType], int] = {}
    time = at = 0

    def bar(step: int, where: StorageType) -> None:
        axes.plot([since.pop((step, where)), time], [step, step], color=colours[where], linewidth=2.5, zorder=1)

    for action in schedule:
        if isinstance(action, Forward):
            if action.write_ics:
                since[action.n0, action.storage] = time
            axes.plot([time, time + len(action)], [action.n0, action.n1], color="black", linewidth=0.8, zorder=2)
            time += len(action)
            at = action.n1
        elif isinstance(action, Reverse):
            axes.plot([time], [at - 0.5], ".", color="#D55E00", markersize=4, zorder=3)
        elif isinstance(action, Move):
            bar(action.n, action.from_storage)
    for name, style in (
        ("forward", {"color": "black"}),
        ("adjoint", {"color": "#D55E00", "marker": ".", "linestyle": ""}),
        ("checkpoint in RAM", {"color": colours[StorageType.RAM]}),
        ("checkpoint on the disk", {"color": colours[StorageType.DISK]}),
    ):
        axes.plot([], [], label=name, **style)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = arguments(__doc__, quick=True)
    parser.add_argument("--picture", type=Path, help="draw a schedule into this file, and measure nothing")
    options = parser.parse_args()
    if options.picture:
        draw(options.picture)
        return
    machine = facts()
    parts = (*known_length(), two_tiers(), unequal(), *unknown_length(options.quick))
    publish(options.into, "schedules", page("Adjoint schedules", __doc__, *parts, machine=machine))


if __name__ == "__main__":
    main()
