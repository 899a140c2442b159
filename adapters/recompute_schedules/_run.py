"""Follows a schedule with plain functions: for a forward without a tape."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

from checkpoint_schedules import Copy, EndForward, EndReverse, Forward, Move, Reverse, StorageType

import recompute as rc
from recompute.text import format_bytes
from recompute_schedules._schedule import Schedule

S = TypeVar("S")
A = TypeVar("A")
RAM, DISK, WORK = StorageType.RAM, StorageType.DISK, StorageType.WORK


@dataclass(frozen=True)
class Result(Generic[S, A]):
    """What a sweep came to. Bytes are those of the checkpoints that were stored, as `rc.sizeof` counts them."""

    state: S
    """After the last step."""
    adjoint: A
    forward_steps: int
    ram_peak: int
    disk_peak: int
    seconds: float


def run(
    schedule: Schedule,
    forward: Callable[[int, S], S],
    reverse: Callable[[int, Any, A], A],
    state: S,
    *,
    adjoint: Callable[[S], A],
    record: Callable[[int, S], tuple[S, Any]] | None = None,
    until: Callable[[int, S], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result[S, A]:
    """One sweep: the forward from a state, and the adjoint back to step 0.

    Parameters
    ----------
    forward
        `forward(n, state)` gives the state after step n. It must not change the one that it got.
    reverse
        `reverse(n, deps, adjoint)` gives the adjoint before step n from the one after it.
    adjoint
        The adjoint after the last step, given the last state.
    record
        As `forward`, with the adjoint dependencies of the step beside the state. None: they are the state before it.
    until
        `until(n, state)`: whether the forward ends after n steps, with this state. For a schedule of unknown length.
    progress
        Called after each action with the forward steps run and the steps reversed so far.

    States on the disk are packed as in a cache's tier, into the folder of the schedule's disk. With `overlap` they are
    written by a thread, as long as RAM has room for what is not written yet.

    Raises ValueError if checkpoints are larger than the schedule was told; what the functions raise passes through.
    """
    if schedule.is_exhausted:
        raise ValueError("the schedule has ended; make a new one, or give it more sweeps")
    follower: _Follower[S] = _Follower(schedule, forward, record, until)
    start = perf_counter()
    if schedule.used(RAM) or schedule.used(DISK):  # a later sweep begins with step 0
        follower.store.put(0, RAM if schedule.used(RAM) else DISK, (state, None, True), schedule.sizes.state)
    value: Any = None
    follower.state = last = state
    with follower.store:
        for action in schedule:
            if isinstance(action, Forward):
                follower.advance(action)
                if follower.at == schedule.max_n and value is None:
                    last, value = follower.state, (adjoint(follower.state),)
            elif isinstance(action, Reverse):
                for step in action:
                    value = (reverse(step, follower.deps, value[0]),)
            elif isinstance(action, (Copy, Move)):
                follower.transfer(action)
            elif not isinstance(action, (EndForward, EndReverse)):
                raise TypeError(f"an unknown action: {action!r}")
            if progress is not None:
                progress(follower.ran, schedule.r)
            if isinstance(action, EndReverse):
                break
    store = follower.store
    return Result(last, value[0], follower.ran, store.peak[RAM], store.peak[DISK], perf_counter() - start)


class _Follower(Generic[S]):
    """Working memory: the forward's state, and the dependencies of one step."""

    def __init__(self, schedule: Schedule, forward: Any, record: Any, until: Any) -> None:
        self.schedule, self.forward, self.until = schedule, forward, until
        self.record = record or (lambda step, state: (forward(step, state), state))
        self.store = _Store(schedule)
        self.at: int | None = 0
        self.ran = 0
        self.state: Any = None
        self.deps: Any = None

    def advance(self, action: Any) -> None:
        """Run steps, and store what is to be stored."""
        sizes, state, deps = self.schedule.sizes, self.state, None
        if action.write_ics:
            self.store.put(action.n0, action.storage, (state, None, True), sizes.state)
        for step in range(action.n0, action.n1):
            if action.write_adj_deps:
                state, deps = self.record(step, state)
            else:
                state = self.forward(step, state)
            self.ran += 1
            self.at = step + 1
            if self.schedule.max_n is None:
                if self.until is None:
                    raise ValueError("the length of the schedule is not known; give until=, or the schedule max_n=")
                if self.until(step + 1, state):
                    self.schedule.finalize(step + 1)
                    break
        self.state = state
        if action.write_adj_deps and action.storage is not WORK:
            self.store.put(action.n0, action.storage, (None, deps, False), sizes.deps)
            deps = None
        self.deps = deps

    def transfer(self, action: Any) -> None:
        """Copy or move between storages."""
        moves = isinstance(action, Move)
        if action.to_storage is StorageType.NONE:
            self.store.drop(action.n, action.from_storage)
            return
        content, nbytes = self.store.get(action.n, action.from_storage)
        if moves:
            self.store.drop(action.n, action.from_storage)
        if action.to_storage is not WORK:
            self.store.put(action.n, action.to_storage, content, nbytes)
            return
        state, self.deps, has_state = content
        self.at, self.state = (action.n, state) if has_state else (None, None)


