"""What a worker holds: its `data`, of which the library's cache evicts what is cheapest to get back.

What was computed here can be computed again; what arrived over the network is a source, and can only move to the disk.
So does what cannot run again: a task that talks to its worker, that holds data itself, or that says so
(`dask.annotate(recompute=False)`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, Final

from distributed.spill import SpilledSize
from distributed.threadpoolexecutor import ThreadPoolExecutor  # at its end its threads are not waited for

import recompute as rc
from recompute import extend
from recompute_dask._payloads import given, is_given_whole, returned
from recompute_dask._recipe import SMALL_BYTES, Held, Recipe, is_bound_to_worker, is_kept, is_unique, made, weight
from recompute_dask._running import Soon

_MAX_DEPTH: Final = 256
"""Released results, one made of the other, that a recipe may need: then history begins anew."""
_MAX_DEPENDENTS: Final = 256
"""Results that are looked at when something they were made of is released."""

_SMALL_SHARE: Final = 1 / 4
"""Of the budget: as much is brought back before it is needed."""

logger = logging.getLogger(__name__)

_given: ContextVar[dict[Any, Any] | None] = ContextVar("recompute_dask_given", default=None)


Outside = tuple[Any, Future[None]]
"""A value, and what ends when it is held."""

_DONE: Final[Future[None]] = Future()
_DONE.set_result(None)


_SETTINGS: Final = extend.Settings(lenient=True, smallest=SMALL_BYTES)
"""As Dask: too much memory is no error."""


class Values(MutableMapping[Any, Any]):
    """Keys and values of one worker, within a budget of bytes.

    To look up a value that was evicted brings it back, in the thread that asks: a worker brings what it needs before,
    in a thread (`bring`), and then looks it up inside of `at_hand`. To store a value never takes long: what something
    has to be evicted for arrives later, in a thread.
    """

    def __init__(self, worker_local_directory: str, disk: int | None = None, bandwidth: Any = None) -> None:
        folder = os.path.dirname(worker_local_directory)  # not inside: a thread may still write when that has gone
        tier = rc.Disk(disk, folder=folder, bandwidth=bandwidth, ahead=True)
        self.cache = rc.Cache(None, tiers=[tier], foresight=False, settings=_SETTINGS)
        self.soon = Soon(self.cache)
        self._released = self.cache.extend.released_sources()
        self._budget = inf
        self._held: dict[Any, Held | None] = {}
        """None: it is outside of the cache."""
        self._entered: dict[Any, tuple[Any, Held]] = {}
        self._outside: dict[Any, Outside] = {}
        """Of the cache: it is arriving, or cannot be kept."""
        self._lock = extend.RLock()
        """Of what has arrived, or is released meanwhile."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recompute-arrivals")

    # The mapping

    def __getitem__(self, key: Any) -> Any:
        at_hand = _given.get()
        if at_hand is not None and key in at_hand:
            value = at_hand[key]
            if isinstance(value, _Lost):
                raise value.error
            return value
        outside = self._outside.get(key)
        if outside is not None:
            return outside[0]
        held = self._held[key]
        assert held is not None
        return held.get()

    def __setitem__(self, key: Any, value: Any) -> None:
        entered = self._entered.pop(key, None)
        if entered is not None and entered[0] is value:
            self._held[key] = entered[1]
            return
        try:
            self._held[key] = held = self._source(value, waits=False)
        except TypeError:  # it can be read only once, by the first task that takes it, as on Dask's own workers
            self._held[key] = None
            self._outside[key] = value, _DONE
            return
        if held is None:
            arriving: Outside = (value, Future())
            self._outside[key] = arriving
            self._thread.submit(self._arrive, key, arriving)

    def __delitem__(self, key: Any) -> None:
        with self._lock:
            del self._held[key]
            self._outside.pop(key, None)

    def __contains__(self, key: Any) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _arrive(self, key: Any, arriving: Outside) -> None:
        """Have a value that had to wait until there was room; unless it was released meanwhile."""
        value, done = arriving
        try:
            if self._outside.get(key) is arriving:
                held = self._source(value, waits=True)
                with self._lock:
                    if self._outside.get(key) is arriving:
                        self._held[key] = held
                        del self._outside[key]
        except Exception:  # of an adapter: then it stays as it is
            logger.warning("%r is in memory, and not counted", key, exc_info=True)
        finally:
            done.set_result(None)

    # What a worker does. In any thread

    def arriving(self, keys: Iterable[Any]) -> list[Future[None]]:
        """What ends when these keys have values that are held."""
        return [self._outside[key][1] for key in keys if key in self._outside]

    def held(self, keys: Iterable[Any]) -> dict[Any, Held]:
        """The values of these keys, as far as there are any: they stay known as long as they are referred to."""
        values = {key: self._held.get(key) for key in keys}
        return {key: held for key, held in values.items() if held is not None}

    @staticmethod
    def look(held: dict[Any, Held]) -> dict[Any, Any] | None:
        """These values, if they are in memory and not much has to be copied for tasks; None: it may take long."""
        values = {key: handle.cache.extend.look(handle) for key, handle in held.items()}
        is_quick = all(
            value is not extend.EVICTED and (held[key].unique or is_given_whole(value)) for key, value in values.items()
        )
        return {key: value if held[key].unique else given(value) for key, value in values.items()} if is_quick else None

    @staticmethod
    def bring(held: dict[Any, Held]) -> dict[Any, Any]:
        """These values, in memory. What cannot be brought back is an error when it is looked up."""
        values: dict[Any, Any] = {}
        for key, handle in held.items():
            try:
                values[key] = handle.get() if handle.unique else given(handle.get())
            except Exception as error:
                values[key] = _Lost(error)
        return values

    @staticmethod
    def fetch(held: dict[Any, Held]) -> None:
        """Have these in memory, if nothing comes between."""
        for handle in held.values():
            try:
                handle.get()
            except Exception:  # the task that needs it will raise it
                return

    @staticmethod
    @contextmanager
    def at_hand(values: dict[Any, Any]) -> Iterator[None]:
        """Look these up instead of what is held, inside the block."""
        token = _given.set(values)
        try:
            yield
        finally:
            _given.reset(token)

    def enter(self, key: Any, value: Any, cost: float, *, waits: bool) -> bool:
        """Have a value that will be stored in a moment, and cannot be made again; the seconds that it took.

        Not `waits`: False if something has to be evicted for it.
        """
        handle = self._source(value, waits=waits)
        if handle is not None:
            self.cache.extend.count_operation(max(cost, 0.0))
            self._entered[key] = value, handle
        return handle is not None

    def enter_made(self, key: Any, value: Any, recipe: Recipe, held: list[Held], cost: float, *, waits: bool) -> bool:
        """As `enter`, with how to make it again and the seconds that takes."""
        payload, writable = returned(value)
        nodes = [extend.node_of(handle) for handle in held]
        handle = self.cache.extend.adopt(
            payload, recipe, nodes, nodes, sys._getframe(), cost=max(cost, 0.0), handle=Held, waits=waits
        )
        if handle is not None:  # not unique: else `is_made_again` would have said no
            self._entered[key] = value, made(handle, held, writable=writable, unique=False)
        return handle is not None

    def forget_entered(self, key: Any) -> None:
        """A value was not stored after all."""
        self._entered.pop(key, None)

    def is_little(self, nbytes: int) -> bool:
        """Whether these bytes leave most of the budget to others."""
        return nbytes <= _SMALL_SHARE * self._budget

    @staticmethod
    def is_made_again(spec: Any, value: Any, nbytes: int, held: dict[Any, Held]) -> bool:
        """Whether a task may run again: not for what is small, nor for what it holds itself, nearly."""
        return (
            not is_kept(value, nbytes)
            and len(held) == len(spec.dependencies)
            and max([handle.depth for handle in held.values()], default=0) < _MAX_DEPTH
            and weight(spec) < max(10_000, nbytes // 8)
            and not is_bound_to_worker(spec)
        )

    @property
    def has_released_sources(self) -> bool:
        """Whether Dask has released what arrived over the network, and recipes need it."""
        return bool(self._released)

    def forget_released_sources(self) -> None:
        """Recipes that keep what Dask has released go, where the result of the recipe is in memory."""
        while self._released:
            source = self._released.popleft()
            for value in self.cache.extend.dependents(source, _MAX_DEPENDENTS) or ():
                if value.payload is not extend.EVICTED:
                    self.cache.extend.detach(value)

    def _source(self, value: Any, *, waits: bool) -> Held | None:
        payload, writable = returned(value)
        held = self.cache.extend.source(payload, Held, waits=waits)
        if held is None:
            return None
        held.writable = writable
        held.depth = 0
        held.unique = is_unique(payload, extend.node_of(held).storage.size)
        return held

    @property
    def spilled_total(self) -> SpilledSize:
        """For the dashboard: bytes of values that are not in memory, and those of copies on the disk."""
        load = self.cache.extend.load()
        return SpilledSize(load.missing, load.moved)

    def release(self, is_enough: Callable[[], bool]) -> None:
        """Evict until it is enough, though there is room: the process has more memory than is known here."""
        while not is_enough():
            if not self.cache.release_memory(1):
                return

    def close(self) -> None:
        """Nothing more arrives."""
        self._thread.shutdown(wait=False)
        self.cache.extend.stop_ahead()

    def set_budget(self, nbytes: float) -> None:
        """Bytes of host memory."""
        self._budget = nbytes
        self.cache.budget = {"cpu": None if nbytes == inf else int(nbytes)}


class _Lost:
    """Instead of a value that could not be brought back."""

    def __init__(self, error: Exception) -> None:
        self.error = error
