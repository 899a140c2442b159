"""Many replays at once, on the cores there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from recompute._budget import Amount
from recompute._simulator.replay import Run, baseline, budgets_of, simulate
from recompute._traces.program import Program
from recompute._workers import workers

if TYPE_CHECKING:
    from concurrent.futures import Future

_WORTH_A_PROCESS: Final = 100_000  # steps: less is done before another Python has started


@dataclass(frozen=True)
class Job:
    """One replay to be done: of the program with this number, with these arguments of `simulate`."""

    program: int
    budget: Amount | Mapping[str, Amount]
    options: Mapping[str, Any] = field(default_factory=dict)


def simulate_many(
    programs: Sequence[Program],
    jobs: Sequence[Job],
    *,
    processes: int = 1,
    done: Callable[[int], None] | None = None,
) -> Iterator[Run]:
    """The replays of `jobs`, in order, as they become ready.

    `processes`: at most so many at a time; with 1, or little to do, all happens here. More of them are spawned, so a
    script that asks for them needs `if __name__ == "__main__":`. `done` is told how many are ready. What a replay
    raises is raised here, and the others are given up.
    """
    peaks = [baseline(program) for program in programs]
    steps = sum(len(programs[job.program].steps) for job in jobs)
    count = min(len(jobs), processes, max(1, steps // _WORTH_A_PROCESS))
    if count <= 1:
        for number, job in enumerate(jobs, 1):
            run = _run(programs, peaks, job)
            if done is not None:
                done(number)
            yield run
        return
    ready = 0

    def count_one(future: Future[Run]) -> None:
        nonlocal ready
        ready += 1
        if done is not None and not future.cancelled():
            done(ready)

    def haste(at: int) -> tuple[int, float]:
        job = jobs[at]
        return -len(programs[job.program].steps), budgets_of(job.budget, peaks[job.program])[1]

    longest_first = sorted(range(len(jobs)), key=haste)
    with workers(count, _start, list(programs), peaks) as pool:
        futures: dict[int, Future[Run]] = {}
        for at in longest_first:
            futures[at] = pool.submit(_work, jobs[at])
            futures[at].add_done_callback(count_one)
        for at in range(len(jobs)):
            yield futures[at].result()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_here: dict[str, Any] = {}
"""In a worker: the programs and their peaks, sent once."""


def _start(programs: list[Program], peaks: list[dict[str, int]]) -> None:
    _here.update(programs=programs, peaks=peaks)


def _work(job: Job) -> Run:
    return _run(_here["programs"], _here["peaks"], job)


def _run(programs: Sequence[Program], peaks: Sequence[Mapping[str, int]], job: Job) -> Run:
    return simulate(programs[job.program], job.budget, peak=peaks[job.program], **job.options)
