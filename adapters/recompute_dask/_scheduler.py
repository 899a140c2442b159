"""Dask's threaded scheduler within a budget: its own `get_async` runs the graph, and tasks are operations of a cache.

Where Dask keeps the results of tasks, there are handles of them; a key that Dask releases is a handle that goes.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import inf
from typing import Any, Final
from weakref import WeakSet

import dask
from dask._task_spec import Alias, GraphNode
from dask.callbacks import local_callbacks
from dask.core import flatten
from dask.local import get_sync
from dask.threaded import get as get_threaded

import recompute as rc
from recompute import extend
from recompute.extend import leave_in_steps
from recompute.text import List, Table, format_bytes, seconds
from recompute_dask._metadata import Metadata, graph_of
from recompute_dask._opened import Join, opened
from recompute_dask._payloads import leaving
from recompute_dask._recipe import SMALL_BYTES, Held, Inlined, Recipe, held_of, is_kept, is_unique, made, stores
from recompute_dask._running import Next, Soon, Together

_SMALL_SHARE: Final = 1 / 8
"""Of the budget: what takes no more at once stays as it is in the graph."""

_MAX_COMPUTATIONS: Final = 8
"""Computations of a block."""

_last: Final[list[rc.Stats]] = []
_running: Final[ContextVar[Computation | None]] = ContextVar("recompute_dask_running", default=None)


def get(dsk: Mapping[Any, Any], keys: Any, budget: Any = None, tiers: Any = None, **options: Any) -> Any:
    """Compute keys of a graph as `dask.threaded.get` does, within a budget: `y.compute(scheduler=rd.get)`.

    Parameters
    ----------
    budget
        Bytes ("4GB"), a share of the memory ("50%"), or a function, as for `recompute.Cache`. By default
        `recompute.budget` of Dask's configuration; None: unlimited.
    tiers
        As for `recompute.Cache`: `rc.Disk("50GB")`, to which moves what is quicker to read than to compute again. By
        default `recompute.tiers` of the configuration, which may be text in a file: bytes on a disk; None: nothing
        moves.
    **options
        Those of `dask.threaded.get`: num_workers, pool, callbacks, ...

    A `compute` inside of a task runs in the thread of that task, within the same budget.

    Raises what tasks raise, and BudgetError for a task whose arguments and result do not fit together.
    """
    outer = _running.get()
    if outer is not None:
        return outer.compute(get_sync, dsk, keys, options)
    if "disk" in options or dask.config.get("recompute.disk", None) is not None:
        raise TypeError("`disk` is called `tiers`: tiers='50GB', or recompute.tiers in the configuration")
    computation = Computation(
        dask.config.get("recompute.budget", None) if budget is None else budget,
        dask.config.get("recompute.tiers", None) if tiers is None else tiers,
    )
    try:
        return computation.compute(get_threaded, dsk, keys, options)
    finally:
        _last[:] = [computation.cache.stats()]
        for block in list(_blocks):
            block._ended.append(_last[0])


class budget:  # reads as a function: with rd.budget("4GB") as block:
    """Compute within a budget inside the block, or from then on: a setting of Dask's scheduler and configuration.

    Parameters
    ----------
    budget, tiers
        As for `get`.

    A block can be entered again. Raises ValueError or TypeError for a budget or tiers that are none.
    """

    def __init__(self, budget: Any, *, tiers: Any = None) -> None:
        self._budget = Computation(budget, tiers).cache.budget  # says now what is wrong with them
        self._settings: dict[str, Any] = {"scheduler": get, "recompute.budget": budget}
        if tiers is not None:
            self._settings["recompute.tiers"] = tiers
        self._ended: deque[rc.Stats] = deque(maxlen=_MAX_COMPUTATIONS)
        self._begin()

    def _begin(self) -> None:
        self._set = dask.config.set({})
        try:
            self._set.__init__(self._settings)  # type: ignore[misc]  # it knows what to undo from its first change on
            _blocks.add(self)
        except BaseException:
            leave_in_steps(self)
            raise

    def __enter__(self) -> budget:
        if self not in _blocks:
            self._begin()
        return self

    def leaving(self) -> Iterable[Callable[[], object]]:
        """What ends the block, in steps that can be done again: see `leave_in_steps`."""
        return partial(_blocks.discard, self), partial(self._set.__exit__, None, None, None)

    __exit__ = leave_in_steps

    @property
    def budget(self) -> Any:
        """Bytes, a share of the memory or a function; None: unlimited. Setting it is for computations that follow."""
        return self._budget

    @budget.setter
    def budget(self, budget: Any) -> None:
        self._budget = rc.Cache(budget).budget
        self._settings["recompute.budget"] = budget
        if self in _blocks:
            dask.config.set({"recompute.budget": budget})

    def stats(self) -> rc.Stats:
        """What the last computation of the block that has ended did. Raises RuntimeError if there was none."""
        if not self._ended:
            raise RuntimeError("nothing was computed yet in this block: y.compute()")
        return self._ended[-1]

    def report(self) -> Table:
        """What the last computations of the block took, the latest one last: `print(block)` shows it."""
        rows = [
            (
                *(format_bytes(done.peak), f"{done.evictions:,}", f"{done.operations:,}"),
                *(f"{done.rematerializations:,}", seconds(done.remat_time), f"{done.overhead:.2f}"),
            )
            for done in self._ended
        ]
        budget = format_bytes(self._budget) if isinstance(self._budget, int) else str(self._budget)
        columns = ("peak", "evicted", "tasks", "repeated", "in", "overhead")
        return Table("recompute_dask.budget", [("budget", budget)], [List(columns, rows, ">>>>>>")])

    def __str__(self) -> str:
        return str(self.report())


_blocks: Final[WeakSet[budget]] = WeakSet()
"""Those that are open, or hold from then on."""


def stats() -> rc.Stats:
    """What the last computation that has ended did: see `recompute.Cache.stats`."""
    if not _last:
        raise RuntimeError("nothing was computed yet with recompute_dask.get: with rd.budget('4GB'): y.compute()")
    return _last[0]


class _Ready:
    """A task that can run, with what it takes."""

    def __init__(self, task: Any, data: Mapping[Any, Any]) -> None:
        self.task = task
        self.data = data


class Computation:
    """One graph, or several of them one inside of the other, with one cache."""

    def __init__(self, budget: Any, tiers: Any) -> None:
        self.cache = rc.Cache(budget, tiers=rc.Disk(tiers) if isinstance(tiers, (int, str)) else tiers or ())
        self._writers: set[str] = set()
        self._soon = Soon(self.cache)
        self._together = Together()
        self._joins: dict[Hashable, Join] = {}
        self._sizes: dict[Hashable, int] = {}
        self._arrays: dict[Hashable, int] = {}

    def compute(self, way: Callable[..., Any], dsk: Mapping[Any, Any], keys: Any, options: dict[str, Any]) -> Any:
        """Compute keys with one of Dask's schedulers."""
        rerun = options.pop("rerun_exceptions_locally", None)
        if rerun is None:
            rerun = dask.config.get("rerun_exceptions_locally", False)
        dsk = self._opened(dsk, keys)
        following = Next(self._soon)
        token = _running.set(None)
        try:
            with local_callbacks(options.pop("callbacks", None)) as callbacks:
                results = way(
                    dsk,
                    keys,
                    **options,
                    callbacks=[*map(_with_values, callbacks), (None, following.start, following.before, None, None)],
                    dumps=_prepared,
                    loads=self._loaded,
                    raise_exception=_rerun if rerun else _reraise,
                    rerun_exceptions_locally=False,
                )
        finally:
            _running.reset(token)
        if way is get_threaded:
            self.cache.extend.be_lenient()  # all results are wanted together
        return _leave(keys, results)

    def _loaded(self, sent: Any) -> Any:
        """What Dask is about to run; as it is, what it is told of the result."""
        if not isinstance(sent, _Ready):
            return sent
        task, data = sent.task, sent.data
        return (lambda _: self._perform(task, data)), data

    def _opened(self, dsk: Any, keys: Any) -> dict[Any, GraphNode]:
        """The graph as it runs."""
        metadata = Metadata(dsk)
        graph = graph_of(dsk)
        room = self.cache.extend.room("cpu") * _SMALL_SHARE
        if room == inf:
            return graph
        graph, joins = opened(graph, set(flatten([keys])), metadata, room)
        self._joins |= joins
        results = metadata.results(graph)
        self._sizes |= results.sizes
        self._arrays |= results.arrays
        return graph

    def _perform(self, task: Any, data: Mapping[Any, Any]) -> Any:
        """Run a task as an operation, or several; the handle of its result."""
        if isinstance(task, Alias):
            return data[task.target]
        with self._together.one() as is_outermost:
            for attempt in range(2 if is_outermost else 0):  # beside others; then alone
                try:
                    return self._performed(task, data, expects=True)
                except rc.BudgetError as error:
                    error.__traceback__ = error.__context__ = None  # whose frames hold what is to be evicted
                if not attempt:
                    self._together.wait_to_be_alone()
            return self._performed(task, data, expects=False)  # what was expected of the result may be too much

    def _performed(self, task: Any, data: Mapping[Any, Any], *, expects: bool) -> Any:
        """`expects`: make room for what the metadata say of the result, or as much for each array as the task takes."""
        join = self._joins.get(task.key)
        if join is not None:
            from recompute_dask._joined import UnlikeMetadata, joined  # it needs NumPy

            try:
                return joined(self.cache, join, data)
            except UnlikeMetadata:
                pass
            except rc.BudgetError as error:
                raise _impossible(task.key, len(join.sources), error) from None
        storing = stores(task)
        recipe, held = Recipe(task, data, self._writers, self._inside, stores=storing), held_of(data)
        if expects:
            taken = sum([storage.size for storage in {extend.node_of(argument).storage for argument in held}])
            recipe.nbytes = self._sizes.get(task.key)
            recipe.guess = taken * self._arrays.get(task.key, 1) or None
        for argument in held if storing else ():  # what is written into cannot be made again
            self.cache.extend.detach(extend.node_of(argument), moves=False)
        nodes = [extend.node_of(argument) for argument in held]
        try:
            (handle,) = self.cache.extend.run(recipe, nodes, nodes, sys._getframe(), handle=Held)
        except rc.BudgetError as error:
            raise _impossible(recipe.key, len(held), error) from None
        except Exception as error:
            if recipe.returned and isinstance(error, TypeError):
                return Inlined(recipe, held)  # the cache has refused the result
            error.__dask_task__ = recipe, held  # type: ignore[attr-defined]  # for `_rerun`
            raise
        if recipe.is_data:  # which must not be held here: another thread might have to wait for it
            if extend.node_of(handle).storage.size < SMALL_BYTES:
                handle.detach()
            return made(handle, held, writable=recipe.writable, unique=False)
        payload, nbytes = extend.node_of(handle).payload, extend.node_of(handle).storage.size
        there = payload is not extend.EVICTED
        if there and is_kept(payload, nbytes):
            handle.detach()
        return made(handle, held, writable=recipe.writable, unique=there and is_unique(payload, nbytes))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """A computation in the block is a part of this one."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


def _prepared(sent: Any) -> Any:
    """What Dask gives to a thread, marked; as it is, what the thread gives back."""
    first, second = sent
    return _Ready(first, second) if isinstance(second, dict) else sent


def _leave(keys: Any, results: Any) -> Any:
    """The values of results in the shape of their keys, for the caller."""
    if isinstance(keys, list):
        return tuple([_leave(key, result) for key, result in zip(keys, results, strict=True)])
    return _value(results)


def _value(result: Any) -> Any:
    if isinstance(result, Inlined):
        return result.recipe.run([held.get() for held in result.held])
    return leaving(result.get(), writable=result.writable) if isinstance(result, Held) else result


def _impossible(key: Hashable, taken: int, error: rc.BudgetError) -> rc.BudgetError:
    why = re.sub(r" \(created at [^)]*\)", "", str(error).split(";")[0])
    return rc.BudgetError(
        f"the task {key!r}, which takes {taken} results at once, does not fit into recompute.budget: "
        f"{why}; make chunks smaller (rechunk in steps, split_every in reductions), use fewer threads (num_workers), "
        "or raise the budget (recompute_dask.least says what a graph needs at once)"
    )


def _reraise(error: BaseException, traceback: Any) -> None:
    raise error.with_traceback(traceback)


def _rerun(error: BaseException, traceback: Any) -> None:
    """Run a task that has failed once more, in this thread, for a debugger."""
    recipe, held = getattr(error, "__dask_task__", (None, ()))
    if recipe is not None:
        recipe.run([argument.get() for argument in held])
    _reraise(error, traceback)


def _with_values(callback: Sequence[Any]) -> tuple[Any, ...]:
    """A callback that is told of the values of results, not of their handles."""
    start, start_state, before, after, finish = callback
    if after is None:
        return tuple(callback)

    def after_task(key: Hashable, result: Any, dsk: Any, state: Any, worker: Any) -> None:
        after(key, result.get() if isinstance(result, Held) else result, dsk, state, worker)

    return start, start_state, before, after_task, finish
