"""Replaying a recorded program through the cache, under another budget or policy."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from time import perf_counter
from typing import Any, Final, Literal

from recompute import extend
from recompute._budget import Amount, bytes_or_share, parse_budget
from recompute._cache import Cache
from recompute._errors import BudgetError
from recompute._recomputable import Recomputable
from recompute._simulator.machine import Placeholder, engine_options
from recompute._traces.program import Call, Program, StepKind
from recompute.events import Listener
from recompute.extend import EVICTED, Node, ReleaseMode
from recompute.policies import DEFAULT, Policy, Search, policy_of

Status = Literal["ok", "oom", "thrash"]
MachineName = Literal["published", "library"]

_PATIENT: Final = 20.0
"""Up to this overhead a round is run to its end, so that the next ones can learn from it."""
_HERE: Final = (compile("", "<trace>", "exec"), 0)


@dataclass(frozen=True)
class Run:
    """One replay. Bytes, and seconds of compute; `seconds` is what the simulation itself took."""

    trace: str
    policy: str
    search: str
    release: str
    budget_bytes: int
    budget_ratio: float
    """Of `baseline_peak_bytes`."""
    status: Status
    """`oom`: something did not fit; `thrash`: more recomputation than the limit allows."""
    overhead: float | None
    """All compute divided by `model_time`; None unless the status is ok."""
    model_time: float
    total_time: float
    peak_bytes: int
    baseline_peak_bytes: int
    """Of a run without a budget."""
    evictions: int
    rematerializations: int
    candidates_scored: int
    seconds: float
    iteration: int = 1
    """Which round of a program that repeats."""

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


class _Thrashing(Exception):
    """More recomputation than the limit allows."""


class _CutShort(Exception):
    """A round has not come to its end."""


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
                raise _Thrashing
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
        published: bool = True,
        effort: float | None = None,
    ) -> None:
        self.clock = _Clock(0.0)
        self._limit = limit
        self.published = published
        self.cache = Cache(
            budget,
            policy=policy,  # type: ignore[arg-type]  # names are checked there
            search=search,  # type: ignore[arg-type]
            release=release,
            clock=self.clock,
            foresight=effort is not None,
            engine=engine_options(published, release, effort or 0.0),
        )
        self._start(program)

    def _start(self, program: Program) -> None:
        """At the beginning of a program: nothing has been done yet, and nothing is referred to any more."""
        self.program = program
        self._evicted = {which for kind, which in program.steps if kind == "evict"}
        counts: Counter[int] = Counter() if self.published else Counter(program.storages)
        self._aliased = frozenset(storage for storage, count in counts.items() if count > 1)
        count = len(program.storages)
        self._values: list[Node | None] = [None] * count
        self._handles: list[Recomputable[Any] | None] = [None] * count
        self._held: dict[int, list[Any]] = {}  # value -> payloads that are kept outside, the oldest first
        self.clock.left = (self._limit - 1) * program.model_time

    def again(self, progress: Callable[[int], None] | None = None, *, program: Program | None = None) -> Status:
        """Let go of all there is, and run the program, or another one, as the next round of one that repeats.

        From a round that does not come to its end nothing is learnt.
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
        except _Thrashing:
            return "thrash"
        return "ok"

    def _source(self, value: int) -> None:
        storage = self.program.storages[value]
        payload = Placeholder(self.program.sizes[storage], self.program.devices[storage], None)
        self._enter(value, extend.source(self.cache, payload, Recomputable))

    def _call(self, number: int) -> None:
        call, cache = self.program.calls[number], self.cache
        arguments = tuple([self._value(argument) for argument in call.arguments])
        rerun = _Rerun(self.program, call, self.clock, self._aliased, None if self.published else call.room)
        made = extend.perform(cache, rerun, arguments, arguments, _HERE, nout=len(call.results))
        for value, handle in zip(call.results, made, strict=True):
            self._enter(value, handle)

    def _enter(self, value: int, handle: Recomputable[Any]) -> None:
        self._values[value] = handle.node
        self._handles[value] = handle

    def _value(self, value: int) -> Node:
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
        if self.published:
            if self.program.makers[value] >= 0:  # constants stay
                self._handles[value] = None
        elif value not in self.program.revived:
            self._handles[value] = None
            if value not in self._evicted:
                self._values[value] = None

    def _evict(self, value: int) -> None:
        found = self._values[value]
        if found is not None:
            extend.evict(self.cache, found)

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


def baseline(program: Program) -> dict[str, int]:
    """The bytes of each device at the peak of a run without a budget: 100 % of a budget ratio.

    The published simulator takes 100 % from a run in which the constants, too, go with their last reference; under a
    budget they stay to the end.
    """
    if program.published and not program.revived:
        return program.most_in_use()
    replay = Replay(program, None, policy="none", published=program.published)
    replay.run()
    return {pool.device: pool.peak for pool in replay.cache.stats().pools}


