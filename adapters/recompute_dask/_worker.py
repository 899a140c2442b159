"""A worker of dask.distributed that recomputes or spills, whichever is cheaper.

    LocalCluster(worker_class=rd.Nanny)              processes
    LocalCluster(worker_class=rd.Worker)             threads of this process
    dask worker --worker-class recompute_dask.Worker scheduler-address:8786

Only where values go in and out it differs from Dask's own: what a task takes is brought back in a thread before the
task runs, and its result is entered with the task as its recipe. The state machine is Dask's, and knows nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Final, TypeVar

import distributed

from recompute_dask._installed import check_version

check_version("distributed", distributed.__version__)  # type: ignore[attr-defined]  # it is there

import dask  # noqa: E402
from dask._task_spec import GraphNode  # noqa: E402
from dask.utils import format_bytes, key_split, parse_bytes  # noqa: E402
from distributed.threadpoolexecutor import ThreadPoolExecutor  # noqa: E402  # at its end its threads are not waited for
from distributed.utils import RateLimiterFilter, set_thread_state  # noqa: E402
from distributed.worker import WORKER_ANY_RUNNING, _worker_cvar  # noqa: E402
from distributed.worker_state_machine import (  # noqa: E402
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    GatherDepSuccessEvent,
    TaskState,
)
from tornado.ioloop import PeriodicCallback  # noqa: E402

from recompute_dask._payloads import copied, refuses_writes, sendable  # noqa: E402
from recompute_dask._recipe import Held, Recipe, held_of, holds, own_task  # noqa: E402
from recompute_dask._values import Values  # noqa: E402

T = TypeVar("T")
_MAX_PARTS_COPIED: Final = 100
"""Parts of containers that are copied here, and not in a thread."""
_NOTHING: Final[Mapping[Any, Any]] = {}

logger = logging.getLogger(__name__)
logger.addFilter(RateLimiterFilter("Unmanaged memory use is high", rate="300s"))  # as Dask's own


class Worker(distributed.Worker):
    """A worker whose values are evicted by what it costs to get them back, and recomputed or read from the disk.

    Takes what `distributed.Worker` takes, but `data`. Of Dask's configuration: the budget is `memory_limit` times
    `distributed.worker.memory.target`; `distributed.worker.memory.max-spill` limits the disk, and `recompute.bandwidth`
    ("200MB") what is written and read a second.
    """

    def __init__(self, *args: Any, data: Any = None, **options: Any) -> None:
        if data is not None:
            raise ValueError("a worker that recomputes has its own data; use distributed.Worker for another mapping")
        most = dask.config.get("distributed.worker.memory.max-spill")
        disk = {
            "disk": None if most is False else int(parse_bytes(most)),
            "bandwidth": dask.config.get("recompute.bandwidth", None),
        }
        super().__init__(*args, data=(Values, disk), **options)
        assert isinstance(self.data, Values)
        self._values = self.data
        manager = self.memory_manager
        fraction = manager.memory_target_fraction or manager.memory_spill_fraction
        limit = manager.memory_limit
        self._values.set_budget(int(limit * fraction) if limit and fraction else inf)
        self._threads_to_bring = ThreadPoolExecutor(self.state.nthreads, thread_name_prefix="recompute")
        self._thread_ahead = ThreadPoolExecutor(1, thread_name_prefix="recompute-ahead")
        self._is_ahead = False
        self._next: list[TaskState] = []
        self._until_next_look = 0
        self._writers: set[str] = set()
        self.handlers["update_data"] = self._update_data_in_thread
        self._spills_at = limit * manager.memory_spill_fraction if limit and manager.memory_spill_fraction else inf
        self._spills_until = limit * fraction if limit and fraction else inf
        if self._spills_at < inf:
            interval = manager.memory_monitor_interval * 1000  # milliseconds
            self.periodic_callbacks["recompute_spill"] = PeriodicCallback(self._spill, interval)

    async def execute(self, key: Any, *, stimulus_id: str) -> Any:
        """Run a task whose arguments are in memory, and have its result with how to make it again."""
        state = self.state.tasks[key]
        spec, annotations = state.run_spec, state.annotations or {}
        assert spec is not None
        self._values.soon.look(self._following)
        held = await self._held([dependency.key for dependency in state.dependencies])
        values = await self._bring(held)
        arrays, containers = holds(spec)
        if containers:  # before the task changes them
            spec = own_task(spec) if containers <= _MAX_PARTS_COPIED else await self._in_thread(own_task, spec)
        if key_split(key) in self._writers:
            values = await self._in_thread(copied, values)
        self._bring_next()
        with self._values.at_hand(values):
            event = await super().execute(key, stimulus_id=stimulus_id)
        if isinstance(event, ExecuteFailureEvent) and held and refuses_writes(event.exception_text):
            self._writers.add(key_split(key))
            values = await self._in_thread(copied, values)
            with self._values.at_hand(values):
                event = await super().execute(key, stimulus_id=stimulus_id)
        del values
        if isinstance(event, ExecuteSuccessEvent) and key not in self.state.actors:
            again = (
                annotations.get("recompute", True)
                and not arrays  # it may write into them
                and self._values.is_made_again(spec, event.value, event.nbytes, held)
            )
            await self._enter({key: event.value}, spec if again else None, held, event.stop - event.start)
        return event

    async def gather_dep(self, worker: str, to_gather: Collection[Any], total_nbytes: int, *, stimulus_id: str) -> Any:
        """Get values from another worker."""
        event = await super().gather_dep(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
        if isinstance(event, GatherDepSuccessEvent):
            await self._enter(event.data)
        return event

    async def get_data(self, comm: Any, keys: Collection[Any], *args: Any, **options: Any) -> Any:
        """Give values to another worker, or to a client."""
        held = await self._held(keys)
        values = await self._bring(held)
        for key, handle in held.items():
            values[key] = sendable(values[key], writable=handle.writable)
        with self._values.at_hand(values):
            return await super().get_data(comm, keys, *args, **options)

    async def close(self, *args: Any, **options: Any) -> Any:
        """Close the worker."""
        closed = await super().close(*args, **options)
        for threads in (self._threads_to_bring, self._thread_ahead):
            threads.shutdown(wait=False)
        self._values.close()
        return closed

    async def _update_data_in_thread(self, data: dict[Any, Any], **options: Any) -> Any:
        """Have values that a client sends."""
        await self._enter(data)
        return self.update_data(data, **options)

    def _following(self, count: int) -> Iterator[Iterable[Held]]:
        """What the next tasks take that are ready. To find them takes time: not for each task."""
        self._until_next_look -= 1
        if self._until_next_look < 0:
            self._until_next_look = count // 4
            self._next = list(self.state.ready.peekn(count))
        for task in self._next:
            if task.state == "ready":
                yield self._values.held([dependency.key for dependency in task.dependencies]).values()

    # In threads

    def _bring_next(self) -> None:
        """What the next task takes comes into memory while this one runs, if it is small beside the budget."""
        if self._is_ahead or not self.state.ready or self.status not in WORKER_ANY_RUNNING:
            return
        following = self.state.ready.peek()
        held = self._values.held([dependency.key for dependency in following.dependencies])
        missing = {key: handle for key, handle in held.items() if not handle.resident}
        if missing and self._values.is_little(sum(self.state.tasks[key].get_nbytes() for key in missing)):
            self._is_ahead = True
            done = self._thread_ahead.submit(self._values.fetch, missing)
            done.add_done_callback(self._is_not_ahead)

    def _is_not_ahead(self, _: object) -> None:
        self._is_ahead = False

    async def _held(self, keys: Collection[Any]) -> dict[Any, Held]:
        """The values of these keys, once they have arrived."""
        for arriving in self._values.arriving(keys):
            await asyncio.wrap_future(arriving)
        return self._values.held(keys)

    async def _bring(self, held: dict[Any, Held]) -> dict[Any, Any]:
        values = self._values.look(held)
        return await self._in_thread(self._values.bring, held) if values is None else values

    async def _enter(
        self,
        values: Mapping[Any, Any],
        task: GraphNode | None = None,
        held: Mapping[Any, Held] = _NOTHING,
        cost: float = 0.0,
    ) -> None:
        """Have values that Dask is about to store; `task`: what makes the one that there is, of `held`."""

        def enter(waits: bool) -> bool:
            """Whether all could be entered."""
            entered = True
            for key in list(rest):
                try:
                    if task is None:
                        entered = self._values.enter(key, rest[key], cost, waits=waits)
                    else:
                        recipe = Recipe(task, held, self._writers, partial(self._outside, key))
                        entered = self._values.enter_made(key, rest[key], recipe, held_of(held), cost, waits=waits)
                except TypeError:  # it can be read only once: it will be stored as what it is
                    logger.debug("The result of %r stays outside of the cache", key, exc_info=True)
                except Exception:
                    logger.warning("The result of %r cannot be computed again", key, exc_info=True)
                if not entered:
                    return False
                del rest[key]
            return True

        def enter_in_thread() -> None:
            enter(waits=True)
            try:
                self._values.forget_released_sources()
            except Exception:  # a value that has to come back for that, and cannot
                logger.warning("What was released is remembered", exc_info=True)

        rest = dict(values)
        if not enter(waits=False) or self._values.has_released_sources:
            await self._in_thread(enter_in_thread)
        loop = asyncio.get_running_loop()
        for key in values:
            loop.call_later(1, self._values.forget_entered, key)

    async def _spill(self) -> None:
        """Evict while the process exceeds `distributed.worker.memory.spill`."""
        memory = self.monitor.get_process_memory
        if memory() > self._spills_at:
            await self._in_thread(self._values.release, lambda: memory() <= self._spills_until)
            if memory() > self._spills_at:
                logger.warning("Unmanaged memory use is high: %s, and nothing is left to evict", format_bytes(memory()))

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads_to_bring, function, *arguments)

    @contextmanager
    def _outside(self, key: Any) -> Iterator[None]:
        """A task that runs in the block is run again, where its result is needed: this worker is where it runs."""
        token = _worker_cvar.set(self)
        try:
            with set_thread_state(execution_state=self.execution_state, key=key):
                yield
        finally:
            _worker_cvar.reset(token)


class Nanny(distributed.Nanny):
    """A process with a `Worker` that recomputes or spills."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"worker_class": Worker, **options})
