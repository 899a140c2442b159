"""Workers of dask.distributed that recompute or spill: nothing is lost, and nothing runs on the event loop."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
dask = pytest.importorskip("dask", reason="the extra 'dask' is not installed")
distributed = pytest.importorskip("distributed", reason="the extra 'dask' is not installed")

import dask.array as da  # noqa: E402  # after importorskip
from dask_graphs import KINDS, check_equal, graphs, misses_of_lru, model  # noqa: E402
from distributed import Client, LocalCluster, wait  # noqa: E402
from distributed.utils import RateLimiterFilter  # noqa: E402
from distributed.utils_test import captured_logger, gen_cluster, inc  # noqa: E402

import recompute as rc  # noqa: E402
import recompute_dask as rd  # noqa: E402
from recompute_dask import _worker  # noqa: E402

CHUNK = 80_000  # bytes
LOOPBACK = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
MEMORY = {
    "distributed.worker.memory.target": 0.05,
    "distributed.worker.memory.spill": False,  # the memory of this process is not what a worker has
    "distributed.worker.memory.pause": False,
}

NO_DISK = {**MEMORY, "distributed.worker.memory.max-spill": 1}


RUNS: list[Any] = []
"""What the functions below note when they run."""


def constant(number: int) -> Any:
    RUNS.append(threading.get_ident())
    return np.full(CHUNK // 8, float(number))


def named(name: str, length: int) -> Any:
    RUNS.append(name)
    return np.ones(length)


async def coroutine(length: int) -> Any:
    RUNS.append("coroutine")
    return np.ones(length)


MADE_AGAIN, STARTED, GO_ON = threading.Event(), threading.Event(), threading.Event()


def name_again(name: str) -> Any:
    RUNS.append(name)
    if sorted(RUNS) == ["one", "one", "other", "other"]:
        MADE_AGAIN.set()
    return np.ones(CHUNK // 8)


def until_made_again(array: Any) -> bool:
    return MADE_AGAIN.wait(30)


def blocked() -> Any:
    STARTED.set()
    GO_ON.wait(30)
    return np.ones(CHUNK // 8)


class Uncopied:
    def __deepcopy__(self, seen: Any) -> Any:
        raise RuntimeError("there is one of these only")


def only_once() -> Any:
    RUNS.append("once")
    if len(RUNS) > 1:
        raise OSError("the file is gone")
    return np.ones(CHUNK // 8)


def small_cluster(**options: Any) -> Any:
    """Two workers of two threads, each with room for five chunks."""
    given: dict[str, Any] = {
        "client": True,
        "Worker": rd.Worker,
        "nthreads": [("127.0.0.1", 2)] * 2,
        "worker_kwargs": {"memory_limit": 100 * CHUNK},
        "config": MEMORY,
        "timeout": 150,  # seconds: on a busy machine, too
    }
    return gen_cluster(**{**given, **options})


class Cluster(LocalCluster):
    """Dask's may be told of a worker's end before it has heard of the worker, and then fails to close."""

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op != "remove" or msg in self.scheduler_info["workers"]:
            super()._update_worker_status(op, msg)


@contextmanager
def processes() -> Iterator[tuple[Any, Any]]:
    """A cluster of two processes, each with room for four chunks, and its client."""
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "300MB", **LOOPBACK}
    with (
        dask.config.set({"distributed.worker.memory.target": 4 * CHUNK / 300e6}),
        Cluster(**options, worker_class=rd.Nanny) as cluster,
        Client(cluster) as client,
    ):
        yield cluster, client


def chunks(number: int = 20, seed: int = 1) -> Any:
    """A vector of so many chunks, and half of their bytes."""
    return da.random.default_rng(seed).random(number * CHUNK // 8, chunks=CHUNK // 8)


async def check_books(scheduler: Any, *workers: Any) -> None:
    """What the scheduler believes that a worker holds is what it holds, in memory or not."""
    for worker in workers:
        data, known = worker.data, scheduler.workers[worker.address].has_what
        while set(data) != {task.key for task in known}:
            await worker.heartbeat()  # meanwhile it is told what was released
        nbytes = sum(task.get_nbytes() for task in known)
        assert worker.state.nbytes == nbytes
        assert 0 <= data.spilled_total.memory <= nbytes + 1_000 * len(data)
        pool = data.cache.stats().pools[0]
        assert pool.used <= pool.budget + pool.overshoot


@small_cluster(config=NO_DISK)
async def test_values_are_evicted_and_computed_again(client: Any, scheduler: Any, *workers: Any) -> None:
    """Twice what fits into the memory of two workers, with the results of one thread."""
    x = chunks()
    wanted = x.compute(scheduler="sync")
    y = client.persist(x)
    await wait(y)
    for _ in range(2):
        np.testing.assert_array_equal(await client.compute(y), wanted)
        np.testing.assert_allclose(await client.compute((y - y.mean()).std()), wanted.std())
    await check_books(scheduler, *workers)
    assert any(worker.data.cache.stats().rematerializations > 0 for worker in workers)
    while not any(worker.data.spilled_total.memory > 0 for worker in workers):
        for worker in workers:
            await worker.heartbeat()  # what was computed last may not have been released yet


@small_cluster()
async def test_what_was_sent_moves_to_the_disk(client: Any, scheduler: Any, *workers: Any) -> None:
    """Values that nobody here has made: more than fit; in threads."""
    values = [np.full(CHUNK // 8, float(number)) for number in range(20)]
    store = type(rc.Disk().open())
    writers, write = set(), store.write

    def noted(disk: Any, parts: Any, nbytes: int) -> Any:
        writers.add(threading.get_ident())
        return write(disk, parts, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", noted)
        futures = await client.scatter(values, hash=False)
    for value, found in zip(values, await client.gather(futures), strict=True):
        np.testing.assert_array_equal(value, found)
    assert all(worker.data.cache.stats().tiers[0].moves > 0 for worker in workers)
    assert all(worker.data.spilled_total.disk > 0 for worker in workers)
    assert threading.get_ident() not in writers
    await check_books(scheduler, *workers)


@small_cluster()
async def test_results_are_writable_where_they_arrive(client: Any, scheduler: Any, *workers: Any) -> None:
    """Though the worker's own are read-only; whether they were computed once or twice."""
    future = client.submit(np.ones, CHUNK // 8, pure=False)
    for _ in range(2):
        found = await client.gather(future, direct=False)
        found += 1
        assert found.sum() == CHUNK // 4
        for worker in workers:
            worker.data.cache.release_memory()


@small_cluster(config=NO_DISK)
async def test_nothing_runs_on_the_event_loop(client: Any, scheduler: Any, *workers: Any) -> None:
    """Neither for a task that takes what was evicted, nor for a client that asks for it."""
    RUNS.clear()
    futures = client.map(constant, range(6), pure=False)
    await wait(futures)
    for worker in workers:
        worker.data.cache.release_memory()
    total = client.submit(lambda arrays: sum(array[0] for array in arrays), futures)
    assert await total == 15
    for worker in workers:
        worker.data.cache.release_memory()
    assert [array[0] for array in await client.gather(futures)] == list(range(6))
    assert len(RUNS) > 12
    assert threading.get_ident() not in RUNS


class Seen:
    """A large value that notes the threads in which it is copied or packed."""

    def __init__(self) -> None:
        self.parts = [[float(number)] for number in range(20_000)]

    def __reduce__(self) -> Any:
        COPIED.append(threading.get_ident())
        return Seen, ()


COPIED: list[Any] = []


@small_cluster(config={**MEMORY, "distributed.worker.memory.rebalance.sender-min": 0.0})
async def test_nothing_is_read_or_written_on_the_event_loop(client: Any, scheduler: Any, *workers: Any) -> None:
    """Whatever Dask does with values: runs tasks, sends, gets, replicates, rebalances, releases, retires, spills."""
    loop = threading.get_ident()
    store, moving, written, read = type(rc.Disk().open()), set(), [0], [0]
    write, read_from = store.write, store.read
    RUNS.clear()

    def noted(disk: Any, parts: Any, nbytes: int) -> Any:
        moving.add(threading.get_ident())
        written[0] += 1
        return write(disk, parts, nbytes)

    def noted_read(disk: Any, where: Any) -> Any:
        moving.add(threading.get_ident())
        read[0] += 1
        return read_from(disk, where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", noted)
        patch.setattr(store, "read", noted_read)
        sent = await client.scatter([np.full(CHUNK // 8, float(number)) for number in range(15)], hash=False)
        made = client.map(constant, range(10), pure=False)
        with dask.annotate(recompute=False):
            kept = client.map(constant, range(10), pure=False)
        await wait([*made, *kept])
        await client.replicate(sent[:8], 2)
        await client.rebalance()
        del made, kept[5:]
        await client.gather(client.map(np.sum, [*sent, *kept], pure=False))
        for worker in workers:
            patch.setattr(worker.monitor, "get_process_memory", lambda: 2**40)
            patch.setattr(worker, "_spills_at", 0)
            await worker._spill()
            assert worker.data.cache.stats().pools[0].used - worker.data.cache.stats().held < CHUNK
        patch.undo()
        patch.setattr(store, "write", noted)
        patch.setattr(store, "read", noted_read)
        await client.retire_workers([workers[0].address])
        assert [array[0] for array in await client.gather(sent)] == list(range(15))
    assert min(len(RUNS), written[0], read[0]) > 0
    assert loop not in {*RUNS, *moving}


@small_cluster(nthreads=[("127.0.0.1", 1)])
async def test_memory_with_nothing_left_to_evict_is_said_once(client: Any, scheduler: Any, worker: Any) -> None:
    """Though the worker looks several times a second, for as long as it lasts."""
    worker._spills_at = worker._spills_until = 0
    RateLimiterFilter.reset_timer(_worker.logger)
    with captured_logger(_worker.logger) as log:
        for _ in range(3):
            await worker._spill()
    assert log.getvalue().count("nothing is left to evict") == 1


@small_cluster(nthreads=[("127.0.0.1", 1)])
async def test_nothing_large_is_copied_on_the_event_loop(client: Any, scheduler: Any, worker: Any) -> None:
    """What a task gets of its own of a value with many parts."""
    COPIED.clear()
    seen = client.submit(Seen, pure=False)
    lengths = [client.submit(lambda one: len(one.parts), seen, pure=False) for _ in range(3)]
    assert await client.gather(lengths) == [20_000] * 3
    assert len(COPIED) > 0
    assert threading.get_ident() not in COPIED


@small_cluster()
async def test_a_task_that_writes_into_its_arguments_gets_copies(client: Any, scheduler: Any, *workers: Any) -> None:
    """What others take stays as it was."""

    def write(array: Any) -> Any:
        array += 1
        return array

    x = client.submit(np.zeros, CHUNK // 8, pure=False)
    written = [client.submit(write, x, pure=False) for _ in range(4)]
    assert [(await future)[0] for future in written] == [1, 1, 1, 1]
    assert (await x)[0] == 0


@small_cluster(config=NO_DISK)
async def test_some_tasks_run_once(client: Any, scheduler: Any, *workers: Any) -> None:
    """Those which say so, coroutines, and those whose result is small: their results move to the disk, or stay."""
    RUNS.clear()
    with dask.annotate(recompute=False):
        annotated = dask.delayed(named)("annotated", CHUNK // 8)
    futures = [
        client.compute(annotated, optimize_graph=False),
        client.submit(coroutine, CHUNK // 8),
        client.submit(named, "small", 3),
        client.submit(named, "again", CHUNK // 8),
    ]
    await wait(futures)
    for worker in workers:
        worker.data.cache.release_memory()
    for future in futures:
        assert (await future)[0] == 1
    assert sorted(RUNS) == ["again", "again", "annotated", "coroutine", "small"]


@small_cluster(config=NO_DISK)
async def test_a_task_knows_its_worker_when_it_runs_again(client: Any, scheduler: Any, *workers: Any) -> None:
    """`get_worker` gives the same one."""

    def ask() -> Any:
        return np.full(CHUNK // 8, float(distributed.get_worker().address.rpartition(":")[2]))

    future = client.submit(ask, pure=False)
    before = (await future)[0]
    for worker in workers:
        worker.data.cache.release_memory()
    assert (await future)[0] == before


@small_cluster()
async def test_a_retired_worker_loses_nothing(client: Any, scheduler: Any, *workers: Any) -> None:
    """Evicted or moved, its values go to the other one."""
    x = chunks(12)
    y = client.persist(x)
    futures = await client.scatter([np.full(CHUNK // 8, float(number)) for number in range(8)], hash=False)
    await wait(y)
    await client.retire_workers([workers[0].address])
    assert list(scheduler.workers) == [workers[1].address]
    np.testing.assert_array_equal(await client.compute(y), x.compute(scheduler="sync"))
    assert [value[0] for value in await client.gather(futures)] == list(range(8))
    await check_books(scheduler, workers[1])


@small_cluster(config={**MEMORY, "distributed.worker.memory.rebalance.sender-min": 0.0})
async def test_values_are_rebalanced_and_replicated(client: Any, scheduler: Any, *workers: Any) -> None:
    """From one worker to the other, by the scheduler's word; the active memory manager drops what there is twice."""
    futures = client.map(lambda n: np.full(CHUNK // 8, float(n)), range(10), workers=[workers[0].address])
    await wait(futures)
    await client.replicate(futures, 2)
    assert len(workers[1].data) == 10
    await client.amm.start()
    await client.amm.run_once()
    await client.amm.stop()
    await client.rebalance()
    assert [value[0] for value in await client.gather(futures)] == list(range(10))
    await check_books(scheduler, *workers)


@small_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_tasks_are_stolen(client: Any, scheduler: Any, *workers: Any) -> None:
    """All were sent to the worker that has their argument; the other one takes some."""
    x = await client.scatter(np.ones(CHUNK // 8), workers=[workers[0].address])
    futures = [client.submit(np.add, x, number, pure=False) for number in range(20)]
    assert [value[0] - 1 for value in await client.gather(futures)] == list(range(20))
    await check_books(scheduler, *workers)


@small_cluster()
async def test_a_worker_that_is_gone_loses_nothing(client: Any, scheduler: Any, *workers: Any) -> None:
    """The scheduler has its tasks run elsewhere."""
    x = chunks(12)
    y = client.persist(x)
    await wait(y)
    await workers[0].close(nanny=False)
    np.testing.assert_array_equal(await client.compute(y), x.compute(scheduler="sync"))
    await check_books(scheduler, workers[1])


@small_cluster()
async def test_what_dask_releases_is_forgotten(client: Any, scheduler: Any, *workers: Any) -> None:
    """With its recipes; and so is what arrived over the network, though results here were made of it."""
    sources = await client.scatter([np.full(CHUNK // 8, float(number)) for number in range(4)], hash=False)
    sums = [client.submit(np.add, one, other, pure=False) for one in sources for other in sources]
    await wait(sums)
    del sources
    chain = sums
    for _ in range(20):
        chain = client.map(inc, chain, pure=False)
    await wait(chain)
    del sums
    assert sorted({value[0] for value in await client.gather(chain)}) == [20.0 + total for total in range(7)]
    await check_books(scheduler, *workers)
    del chain
    while any(worker.data for worker in workers):
        await client.run(os.getpid)  # meanwhile they are told
    for worker in workers:
        stats = worker.data.cache.stats()
        assert stats.used - stats.held <= 1_000  # a thread may hold what it has made last
        assert worker.data.spilled_total.memory == 0


@small_cluster(config=NO_DISK)
async def test_a_task_that_fails_the_second_time_is_an_error_of_who_needs_it(
    client: Any, scheduler: Any, *workers: Any
) -> None:
    """With the exception; other values are as they were."""
    RUNS.clear()
    one = client.submit(only_once, workers=[workers[0].address])
    other = client.submit(np.ones, CHUNK // 8, workers=[workers[0].address])
    await wait([one, other])
    workers[0].data.cache.release_memory()
    with pytest.raises(OSError, match="the file is gone"):
        await client.submit(np.sum, one, workers=[workers[0].address])
    assert await client.submit(np.sum, other) == CHUNK // 8


@small_cluster(config=NO_DISK, nthreads=[("127.0.0.1", 1)])
async def test_what_the_next_task_takes_comes_back_meanwhile(client: Any, scheduler: Any, worker: Any) -> None:
    """While a task runs, which does not end before."""
    RUNS.clear()
    MADE_AGAIN.clear()
    one, other = [client.submit(name_again, name, pure=False) for name in ("one", "other")]
    await wait([one, other])
    worker.data.cache.release_memory()
    waiting = [dask.delayed(until_made_again)(value) for value in (one, other)]
    assert await client.gather(client.compute(waiting, optimize_graph=False)) == [True, True]


@small_cluster(nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": 400 * CHUNK})
async def test_what_is_needed_soon_stays_in_memory(client: Any, scheduler: Any, worker: Any) -> None:
    """By the tasks that are ready: more comes back from memory than if what was used longest ago were evicted."""
    STARTED.clear()
    GO_ON.clear()
    with dask.annotate(recompute=False):
        values = client.map(lambda number: np.full(CHUNK // 8, float(number)), range(80), pure=False)
    await wait(values)
    blocking = client.submit(blocked, pure=False)
    await asyncio.to_thread(STARTED.wait, 30)
    order = random.Random(1).choices(range(80), k=200)
    looks = [client.submit(lambda array: array[0], values[number], pure=False) for number in order]
    while len(worker.state.ready) < len(looks):
        await client.run(os.getpid)  # meanwhile they arrive
    before = worker.data.cache.stats().tiers[0].read
    GO_ON.set()
    assert await client.gather(looks) == order
    assert worker.data.cache.stats().tiers[0].read - before < 0.9 * misses_of_lru(order, 20) * CHUNK
    del blocking


@small_cluster(config=NO_DISK, nthreads=[("127.0.0.1", 1)])
async def test_a_value_may_be_released_while_it_is_computed_again(client: Any, scheduler: Any, worker: Any) -> None:
    """Nobody wants it any more: it goes, and the worker goes on."""
    STARTED.clear()
    GO_ON.set()
    slow = client.submit(blocked, pure=False)
    await wait(slow)
    worker.data.cache.release_memory()
    GO_ON.clear()
    STARTED.clear()
    total = client.submit(np.sum, slow)
    await asyncio.to_thread(STARTED.wait, 30)
    slow.release()
    total.release()
    GO_ON.set()
    assert await client.submit(inc, 1) == 2
    while worker.data:
        await client.run(os.getpid)  # meanwhile it is told


@small_cluster()
async def test_a_worker_may_close_while_it_writes(client: Any, scheduler: Any, *workers: Any) -> None:
    """Another one makes what it had; it leaves nothing behind."""
    store = type(rc.Disk().open())
    begun, go_on, write, written = threading.Event(), threading.Event(), store.write, []

    def slowly(disk: Any, parts: Any, nbytes: int) -> Any:
        begun.set()
        go_on.wait(30)
        written.append(write(disk, parts, nbytes))
        return written[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", slowly)
        with dask.annotate(recompute=False, workers=[workers[0].address], allow_other_workers=True):
            made = [client.submit(np.full, CHUNK // 8, float(number), pure=False) for number in range(10)]
        assert await asyncio.to_thread(begun.wait, 30)
        closing = asyncio.create_task(workers[0].close(nanny=False))
        while workers[0].status is not distributed.Status.closing:
            await client.run(os.getpid, workers=[workers[1].address])
        go_on.set()
        await closing
        assert [array[0] for array in await client.gather(made)] == list(range(10))
        while not written:
            await client.run(os.getpid)
    assert not os.path.exists(workers[0].local_directory)


@small_cluster()
async def test_values_of_all_kinds_and_sizes(client: Any, scheduler: Any, *workers: Any) -> None:
    """No bytes, no array, none at all: they come back as they were, whether they stay, move or are made again."""
    values = [np.zeros(0), np.zeros((0, 5)), None, "text" * 50_000, {"a": np.ones(20_000)}, (1, [np.arange(9_000)])]
    made = [client.submit(lambda value=value: value, pure=False) for value in values]
    sent = await client.scatter(values, hash=False)
    for futures in (made, sent):
        await wait(futures)
        for worker in workers:
            worker.data.cache.release_memory()
        for value, found in zip(values, await client.gather(futures), strict=True):
            assert repr(value) == repr(found)
        kinds = client.map(lambda value: type(value).__name__, futures, pure=False)
        assert await client.gather(kinds) == [type(value).__name__ for value in values]
    await check_books(scheduler, *workers)


@small_cluster(nthreads=[("127.0.0.1", 1)])
async def test_what_can_be_read_once_is_read_once(client: Any, scheduler: Any, worker: Any) -> None:
    """As on Dask's own workers: an iterator stays as it is, for the first task that takes it, and is released."""
    iterator = client.submit(lambda: (number * number for number in range(4)), pure=False)
    first = await client.submit(list, iterator, pure=False)
    assert first == [0, 1, 4, 9]
    assert await client.submit(list, iterator, pure=False) == []
    del iterator
    while any("lambda" in key for key in worker.data):
        await client.run(os.getpid)  # meanwhile it is told
    assert worker.data._outside == {}


@small_cluster()
async def test_arguments_that_exceed_the_memory(client: Any, scheduler: Any, *workers: Any) -> None:
    """As on Dask's own workers, a task gets them all the same."""
    futures = client.map(lambda n: np.full(CHUNK // 8, float(n)), range(12), pure=False)
    assert await client.submit(lambda arrays: sum(array[0] for array in arrays), futures) == 66
    await check_books(scheduler, *workers)


@small_cluster()
async def test_a_task_that_raises_is_an_error_of_its_own(client: Any, scheduler: Any, *workers: Any) -> None:
    """Also where arguments cannot be copied for a task that seems to write into them; others go on."""

    def refuse(array: Any, other: Any) -> None:
        raise ValueError("assignment destination is read-only")

    x = client.submit(np.ones, CHUNK // 8, pure=False)
    uncopied = client.submit(Uncopied, pure=False)
    with pytest.raises(ValueError, match="destination is read-only"):
        await client.submit(refuse, x, uncopied, pure=False)
    assert await client.submit(np.sum, x) == CHUNK // 8
    assert len(scheduler.workers) == 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A client of two workers in this process, with next to no memory."""
    options = {
        "n_workers": 2,
        "threads_per_worker": 2,
        "processes": False,
        "memory_limit": 100_000,
        "protocol": "tcp",
        **LOOPBACK,
    }
    with (
        dask.config.set(MEMORY),
        LocalCluster(**options, worker_class=rd.Worker) as cluster,
        Client(cluster) as client,
    ):
        yield client


@settings(max_examples=30)
@given(graphs([kind for kind in KINDS if kind != "lazily"]))
def test_a_graph_has_the_results_of_the_model(cluster: Any, graph: Any) -> None:
    """Random graphs on two workers that evict nearly everything."""
    tasks, keys = graph
    wanted = model(tasks, keys, {})
    found = cluster.get(tasks, keys)
    check_equal(wanted, (found[0], tuple(found[1])))


def test_processes_of_which_one_is_killed() -> None:
    """A cluster of nannies: the results of plain threads, before and after."""
    x = chunks(12)
    wanted = x.compute(scheduler="sync")
    with processes() as (_, client):
        y = client.persist(x)
        wait(y)
        np.testing.assert_array_equal(client.compute(y).result(), wanted)
        evictions = client.run(lambda dask_worker: dask_worker.data.cache.stats().evictions)
        assert any(evictions.values())
        (first, *_) = client.run(os.getpid).values()
        os.kill(first, signal.SIGKILL)
        np.testing.assert_array_equal(client.compute(y).result(), wanted)


def test_a_worker_has_its_own_data() -> None:
    """Another mapping is refused, with the cure."""
    with pytest.raises(ValueError, match=r"use distributed\.Worker"):
        rd.Worker("tcp://127.0.0.1:1", data={})
