"""Calls remembered: the same arguments give the same Recomputable, whose bytes count in the budget.

What is remembered belongs to a cache and goes with it. A key is made of the arguments themselves or of digests of their
content, and never of an `id` that another object may have later.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial, update_wrapper
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from threading import Event, get_ident
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary, WeakSet

from recompute import _context
from recompute._adapters.adapter import fingerprint, foreign_fingerprint, kinds
from recompute._engine.frames import running
from recompute._handle import apply_at, common_engine
from recompute._locks import RLock
from recompute._recomputable import Recomputable
from recompute.text import name_of

if TYPE_CHECKING:
    from recompute._cache import Cache
    from recompute._engine.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_MOST = 16_384
"""Entries that are remembered, unless something else is said."""

_LONG = 256
"""Bytes: of longer keys, which would take memory that nothing counts, a digest is kept."""

_PATIENCE = 1.0
"""Seconds until a thread that waits for another's call looks again: an interrupt may have kept that from telling."""


class CacheInfo(NamedTuple):
    """As of `functools.lru_cache`."""

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


class Memoized(Generic[P, R_co]):
    """A function whose calls are remembered. Made by `memoize`."""

    __name__: str
    __wrapped__: Callable[P, R_co]

    def __init__(
        self,
        function: Callable[P, R_co],
        cache: Cache | None,
        key: Callable[..., Hashable] | None,
        max_entries: int | None,
        *,
        typed: bool,
    ) -> None:
        update_wrapper(self, function)
        self._cache = cache
        self._key = key
        self._typed = typed
        self._most = max_entries

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Recomputable[R_co]: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Recomputable[R_co]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Recomputable of the first call with these arguments; `ap(function, *args, **kwargs)` if this is it."""
        caller = sys._getframe(1)
        cache, key = self._cache_for(args, kwargs), self._key_of(args, kwargs)
        table = self._table(cache)
        while True:
            pending: _Pending | None = None
            entry: Any
            try:
                with table.lock:
                    entry = table.entries.get(key)
                    if entry is None or (type(entry) is _Pending and entry.over.is_set()):  # it was interrupted
                        pending = table.entries[key] = _Pending()
                        table.misses += 1
                    elif type(entry) is not _Pending:
                        table.hits += 1
                        table.used(key)
                        return entry.handle() if type(entry) is _Changeable else entry
                if pending is not None:
                    made = self._call(cache, args, kwargs, caller)
                    table.keep(key, pending, made if type(made) is Recomputable else _Changeable(made), self._most)
                    return made
            except BaseException:
                if pending is not None:
                    table.forget(key, pending)
                raise
            finally:
                if pending is not None:
                    pending.over.set()
            if entry.owner == get_ident() or running.frame() is not None:
                # It needs itself, or others wait for the operation that asks: it must not wait for them.
                return self._call(cache, args, kwargs, caller)
            entry.over.wait(_PATIENCE)

    def _call(self, cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        if self._cache is None and _context.current_cache() is cache:
            return apply_at(self.__wrapped__, args, kwargs, 1, None, caller, Recomputable)
        return _context.within(cache, apply_at, self.__wrapped__, args, kwargs, 1, None, caller, Recomputable)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<memoized {name_of(self.__wrapped__)}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined,no-any-return]  # `update_wrapper` sets it

    def cache_info(self) -> CacheInfo:
        """Hits, misses, the largest and the present number of entries, in the current cache."""
        table = self._table(self._cache or _context.current_cache())
        with table.lock:
            return CacheInfo(table.hits, table.misses, self._most, len(table.entries))

    def cache_clear(self) -> None:
        """Forget all calls in the current cache. What is referred to from elsewhere stays as it is."""
        table = self._table(self._cache or _context.current_cache())
        with table.lock:
            table.hits = table.misses = 0
            entries, table.entries = table.entries, OrderedDict()
        del entries  # without the lock

    def cache_parameters(self) -> dict[str, Any]:
        """`{"maxsize": ..., "typed": ...}`, as of `functools.lru_cache`."""
        return {"maxsize": self._most, "typed": self._typed}

    def _cache_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache:
        """The one that was given, or that of Recomputables among the arguments, or the current one."""
        engine: Engine | None = None if self._cache is None else self._cache._engine
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Recomputable):
                engine = common_engine(engine, argument, args, kwargs)
        return _context.current_cache() if engine is None else engine.cache

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if self._key is not None:
            key = self._key(*args, **kwargs)
            try:
                hash(key)
            except TypeError:
                raise TypeError(
                    f"the key of a call of {name_of(self.__wrapped__)} cannot be hashed: {key!r}; return a tuple, a "
                    "string, or a number"
                ) from None
            return key
        try:
            parts = [self._part(argument) for argument in args]
            for name, argument in kwargs.items():
                parts += [_Name(name), self._part(argument)]
        except RecursionError:
            if not any(type(argument) in (list, tuple, dict) for argument in (*args, *kwargs.values())):
                raise
            raise ValueError(
                f"an argument of {name_of(self.__wrapped__)} is nested too deeply, or contains itself; pass key= a "
                "function that returns what tells calls apart, or wrap the argument once with rc.pure"
            ) from None
        return tuple(parts)

    def _part(self, argument: Any) -> Hashable:
        cls = type(argument)
        kind = kinds[cls]
        part: Hashable
        if kind.handle:
            node: Hashable = argument._node
            return node
        if cls in (list, tuple, dict):
            parts = argument.items() if cls is dict else argument
            return cls, *[tuple(map(self._part, one)) if cls is dict else self._part(one) for one in parts]
        if cls.__hash__ is None or cls is slice or foreign_fingerprint(cls) is not None:
            part = fingerprint(argument)
            if part is None:
                raise TypeError(
                    f"{name_of(self.__wrapped__)} is remembered by its arguments, but a {name_of(cls)} among them can "
                    "neither be hashed nor digested; pass key= a function that returns what tells calls apart, or wrap "
                    "the argument once with rc.pure"
                )
            graph = argument if getattr(argument, "requires_grad", False) else None  # gradients go to this very one
            return cls, part, None if kind.device is None else kind.device(argument), graph
        if cls in (str, bytes) and len(argument) > _LONG:
            return cls, len(argument), fingerprint(argument)
        hash(argument)  # a frozen dataclass may contain a list: its own error says so
        return (cls, argument) if self._typed else argument

    def _table(self, cache: Cache) -> _Table:
        tables = cache.__dict__.setdefault("_memoized", None)
        if tables is None:
            with _making:
                tables = cache.__dict__["_memoized"]
                if tables is None:
                    tables = cache.__dict__["_memoized"] = WeakKeyDictionary()
        table: _Table | None = tables.get(self)
        if table is None:
            with _making:
                table = tables.setdefault(self, _Table())
                _tables.add(table)
        return table


_making = RLock()


class _Pending:
    """Instead of an entry while a thread makes it."""

    __slots__ = ("over", "owner")

    def __init__(self) -> None:
        self.owner = get_ident()
        self.over = Event()


class _Changeable:
    """An entry whose Recomputable can be changed in place, as a wrapped array: calls after that give another one."""

    __slots__ = ("_given", "_own")

    def __init__(self, given: Recomputable[Any]) -> None:
        self._given = given
        self._own: Recomputable[Any] = Recomputable(given.cache, given._node)

    def handle(self) -> Recomputable[Any]:
        if self._given._node is not self._own._node:
            self._given = type(self._given)(self._own.cache, self._own._node)
        return self._given


class _Name(str):
    """The name of an argument, which no argument is equal to."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _Name and str.__eq__(self, other)

    __hash__ = str.__hash__


