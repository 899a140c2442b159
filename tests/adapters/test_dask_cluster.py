"""Clusters of workers that recompute: actors, tasks that secede, resources, and processes that come and go."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
dask = pytest.importorskip("dask", reason="the extra 'dask' is not installed")
distributed = pytest.importorskip("distributed", reason="the extra 'dask' is not installed")

from distributed import wait  # noqa: E402  # after importorskip
from test_dask_worker import CHUNK, check_books, chunks, constant, processes, small_cluster  # noqa: E402


class Counter:
    """An actor: it has a state, and is never copied or run again."""

    total = 0.0

    def add(self, array: Any) -> float:
        self.total += float(array[0])
        return self.total


def sum_seceded(numbers: list[int]) -> float:
    """A task that makes others, and leaves its thread to them while it waits."""
    with distributed.worker_client() as client:
        futures = client.map(constant, numbers, pure=False)
        return float(sum(array[0] for array in client.gather(futures)))


@small_cluster()
async def test_actors_keep_their_state(client: Any, scheduler: Any, *workers: Any) -> None:
    """Their worker evicts everything else around them; a call sees what the last one left, and nothing runs again."""
    counter = await client.submit(Counter, actor=True)
    arrays = client.map(constant, range(20), pure=False)
    await wait(arrays)
    assert sum(worker.data.cache.stats().evictions for worker in workers) > 0
    totals = [await counter.add(array) for array in await client.gather(arrays)]
    assert totals == [sum(range(n + 1)) for n in range(20)]
    assert await counter.total == 190
    for worker in workers:  # what an actor is made of is no value of the cache
        assert not any(isinstance(value, Counter) for value in worker.data.values())


@small_cluster()
async def test_tasks_that_secede(client: Any, scheduler: Any, *workers: Any) -> None:
    """They wait for tasks of their own on the same threads; the values of those are evicted meanwhile."""
    futures = [client.submit(sum_seceded, list(range(start, start + 10)), pure=False) for start in range(0, 40, 10)]
    assert await client.gather(futures) == [sum(range(start, start + 10)) for start in range(0, 40, 10)]
    await check_books(scheduler, *workers)


@small_cluster(worker_kwargs={"memory_limit": 100 * CHUNK, "resources": {"GPU": 1}})
async def test_resources_and_priorities(client: Any, scheduler: Any, *workers: Any) -> None:
    """Annotated tasks run where and when Dask wants them; what is evicted comes back without the resource."""
    with dask.annotate(resources={"GPU": 1}, priority=10, retries=1):
        x = chunks() + 1.0
    wanted = x.compute(scheduler="sync")
    y = client.persist(x, optimize_graph=False)
    for _ in range(2):
        np.testing.assert_array_equal(await client.compute(y), wanted)
    await check_books(scheduler, *workers)


def test_four_processes_that_come_and_go() -> None:
    """A cluster that scales up and down while values are evicted, with replicas: the results of plain threads."""
    x = chunks(24)
    wanted = x.compute(scheduler="sync")
    with processes() as (cluster, client):
        y = client.persist(x)
        wait(y)
        client.replicate(y, n=2)
        for size in (4, 1, 3):
            cluster.scale(size)
            client.wait_for_workers(size)
            np.testing.assert_array_equal(client.compute(y).result(), wanted)
            np.testing.assert_allclose(client.compute((y - y.mean()).std()).result(), wanted.std())
        cluster.adapt(minimum=1, maximum=4)
        futures = [client.compute((y * n).sum()) for n in range(20)]
        np.testing.assert_allclose(client.gather(futures), [n * wanted.sum() for n in range(20)])
        assert any(client.run(lambda dask_worker: dask_worker.data.cache.stats().evictions).values())
