"""The cache as users see it: its settings, its budget, what it reports about itself."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from re import fullmatch
from time import perf_counter
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, get_args

from recompute import _context, _form
from recompute._adapters.adapter import known_devices
from recompute._budget import Budget, Limits, check_takes, format_bytes, parse_bytes
from recompute._engine import requests
from recompute._engine.engine import Engine
from recompute._engine.events import Listener
from recompute._engine.extension import Extension
from recompute._engine.graph import ReleaseMode
from recompute._engine.options import Settings
from recompute._engine.states import NAMES
from recompute._engine.stats import PoolStats, Recomputed, Stats, TierStats, table
from recompute._logged import Log
from recompute._policy.formulas import DEFAULT, Policy, PolicyName, Score, Scored, policy_of
from recompute._policy.search import Search, SearchName, search_of
from recompute._tiers.tier import Tier
from recompute._tiers.tiers import Tiers
from recompute.text import Table, qualified

if TYPE_CHECKING:
    from recompute._engine.stats import Holdings
    from recompute._engine.story import Steps, Story
    from recompute._foresight.rounds import Foresight
    from recompute._recomputable import Recomputable
    from recompute._sight.why import Why
    from recompute._traces.write import Recorder
    from recompute._watching import View


T = TypeVar("T")


class _Iteration(_context.Alone):
    """A block in which no other one of its cache begins."""

    def __init__(self, inside: list[_context.Alone], make: Callable[[], AbstractContextManager[None]]) -> None:
        self.inside = inside
        self._make = make

    def __enter__(self) -> None:
        if self.inside:
            raise RuntimeError("this cache is in an iteration already; one begins when the one before it has ended")
        try:
            self.inside.append(self)
            self.block = self._make()
            self.block.__enter__()
        except BaseException:
            self.inside.clear()
            raise


_ATTRIBUTES: Final = frozenset({"_engine", "extend", "_record", "_log", "_foresight", "_inside", "_story"})


class Cache:
    """Values that can be recomputed, within a memory budget.

    `with cache:` makes it the current cache, in which `pure` and `ap` work, for this thread or task.

    Parameters
    ----------
    budget
        Bytes, text ("512MB", "1.5 GiB"), a function from bytes used to bytes allowed (`available`), or None for
        unlimited: for every device; or a mapping from device to one of these.
    policy
        Which value is cheapest to lose: a name, a `Policy`, or a function (cost, neighbours, size, staleness) -> score.
    search
        How to look for it: "exact", "sample", "ignore small", "batch", or a `Search`.
    release
        What happens when the last outside reference to a value is dropped: "eager" evicts it (under the default policy
        it stays while something evicted that is needed is made from it), "ignore" does nothing, "banish" also forgets
        how it was made as soon as nothing evicted needs it (the three modes of Kirisame et al.).
    clock
        Seconds; operations are costed by it.
    foresight
        Learn from a program that repeats, with the default policy: see `iteration`. Another policy decides alone.
    tiers
        Where evicted bytes may go, the fastest first: `[Disk("50GB")]`; or a mapping from device to that. Values that
        are quicker to fetch than to recompute move there, and so do sources, which can only move.
    verify
        Compare digests of results: `ImpureError` if a second run differs or a value was changed in place. Slow.
    trace
        A file that every event is written to, for `recompute.traces.read`: JSON lines, compressed if it ends in ".gz".
        Complete whenever the outermost `with cache:` ends, and when the cache is freed. Raises OSError if it cannot be
        opened; an error while writing is a warning. Cost: some microseconds an event.
    log
        How many transitions of values are remembered for `story` and `why`: what became of a value, and for what.
        Cost: nothing if 0, else some microseconds for each.
    settings
        For adapters and studies: see `recompute.extend.Settings`.
    """

    def __init__(
        self,
        budget: Budget | Mapping[str, Budget] = None,
        *,
        policy: PolicyName | Policy | type[Policy] | Score = DEFAULT,
        search: SearchName | Search | type[Search] = "exact",
        release: ReleaseMode = "eager",
        clock: Callable[[], float] = perf_counter,
        foresight: bool = True,
        tiers: Tier | Sequence[Tier] | Mapping[str, Tier | Sequence[Tier]] = (),
        verify: bool = False,
        trace: str | os.PathLike[str] | None = None,
        log: int = 0,
        settings: Settings | None = None,
    ) -> None:
        if release not in get_args(ReleaseMode):
            raise ValueError(f"unknown release mode {release!r}; choose from {', '.join(get_args(ReleaseMode))}")
        for name, given, kinds, what in (
            ("foresight", foresight, bool, "True or False"),
            ("verify", verify, bool, "True or False"),
            ("trace", trace, (str, os.PathLike, NoneType), "the name of a file, such as 'run.jsonl.gz', or None"),
            ("settings", settings, (Settings, NoneType), "a recompute.extend.Settings, or None"),
        ):
            if not isinstance(given, kinds):
                raise TypeError(f"{name} must be {what}, not {given!r}")
        settings = settings or Settings()
        policy = policy_of(policy)
        if isinstance(policy, Scored):
            check_takes(policy.function, 4, "the policy", "four numbers: cost, neighbours, size, staleness")
        if callable(clock) and clock is not perf_counter:
            check_takes(clock, 0, "the clock", "no arguments, as time.perf_counter does")
        opened = Tiers(tiers)
        self._engine = Engine(
            *(
                limits_of(budget),
                policy,
                search_of(search),
                release,
                clock,
                verify,
                settings,
            ),
            tiers=opened if opened.all() else None,
        )
        self._engine.cache = self
        self.extend = Extension(self._engine)
        """What adapters ask of the engine: see `recompute.extend`."""
        self._engine.hold = partial(requests.hold, self._engine)
        self._story: Story | None = None
        if _count(log):
            from recompute._engine.story import Story

            self._story = self._engine.machine.watch = self._engine.memory.story = Story(self._engine.meter, log)
            self._engine.watch()
        self._foresight: Foresight | None = None
        self._inside: list[_context.Alone] = []
        if foresight and self.policy.name == DEFAULT:
            self._engine.pressed = self._watch
        self._record = None if trace is None else self._start_recording(trace)
        self._log = Log()
        self._log.look(self.subscribe)
        if not settings.internal:
            for tell in _context.on_new_cache:
                tell(self)
            if budget is not None:
                _context.expect_entry(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if type(self) is Cache and name not in _ATTRIBUTES and not hasattr(Cache, name):
            from difflib import get_close_matches  # only here: `import recompute` is to be quick

            meant = get_close_matches(name, ["budget"], 1)
            raise AttributeError(
                f"a Cache has no {name!r} that could be set" + (f"; did you mean {meant[0]!r}?" if meant else "")
            )
        object.__setattr__(self, name, value)

    @property
    def policy(self) -> Policy:
        """Which value is cheapest to lose."""
        return self._engine.memory.policy

    @property
    def search(self) -> Search:
        """How to look for it."""
        return self._engine.memory.search

    @property
    def release(self) -> ReleaseMode:
        """What happens when the last outside reference to a value goes."""
        return self._engine.references.mode.name

    @property
    def budget(self) -> Any:
        """Bytes, a function, a mapping from device to these, or None; see `Cache`. Setting it evicts immediately.

        Raises BudgetError, and changes nothing, if sources, pins, operations in flight and what callers hold exceed it.
        """
        return self._engine.memory.limits.given

    @budget.setter
    def budget(self, budget: Budget | Mapping[str, Budget]) -> None:
        requests.set_limits(self._engine, limits_of(budget))

    def release_memory(self, nbytes: int | str | None = None, device: str | None = None) -> int:
        """Evict until `nbytes` more are free, or everything it can (None); returns the bytes freed.

        On one device, such as "cuda:0", or on each that has values (None). For an allocator or a host application that
        runs short of memory itself. Safe to call from inside an operation.
        """
        wanted = None if nbytes is None else parse_bytes(nbytes, "nbytes")
        if device is not None and not isinstance(device, str):
            raise TypeError(f"device is the name of one, such as 'cpu' or 'cuda:0', not {device!r}")
        devices = list(self._engine.memory.pools) if device is None else [device]
        return sum([requests.release_memory(self._engine, wanted, device) for device in devices])

    def stats(self) -> Stats:
        """What the cache has done and holds now. O(candidates)."""
        engine = self._engine
        engine.tidy()
        for pool in list(engine.memory.pools.values()):
            pool.ask_limit(needed=False)
        journal, meter = engine.journal, engine.meter
        with engine.changes.alone(), engine.changes.begun(python=True):
            pools = tuple(
                PoolStats(
                    pool.device,
                    None if pool.limit == inf else int(pool.limit),
                    pool.used,
                    max(pool.past, pool.peak),
                    pool.overshoot,
                    pool.pinned,
                    pool.sources + pool.movable,
                    pool.held,
                    sum(not storage.locks for storage in pool.candidates),
                )
                for pool in engine.memory.pools.values()
            )
            repeated = [
                Recomputed(
                    function if isinstance(function, str) else qualified(function.co_qualname), int(times), seconds
                )
                for function, (times, seconds) in meter.repeated.items()
            ]
            return Stats(
                used=sum(pool.used for pool in pools),
                peak=sum(pool.peak for pool in pools),
                overshoot=sum(pool.overshoot for pool in pools),
                held=sum(pool.held for pool in pools),
                operations=journal.operations,
                evictions=journal.evictions,
                releases=journal.releases,
                rematerializations=journal.rematerializations,
                recoveries=journal.recoveries,
                model_time=meter.now - meter.remat_time,
                remat_time=meter.remat_time,
                scored=sum(pool.candidates.scored for pool in engine.memory.pools.values()),
                recomputed=tuple(sorted(repeated, key=lambda one: (-one.seconds, -one.times, one.function))),
                pools=pools,
                coercions=journal.coercions,
                library_time=meter.library_time,
                tiers=_tier_stats(engine.memory.tiers),
                moving_time=meter.moving_time,
                foresight="" if self._foresight is None else self._foresight.state,
            )

    def iteration(self) -> AbstractContextManager[None]:
        """A round of a program that repeats: a step of training, of a sampler, of a solver.

        The cache learns from one round for the next: what is needed when, and what is not needed again. A plan is made
        in the background, and followed as soon as it is ready. It is only advice: results and budget stay the same, and
        a round that differs is recorded again. Unmarked rounds are found, too: the same functions on the same shapes in
        the same order.

        Raises RuntimeError inside another iteration of this cache.
        """
        return _Iteration(self._inside, self._round)

    @contextmanager
    def _round(self) -> Iterator[None]:
        foresight = None
        failed = True
        try:
            if self._engine.pressed is not None and self.budget is not None:
                with self._engine.wall:
                    foresight = self._ahead()
                    foresight.begin()
            yield
            failed = False
        finally:
            if foresight is not None:
                with self._engine.wall:
                    foresight.end(failed=failed)

    def iterations(self, items: Iterable[T]) -> Iterator[T]:
        """Each of the items, in an `iteration` of its own: `for batch in cache.iterations(batches)`.

        The round of an item ends when the next one is asked for. From one that is left by `break` or an exception
        nothing is learnt. Raises RuntimeError inside another iteration of this cache.
        """
        for item in items:
            with self.iteration():
                yield item

    def next_iteration(self, *, last: bool = False) -> None:
        """One round of a program that repeats ends here and the next begins: `iteration` without a block.

        `last`: no other one begins; what plans in the background ends, and is waited for. Inside a block it does
        nothing.
        """
        if last and not self._inside and self._foresight is not None:
            with self._engine.wall:
                self._foresight.stop()
        elif not last and not self._inside and self._engine.pressed is not None and self.budget is not None:
            with self._engine.wall:
                self._ahead().next()

    def _ahead(self) -> Foresight:
        if self._foresight is None:
            from recompute._foresight.rounds import Foresight

            options = self._engine.options
            self._foresight = Foresight(self, options.effort, waits=options.waits)
            self._engine.unadvised = self._foresight.give_up
        return self._foresight

    def _watch(self) -> None:
        """Memory is short."""
        self._ahead().watch()

    def story(self, value: Recomputable[Any] | int | None = None) -> Steps:
        """What became of the storage of a value, and why, the oldest first: why it was recomputed, for instance.

        `value`: one that this cache made, or the number of its storage (`Recomputable.number`), which it may have
        forgotten; None: the stories of all storages. Prints as a line a step. Raises ValueError if the cache keeps no
        log: see `Cache(log=)`. O(log).
        """
        story = self._told()
        with self._engine.changes.alone(), self._engine.changes.begun(python=True):
            if value is None:
                return story.all()
            if isinstance(value, int):
                return story.of(value)
            storage = value._node.storage
            steps = story.of(storage.number)
            steps.now = NAMES[storage.state]
            return steps

    def why(self) -> Why:
        """The ten functions whose recomputation took most time, what they were evicted for, and what would help.

        Of what the log still has. `print` it. Raises ValueError if the cache keeps none: see `Cache(log=)`. O(log).
        """
        from recompute._sight.why import Why

        return Why(self.story())

    def memory(self) -> Holdings:
        """Where the memory is: bytes in memory and evicted, by the function and line that made them, the most first.

        `print` it. Sources have no line, and are listed by type. Recomputes nothing. O(values).
        """
        from recompute._engine.stats import Holdings, holdings

        self._engine.tidy()
        with self._engine.changes.alone(), self._engine.changes.begun():
            return Holdings(holdings(self._engine.memory.storages, self._engine.machine.held))

    def _told(self) -> Story:
        """The log, with what is on its way there."""
        if self._story is None:
            raise ValueError("this cache keeps no log; make it with Cache(..., log=10_000)")
        self._engine.settling.settle()
        return self._story

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` for every event; returns a function that stops it."""
        return self._engine.subscribe(listener)

    def watch(self, *, every: float = 0.25) -> View:
        """Show what the cache does while it runs: in a terminal on stderr, or below a notebook's cell.

        As a statement, or `with cache.watch():`; `stop()` ends it, and so does the end of the cache or of the program.
        In a terminal it is a panel if rich is installed (the extra `cli`), else a line; elsewhere nothing is shown.
        Redrawn every `every` seconds if something has happened. Cost: about a microsecond for each event.
        """
        from recompute._watching import View

        return View(self, every)

    def __enter__(self) -> Cache:
        self._log.look(self.subscribe)
        around = _context.times_entered(self)
        try:
            _context.enter(self)
        except BaseException:
            if _context.times_entered(self) > around:
                _context.leave(self)
            raise
        return self

    __exit__ = _context.leave_block

    def _start_recording(self, trace: str | os.PathLike[str]) -> Recorder:
        from recompute._traces.write import Recorder, settings_of

        recorder = Recorder(trace, settings_of(self))
        recorder.listen(self)
        weakref.finalize(self, recorder.close)  # also when the interpreter ends
        return recorder

    @property
    def trace(self) -> str | None:
        """The file that every event is written to; None: nothing is recorded."""
        return None if self._record is None else self._record.path

    def flush(self) -> None:
        """The trace, if there is one, is a complete file from here on."""
        if self._record is not None:
            self._engine.settling.settle()
            self._record.flush()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a cache cannot be copied or pickled; make one in each process, and send it Recomputables: values"
        )

    def __repr__(self) -> str:
        engine = self._engine
        used = sum(pool.used for pool in list(engine.memory.pools.values()))
        return (
            f"<Cache (policy {self.policy.name}): {format_bytes(used)} used of {engine.memory.limits}, "
            f"{engine.journal.evictions} evictions>"
        )

    def _table(self) -> Table:
        settings = f"policy {self.policy.name}, search {self.search.name}, release {self.release}"
        return table(self.stats(), f"recompute.Cache: {settings}, {_form.name()} form")

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()