class _Table:
    """The calls of one function in one cache, the least recently used first."""

    __slots__ = ("__weakref__", "entries", "hits", "lock", "misses")

    def __init__(self) -> None:
        self.lock = RLock()  # a key's `__eq__`, a destructor or a signal handler may call the function, too
        self.entries: OrderedDict[Hashable, Any] = OrderedDict()
        self.hits = self.misses = 0

    def used(self, key: Hashable) -> None:
        """It is the most recently used one."""
        try:
            self.entries.move_to_end(key)
        except KeyError:  # its `__eq__` has cleared the table
            return

    def forget(self, key: Hashable, pending: _Pending) -> None:
        with self.lock:
            if self.entries.get(key) is pending:
                del self.entries[key]

    def keep(self, key: Hashable, pending: _Pending, made: Any, most: int | None) -> None:
        gone = []
        with self.lock:
            if self.entries.get(key) is pending:  # else all were forgotten meanwhile
                self.entries[key] = made
                self.used(key)
            while most is not None and len(self.entries) > most:
                for oldest, entry in self.entries.items():
                    if type(entry) is not _Pending:
                        gone.append((oldest, entry))
                        del self.entries[oldest]
                        break
                else:
                    break
        del gone  # without the lock

    def after_fork(self) -> None:
        """In the child, where no other thread goes on with a call, or gives the lock back."""
        self.lock = RLock()
        for entry in list(self.entries.values()):
            if type(entry) is _Pending and entry.owner != get_ident():
                entry.over = Event()  # its lock may be held
                entry.over.set()