class _Store:
    """Checkpoints in RAM and in files; the bytes of what is still being written count as RAM."""

    def __init__(self, schedule: Schedule) -> None:
        self._limits = {RAM: schedule.sizes.ram, DISK: schedule.sizes.disk}
        self._overlap = schedule.overlap
        self._files = None if schedule.disk_tier is None else schedule.disk_tier.open()
        self._entries: dict[tuple[int, StorageType], tuple[Any, int]] = {}
        self._used = {RAM: 0, DISK: 0}
        self.peak = {RAM: 0, DISK: 0}
        self._thread: ThreadPoolExecutor | None = None
        self._writing: tuple[Future[Any], int] | None = None

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        if self._thread is not None:
            self._thread.shutdown()
        for number, where in list(self._entries):
            self.drop(number, where)

    def put(self, step: int, where: StorageType, content: Any, most: int) -> None:
        nbytes = sum([rc.sizeof(part) for part in content[:2] if part is not None])
        if nbytes > most:
            name = "state_bytes" if content[2] else "deps_bytes"
            raise ValueError(
                f"a checkpoint of step {step} takes {format_bytes(nbytes)}, more than {name} says; give {name}={nbytes}"
            )
        self._used[where] += nbytes
        if where is RAM:
            if self._writing is not None and self._used[RAM] + self._writing[1] > self._limits[RAM]:
                self._wait()
            self._entries[step, RAM] = content, nbytes
        else:
            self._wait()
            self._entries[step, DISK] = self._write(content, nbytes), nbytes
        in_flight = self._writing[1] if self._writing is not None else 0
        self.peak[RAM] = max(self.peak[RAM], self._used[RAM] + in_flight)
        self.peak[DISK] = max(self.peak[DISK], self._used[DISK])

    def _write(self, content: Any, nbytes: int) -> Any:
        """Where it lies, or will lie."""

        def write() -> Any:
            assert self._files is not None, "the schedule has a disk"
            head, buffers = _PACKER.pack(content)
            return head, self._files.write([memoryview(part).cast("B") for part in buffers], nbytes)

        if not self._overlap or self._used[RAM] + nbytes > self._limits[RAM]:
            return write()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "recompute-schedules")
        future = self._thread.submit(write)
        self._writing = future, nbytes
        return future

    def _wait(self) -> None:
        """Until nothing is being written. Raises what the write has raised."""
        if self._writing is not None:
            future, self._writing = self._writing[0], None
            future.result()

    def get(self, step: int, where: StorageType) -> tuple[Any, int]:
        content, nbytes = self._entries[step, where]
        if where is DISK:
            assert self._files is not None, "the schedule has a disk"
            self._wait()
            head, place = content.result() if isinstance(content, Future) else content
            with self._files.read(place) as load:
                content = _PACKER.unpack(head, lambda memory: load(memoryview(memory).cast("B")))
        return content, nbytes

    def drop(self, step: int, where: StorageType) -> None:
        content, nbytes = self._entries.pop((step, where))
        self._used[where] -= nbytes
        if where is DISK:
            assert self._files is not None, "the schedule has a disk"
            self._wait()
            self._files.remove((content.result() if isinstance(content, Future) else content)[1])


_PACKER = rc.adapters.Adapter()
