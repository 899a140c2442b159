"""One replay in the published machine, and the peak of a run without a budget, of which budgets are shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, get_args

from recompute._cache import limits_of
from recompute._simulator.neighbourhoods import Value, knows
from recompute._simulator.published import Machine, OutOfMemory
from recompute._simulator.replay import Replay
from recompute._simulator.run import Counts, Status, StepLoop
from recompute._traces.program import Program
from recompute.events import Listener
from recompute.policies import Policy, ReleaseMode, Search, policy_of, search_of


class PublishedReplay(StepLoop):
    """One replay of a program in a `Machine`, as `Replay` is one in a cache: `run` it once, or `again` and again."""

    short = OutOfMemory

    def __init__(
        self,
        program: Program,
        budget: Mapping[str, int] | None,
        *,
        policy: str | Policy,
        search: str | Search = "exact",
        release: ReleaseMode = "eager",
        limit: float = 2.0,
    ) -> None:
        if release not in get_args(ReleaseMode):
            raise ValueError(f"unknown release mode {release!r}; choose from {', '.join(get_args(ReleaseMode))}")
        chosen, how = policy_of(policy), search_of(search)  # type: ignore[arg-type]  # names are checked there
        if not knows(chosen):
            raise ValueError(
                f"the policy {chosen.name!r} needs the library's machine: the published one does not know it"
            )
        self.search = how.name
        self.machine = Machine(limits_of(budget), chosen, how, release)
        self._limit = limit
        self._start(program)

    def _start(self, program: Program) -> None:
        self.program = program
        self.values: dict[int, Value] = {}
        self.machine.left = (self._limit - 1) * program.model_time

    def counts(self) -> Counts:
        """The counts so far."""
        machine = self.machine
        return Counts(
            model_time=machine.clock - machine.remat_time,
            remat_time=machine.remat_time,
            peak=sum(pool.peak for pool in machine.pools.values()),
            evictions=machine.evictions,
            rematerializations=machine.rematerializations,
            scored=sum(pool.candidates.scored for pool in machine.pools.values()),
        )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` for every event; returns a function that stops it."""
        listeners = self.machine.listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def again(self, progress: Callable[[int], None] | None = None, *, program: Program | None = None) -> Status:
        """Drop everything but constants, and run the program, or another one, as the next round."""
        for _, value in sorted(self.values.items(), reverse=True):
            if value.referred:
                self.machine.drop(value)
        self._start(program or self.program)
        return self.run(progress)

    def _source(self, value: int) -> None:
        program = self.program
        storage = program.storages[value]
        self.values[value] = self.machine.source(program.sizes[storage], program.devices[storage])

    def _call(self, number: int) -> None:
        call = self.program.calls[number]
        arguments = tuple([self.values[argument] for argument in call.arguments])
        self.values.update(zip(call.results, self.machine.call(call, arguments, self.program), strict=True))

    def _keep(self, value: int) -> None:
        self.values[value].referred = True

    def _drop(self, value: int) -> None:
        made = self.values[value]
        if self.program.makers[value] >= 0 and made.referred:
            self.machine.drop(made)

    do: ClassVar = {
        "source": _source,
        "call": _call,
        "get": lambda replay, value: replay.machine.get(replay.values[value]),
        "keep": _keep,
        "drop": _drop,
        "pin": lambda replay, value: replay.machine.pin(replay.values[value]),
        "unpin": lambda replay, value: replay.machine.unpin(replay.values[value]),
        "detach": lambda replay, value: replay.machine.detach(replay.values[value]),
        "evict": lambda replay, value: replay.machine.request(replay.values[value]),
        "hold": lambda replay, value: replay.machine.hold(replay.values[value]),
        "let go": lambda replay, value: replay.machine.let_go(replay.values[value]),
    }


def baseline(program: Program) -> dict[str, int]:
    """The bytes of each device at the peak of a run without a budget: 100 % of a budget ratio.

    The published simulator takes 100 % from a run in which the constants, too, go with their last reference; under a
    budget they stay to the end.
    """
    if program.published and not program.revived:
        peak = program.most_in_use()
    elif program.published:
        published = PublishedReplay(program, None, policy="none")
        published.run()
        peak = {device: pool.peak for device, pool in published.machine.pools.items()}
    else:
        replay = Replay(program, None, policy="none")
        replay.run()
        peak = {pool.device: pool.peak for pool in replay.cache.stats().pools}
    return peak or {"cpu": 0}  # of a program that holds nothing, which can have a budget all the same
