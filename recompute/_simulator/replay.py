"""One replay: the steps of a recorded program, done in a cache with a virtual clock, or in the published machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import Any, Final, get_args

from recompute._cache import Cache, limits_of
from recompute._errors import BudgetError
from recompute._recomputable import Recomputable
from recompute._simulator import victims
from recompute._simulator.machine import Placeholder, engine_options
from recompute._simulator.published import Machine, OutOfMemory
from recompute._simulator.run import Counts, Status, Thrashing
from recompute._simulator.tier import SimulatedStore, SimulatedTier
from recompute._traces.program import Call, Program, StepKind
from recompute.events import Listener
from recompute.extend import EVICTED, Value
from recompute.policies import Policy, ReleaseMode, Search, policy_of, search_of

_END: Final = 1 << 20
"""An instruction after the last of any code."""

_HERE: Final = (compile("0", "<trace>", "exec"), _END)


@lru_cache(4096)
def _code(place: str) -> CodeType:
    """Code that is at a place, as far as messages and events can tell."""
    name, _, line = place.rpartition(":")
    return _HERE[0].replace(co_filename=name, co_firstlineno=int(line) if line.isdecimal() else 1)


class _CutShort(Exception):
    """A round was not finished."""


class _Clock:
    """Tells an operation its cost: zero when asked before it ran, its cost when asked after."""

    def __init__(self, most: float) -> None:
        self.elapsed = 0.0
        self.left = most
        """Recomputation that is still allowed, in units of the program."""

    def __call__(self) -> float:
        elapsed, self.elapsed = self.elapsed, 0.0
        return elapsed


class _Rerun:
    """The function of a replayed operation: takes its time, and returns placeholders."""

    __slots__ = ("__name__", "call", "clock", "makes", "room", "runs")

    def __init__(self, program: Program, call: Call, clock: _Clock, aliased: Set[int], room: int | None) -> None:
        self.__name__ = call.name
        self.call = call
        self.clock = clock
        self.runs = 0
        at: dict[int, int] = {}  # storage -> position among the arguments
        for position, value in enumerate(call.arguments):
            at.setdefault(program.storages[value], position)
        first: dict[int, int] = {}  # storage -> position among the results, counted from -1 downwards
        # (bytes, device, where to find the memory, whether others will share it)
        self.makes: list[tuple[int, str, int | None, bool]] = []
        for number, value in enumerate(call.results):
            storage = program.storages[value]
            where = at.get(storage, first.get(storage))
            first.setdefault(storage, -1 - number)
            self.makes.append((program.sizes[storage], program.devices[storage], where, storage in aliased))
        # (device, bytes) to be asked for before the first run; `room`: the bytes, where only these were known
        self.room = [(device, size) for size, device, where, _ in self.makes if where is None]
        if room is not None:
            self.room = [(self.makes[0][1], room)] if room else []

    def __call__(self, *payloads: Placeholder) -> Any:
        call, clock = self.call, self.clock
        cost = call.cost
        if self.runs:
            if call.again:
                cost = call.again[min(self.runs, len(call.again)) - 1]
            clock.left -= cost
            if clock.left < 0:
                raise Thrashing
        self.runs += 1
        clock.elapsed = cost
        made: list[Placeholder] = []
        for size, device, where, aliased in self.makes:
            if where is None:  # whoever holds an alias holds the memory, but not the first payload on it
                owner = Placeholder(size, device, None) if aliased else None
            else:
                shared = payloads[where] if where >= 0 else made[-1 - where]
                owner = shared.owner or shared
            made.append(Placeholder(size, device, owner))
        return made if len(made) > 1 else made[0]


class Replay:
    """One replay of a program: `run` it once, or `again` and again, as rounds of one that repeats."""

    def __init__(
        self,
        program: Program,
        budget: Mapping[str, int] | None,
        *,
        policy: str | Policy,
        search: str | Search = "exact",
        release: ReleaseMode = "eager",
        limit: float = 2.0,
        effort: float | None = None,
        tier: SimulatedTier | None = None,
        log: int = 0,
    ) -> None:
        self.clock = _Clock(0.0)
        self._limit = limit
        self.cache = Cache(
            budget,
            policy=policy,  # type: ignore[arg-type]  # names are checked there
            search=search,  # type: ignore[arg-type]
            release=release,
            clock=self.clock,
            foresight=effort is not None,
            tiers=() if tier is None else tier,
            log=log,
            settings=engine_options(effort or 0.0),
        )
        self.cache.engine.memory.neighbourhood.keeps = program.settings.get("keeps") is not False
        tiers = self.cache.engine.memory.tiers
        self._stores = [] if tiers is None else [store for _, store in tiers.all() if isinstance(store, SimulatedStore)]
        self._start(program)

    @property
    def search(self) -> str:
        return self.cache.search.name

    def counts(self) -> Counts:
        """What it has done so far."""
        waited = self.cache.engine.meter.moving_time + sum([store.backlog for store in self._stores])
        stats = self.cache.stats()
        return Counts(
            model_time=stats.model_time,
            remat_time=stats.remat_time,
            peak=stats.peak,
            evictions=stats.evictions,
            rematerializations=stats.rematerializations,
            scored=stats.scored,
            waited=waited,
            written=sum(tier.written for tier in stats.tiers),
            read=sum(tier.read for tier in stats.tiers),
        )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """As `Cache.subscribe`."""
        return self.cache.subscribe(listener)

    def _start(self, program: Program) -> None:
        """At the beginning of a program: nothing has been done yet, and nothing is referred to any more."""
        self.program = program
        self._evicted = {which for kind, which in program.steps if kind == "evict"}
        counts = Counter(program.storages)
        self._aliased = frozenset(storage for storage, count in counts.items() if count > 1)
        count = len(program.storages)
        self._values: list[Value | None] = [None] * count
        self._handles: list[Recomputable[Any] | None] = [None] * count
        self._held: dict[int, list[Any]] = {}  # value -> payloads that are kept outside, the oldest first
        self.clock.left = (self._limit - 1) * program.model_time
        clock, meter = self.clock, self.cache.engine.meter

        def pass_time(units: float) -> None:
            clock.elapsed += units

        for store in self._stores:
            store.run_in(program.unit, lambda: meter.now, pass_time)

    def again(self, progress: Callable[[int], None] | None = None, *, program: Program | None = None) -> Status:
        """Let go of all there is, and run the program, or another one, as the next round of one that repeats.

        Nothing is learnt from a round that does not finish.
        """
        self._start(program or self.program)
        status: Status = "ok"
        with suppress(_CutShort), self.cache.iteration():
            status = self.run(progress)
            if status != "ok":
                raise _CutShort
        return status

    def run(self, progress: Callable[[int], None] | None = None) -> Status:
        """Replay all steps; `progress(steps)` is told now and then how many are done."""
        try:
            for number, (kind, which) in enumerate(self.program.steps):
                _DO[kind](self, which)
                if progress is not None and not number & 0xFF:
                    progress(number)
            for value in self.program.outputs:
                self._handle(value).pin()
        except BudgetError:
            return "oom"
        except Thrashing:
            return "thrash"
        return "ok"

    def _source(self, value: int) -> None:
        storage = self.program.storages[value]
        payload = Placeholder(self.program.sizes[storage], self.program.devices[storage], None)
        self._enter(value, self.cache.extend.source(payload, Recomputable))

    def _call(self, number: int) -> None:
        call, cache = self.program.calls[number], self.cache
        arguments = tuple([self._value(argument) for argument in call.arguments])
        rerun = _Rerun(self.program, call, self.clock, self._aliased, call.room)
        place = (_code(call.place), _END) if call.place else _HERE
        made = cache.extend.run(rerun, arguments, arguments, place, handle=Recomputable, nout=len(call.results))
        for value, handle in zip(call.results, made, strict=True):
            self._enter(value, handle)

    def _enter(self, value: int, handle: Recomputable[Any]) -> None:
        self._values[value] = handle.node
        self._handles[value] = handle

    def _value(self, value: int) -> Value:
        found = self._values[value]
        assert found is not None, f"value {value} is used before it is made"
        return found

    def _handle(self, value: int) -> Recomputable[Any]:
        handle = self._handles[value]
        assert handle is not None, f"value {value} is used without a reference"
        return handle

    def _keep(self, value: int) -> None:
        if self._handles[value] is not None:
            return
        self._handles[value] = Recomputable(self.cache, self._value(value))

    def _drop(self, value: int) -> None:
        if value not in self.program.revived:
            self._handles[value] = None
            if value not in self._evicted:
                self._values[value] = None

    def _evict(self, value: int) -> None:
        found = self._values[value]
        if found is not None:
            self.cache.extend.evict(found)

    def _hold(self, value: int) -> None:
        found, held = self._values[value], self._held.setdefault(value, [])
        payload = None if found is None else found.payload
        held.append(held[-1] if held and payload in (None, EVICTED) else payload)


# Not bound to a replay, which would then refer to itself: it goes with its last reference, before its cache does, not
# together with it whenever the collector comes.
_DO: Final[dict[StepKind, Callable[[Replay, int], object]]] = {
    "source": Replay._source,
    "call": Replay._call,
    "get": lambda replay, value: replay._handle(value).get(),
    "keep": Replay._keep,
    "drop": Replay._drop,
    "pin": lambda replay, value: replay._handle(value).pin(),
    "unpin": lambda replay, value: replay._handle(value).unpin(),
    "detach": lambda replay, value: replay._handle(value).detach(),
    "evict": Replay._evict,
    "hold": Replay._hold,
    "let go": lambda replay, value: replay._held[value].pop(0),
}


class PublishedReplay:
    """One replay of a program in a `Machine`, as `Replay` is one in a cache: `run` it once, or `again` and again."""

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
        if not victims.knows(chosen):
            raise ValueError(
                f"the policy {chosen.name!r} needs the library's machine: the published one does not know it"
            )
        self.search = how.name
        self.machine = Machine(limits_of(budget), chosen, how, release)
        self._limit = limit
        self._start(program)

    def _start(self, program: Program) -> None:
        self.program = program
        self.values: list[victims.Value | None] = [None] * len(program.storages)
        self.machine.left = (self._limit - 1) * program.model_time

    def counts(self) -> Counts:
        """What it has done so far."""
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
        """Call `listener(event)` for every event from now on; returns a function that stops it."""
        listeners = self.machine.listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def again(self, progress: Callable[[int], None] | None = None, *, program: Program | None = None) -> Status:
        """Let go of all there is, though constants stay, and run the program, or another one, as the next round."""
        for value in reversed(self.values):
            if value is not None and value.referred:
                self.machine.drop(value)
        self._start(program or self.program)
        return self.run(progress)

    def run(self, progress: Callable[[int], None] | None = None) -> Status:
        """Replay all steps; `progress(steps)` is told now and then how many are done."""
        try:
            for number, (kind, which) in enumerate(self.program.steps):
                _PUBLISHED[kind](self, which)
                if progress is not None and not number & 0xFF:
                    progress(number)
            for value in self.program.outputs:
                self.machine.pin(self._referred(value))
        except OutOfMemory:
            return "oom"
        except Thrashing:
            return "thrash"
        return "ok"

    def _value(self, value: int) -> victims.Value:
        found = self.values[value]
        assert found is not None, f"value {value} is used before it is made"
        return found

    def _referred(self, value: int) -> victims.Value:
        found = self._value(value)
        assert found.referred, f"value {value} is used without a reference"
        return found

    def _source(self, value: int) -> None:
        program = self.program
        storage = program.storages[value]
        self.values[value] = self.machine.source(program.sizes[storage], program.devices[storage])

    def _call(self, number: int) -> None:
        call = self.program.calls[number]
        arguments = tuple([self._value(argument) for argument in call.arguments])
        for value, made in zip(call.results, self.machine.call(call, arguments, self.program), strict=True):
            self.values[value] = made

    def _keep(self, value: int) -> None:
        self._value(value).referred = True

    def _drop(self, value: int) -> None:
        found = self.values[value]
        if self.program.makers[value] >= 0 and found is not None and found.referred:
            self.machine.drop(found)


_PUBLISHED: Final[dict[StepKind, Callable[[PublishedReplay, int], None]]] = {
    "source": PublishedReplay._source,
    "call": PublishedReplay._call,
    "get": lambda replay, value: replay.machine.get(replay._referred(value)),
    "keep": PublishedReplay._keep,
    "drop": PublishedReplay._drop,
    "pin": lambda replay, value: replay.machine.pin(replay._referred(value)),
    "unpin": lambda replay, value: replay.machine.unpin(replay._referred(value)),
    "detach": lambda replay, value: replay.machine.detach(replay._referred(value)),
    "evict": lambda replay, value: replay.machine.request(replay._value(value)),
    "hold": lambda replay, value: replay.machine.hold(replay._value(value)),
    "let go": lambda replay, value: replay.machine.let_go(replay._value(value)),
}


def baseline(program: Program) -> dict[str, int]:
    """The bytes of each device at the peak of a run without a budget: 100 % of a budget ratio.

    The published simulator takes 100 % from a run in which the constants, too, go with their last reference; under a
    budget they stay to the end.
    """
    if program.published and not program.revived:
        return program.most_in_use()
    if program.published:
        published = PublishedReplay(program, None, policy="none")
        published.run()
        return {device: pool.peak for device, pool in published.machine.pools.items()}
    replay = Replay(program, None, policy="none")
    replay.run()
    return {pool.device: pool.peak for pool in replay.cache.stats().pools}
