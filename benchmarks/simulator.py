"""Evidence on recorded training iterations: the published figures, the default policy, the time that a replay takes.

Overheads by budget, as a share of the peak, on four training iterations that the DTR authors recorded. The published
policies run as in their authors' simulator, the default as in the library. `oom`: something did not fit; `thrash`: the
overhead is above 2. Times are those of one process, one replay after the other; ratios between policies come from one
run. The figures of the published simulator are in tests/simulator/published_figures.py.

    python benchmarks/simulator.py TRACES_FOLDER [--into docs/results]
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any, Final

from _common import ROOT, arguments, facts, page, publish, say, section

sys.path.insert(0, str(ROOT / "tests" / "simulator"))
from published_figures import BUDGETS, FIGURES  # where the tests that use them are, too

from recompute.simulator import Run, baseline, simulate
from recompute.traces import Program, read

TRACES: Final = ("unet", "resnet32", "transformer", "treelstm")
POLICIES: Final = ("default", "dtr-eq", "dtr", "dtr-local", "msps", "lru", "size")

AUTHORS: Final = {"unet": 0.1, "treelstm": 8.0}
"""Seconds that the authors' simulator takes for its slowest run with dtr-eq, on this class of machine."""


def main() -> None:
    options = arguments(__doc__, traces=True).parse_args()
    machine = facts()
    parts: list[str] = []
    everything: list[dict[str, Any]] = []
    speeds: list[tuple[str, ...]] = []
    for name in TRACES:
        start = perf_counter()
        program = read(options.traces / f"{name}.jsonl")
        parsed = perf_counter() - start
        peak = baseline(program)
        runs = {
            policy: [simulate(program, of_peak=budget, policy=policy, peak=peak) for budget in BUDGETS]
            for policy in POLICIES
        }
        everything += [{**run.as_dict(), "trace": name} for group in runs.values() for run in group]
        parts.append(_overheads(name, program, runs))
        for policy, group in runs.items():
            slowest = max(group, key=lambda run: run.seconds)
            known = AUTHORS.get(name) if policy == "dtr-eq" else None
            total = sum(run.seconds for run in group)
            at = f"{slowest.budget_ratio:.1f} ({slowest.status})"
            faster = f"{known / slowest.seconds:.0f} times faster than {known} s" if known else ""
            speeds.append((name, policy, f"{total:.2f}", f"{slowest.seconds:.2f}", at, faster))
        say(f"{name}: read in {parsed:.2f} s")
    head = "trace | policy | all nine budgets, s | slowest, s | slowest budget | compared with the authors' simulator"
    parts.append(section("How long a replay takes", "", head, speeds))
    text = page("Recorded programs, replayed", __doc__, *parts, machine=machine)
    publish(options.into, "simulator", text, {"machine": machine, "runs": everything})


def _overheads(name: str, program: Program, runs: dict[str, list[Run]]) -> str:
    rows = []
    for policy, group in runs.items():
        figures = FIGURES.get((name, policy))
        off = "" if figures is None else f"{_difference(figures, group):.4f}"
        rows.append((policy, *[f"{run.overhead:.3f}" if run.overhead else run.status for run in group], off))
    peak = runs["default"][0].baseline_peak_bytes
    what = f"{len(program.calls):,} operations, {len(program.sizes):,} storages, a peak of {peak:,} bytes."
    head = ("policy", *[f"{budget:.1f}" for budget in BUDGETS], "largest difference from published")
    return section(name, what, head, rows)


def _difference(figures: list[float | None], group: list[Run]) -> float:
    """The largest; infinite if another budget fails."""
    same = all((figure is None) == (run.overhead is None) for figure, run in zip(figures, group, strict=True))
    both = [abs(figure - run.overhead) for figure, run in zip(figures, group, strict=True) if figure and run.overhead]
    return max(both, default=0.0) if same else float("inf")


if __name__ == "__main__":
    main()
