"""`recompute_dask` within a budget: array programs compared with plain threads, two workers with Dask's own spilling.

    python benchmarks/dask_programs.py [--quick] [--fits] [--into docs/results]

`--fits` measures bytes and counts only, and writes the sections from "What fits" on; that takes two minutes. All of it
writes dask.md, and with matplotlib the picture dask.png of docs. It takes about six minutes on two cores. Much of that
is waiting for a disk that is slowed down to 200 MB/s, in the same way for both sides: where a file is written or read,
the worker sleeps as long as that would take. (Not named dask.py, because `import dask` would find it.)
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Event, Lock, Thread
from time import perf_counter, process_time, sleep
from typing import Any, Final

import dask
import dask.array as da
import distributed
import numpy as np
from _common import RESULTS, arguments, facts, page, say, section, write
from distributed import Client, LocalCluster, wait

import recompute_dask as rd

PICTURE: Final = RESULTS.parent / "pictures" / "dask.png"
SLOW: Final = 200_000_000  # bytes a second
CHUNK: Final = 4_000_000  # bytes
ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""As Dask advises: NumPy's threads that wait for others would count as CPU time."""

FITS: Final = "What fits"


def programs_that_join(side: int) -> dict[str, Any]:
    """What takes many blocks at once, of side x side numbers in chunks of 200 x 200, or as many."""
    x = da.random.default_rng(1).random((side, side), chunks=(200, 200))
    tall = da.random.default_rng(2).random((side * 10, 100), chunks=(400, 100))
    pieces = x.rechunk((100, 400))
    q, r = da.linalg.qr(tall)
    fourier = da.fft.fft(da.fft.fft(x.rechunk((side // 50, side)), axis=1).rechunk((side, side // 50)), axis=0)
    return {
        "rechunk, and less its mean": (pieces - pieces.mean(axis=0)).std(axis=1),
        "rechunk to rows": (x.rechunk((side // 100, side)) + 1).std(axis=1),
        "rechunk, all of it": x.rechunk((100, 400)),
        "fft along rows": abs(da.fft.fft(x.rechunk((side // 100, side)), axis=1)).sum(axis=0),
        "fft along both axes": abs(fourier).max(),
        "fft2 of one block": abs(da.fft.fft2(x.rechunk(side))).max(),
        "map_overlap": da.map_overlap(lambda a: a + 1, x, depth=2, boundary="reflect", dtype=float).std(axis=0),
        "qr, q reduced": (q.std(axis=0), r),
        "qr, all of both": (q, r),
        "median": da.median(x.rechunk((side, side // 100)), axis=0),
        "cumulative sums, blelloch": da.cumsum(x, axis=0, method="blelloch").max(axis=1),
        "cumulative sums": x.cumsum(axis=0).max(axis=1),
        "solve": da.linalg.solve(x[:800, :800] @ x[:800, :800].T + 800 * da.eye(800, chunks=200), x[:800, 0]),
        "groupby().mean() of a frame": frame(side).groupby("key").mean(),
    }


def frame(side: int) -> Any:
    """Rows less the mean of all."""
    import dask.dataframe as dd
    import pandas as pd

    def part(number: int) -> Any:
        numbers = np.random.default_rng(number)
        return pd.DataFrame({"key": numbers.integers(0, 100, 10_000), "value": numbers.random(10_000)})

    whole = dd.from_map(part, range(side // 50), meta=part(0).iloc[:0])
    return whole.assign(value=whole.value - whole.value.mean())


def measure_fits(side: int) -> str:
    lines = []
    for name, program in programs_that_join(side).items():
        several = program if isinstance(program, tuple) else (program,)
        wanted = dask.compute(*several, scheduler="threads", num_workers=2)
        dask.compute(*several, scheduler=rd.get, num_workers=2)
        stats = rd.stats()
        peak, tasks = stats.peak, stats.operations
        cells = []
        for share in (0.5, 0.25):
            budget = int(share * peak)
            try:
                found = dask.compute(*several, scheduler=rd.get, budget=budget, num_workers=2)
            except MemoryError:
                cells += ["does not fit", ""]
                continue
            assert all(map(_is_same, wanted, found)), name
            stats = rd.stats()
            cells += [f"{stats.overshoot / budget:.1%}", f"{stats.rematerializations / tasks:.1f}"]
        least = rd.least(program).nbytes
        lines.append((name, mega(peak, 2), mega(least, 2) if least > 1000 else "not known", *cells))
        say(" | ".join(lines[-1]))
    what = f"""\
Bytes and counts, on {datetime.now(UTC):%Y-%m-%d} with dask {dask.__version__}; counts vary from run to run. Two
threads; a chunk has 320 kB. `peak`: of the results that Dask keeps between tasks, without a budget; `least`: what
`rd.least` says. Then, at a half and at a quarter of the peak: how far the results exceeded the budget, and how many
operations ran again, as a multiple of the tasks of the graph. All results are those of plain threads, to the last bit;
but for the frame, whose parts Dask itself adds up in another order from run to run."""
    head = "program | peak | least | 50%: exceeded by | ran again | 25%: exceeded by | ran again"
    return section(FITS, what, head, lines)


def mega(nbytes: float, digits: int = 0) -> str:
    return f"{nbytes / 1e6:.{digits}f} MB"


def _is_same(one: Any, other: Any) -> bool:
    if hasattr(one, "equals"):  # a frame: Dask itself adds its parts up in another order from run to run
        return bool(np.allclose(one, other))
    return type(one) is type(other) and one.tobytes() == other.tobytes()


def measure_twice(counts: tuple[int, ...], columns: int, budget: int) -> str:
    loads: list[int] = []

    def load(number: int) -> Any:
        loads.append(number)
        return np.random.default_rng(number).random((1, columns))

    def run(**options: Any) -> tuple[Any, int, int]:
        loads.clear()
        tracemalloc.start()
        result = program.compute(num_workers=2, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result, peak, len(loads)

    lines = []
    for rows in counts:
        parts = [da.from_delayed(dask.delayed(load, pure=True)(number), (1, columns), float) for number in range(rows)]
        data = da.concatenate(parts)
        program = (data - data.mean(0)).mean(1)
        wanted, plain, once = run(scheduler="threads")
        found, ours, twice = run(scheduler=rd.get, budget=budget)
        assert wanted.tobytes() == found.tobytes()
        memory = [mega(size) for size in (rows * columns * 8, plain, ours)]
        lines.append((str(rows), *memory[:2], str(once), memory[2], str(twice), f"{twice / rows:.2f}"))
        say(" | ".join(lines[-1]))
    what = f"""\
`(data - data.mean(0)).mean(1)` of rows of {columns} numbers ({columns * 8 // 1000} kB), each a chunk that is loaded by
a task of its own: [distributed#2602](https://github.com/dask/distributed/issues/2602). Memory: the peak of all that
Python allocates (`tracemalloc`), temporaries of tasks included."""
    budgeted = f"a budget of {mega(budget)}: memory"
    head = ("rows", "data", "plain threads: memory", "loads", budgeted, "loads", "loads a row")
    return section("Loading twice", what, head, lines)


def fits(quick: bool) -> list[str]:
    """The sections about what fits."""
    columns, budget = (10_000, 3_000_000) if quick else (100_000, 30_000_000)
    counts = (40, 80) if quick else (100, 200, 400)
    return [measure_fits(1000 if quick else 2000), measure_twice(counts, columns, budget)]


def programs(size: int) -> dict[str, Any]:
    """What is computed, of about `size` x 500 numbers in chunks of 1,000 x 500, or as many."""
    x = da.random.default_rng(1).random((size, 500), chunks=(1000, 500))
    tall = da.random.default_rng(2).random((size * 5, 100), chunks=(5000, 100))
    days = x.reshape((size // 1000, 1000, 500))
    return {
        "x - mean": ((x - x.mean(axis=0)) ** 2).sum(),
        "anomalies": abs((days - days.mean(axis=0)) / days.std(axis=0)).max(),
        "svd": da.linalg.svd(tall)[0].std(axis=0),
        "cov": da.cov(x[:, :250], rowvar=False).sum(),
    }


def measure_threads(times: int, size: int) -> str:
    lines = []
    for name, program in programs(size).items():
        program.compute(scheduler=rd.get, num_workers=2)
        peak = rd.stats().peak
        ways: dict[str, dict[str, Any]] = {"plain": {"scheduler": "threads"}, "none": {"scheduler": rd.get}}
        for share in (1.0, 0.5, 0.25):
            ways[f"{share}"] = {"scheduler": rd.get, "budget": int(share * peak)}
        found: dict[str, float] = {}
        for _ in range(times):
            for way, options in ways.items():
                try:
                    seconds = timed(program.compute, **options, num_workers=2)
                except MemoryError:
                    seconds = float("nan")
                found[way] = min(seconds, found.get(way, seconds))
        ratios = [found[way] / found["plain"] for way in ways if way != "plain"]
        cells = ["does not fit" if ratio != ratio else f"{ratio:.2f}" for ratio in ratios]
        lines.append((name, mega(peak), *cells))
        say(" | ".join(lines[-1]))
    what = f"""\
CPU time of the process (all threads, recomputation included) as a multiple of that with plain threads. Budgets are
shares of the peak of the same program without a budget. The least of {times} runs, taken in turns. A chunk has 4 MB.
Most tasks take a few milliseconds; the cache adds a fifth of a millisecond to each."""
    head = "program | peak without a budget | no budget | 100% | 50% | 25%"
    return section("One machine: a budget for the threaded scheduler", what, head, lines)


def timed(run: Callable[..., Any], **options: Any) -> float:
    start = process_time()
    run(**options)
    return process_time() - start


class SlowDisk(distributed.WorkerPlugin):  # type: ignore[misc]
    """Makes the disk of Dask's own spilling as slow as one of so many bytes a second.

    As in recompute_dask with `recompute.bandwidth`, each transfer sleeps until it, and those before it, would have
    taken as long as they would there.
    """

    def __init__(self, bandwidth: int) -> None:
        self.bandwidth = bandwidth

    def setup(self, worker: Any) -> None:
        import zict

        lock, busy = Lock(), [0.0]
        set_item, get_item = zict.File.__setitem__, zict.File.__getitem__

        def slowly(nbytes: int, start: float) -> None:
            with lock:
                busy[0] = until = max(busy[0], start) + nbytes / self.bandwidth
            sleep(max(0.0, until - perf_counter()))

        def set_slowly(file: Any, key: Any, value: Any) -> None:
            start = perf_counter()
            set_item(file, key, value)
            parts = value if isinstance(value, list) else [value]
            slowly(sum(memoryview(part).nbytes for part in parts), start)

        def get_slowly(file: Any, key: Any) -> Any:
            start = perf_counter()
            value = get_item(file, key)
            slowly(len(value), start)
            return value

        zict.File.__setitem__, zict.File.__getitem__ = set_slowly, get_slowly


def step(array: Any) -> Any:
    return np.sqrt(array * array + 1.0)


def look(array: Any, number: int) -> float:
    return float(array[number % len(array)])


def books(dask_worker: Any) -> tuple[float, float, float, float]:
    """(bytes in memory, bytes on the disk now, bytes written so far, tasks run again so far)."""
    data = dask_worker.data
    if hasattr(data, "cache"):
        stats = data.cache.stats()
        tier = stats.tiers[0]
        return stats.used, tier.used, tier.written, stats.rematerializations
    written = data.cumulative_metrics["disk-write", "bytes"]
    return data.fast.total_weight, data.spilled_total.disk, written, 0


def measure_cluster(nanny: Any, steps: int, slow: bool, chunks: int, reads: int, room: int) -> dict[str, Any]:
    """One program on one kind of workers."""
    limit = 4_000_000_000
    settings = {
        "distributed.worker.memory.target": room / limit,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "recompute.bandwidth": SLOW if slow else None,
    }
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": limit, "worker_class": nanny}
    history: list[tuple[float, ...]] = []
    done = Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set({**settings, "temporary-directory": folder}),
        LocalCluster(**options, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        if slow:
            client.register_plugin(SlowDisk(SLOW))
        x = da.random.default_rng(1).random(chunks * CHUNK // 8, chunks=CHUNK // 8)
        for _ in range(steps):
            x = x.map_blocks(step, dtype=float)
        start = perf_counter()

        def watch() -> None:
            while not done.wait(0.25):
                by_worker = client.run(books).values()
                history.append((perf_counter() - start, *map(sum, zip(*by_worker, strict=True))))

        watcher = Thread(target=watch)
        watcher.start()
        try:
            x = client.persist(x, optimize_graph=False)
            wait(x)
            parts = distributed.futures_of(x)
            chosen = random.Random(1).choices(range(chunks), k=reads)
            looks = [client.submit(look, parts[number], turn, pure=False) for turn, number in enumerate(chosen)]
            total = sum(client.gather(looks))
            seconds = perf_counter() - start
        finally:
            done.set()
            watcher.join()
        _, _, written, again = map(sum, zip(*client.run(books).values(), strict=True))
    return {"seconds": seconds, "total": total, "written": written, "again": again, "history": history}


def measure_clusters(times: int, chunks: int, reads: int, room: int) -> tuple[str, dict[str, dict[str, Any]]]:
    """The table of all programs on both kinds of workers; the runs of one, for the picture."""
    steps = 10
    lines = []
    pictured = {}
    for graph, deep in (("shallow", 0), ("deep", steps)):
        for disk, slow in (("native", False), ("200 MB/s", True)):
            runs: dict[Any, list[dict[str, Any]]] = {distributed.Nanny: [], rd.Nanny: []}
            for _ in range(times):
                for nanny, measured in runs.items():
                    measured.append(measure_cluster(nanny, deep, slow, chunks, reads, room))
            own, ours = (min(measured, key=lambda run: run["seconds"]) for measured in runs.values())
            assert own["total"] == ours["total"]
            seconds = [f"{run['seconds']:.1f} s" for run in (own, ours)]
            written = [mega(run["written"]) for run in (own, ours)]
            speedup = f"{own['seconds'] / ours['seconds']:.2f}"
            lines.append((graph, disk, *seconds, speedup, *written, f"{ours['again']:.0f}"))
            say(" | ".join(lines[-1]))
            if graph == "shallow" and slow:
                pictured = {"Dask's own spilling": own, "recompute or spill": ours}
    what = f"""\
{chunks} chunks of 4 MB are persisted on two workers with one thread each and room for {mega(room)} of chunks each. Then
{reads} tasks each read one of them, in random order. `shallow`: the numbers of a chunk are drawn at random. `deep`: the
chunk then goes through {steps} more steps, and only the last result is kept. Times are for the whole program, the least
of {times} runs taken in turns; bytes written and tasks rerun are those of that run. The disk is either the machine's
own, whose page cache holds everything, or slowed down to 200 MB/s for both sides. Creating the chunks takes the same
compute on both sides; in deep graphs this is most of the time."""
    head = "graph | disk | Dask's own spilling | recompute or spill | speedup | written by Dask | by us | tasks rerun"
    return section("Two workers: recomputing or spilling", what, head, lines), pictured


def draw(found: dict[str, dict[str, Any]]) -> None:
    """Bytes in memory and on the disk, and tasks run again, over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, (name, measured) in zip(axes, found.items(), strict=True):
        times, memory, disk, written, _ = zip(*measured["history"], strict=True)
        axis.plot(times, [nbytes / 1e6 for nbytes in memory], label="in memory")
        axis.plot(times, [nbytes / 1e6 for nbytes in disk], label="on the disk")
        axis.plot(times, [nbytes / 1e6 for nbytes in written], ":", label="written so far")
        again = [row[4] * CHUNK / 1e6 for row in measured["history"]]
        axis.plot(times, again, "--", label="computed again so far")
        axis.set(title=f"{name}: {measured['seconds']:.0f} s", xlabel="seconds")
    axes[0].set(ylabel="MB, both workers", yscale="symlog")
    axes[0].legend(fontsize="small")
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = arguments(__doc__, quick=True)
    parser.add_argument("--fits", action="store_true", help="only what does not depend on time")
    options = parser.parse_args()
    quick = options.quick
    if options.fits:
        parts = fits(quick)
        if not quick:
            before = (options.into / "dask.md").read_text().partition(f"## {FITS}")[0]
            write(options.into, "dask", before + "\n\n".join(parts) + "\n")
        return
    times, size = (1, 10_000) if quick else (3, 60_000)
    machine = facts("dask", "distributed")
    threads = measure_threads(times, size)
    cluster, pictured = measure_clusters(times, *((20, 40, 16_000_000) if quick else (200, 600, 80_000_000)))
    text = page("Dask", __doc__, threads, cluster, machine=machine) + "\n" + "\n\n".join(fits(quick)) + "\n"
    if not quick:
        write(options.into, "dask", text)
        draw(pictured)
    say(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    if not ONE_THREAD.items() <= os.environ.items():  # read when NumPy is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    sys.path.insert(0, os.path.dirname(__file__))
    main()
