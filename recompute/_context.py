"""The current cache: the innermost `with cache:` of this thread or task, else the default one."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from gc import disable, enable, isenabled
from typing import TYPE_CHECKING, Final

from recompute._engine.changes import is_nested, shared

if TYPE_CHECKING:
    from recompute._cache import Cache

_entered: Final[ContextVar[tuple[Cache, ...]]] = ContextVar("recompute_entered", default=())
_default: list[Cache] = []
on_new_cache: Final[list[Callable[[Cache], None]]] = []
"""Called with each cache that is made, by what runs programs."""


def current_cache() -> Cache:
    """The cache that `pure` and `ap` use here."""
    entered = _entered.get()
    return entered[-1] if entered else default_cache()


def default_cache() -> Cache:
    """The cache of code that entered none: unlimited, unless `set_default_cache` has set another."""
    if not _default:
        from recompute._cache import Cache

        _default.append(Cache())
    return _default[0]


def set_default_cache(cache: Cache | None) -> None:
    """Make `cache` the default one in every thread; None: a fresh unlimited one."""
    if cache is not None and not hasattr(cache, "release_memory"):
        raise TypeError(f"the default cache is a Cache, not {cache!r}; make one: Cache(budget={cache!r})")
    _default[:] = [] if cache is None else [cache]


def is_default(cache: Cache) -> bool:
    """Whether that is the default cache, as of now."""
    return cache in _default


def enter(cache: Cache) -> None:
    around = _entered.get()
    _change((*around, cache), around)


def leave() -> None:
    around = _entered.get()[:-1]
    _change(around, around)


def is_entered(cache: Cache) -> bool:
    """Whether a `with cache:` is around this."""
    return cache in _entered.get()


def _change(entered: tuple[Cache, ...], interrupted: tuple[Cache, ...]) -> None:
    """Or what is to be set if an interrupt strikes meanwhile: then no `with` follows, or it is over all the same."""
    try:
        _set(entered)
    except BaseException:
        _set(interrupted)
        raise


def _set(entered: tuple[Cache, ...]) -> None:
    """Without the garbage collector.

    In Python 3.11 it may run in the middle of `ContextVar.set`, and a destructor that enters a cache makes the
    interpreter crash.
    """
    with shared.lock:
        if shared.change is not None and is_nested(shared.lock):  # it is paused
            _entered.set(entered)
            return
        if shared.change is None:
            shared.collects = isenabled()
        shared.change = _entered
        disable()
        _entered.set(entered)
        _ = shared, shared, shared  # as in `Changes.end`
        if shared.collects:
            enable()
        shared.change = None
