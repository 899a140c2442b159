"""A mean that is subtracted from what it was taken of (dask/distributed issue 2602), in a tenth of the memory.

    python benchmarks/dask_means.py [--quick] [--into docs]

`data - data.mean(0)` needs all rows twice: to add them up, and to subtract the mean. Plain threads keep them in
between, Dask's own workers write them to the disk, and a budget loads them again. 400 rows of 800 kB are "loaded",
which takes about a millisecond each, with plain threads, with `rd.get` and 32 MB, and by one worker process that may
hold 32 MB, Dask's own and `rd.Worker`. Memory is that of the process, sampled every 20 ms, less what it had before. The
same with xarray, by month. Prints a table, and draws pictures/dask-means.svg.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any, Final

import dask
import dask.array as da
import numpy as np
import pandas as pd
import psutil
import xarray as xr
from _common import arguments, facts, markdown, page, say
from distributed import Client, LocalCluster

import recompute_dask as rd

BUDGET: Final = 32_000_000  # bytes
WORKER: Final = {
    "distributed.worker.memory.target": BUDGET / 1e10,
    "distributed.worker.memory.spill": False,  # the limit is for values; a process has more memory than that
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


def load(row: int, length: int, log: str) -> Any:
    """A row, and a byte in the log for it."""
    with open(log, "ab") as file:
        file.write(b".")
    return np.random.default_rng(row).random((1, length))


def loaded(rows: int, length: int, log: str) -> Any:
    one = dask.delayed(load, pure=False)
    return da.concatenate([da.from_delayed(one(row, length, log), (1, length), float) for row in range(rows)])


def means(rows: int, length: int, log: str) -> Any:
    """Each row's mean distance from the mean of all rows."""
    data = loaded(rows, length, log)
    return (data - data.mean(0)).mean(1)


def months(rows: int, length: int, log: str) -> Any:
    """The same with the mean of the month, by xarray."""
    data = loaded(rows, length, log)
    days = xr.DataArray(data, dims=("day", "place"), coords={"day": pd.date_range("2000-01-01", periods=rows)})
    by_month = days.groupby("day.month")
    return (by_month - by_month.mean("day")).mean("place").data


@dataclass
class Run:
    name: str
    memory: list[tuple[float, float]]
    """(seconds, bytes), relative to the start."""
    loads: int
    result: Any

    @property
    def peak(self) -> float:
        return max(size for _, size in self.memory)

    @property
    def seconds(self) -> float:
        return self.memory[-1][0]


def sampled(name: str, process: int, log: str, work: Callable[[], Any]) -> Run:
    """Do the work, and look at a process meanwhile."""
    looked, over, start = psutil.Process(process), Event(), perf_counter()
    before = looked.memory_info().rss
    memory: list[tuple[float, float]] = []

    def look() -> None:
        while not over.wait(0.02):
            memory.append((perf_counter() - start, looked.memory_info().rss - before))

    thread = Thread(target=look)
    thread.start()
    try:
        result = work()
    finally:
        over.set()
        thread.join()
    memory.append((perf_counter() - start, looked.memory_info().rss - before))
    run = Run(name, memory, os.path.getsize(log), result)
    say(f"  {name}: {run.peak / 1e6:.0f} MB, {run.seconds:.1f} s, {run.loads} loads")
    return run


@contextmanager
def worker(**options: Any) -> Iterator[tuple[Client, int]]:
    """A client, and the process of its only worker."""
    with (
        dask.config.set(WORKER),
        LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit=10**10, dashboard_address="127.0.0.1:0", **options
        ) as cluster,
        Client(cluster) as client,
    ):
        (process,) = client.run(os.getpid).values()
        yield client, process


def runs(program: Callable[[int, int, str], Any], rows: int, length: int, folder: str) -> Iterator[Run]:
    """Each way, in turn."""
    for name, options in {
        "threads": {"scheduler": "threads"},
        "rd.get": {"scheduler": rd.get, "budget": BUDGET},
    }.items():
        log = os.path.join(folder, name)
        with get_context("spawn").Pool(1) as pool:  # a process of its own: memory that was freed may stay with it
            process = pool.apply(os.getpid)
            work = partial(pool.apply, here, (program, rows, length, log), options)
            yield sampled(name, process, log, work)
    for name, options in {"a worker that spills": {}, "rd.Worker": {"worker_class": rd.Nanny}}.items():
        log = os.path.join(folder, name)
        with worker(**options) as (client, process):
            future = partial(client.compute, program(rows, length, log))
            yield sampled(name, process, log, lambda future=future: future().result())


def here(program: Callable[[int, int, str], Any], rows: int, length: int, log: str, **options: Any) -> Any:
    """Compute it in this process."""
    return program(rows, length, log).compute(num_workers=2, **options)


def draw(found: list[Run], into: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for run in found:
        axes.plot(*zip(*[(seconds, size / 1e6) for seconds, size in run.memory], strict=True), label=run.name)
    axes.axhline(BUDGET / 1e6, color="grey", linestyle=":", label="budget")
    axes.set(xlabel="seconds", ylabel="memory of the process, MB", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(into / "pictures" / "dask-means.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    given = arguments(__doc__, into=None, quick=True).parse_args()
    rows, length = (40, 10_000) if given.quick else (400, 100_000)
    lines = []
    for program in (means, months):
        say(program.__doc__ or "")
        with tempfile.TemporaryDirectory() as folder:
            found = list(runs(program, rows, length, folder))
        assert all(np.allclose(run.result, found[0].result) for run in found)
        if program is means and given.into is not None:
            (given.into / "pictures").mkdir(exist_ok=True)
            draw(found, given.into)
        lines += [
            [program.__name__, run.name, f"{run.peak / 1e6:.0f}", f"{run.seconds:.1f}", f"{run.loads / rows:.2f}"]
            for run in found
        ]
    table = markdown("program | way | most memory, MB | seconds | loads of a row", lines)
    print(page("Means", __doc__, table, machine=facts("dask", "distributed")))


if __name__ == "__main__":
    main()
