"""Plans on recorded training iterations: what is possible if the future is known, compared with earlier figures.

Overheads of schedules that were planned in advance, for four training iterations that the DTR authors recorded. `own`
is the library's planner, which searches until the time limit, one plan per core; the other two are Chen's. They are
compared with the best figures known before, and with the default policy, which knows only the past. An empty cell means
that the method has no plan for that budget, or that no figure is known. Every plan is checked by the verifier.

    python benchmarks/plans.py TRACES_FOLDER [--time-limit 15] [--into docs/results]
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Final

from _common import arguments, facts, markdown, page, publish

from recompute.planners import PlanError, plan, verify
from recompute.simulator import simulate
from recompute.traces import read

BUDGETS: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
TRACES: Final = ("unet", "resnet32", "transformer", "treelstm")
METHODS: Final = ("own", "chen-greedy", "chen-sqrt")

BEFORE: Final = {
    "unet": {0.5: 1.101, 0.4: 1.141, 0.3: 1.349},
    "resnet32": {0.5: 1.093, 0.3: 1.169, 0.2: 1.218, 0.1: 1.764},
    "transformer": {0.5: 1.049, 0.3: 1.080, 0.2: 1.135, 0.15: 1.200},
}
"""The best figures known before: some fifty policies that know the next use, and local search over their weights."""


def main() -> None:
    parser = arguments(__doc__, traces=True)
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds for each plan of the library's planner")
    options = parser.parse_args()
    machine = facts()
    jobs = [
        (str(options.traces / f"{name}.jsonl"), budget, method, options.time_limit)
        for name in TRACES
        for method in (*METHODS, "default")
        for budget in BUDGETS
    ]
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(_overhead, jobs), strict=True))
    parts: list[str] = []
    for name in TRACES:
        path = str(options.traces / f"{name}.jsonl")
        rows = [(method, [found[path, budget, method, options.time_limit] for budget in BUDGETS]) for method in METHODS]
        rows.append(("known before", [BEFORE.get(name, {}).get(budget) for budget in BUDGETS]))
        rows.append(("default policy", [found[path, budget, "default", options.time_limit] for budget in BUDGETS]))
        lines = [(label, *(f"{cell:.4f}" if cell else "" for cell in row)) for label, row in rows]
        parts += [f"## {name}", markdown(("method", *map(str, BUDGETS)), lines)]
    parts.append(f"The library's planner had {options.time_limit:g} seconds on one core for each plan.")
    publish(options.into, "plans", page("Plans", __doc__, *parts, machine=machine))


def _overhead(job: tuple[str, float, str, float]) -> float | None:
    path, budget, method, time_limit = job
    program = read(path)
    if method == "default":
        return simulate(program, of_peak=budget).overhead
    try:
        found = plan(program, of_peak=budget, method=method, **({"time_limit": time_limit} if method == "own" else {}))
    except PlanError:
        return None
    return verify(program, found)[1]


if __name__ == "__main__":
    main()
