"""Many replays at once, on the cores there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from recompute._simulator.replay import baseline
from recompute._simulator.run import Run
from recompute._simulator.simulate import budgets_of, iterate, simulate
from recompute._traces.program import Program
from recompute._workers import workers

if TYPE_CHECKING:
    from concurrent.futures import Future

_WORTH_A_PROCESS: Final = 100_000  # steps: less is done before another Python has started
_A_PLAN: Final = 1_000_000  # steps that are done in the time of a plan, times its effort


@dataclass(frozen=True)
class Job:
    """One replay to be done: of the program with this number, with these arguments of `simulate` or `iterate`."""

    program: int
    options: Mapping[str, Any]
    """The budget among them: {"budget": "512MB", "policy": "lru"}."""
    iterations: int | None = None
    """Rounds of a program that repeats, as by `iterate`; None: one replay, as by `simulate`."""

    @property
    def rounds(self) -> int:
        """How many runs there are, if none of them fails."""
        return 1 if self.iterations is None else self.iterations


def simulate_many(
    programs: Sequence[Program],
    jobs: Sequence[Job],
    *,
    processes: int = 1,
    done: Callable[[int], None] | None = None,
) -> Iterator[Run]:
    """The runs of `jobs`, in order, as they become ready: one of each, or one for each round until one fails.

    `processes`: at most so many jobs at a time; with 1, or little to do, all happens here. More of them are spawned, so
    a script that asks for them needs `if __name__ == "__main__":`. `done` is told how many runs are ready; those that a
    failure has made impossible count, too. What a replay raises is raised here, and the others are given up.
    """
    peaks = [baseline(program) for program in programs]
    count = min(len(jobs), processes, max(1, sum(_work_of(job, programs) for job in jobs) // _WORTH_A_PROCESS))
    ready = 0

    def count_more(runs: int) -> None:
        nonlocal ready
        ready += runs
        if done is not None:
            done(ready)

    if count <= 1:
        for job in jobs:
            left = job.rounds
            for run in _runs(programs, peaks, job):
                left -= 1
                count_more(1)
                yield run
            if left:
                count_more(left)
        return

    def haste(at: int) -> tuple[int, float]:
        job = jobs[at]
        amount = job.options.get("budget"), job.options.get("of_peak")
        return -_work_of(job, programs), budgets_of(peaks[job.program], *amount)[1]

    def counted(job: Job) -> Callable[[Future[list[Run]]], None]:
        return lambda future: None if future.cancelled() else count_more(job.rounds)

    longest_first = sorted(range(len(jobs)), key=haste)
    with workers(count, _start, list(programs), peaks) as pool:
        futures: dict[int, Future[list[Run]]] = {}
        for at in longest_first:
            futures[at] = pool.submit(_work, jobs[at])
            futures[at].add_done_callback(counted(jobs[at]))
        for at in range(len(jobs)):
            yield from futures[at].result()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_here: dict[str, Any] = {}
"""In a worker: the programs and their peaks, sent once."""


def _start(programs: list[Program], peaks: list[dict[str, int]]) -> None:
    _here.update(programs=programs, peaks=peaks)


def _work(job: Job) -> list[Run]:
    return list(_runs(_here["programs"], _here["peaks"], job))


def _runs(programs: Sequence[Program], peaks: Sequence[Mapping[str, int]], job: Job) -> Iterator[Run]:
    program, peak = programs[job.program], peaks[job.program]
    if job.iterations is None:
        return iter([simulate(program, peak=peak, **job.options)])
    return iterate(program, iterations=job.iterations, peak=peak, **job.options)


def _work_of(job: Job, programs: Sequence[Program]) -> int:
    """How much a job has to do, in steps."""
    work = len(programs[job.program].steps) * job.rounds
    if job.rounds > 1 and job.options.get("foresight", True):
        work += int(_A_PLAN * job.options.get("effort", 1.0))
    return work