_tables: WeakSet[_Table] = WeakSet()


def _in_child() -> None:
    global _making
    _making = RLock()
    for table in list(_tables):
        table.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class _Decorator(Protocol):
    def __call__(self, function: Callable[P, R], /) -> Memoized[P, R]: ...


@overload
def memoize(
    function: Callable[P, R],
    /,
    *,
    cache: Cache | None = None,
    key: Callable[..., Hashable] | None = None,
    typed: bool = False,
    max_entries: int | None = _MOST,
) -> Memoized[P, R]: ...
@overload
def memoize(
    *,
    cache: Cache | None = None,
    key: Callable[..., Hashable] | None = None,
    typed: bool = False,
    max_entries: int | None = _MOST,
) -> _Decorator: ...
def memoize(
    function: Callable[..., Any] | None = None,
    /,
    *,
    cache: Cache | None = None,
    key: Callable[..., Hashable] | None = None,
    typed: bool = False,
    max_entries: int | None = _MOST,
) -> Any:
    """A function that returns a Recomputable, the same one for the same arguments. Also a decorator.

    Parameters
    ----------
    function
        Pure, as for `ap`. Not a coroutine function or a generator function: TypeError.
    cache
        The cache whose budget counts the results. None: the one that is current at the call, so that functions can be
        decorated before there is any. Calls that are remembered go with their cache.
    key
        What tells calls apart: called with their arguments, returns something hashable. None: the arguments. What can
        be hashed counts by hash and equality, as with `functools.lru_cache`; Recomputables by the value that they refer
        to; arrays, and what cannot be hashed, by type and a digest of the content, in O(bytes) for each call.
    typed
        Whether equal arguments of different types are different, such as `1` and `1.0`.
    max_entries
        How many calls are remembered: beyond that the least recently used is forgotten. None: all.

    A call that is remembered keeps the recipe of its result: the function, its arguments, some hundred bytes. The
    result itself may be evicted, and is recomputed on `get`. Threads compute a call once. Exceptions are not kept.
    `cache_info`, `cache_clear` and `cache_parameters` are those of `functools.lru_cache`, for the current cache.
    """
    if function is None:
        return partial(memoize, cache=cache, key=key, typed=typed, max_entries=max_entries)
    if not callable(function):
        raise TypeError(
            f"memoize takes a function, not {function!r}; options have names, as in memoize(max_entries=10)"
        )
    for is_such, what in (
        (iscoroutinefunction, "a coroutine function: its coroutine can be awaited once"),
        (isasyncgenfunction, "an asynchronous generator function: what it returns can be read once"),
        (isgeneratorfunction, "a generator function: what it returns can be read once"),
    ):
        if is_such(function):
            raise TypeError(f"{name_of(function)} is {what}; memoize a plain function that returns the value itself")
    if key is not None and not callable(key):
        raise TypeError(f"key must be a function of the arguments of a call, not {key!r}")
    from recompute._cache import Cache as Class

    if cache is not None and not isinstance(cache, Class):
        raise TypeError(f"cache must be a Cache, or None for the current one at each call, not {cache!r}")
    if max_entries is not None and (type(max_entries) is not int or max_entries < 1):
        raise ValueError(f"max_entries must be a whole number, at least 1, or None, not {max_entries!r}")
    return Memoized(function, cache, key, max_entries, typed=typed)