def _tier_stats(tiers: Tiers | None) -> tuple[TierStats, ...]:
    found = () if tiers is None else tiers.all()
    return tuple(
        [
            TierStats(
                store.name,
                device,
                None if store.limit == inf else int(store.limit),
                store.used,
                store.writing.transfers,
                store.reading.transfers,
                store.writing.nbytes,
                store.reading.nbytes,
                store.writing.time,
                store.reading.time,
                store.writing.bandwidth,
                store.reading.bandwidth,
            )
            for device, store in found
        ]
    )


def _count(log: int) -> int:
    if isinstance(log, bool) or not isinstance(log, int) or log < 0:
        raise ValueError(f"log is how many transitions are remembered, such as 10_000, not {log!r}")
    return log


def limits_of(budget: Budget | Mapping[str, Budget]) -> Limits:
    """What a budget says. Raises ValueError for a name that is no device: one without a number."""
    limits = Limits(budget)
    if isinstance(budget, Mapping):
        known = known_devices()
        for device in budget:
            if known is not None and device not in known and not fullmatch(r"[a-z]+:[\d,-]+", device):
                raise ValueError(
                    f"the budget names the device {device!r}, which no adapter knows; devices are {', '.join(known)}, "
                    "and such as 'cuda:0' for arrays of PyTorch and CuPy, 'gpu:0' for JAX (see `recompute doctor`)"
                )
    return limits
