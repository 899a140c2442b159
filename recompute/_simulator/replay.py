"""One replay: the steps of a recorded program, done in a cache with a virtual clock and placeholders for values.

Also the order in which a cache runs a program within a budget, and the values that numbers in its events stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType
from typing import Any, ClassVar, Final

from recompute._adapters.adapter import Adapter, register
from recompute._cache import Cache
from recompute._errors import BudgetError
from recompute._recomputable import Recomputable
from recompute._simulator.run import Counts, Status, StepLoop, Thrashing, uncollected
from recompute._simulator.tier import SimulatedStore, SimulatedTier
from recompute._traces.program import Call, Program, Step, file_and_line
from recompute.events import Added, Event, Listener, Performed
from recompute.extend import EVICTED, Settings, Value
from recompute.policies import DEFAULT, Policy, ReleaseMode, Search


class Placeholder:
    """Stands in for a value: memory of a size, on a device, that aliases share."""

    __slots__ = ("__weakref__", "device", "owner", "size")

    def __init__(self, size: int, device: str, owner: Placeholder | None) -> None:
        self.size = size
        self.device = device
        self.owner = owner  # None: itself


class _PlaceholderAdapter(Adapter):
    name = "placeholder"

    def nbytes(self, value: Any) -> int:
        return int(value.size)

    def buffer(self, value: Any) -> object:
        return value.owner or value

    def watch(self, value: Any) -> object:
        return value.owner or value

    def device(self, value: Any) -> str:
        return str(value.device)

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return (value.size, value.device, value.owner is not None), ()

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        size, device, shared = head
        return Placeholder(size, device, Placeholder(size, device, None) if shared else None)


register(Placeholder, _PlaceholderAdapter())


_END: Final = 1 << 20
"""An instruction after the last of any code."""

_HERE: Final = (compile("0", "<trace>", "exec"), _END)


@lru_cache(4096)
def _code(place: str) -> CodeType:
    """Code that is at a place, as far as messages and events can tell."""
    name, line = file_and_line(place)
    return _HERE[0].replace(co_filename=name, co_firstlineno=line or 1)


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


class Rerun:
    """The function of a replayed operation: takes its time, and returns placeholders."""

    __slots__ = ("__name__", "call", "clock", "makes", "note", "room", "runs")

    def __init__(
        self, program: Program, call: Call, clock: _Clock, aliased: Set[int], note: Callable[[], object] | None
    ) -> None:
        self.__name__ = call.name
        self.call = call
        self.clock = clock
        self.note = note  # called after each run
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
        # (device, bytes) to be asked for before the first run; `call.room`: the bytes, where only these were known
        self.room = [(device, size) for size, device, where, _ in self.makes if where is None]
        if call.room is not None:
            self.room = [(self.makes[0][1], call.room)] if call.room else []

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
            if where is None:  # an alias that is held holds the memory, but not the first payload on it
                owner = Placeholder(size, device, None) if aliased else None
            else:
                shared = payloads[where] if where >= 0 else made[-1 - where]
                owner = shared.owner or shared
            made.append(Placeholder(size, device, owner))
        if self.note is not None:
            self.note()
        return made if len(made) > 1 else made[0]


class Replay(StepLoop):
    """One replay of a program: `run` it once, or `again` and again, as rounds of one that repeats."""

    short = BudgetError

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
        order: list[Step] | None = None,
    ) -> None:
        """`order`: where to note what runs, is got and is detached, in half the time that events would take."""
        self.clock = _Clock(0.0)
        self._order = order
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
            settings=Settings(room=_recorded_room, warns=False, effort=effort or 0.0, waits=True, internal=True),
        )
        self.cache._engine.memory.neighbourhood.keeps = program.settings.get("keeps") is not False
        tiers = self.cache._engine.memory.tiers
        self._stores = [] if tiers is None else [store for _, store in tiers.all() if isinstance(store, SimulatedStore)]
        self._start(program)

    @property
    def search(self) -> str:
        return self.cache.search.name

    def counts(self) -> Counts:
        """The counts so far."""
        waited = self.cache._engine.meter.moving_time + sum([store.backlog for store in self._stores])
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
        clock, meter = self.clock, self.cache._engine.meter

        def pass_time(units: float) -> None:
            clock.elapsed += units

        for store in self._stores:
            store.run_in(program.unit, lambda: meter.now, pass_time)

    def again(self, progress: Callable[[int], None] | None = None, *, program: Program | None = None) -> Status:
        """Drop everything, and run the program, or another one, as the next round of one that repeats.

        Nothing is learnt from a round that does not finish.
        """
        self._start(program or self.program)
        status: Status = "ok"
        with suppress(_CutShort), self.cache.iteration():
            status = self.run(progress)
            if status != "ok":
                raise _CutShort
        return status

    def _source(self, value: int) -> None:
        storage = self.program.storages[value]
        payload = Placeholder(self.program.sizes[storage], self.program.devices[storage], None)
        self._enter(value, self.cache.extend.source(payload, Recomputable))

    def _call(self, number: int) -> None:
        call, cache = self.program.calls[number], self.cache
        arguments = tuple([self._value(argument) for argument in call.arguments])
        place = (_code(call.place), _END) if call.place else _HERE
        note = None if self._order is None else partial(self._order.append, ("call", number))
        function = Rerun(self.program, call, self.clock, self._aliased, note)
        made = cache.extend.run(function, arguments, arguments, place, handle=Recomputable, nout=len(call.results))
        for value, handle in zip(call.results, made, strict=True):
            self._enter(value, handle)

    def _enter(self, value: int, handle: Recomputable[Any]) -> None:
        self._values[value] = handle._node
        self._handles[value] = handle

    def _value(self, value: int) -> Value:
        node = self._values[value]
        assert node is not None, f"value {value} is used before it is made"
        return node

    def _handle(self, value: int) -> Recomputable[Any]:
        handle = self._handles[value]
        assert handle is not None, f"value {value} is used without a reference"
        return handle

    def _keep(self, value: int) -> None:
        if self._handles[value] is not None:
            return
        self._handles[value] = Recomputable(self.cache, self._value(value))

    def _get(self, value: int) -> None:
        self._handle(value).get()
        if self._order is not None:
            self._order.append(("get", value))

    def _detach(self, value: int) -> None:
        self._handle(value).detach()
        if self._order is not None:
            self._order.append(("detach", value))

    def _drop(self, value: int) -> None:
        if value not in self.program.revived:
            self._handles[value] = None
            if value not in self._evicted:
                self._values[value] = None

    def _evict(self, value: int) -> None:
        node = self._values[value]
        if node is not None:
            self.cache.extend.evict(node)

    def _hold(self, value: int) -> None:
        node, held = self._values[value], self._held.setdefault(value, [])
        payload = None if node is None else node.payload
        held.append(held[-1] if held and payload in (None, EVICTED) else payload)

    do: ClassVar = {
        "source": _source,
        "call": _call,
        "get": _get,
        "keep": _keep,
        "drop": _drop,
        "pin": lambda replay, value: replay._handle(value).pin(),
        "unpin": lambda replay, value: replay._handle(value).unpin(),
        "detach": _detach,
        "evict": _evict,
        "hold": _hold,
        "let go": lambda replay, value: replay._held[value].pop(0),
    }


def _recorded_room(function: Any) -> tuple[Sequence[tuple[str, int]], bool]:
    return function.room, function.call.sure


class Numbers:
    """Follows the events of a replay: which value of the program each number in them means."""

    def __init__(self, program: Program) -> None:
        self.values: dict[int, int] = {}
        """Number in the events -> value of the program."""
        self.homes: dict[int, int] = {}
        """Value of the program -> number in the events of the storage that it was made on."""
        self.storages: dict[int, int] = {}
        """Number of a storage in the events -> storage of the program."""
        self._program = program
        self._calls = iter([which for kind, which in program.steps if kind == "call"])
        self._sources = iter([which for kind, which in program.steps if kind == "source"])

    def hear(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, Added):
            self._make(event.storage, event.storage, next(self._sources))
        elif isinstance(event, Performed):
            if not event.again:
                self.values.update(zip(event.results, self._program.calls[next(self._calls)].results, strict=False))
            for number, home in zip(event.results, event.homes, strict=True):
                if number in self.values:
                    self._make(number, home, self.values[number])

    def _make(self, number: int, home: int, value: int) -> None:
        self.values[number] = value
        self.homes.setdefault(value, home)
        self.storages.setdefault(home, self._program.storages[value])


def order_of_runs(program: Program, budget: int, limit: float = 20.0) -> list[Step] | None:
    """The calls, repeated ones too, and what is got and detached, in order; None: the program does not fit.

    So it is, too, if it costs more than `limit` times what it costs by itself. The default policy decides. Some ten
    microseconds for each run. None as well for calls without results, which the cache does not know.
    """
    if not all(call.results for call in program.calls):
        return None
    order: list[Step] = []
    budgets = dict.fromkeys([program.devices[storage] for storage in program.storages], budget)
    replay = Replay(program, budgets, policy=DEFAULT, limit=limit, order=order)
    with uncollected():
        status = replay.run()
    return order if status == "ok" else None
