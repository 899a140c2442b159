"""Programs that repeat: what the default policy learns from one round for the next, on recorded training iterations.

The programs are training iterations that the DTR authors recorded, and one of their GAN, unrolled. Overhead is all
compute of a round divided by its compute without eviction. Each round waits for its plan, and planning effort is
counted in steps, so the figures are the same on every machine. With effort 1 it takes a quarter of an hour on two
cores. `--differ` names the traces to replay with rounds that differ.

    python benchmarks/foresight.py TRACES_FOLDER [--effort 1] [--rounds 8] [--only unet,resnet32] [--into docs/results]
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Final

from _common import arguments, facts, page, publish, say, section
from varied import varied

from recompute.simulator import Job, Replay, Run, baseline, simulate_many
from recompute.traces import Program, read

BEST: Final = {
    "unet": {0.8: 1.025, 0.5: 1.096, 0.4: 1.141, 0.3: 1.283},
    "resnet32": {0.8: 1.024, 0.5: 1.090, 0.4: 1.129, 0.3: 1.167, 0.2: 1.210, 0.1: 1.651},
    "transformer": {0.8: 1.013, 0.5: 1.048, 0.4: 1.059, 0.3: 1.074, 0.2: 1.127},
    "treelstm": {0.8: 1.000, 0.5: 1.087, 0.4: 1.136, 0.3: 1.187, 0.2: 1.261, 0.1: 1.325},
    "unroll_gan": {0.8: 1.008, 0.5: 1.035, 0.4: 1.052, 0.3: 1.071, 0.2: 1.095},
}
"""The best overheads that are known, by planning in advance."""

AIM: Final = 0.003
"""How far a round may be above the best."""

VARIED: Final = (0.3, 0.6)
"""Budgets at which rounds differ: one that is tight, and a comfortable one."""

COSTS: Final = 0.1
INSERTED: Final = (0.0, 0.01, 0.05, 0.3)
LEARNT: Final = 2
"""Rounds left out of the mean: the first one is only recorded, and in the second one the plan is new."""

LIMIT: Final = 20.0

SAME: Final = (
    f"The best figures known come from planning in advance. An asterisk marks figures more than {AIM} above them."
)
DIFFERENT: Final = """\
In every round each cost is up to {costs:.0%} higher or lower than recorded. "New operations" is the number of
operations added, as a share of those recorded. Each takes a value that is still referenced, makes one of the same size,
and has the name and cost of some recorded operation; its result is dropped up to eight operations later. The means are
over rounds {first} to {last}, of the same programs with and without foresight. "Worst round" is the largest difference
from the cache without foresight in any of these rounds. Plans had a tenth of the effort."""


@dataclass(frozen=True)
class Varied:
    """Overheads of rounds, each a copy of a program, online and with foresight. None: it did not finish."""

    trace: str
    budget: float
    inserted: float
    online: Sequence[float | None]
    ahead: Sequence[float | None]


def main() -> None:
    parser = arguments(__doc__, traces=True)
    parser.add_argument("--effort", type=float, default=1.0, help="effort of a plan; default 1, about ten seconds")
    parser.add_argument("--rounds", type=int, default=8, help="how many rounds that differ; default %(default)s")
    parser.add_argument("--only", metavar="NAME[,..]", default=",".join(BEST), help="traces; default %(default)s")
    parser.add_argument(
        "--differ", metavar="NAME[,..]", default="unet,resnet32,transformer", help="default %(default)s"
    )
    parser.add_argument("--processes", type=int, default=2, help="how many at a time; default %(default)s")
    options = parser.parse_args()
    if options.rounds <= LEARNT:
        parser.error(f"--rounds must be more than {LEARNT}")
    machine = facts()
    names = options.only.split(",")
    folder, effort, processes = options.traces, options.effort, options.processes
    text = page(
        "Foresight",
        __doc__,
        same_rounds(folder, names, effort, processes),
        different_rounds(folder, options.differ.split(","), effort / 10, options.rounds, processes),
        f"The effort of a plan was {effort:g}; an effort of 1 takes about ten seconds.",
        machine=machine,
    )
    publish(options.into, "foresight", text)


def same_rounds(folder: Path, names: Sequence[str], effort: float, processes: int) -> str:
    """The table of a program repeated as it is."""
    programs = [program_of(folder, name) for name in names]
    jobs = [
        Job(number, {"of_peak": budget, **options}, iterations=3)
        for number, name in enumerate(names)
        for budget in BEST[name]
        for options in ({"foresight": False}, {"effort": effort})
    ]
    runs: list[list[Run]] = []
    whole = 3 * len(jobs)
    for run in simulate_many(
        programs, jobs, processes=processes, done=lambda count: say(f"{count} of {whole} identical rounds")
    ):
        if run.iteration == 1:
            runs.append([])
        runs[-1].append(run)
    rows: list[Sequence[str]] = []
    cases = [(name, budget, best) for name in names for budget, best in BEST[name].items()]
    for (name, budget, best), online, ahead in zip(cases, runs[::2], runs[1::2], strict=True):
        last = ahead[-1].overhead
        second = shown(online[1]) if len(online) > 1 else ""
        against = "" if last is None else f"{last - best:+.4f}{' *' if last - best > AIM else ''}"
        rows.append((name, f"{budget:g}", f"{best:.3f}", shown(online[0]), second, shown(ahead[-1]), against))
    head = "trace | budget | best known | round 1 | round 2 without foresight | round 3 | against best known"
    return section("Identical rounds", SAME, head, rows)


def shown(run: Run) -> str:
    return run.status if run.overhead is None else f"{run.overhead:.4f}"


def different_rounds(folder: Path, names: Sequence[str], effort: float, rounds: int, processes: int) -> str:
    """The table of copies that differ."""
    jobs = [
        (folder, name, budget, inserted, effort, rounds) for name in names for budget in VARIED for inserted in INSERTED
    ]
    rows: list[Sequence[str]] = []
    with ProcessPoolExecutor(processes) as pool:
        for found in pool.map(vary, *zip(*jobs, strict=True)):
            say(f"{len(rows) + 1} of {len(jobs)} programs whose rounds differ")
            pairs = list(zip(found.online, found.ahead, strict=True))[LEARNT:]
            worst = max([after - before for before, after in pairs if before and after], default=0.0)
            start = (found.trace, f"{found.budget:g}", f"{found.inserted:.0%}")
            rows.append((*start, averaged(found.online), averaged(found.ahead), f"{worst:+.3f}"))
    head = "trace | budget | new operations | without foresight | with foresight | worst round"
    told = DIFFERENT.format(costs=COSTS, first=LEARNT + 1, last=rounds)
    return section("Rounds that differ", told, head, rows)


def vary(folder: Path, name: str, budget: float, inserted: float, effort: float, rounds: int) -> Varied:
    """The rounds of one program, each a copy with a seed of its own."""
    program = program_of(folder, name)
    copies = [varied(program, seed, costs=COSTS, inserted=inserted) for seed in range(rounds)]
    bytes_of = {device: int(budget * peak) for device, peak in baseline(program).items()}
    both: list[list[float | None]] = []
    for of_plan in (None, effort):
        replay = Replay(program, bytes_of, policy="default", limit=LIMIT, effort=of_plan)
        both.append([overhead_of(replay, copy) for copy in copies])
    return Varied(name, budget, inserted, *both)


def overhead_of(replay: Replay, program: Program) -> float | None:
    """One more round."""
    before = replay.cache.stats()
    status = replay.again(program=program)
    after = replay.cache.stats()
    again = after.remat_time - before.remat_time
    return 1.0 + again / program.model_time if status == "ok" else None


def averaged(overheads: Sequence[float | None]) -> str:
    """The mean of the later rounds that came to their end, and how many did not."""
    later = overheads[LEARNT:]
    ended = [run for run in later if run is not None]
    failed = f" ({len(later) - len(ended)} failed)" if len(ended) < len(later) else ""
    return f"{mean(ended):.4f}{failed}" if ended else "failed"


@cache
def program_of(folder: Path, name: str) -> Program:
    return read(str(folder / f"{name}.jsonl"))


if __name__ == "__main__":
    main()
