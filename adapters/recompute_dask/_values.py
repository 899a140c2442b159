"""What a worker holds: its `data`, of which the library's cache evicts what is cheapest to get back.

What was computed here can be computed again; what arrived over the network is a source, and can only move to the disk.
So does what cannot run again: a task that talks to its worker, that holds data itself, or that says so
(`dask.annotate(recompute=False)`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, Final

from dask.sizeof import sizeof
from distributed.spill import SpilledSize

import recompute as rc
from recompute import extend
from recompute_dask._payloads import given, is_writable_array, returned
from recompute_dask._recipe import Held, Recipe, is_bound_to_worker, is_kept, made

_DEEP: Final = 256
"""Released results, one made of the other, that a recipe may need: then history begins anew."""
_MANY: Final = 256
"""Results that are looked at when something they were made of is released."""

_LITTLE: Final = 1 / 4
"""Of the budget: as much is brought back before it is needed."""

_given: ContextVar[dict[Any, Any] | None] = ContextVar("recompute_dask_given", default=None)


class Values(MutableMapping[Any, Any]):
    """Keys and values of one worker, within a budget of bytes.

    To look up a value that was evicted brings it back, in the thread that asks: a worker brings what it needs before,
    in a thread (`bring`), and then looks it up inside of `at_hand`.
    """

    def __init__(self, worker_local_directory: str, disk: int | None = None, bandwidth: Any = None) -> None:
        folder = os.path.dirname(worker_local_directory)  # not inside: a thread may still write when that has gone
        tier = rc.Disk(disk, folder=folder, bandwidth=bandwidth)
        self.cache = rc.Cache(None, tiers=[tier], foresight=False)
        extend.be_lenient(self.cache)  # as Dask: too much memory is no error
        self._released = extend.released_sources(self.cache)
        self._budget = inf
        self._held: dict[Any, Held] = {}
        self._entered: dict[Any, tuple[Any, Held]] = {}

    # The mapping

    def __getitem__(self, key: Any) -> Any:
        at_hand = _given.get()
        if at_hand is not None and key in at_hand:
            value = at_hand[key]
            if isinstance(value, _Lost):
                raise value.error
            return value
        return self._held[key].get()

    def __setitem__(self, key: Any, value: Any) -> None:
        entered = self._entered.pop(key, None)
        self._held[key] = entered[1] if entered is not None and entered[0] is value else self._source(value)

    def __delitem__(self, key: Any) -> None:
        del self._held[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    # What a worker does. In any thread

    def held(self, keys: Iterable[Any]) -> dict[Any, Held]:
        """The values of these keys, as far as there are any: they stay known as long as somebody has them."""
        return {key: self._held[key] for key in keys if key in self._held}

    @staticmethod
    def bring(held: dict[Any, Held]) -> dict[Any, Any]:
        """These values, in memory. What cannot be brought back is an error when it is looked up."""
        values: dict[Any, Any] = {}
        for key, each in held.items():
            try:
                values[key] = given(each.get())
            except Exception as error:
                values[key] = _Lost(error)
        return values

    @staticmethod
    def fetch(held: dict[Any, Held]) -> None:
        """Have these in memory, if nothing comes between."""
        for each in held.values():
            try:
                each.get()
            except Exception:  # whoever needs it will hear of that
                return

    @staticmethod
    @contextmanager
    def at_hand(values: dict[Any, Any]) -> Iterator[None]:
        """Look these up in the place of what is held, inside the block."""
        token = _given.set(values)
        try:
            yield
        finally:
            _given.reset(token)

    def enter(self, key: Any, value: Any) -> None:
        """Have a value that will be stored in a moment, and cannot be made again."""
        self._entered[key] = value, self._source(value)

    def enter_made(self, key: Any, value: Any, recipe: Recipe, held: list[Held], cost: float) -> None:
        """Have a value that will be stored in a moment, with how to make it again and the seconds that takes."""
        payload, writable = returned(value)
        nodes = [each.node for each in held]
        handle = extend.adopt(
            self.cache, payload, recipe, nodes, nodes, sys._getframe(), cost=max(cost, 0), handle=Held
        )
        self._entered[key] = value, made(handle, held, writable)

    def forget_entered(self, key: Any) -> None:
        """A value was not stored after all."""
        self._entered.pop(key, None)

    def has_room(self, nbytes: int) -> bool:
        """Whether nothing has to be evicted for so many more bytes, and nothing is on its way out.

        Whoever uses the cache meanwhile may have to help with that.
        """
        pool = extend.fullest(self.cache)
        used, departing = (0, 0) if pool is None else (pool.used, pool.departing)
        return not departing and used + nbytes <= self._budget

    def is_little(self, nbytes: int) -> bool:
        """Whether these bytes leave most of the budget to others."""
        return nbytes <= _LITTLE * self._budget

    @staticmethod
    def is_made_again(spec: Any, value: Any, nbytes: int, held: dict[Any, Held]) -> bool:
        """Whether a task may run again: not for what is small, nor for what it holds itself, nearly."""
        return (
            not is_kept(value, nbytes)
            and len(held) == len(spec.dependencies)
            and max([each.depth for each in held.values()], default=0) < _DEEP
            and sizeof(spec) < max(10_000, nbytes // 8)
            and not is_bound_to_worker(spec)
            and not any(map(is_writable_array, getattr(spec, "args", ())))  # it may write into them
        )

    @property
    def has_released_sources(self) -> bool:
        """Whether Dask has released what arrived over the network, and recipes need it."""
        return bool(self._released)

    def forget_released_sources(self) -> None:
        """Recipes that keep what Dask has released go, where the result of the recipe is in memory."""
        while self._released:
            source = self._released.popleft()
            for value in extend.dependents(self.cache, source, _MANY) or ():
                if value.payload is not extend.EVICTED:
                    extend.detach(self.cache, value)

    def _source(self, value: Any) -> Held:
        payload, writable = returned(value)
        held = extend.source(self.cache, payload, Held)
        held.writable = writable
        held.depth = 0
        return held

    # What Dask asks of a buffer that spills

    @property
    def spilled_total(self) -> SpilledSize:
        """Bytes of values that are not in memory, and those of copies on the disk."""
        copies = sum(tier.used for tier in self.cache.stats().tiers)
        return SpilledSize(extend.load(self.cache)[0], copies)

    @property
    def fast(self) -> bool:
        """Whether there is anything to evict."""
        pool = extend.fullest(self.cache)
        return pool is not None and pool.used > 0

    def evict(self) -> int:
        """Evict something, though there is room: the process has more memory than is known here. Bytes; -1: nothing."""
        try:
            return self.cache.release_memory(1) or -1
        except OSError:
            return -1

    def set_budget(self, nbytes: float) -> None:
        """Bytes of host memory."""
        self._budget = nbytes
        self.cache.budget = {"cpu": None if nbytes == inf else int(nbytes)}


class _Lost:
    """In the place of a value that could not be brought back."""

    def __init__(self, error: Exception) -> None:
        self.error = error
