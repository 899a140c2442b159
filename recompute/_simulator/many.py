"""Many replays side by side, on the cores there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from recompute._simulator.published_replay import baseline
from recompute._simulator.run import Run
from recompute._simulator.simulate import budgets_of, iterate, simulate
from recompute._traces.program import Program
from recompute._workers import workers

if TYPE_CHECKING:
    from concurrent.futures import Future

S = TypeVar("S")
J = TypeVar("J")
R = TypeVar("R")

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
            for run in _runs((programs, peaks), job):
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

    longest_first = sorted(range(len(jobs)), key=haste)
    done_with = lambda job: count_more(job.rounds)
    for runs in spread(_all_runs, (list(programs), peaks), jobs, count, order=longest_first, done=done_with):
        yield from runs


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(
    work: Callable[[S, J], R],
    shared: S,
    jobs: Sequence[J],
    processes: int,
    *,
    order: Sequence[int] | None = None,
    done: Callable[[J], None] = lambda job: None,
) -> Iterator[R]:
    """The results of `work(shared, job)` for each job, in order, as they become ready.

    With more processes than one, `work` is a function of a module, `shared` is sent to each process once, and the jobs
    are begun in this `order`. `done` is told which one is ready, by any thread.
    """
    if processes <= 1:
        for job in jobs:
            yield work(shared, job)
            done(job)
        return
    with workers(processes, _start, shared) as pool:
        futures: dict[int, Future[R]] = {}
        for at in range(len(jobs)) if order is None else order:
            futures[at] = pool.submit(_work, work, jobs[at])
            futures[at].add_done_callback(partial(_tell, done, jobs[at]))
        for at in range(len(jobs)):
            yield futures[at].result()


def _tell(done: Callable[[J], None], job: J, future: Future[Any]) -> None:
    if not future.cancelled():
        done(job)


_here: list[Any] = []
"""In a worker: what all jobs share."""


def _start(shared: Any) -> None:
    _here[:] = [shared]


def _work(work: Callable[[Any, J], R], job: J) -> R:
    return work(_here[0], job)


_Subject = tuple[Sequence[Program], Sequence[Mapping[str, int]]]
"""Programs, and the peak of each."""


def _all_runs(subject: _Subject, job: Job) -> list[Run]:
    return list(_runs(subject, job))


def _runs(subject: _Subject, job: Job) -> Iterator[Run]:
    programs, peaks = subject
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
