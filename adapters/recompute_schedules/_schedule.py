"""The schedule: which checkpoints to store, copy and drop, and when, so that they fit in bytes and time is least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

from checkpoint_schedules import CheckpointSchedule, Copy, EndForward, EndReverse, Forward, Move, Reverse, StorageType

import recompute as rc
from recompute.text import format_bytes, parse_budget
from recompute_schedules._costs import Meter, Prices, Sizes, checked_seconds, probe
from recompute_schedules._online import Online
from recompute_schedules._tables import Choice, EqualSteps, Kind, UnequalSteps

RAM, DISK, WORK, NONE = StorageType.RAM, StorageType.DISK, StorageType.WORK, StorageType.NONE
Size = int | str


@dataclass(frozen=True)
class _Checkpoint:
    step: int
    kind: Kind
    """Restart data, or adjoint dependencies."""
    where: StorageType
    nbytes: int


class _Stored:
    """The checkpoints that are stored, oldest first, and their bytes."""

    def __init__(self, sizes: Sizes) -> None:
        self.checkpoints: list[_Checkpoint] = []
        self.used = {RAM: 0, DISK: 0}
        self.peak = {RAM: 0, DISK: 0}
        self._sizes = sizes

    def free(self, where: StorageType) -> int:
        """Bytes."""
        return (self._sizes.ram if where is RAM else self._sizes.disk) - self.used[where]

    def push(self, step: int, kind: Kind, where: StorageType) -> None:
        """Store one."""
        nbytes = self._sizes.state if kind is Kind.STATE else self._sizes.deps
        self.checkpoints.append(_Checkpoint(step, kind, where, nbytes))
        self._count(where, nbytes)

    def pop(self, checkpoint: _Checkpoint) -> None:
        """Drop one."""
        self.checkpoints.remove(checkpoint)
        self.used[checkpoint.where] -= checkpoint.nbytes

    def states(self) -> list[_Checkpoint]:
        """Those of restart data."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.kind is Kind.STATE]

    def down(self) -> Any:
        """The action that moves the oldest restart data from RAM to the disk."""
        number, old = next((number, old) for number, old in enumerate(self.checkpoints) if old.where is RAM)
        self.used[RAM] -= old.nbytes
        self._count(DISK, old.nbytes)
        self.checkpoints[number] = replace(old, where=DISK)
        return Move(old.step, RAM, DISK)

    def _count(self, where: StorageType, nbytes: int) -> None:
        self.used[where] += nbytes
        self.peak[where] = max(self.peak[where], self.used[where])