def simulate(
    program: Program,
    budget: Amount | Mapping[str, Amount],
    *,
    policy: str | Policy = DEFAULT,
    search: str | Search = "exact",
    release: ReleaseMode = "eager",
    limit: float = 2.0,
    machine: MachineName | None = None,
    peak: Mapping[str, int] | None = None,
    listener: Listener | None = None,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Replay a program under a budget: what would that have cost?

    Parameters
    ----------
    budget
        Bytes for each device ("512MB"), a share (0.4, "40%") of the peak of each without a budget, or a mapping from
        device to one of these.
    policy, search, release
        As of `Cache`.
    limit
        The overhead above which the run is given up as thrashing: more than `limit` - 1 times the model time has been
        spent on recomputation.
    machine
        "published": as the DTR authors' simulator, see `PublishedMachine`; "library": the cache as it is. By default
        the published one for the published policies on published traces, else the library's.
    peak
        What `baseline` gave, if it is known.
    listener
        Hears the events of the cache.
    progress
        Called now and then with the number of steps done, of `len(program.steps)`.
    """
    options: dict[str, Any] = {"policy": policy, "search": search, "release": release, "limit": limit}
    options |= {"machine": machine, "peak": peak, "listener": listener, "progress": progress}
    (run,) = _replay(program, budget, **options)
    return run


def iterate(
    program: Program,
    budget: Amount | Mapping[str, Amount],
    iterations: int,
    *,
    foresight: bool = True,
    effort: float = 1.0,
    policy: str | Policy = DEFAULT,
    search: str | Search = "exact",
    release: ReleaseMode = "eager",
    limit: float = 2.0,
    machine: MachineName | None = None,
    peak: Mapping[str, int] | None = None,
    listener: Listener | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Run]:
    """Replay a program several times in one cache, as rounds of a program that repeats it: each run as it is ready.

    In between all references go, constants included. A run that does not fit is the last one; one above the limit is
    run to its end, for the next one to learn from it. Parameters as of `simulate`, and

    foresight
        Whether the cache learns from one round for the next; the default policy alone does.
    effort
        For the plan of a round, which is waited for: 1 is about ten seconds.
    """
    if iterations < 1:
        raise ValueError(f"iterations is a number of rounds, at least 1, not {iterations!r}")
    if not 0 <= effort < inf:
        raise ValueError(f"effort is a number, 0 or more, not {effort!r}; 1 is about ten seconds")
    options: dict[str, Any] = {"policy": policy, "search": search, "release": release, "limit": limit}
    options |= {"machine": machine, "peak": peak, "listener": listener, "progress": progress}
    return _replay(program, budget, iterations=iterations, effort=effort if foresight else None, **options)


def _replay(
    program: Program,
    budget: Amount | Mapping[str, Amount],
    *,
    policy: str | Policy,
    limit: float,
    machine: MachineName | None,
    peak: Mapping[str, int] | None,
    listener: Listener | None,
    progress: Callable[[int], None] | None,
    iterations: int | None = None,
    effort: float | None = None,
    **options: Any,
) -> Iterator[Run]:
    if not limit >= 1:
        raise ValueError(f"limit is an overhead, at least 1, not {limit!r}")
    peak = baseline(program) if peak is None else peak
    budgets, ratio = budgets_of(budget, peak)
    policy_object = policy_of(policy)  # type: ignore[arg-type]  # any name, which is checked there
    published = program.published and policy_object.published if machine is None else machine == "published"
    options |= {
        "policy": policy_object,
        "limit": limit if iterations is None else max(limit, _PATIENT),
        "published": published,
        "effort": effort,
    }
    replay = Replay(program, budgets, **options)
    return _runs(replay, iterations, limit, listener, progress, peak, budgets, ratio, policy)


def _runs(
    replay: Replay,
    iterations: int | None,
    limit: float,
    listener: Listener | None,
    progress: Callable[[int], None] | None,
    peak: Mapping[str, int],
    budgets: Mapping[str, int],
    ratio: float,
    policy: str | Policy,
) -> Iterator[Run]:
    program, cache = replay.program, replay.cache
    for iteration in range(1, 1 + (iterations or 1)):
        before = cache.stats()
        stop = None if listener is None else cache.subscribe(listener)
        collecting = gc.isenabled()
        gc.disable()  # the graph lives to the end of the replay
        start = perf_counter()
        try:
            status = replay.run(progress) if iterations is None else replay.again(progress)
        finally:
            seconds = perf_counter() - start
            if collecting:
                gc.enable()
            if stop is not None:  # what goes with the replay afterwards is no step of it
                stop()
        after = cache.stats()
        ended = status == "ok"
        model, again = after.model_time - before.model_time, after.remat_time - before.remat_time
        if ended and model + again > limit * program.model_time:
            status = "thrash"
        yield Run(
            trace=program.name,
            policy=policy if isinstance(policy, str) else cache.policy.name,
            search=cache.search.name,
            release=cache.release,
            budget_bytes=sum(budgets.values()),
            budget_ratio=ratio,
            status=status,
            overhead=_overhead(model + again, program.model_time) if status == "ok" else None,
            model_time=program.model_time * program.unit,
            total_time=(model + again) * program.unit,
            peak_bytes=after.peak,
            baseline_peak_bytes=sum(peak.values()),
            evictions=after.evictions - before.evictions,
            rematerializations=after.rematerializations - before.rematerializations,
            candidates_scored=after.scored - before.scored,
            seconds=seconds,
            iteration=iteration,
        )
        if not ended:
            return


def _overhead(total: float, model: float) -> float:
    return total / model if model else 1.0


def budgets_of(budget: Amount | Mapping[str, Amount], peak: Mapping[str, int]) -> tuple[dict[str, int], float]:
    """Bytes by device, and which share of the whole peak they are."""
    number = budget if isinstance(budget, Mapping) else bytes_or_share(budget)
    wanted = number if isinstance(number, Mapping) else dict.fromkeys(peak, number)
    budgets = {
        device: parse_budget(amount, whole=peak.get(device), of=f"the peak of {device}")
        for device, amount in wanted.items()
    }
    return budgets, number if isinstance(number, float) else sum(budgets.values()) / max(1, sum(peak.values()))
