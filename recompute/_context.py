"""The current cache: the innermost `with cache:` of this thread or task, else the default one."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from recompute._engine.changes import without_collector

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
    """The cache of code that entered none: unlimited, unless `set_default_cache` said otherwise."""
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
    without_collector(_entered.set, (*_entered.get(), cache))


def leave() -> None:
    without_collector(_entered.set, _entered.get()[:-1])


def is_entered(cache: Cache) -> bool:
    """Whether a `with cache:` is around this."""
    return cache in _entered.get()