class Schedule(CheckpointSchedule):  # type: ignore[misc]  # checkpoint_schedules has no types
    """A checkpointing schedule within bytes.

    Parameters
    ----------
    ram, disk
        Bytes for checkpoints, as an int or as text such as "2GB". Stored checkpoints never take more. `working_bytes`
        come on top. `disk` may be an `rc.Disk`, too, whose folder `run` then uses. None: no disk. They are the two
        storages of `checkpoint_schedules`, to which its actions refer; hence not `tiers`, of which there is any number.
    state_bytes, deps_bytes
        Bytes of the restart data at the start of a step, and of the adjoint dependencies of one step. None: as large as
        restart data. Dependencies are stored where that saves time; never, if they are larger than `ram` and `disk`.
    max_n
        The number of steps. None: `finalize(n)` says it when the forward has ended; then a step must need nothing but
        the restart data before it, since checkpoints are dropped while the forward goes on.
    step_seconds
        What steps take: None, all the same; a number, all so many seconds; a sequence, for each step; "measured": the
        first sweep measures each, and later sweeps are planned with that. `measured` has it.
    disk_bandwidth
        Bytes a second of the disk; "measured": as a file that is written and read shows, corrected by what is read
        later. It is compared with `step_seconds`. None: the disk takes no time, unless `disk` has a bandwidth.
    overlap
        Writes to the disk go on while the forward does, as `run` does it where RAM has room: only what takes longer
        than the steps to the next action counts.
    sweeps
        Adjoint sweeps; None: any number. With more than one the restart data of step 0 stay stored, and each further
        sweep runs the forward again.
    clock
        Seconds.

    Known length, equal steps: as few forward steps as any schedule. Planning takes O(min(max_n, 1024)^2 x levels); the
    levels are at most the checkpoints that fit, or 256; with unequal steps O(max_n^3 x levels), and blocks of steps
    instead of steps where that would take more than some seconds. See `_tables` and `_online` for sources.

    Raises ValueError or TypeError, with the cure, for sizes in which nothing can be reversed and for wrong arguments.
    """

    _n: int  # of the base class: where the forward is,
    _r: int  # how many steps are reversed,
    _max_n: int | None  # and how many steps there are

    def __init__(
        self,
        *,
        ram: Size,
        state_bytes: Size,
        disk: Size | rc.Disk | None = None,
        max_n: int | None = None,
        deps_bytes: Size | None = None,
        step_seconds: float | Sequence[float] | Literal["measured"] | None = None,
        disk_bandwidth: Size | Literal["measured"] | None = None,
        overlap: bool = False,
        sweeps: int | None = 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if max_n is not None and (not isinstance(max_n, int) or max_n < 1):
            raise ValueError(f"max_n must be a positive number of steps, or None, not {max_n!r}")
        if sweeps is not None and (not isinstance(sweeps, int) or sweeps < 1):
            raise ValueError(f"sweeps must be a positive number, or None for any, not {sweeps!r}")
        self._given = checked_seconds(step_seconds, max_n)
        super().__init__(len(self._given) if isinstance(self._given, list) else max_n)
        state = parse_budget(state_bytes, what="state_bytes")
        deps = state if deps_bytes is None else parse_budget(deps_bytes, what="deps_bytes")
        self.disk_tier = disk if isinstance(disk, rc.Disk) else None if disk is None else rc.Disk(disk)
        on_disk = 0 if self.disk_tier is None else int(min(self.disk_tier.nbytes, 1 << 62))
        self._sizes = Sizes(state, deps, parse_budget(ram, what="ram"), on_disk)
        self._stores = self._max_n != 1 or sweeps != 1
        if self._stores and max(self._sizes.ram, self._sizes.disk) < state:
            raise ValueError(
                f"the restart data of a step take {format_bytes(state)}, and neither ram={ram!r} nor disk={disk!r} "
                f"holds them; give at least ram={state}"
            )
        self.overlap = overlap
        bandwidth = self._bandwidth_of(disk_bandwidth)
        self._meter = Meter(bandwidth, measures=step_seconds == "measured", reads=disk_bandwidth == "measured")
        self._sweeps, self._swept = sweeps, 0
        self._clock = clock
        self._running: tuple[Any, float] | None = None
        self._begun = 0  # where the latest advance began
        self._stored = _Stored(self._sizes)
        self._table: EqualSteps | UnequalSteps | None = None

    def _bandwidth_of(self, given: Size | Literal["measured"] | None) -> tuple[float, float] | None:
        """Bytes a second, written and read; None: transfers take no time."""
        tier = self.disk_tier
        if tier is None:
            if given is not None:
                raise ValueError("disk_bandwidth is of a disk; give disk=, the bytes that checkpoints may take there")
            return None
        if given is None:
            given = tier.bandwidth
        elif self._given is None:
            raise ValueError('disk_bandwidth is compared with step_seconds; give these, too: seconds, or "measured"')
        if given is None or self._given is None:
            return None
        if given == "measured":
            return probe(tier, self._sizes.state)
        pace = float(parse_budget(given, what="disk_bandwidth"))
        return pace, pace

    # What is known

    @property
    def working_bytes(self) -> int:
        """Bytes on top of `ram`: the state that the forward is at, and the adjoint dependencies of one step."""
        return self._sizes.state + self._sizes.deps

    @property
    def sizes(self) -> Sizes:
        """The bytes that were given."""
        return self._sizes

    def used(self, storage: StorageType) -> int:
        """Bytes of the checkpoints that are stored now, in RAM or on the disk."""
        return self._stored.used[storage]

    def peak(self, storage: StorageType) -> int:
        """The most bytes of checkpoints so far."""
        return self._stored.peak[storage]

    @property
    def measured(self) -> list[float] | None:
        """Seconds of each step, as measured so far; None: not all are known."""
        return self._meter.seconds(self._max_n)

    @property
    def is_exhausted(self) -> bool:
        """Whether no sweep is left."""
        return self._swept == self._sweeps

    def uses_storage_type(self, storage_type: StorageType) -> bool:
        """Whether checkpoints may lie there."""
        if storage_type not in self._stored.used:
            return storage_type is WORK
        room = self._sizes.ram if storage_type is RAM else self._sizes.disk
        return self._stores and room >= min(self._sizes.state, self._sizes.deps)

    def finalize(self, n: int) -> None:
        """Say that the forward has ended after `n` steps, during or after an advance beyond that or to it.

        Raises RuntimeError if that cannot be.
        """
        if n < 1:
            raise ValueError(f"a forward has at least one step, not {n}")
        if self._max_n is None:
            if not self._begun < n <= self._n:
                raise RuntimeError(
                    f"the forward cannot have ended after {n} steps: the latest advance is from step {self._begun} to "
                    f"{self._n}; call finalize during it or after it"
                )
            self._n = self._max_n = n
        elif n != self._max_n or self._swept or self._r or self._n != n:
            raise RuntimeError(
                f"the forward cannot have ended after {n} steps: it has {self._max_n}, and the schedule is at {self._n}"
            )

    # The actions

    def __next__(self) -> Any:
        now = self._clock()
        if self._running is not None:
            action, since = self._running
            self._meter.learn(action, now - since, self._sizes, self._n)
        self._running = None
        action = super().__next__()
        self._running = action, self._clock()
        return action

    def _iterator(self) -> Iterator[Any]:
        if self._max_n is None:
            yield from self._online()
            yield EndForward()
            self._table = None
            yield from self._sweep(at_hand=False, announce=False)
        else:
            yield from self._sweep(at_hand=True, announce=True)
        while True:
            self._swept += 1
            if not self.is_exhausted:
                self._r, self._table = 0, None
            yield EndReverse()
            if self.is_exhausted:
                return
            yield from self._sweep(at_hand=False, announce=False)

    def _sweep(self, *, at_hand: bool, announce: bool) -> Iterator[Any]:
        """To the adjoint, and back to step 0. `at_hand`: the forward's state is in working memory."""
        steps = self._max_n
        assert steps is not None, "a sweep begins when the length is known"
        while self._r < steps:
            stop = steps - self._r
            kept: _Checkpoint | None = None
            if not at_hand:
                kept = self._stored.checkpoints[-1]
                if kept.kind is Kind.DEPS:
                    self._stored.pop(kept)
                    if kept.step < stop - 1:  # a step between was dropped
                        yield Move(kept.step, kept.where, NONE)
                        continue
                    self._n = stop
                    yield Move(kept.step, kept.where, WORK)
                    self._r += 1
                    yield Reverse(stop, stop - 1, True)
                    continue
                self._n = kept.step
            choice, stays = self._choose(stop, kept)
            if kept is not None:
                if stays:
                    yield Copy(kept.step, kept.where, WORK)
                else:
                    self._stored.pop(kept)
                    yield Move(kept.step, kept.where, WORK)
            yield self._advance(choice)
            at_hand = self._n < stop
            if announce and self._n == steps:
                announce = False
                yield EndForward()
                if self._meter.measures and self._sizes.has_disk:
                    self._table = None
            if choice.kind is Kind.LAST:
                self._r += 1
                yield Reverse(stop, stop - 1, True)

    def _choose(self, stop: int, kept: _Checkpoint | None) -> tuple[Choice, bool]:
        """What to do at the state that the forward is at; and whether its restart data stay in the storage."""
        if self._table is None:
            self._table = self._planned()
        free = {where: self._stored.free(where) for where in (RAM, DISK)}
        where = NONE
        if kept is not None:
            where = kept.where
            free[where] += kept.nbytes
        choice = self._table.choose(self._n, stop, free[RAM], free[DISK], where)
        stays = kept is not None and choice.kind in (Kind.STATE, Kind.NOTHING) and choice.where is where
        if stays:
            return replace(choice, kind=Kind.NOTHING), True
        if kept is None:
            if self._n == 0 and choice.kind is not Kind.STATE and self._is_needed_again(0):
                where = RAM if free[RAM] >= self._sizes.state else DISK
                free[where] -= self._sizes.state
                no_other = max(free.values()) < self._sizes.state and (stop - 2) * self._sizes.deps > free[RAM]
                return Choice(Kind.STATE, stop - 1 if no_other else 1, where), False
            return choice, False
        if not self._is_needed_again(kept.step):
            return choice, False
        free[where] -= kept.nbytes
        if choice.kind is Kind.LAST:
            return choice, True
        if free[RAM] < self._sizes.state and (stop - 1) * self._sizes.deps > free[RAM]:
            return Choice(Kind.NOTHING, stop - 1), True
        choice = self._table.choose(self._n, stop, free[RAM], free[DISK], NONE)
        return Choice(Kind.NOTHING, choice.stop), True  # one storage has one thing for a step

    def _is_needed_again(self, step: int) -> bool:
        """Whether a later sweep needs the restart data of this step."""
        return step == 0 and (self._sweeps is None or self._swept + 1 < self._sweeps)

    def _advance(self, choice: Choice) -> Any:
        """The action that does this."""
        start = self._begun = self._n
        if choice.kind in (Kind.STATE, Kind.DEPS):
            self._stored.push(start, choice.kind, choice.where)
        where = WORK if choice.kind in (Kind.NOTHING, Kind.LAST) else choice.where
        self._n = choice.stop
        return Forward(start, choice.stop, choice.kind is Kind.STATE, choice.kind in (Kind.DEPS, Kind.LAST), where)

    def _planned(self) -> EqualSteps | UnequalSteps:
        steps, prices, sizes = self._max_n, self._prices(), self._sizes
        assert steps is not None, "a plan is made when the length is known"
        seconds = self._given if isinstance(self._given, list) else self.measured if self._swept else None
        if seconds is not None and len(set(seconds)) > 1:
            states = [checkpoint.step for checkpoint in self._stored.states()]
            return UnequalSteps(seconds, sizes, prices, states)
        return EqualSteps(steps, sizes, prices.divided(self._step()))

    def _prices(self) -> Prices:
        """In seconds."""
        state, deps = self._sizes.state, self._sizes.deps
        write, read = self._meter.writing, self._meter.reading
        return Prices(write(state), read(state), write(deps), read(deps), self.overlap)

    def _step(self) -> float:
        """Seconds of a step; as long as nothing is known, as many as its restart data take to be read."""
        if isinstance(self._given, list):
            return sum(self._given) / len(self._given) or 1.0
        if isinstance(self._given, float):
            return self._given
        return self._meter.mean or self._meter.reading(self._sizes.state) or 1.0

    # The forward, as long as its length is not known

    def _online(self) -> Iterator[Any]:
        prices = self._prices().divided(self._step())
        online = Online(self._sizes, prices.write_state + prices.read_state)
        due = 1
        latest: list[_Checkpoint] = []  # dependencies, the oldest first
        while self._max_n is None:
            now = self._n
            is_stored = now == 0
            if now >= due:
                due = now + online.stride(now)
                is_stored, drop = online.decide(now)
                if drop is not None:
                    dropped = next(old for old in self._stored.states() if old.step == drop)
                    self._stored.pop(dropped)
                    yield Move(dropped.step, dropped.where, NONE)
            window = online.window(len(online.states), now)
            while len(latest) > max(0, window - (not is_stored)) or (
                latest and is_stored and self._stored.free(RAM) < self._sizes.state <= self._sizes.ram
            ):
                self._stored.pop(latest[0])
                yield Move(latest[0].step, RAM, NONE)
                del latest[0]
            if is_stored:
                if self._stored.free(RAM) < self._sizes.state <= self._sizes.ram:
                    yield self._stored.down()
                where = RAM if self._stored.free(RAM) >= self._sizes.state else DISK
                yield self._advance(Choice(Kind.STATE, now + 1 if window else max(due, now + 1), where))
            elif window:
                yield self._advance(Choice(Kind.DEPS, now + 1, RAM))
                latest.append(self._stored.checkpoints[-1])
            else:
                yield self._advance(Choice(Kind.NOTHING, max(due, now + 1)))
