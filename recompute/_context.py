"""The current cache, that of the innermost `with cache:` of a thread or task, and blocks that are not nested.

Compiled, no signal is looked for as a block is left, so that none leaves it open. Blocks are entered by functions in
Python, which take it back if an interrupt comes: Python 3.14 looks for signals after others, before the block begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from gc import collect
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from recompute._interrupts import is_interrupt
from recompute.text import outside, warn

if TYPE_CHECKING:
    from recompute._cache import Cache

T = TypeVar("T")

_entered: Final[ContextVar[tuple[Cache, ...]]] = ContextVar("recompute_entered", default=())
_default: list[Cache] = []
on_new_cache: Final[list[Callable[[Cache], None]]] = []
"""Called with each cache that is made, by what runs programs."""


_unentered: Final[WeakKeyDictionary[Cache, str]] = WeakKeyDictionary()
"""Caches with a budget that nothing has entered yet, and where they were made."""


def current_cache() -> Cache:
    """The cache that `pure` and `ap` use here."""
    entered = (_inner() if _setting else None) or _entered.get()
    if entered:
        return entered[-1]
    cache = default_cache()
    if _unentered:
        _tell_of_unentered(cache)
    return cache


def expect_entry(cache: Cache) -> None:
    """A cache with a budget was made: it is about to be entered, or used in another way."""
    frame: FrameType | None = sys._getframe(outside() - 1)
    _unentered[cache] = "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _tell_of_unentered(current: Cache) -> None:
    """Warn once of a cache that seems to have been forgotten, if the current one has no budget itself."""
    if current.budget is not None:
        return
    collect()  # a cache that nothing refers to any more is not meant
    for cache, place in list(_unentered.items()):
        _unentered.pop(cache, None)
        if not cache._engine.memory.pools and not is_default(cache):
            warn(
                "this goes into the default cache, which has no budget, while the cache of "
                f"{cache._engine.memory.limits} made at {place} was never entered; use it in a block, `with cache:`, "
                "or make it the default one, with recompute.set_default_cache(cache)",
                RuntimeWarning,
                stacklevel=outside(),
            )


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


def leave_block(cache: Cache, *exception: object) -> None:
    """`Cache.__exit__`: when the outermost block ends, the trace becomes a complete file."""
    leave(cache)
    if cache.trace is not None and not is_entered(cache):
        cache.flush()


class Alone(ContextDecorator):
    """A block that is left before it is entered again; `Cache.iteration` has `__enter__`."""

    inside: list[Alone]
    """The block that was entered, if any."""
    block: AbstractContextManager[None]

    def __exit__(self, *exception: Any) -> bool | None:
        self.inside.clear()
        return self.block.__exit__(*exception)


class InSteps(Protocol):
    """A block that `leave_in_steps` leaves."""

    def leaving(self) -> Iterable[Callable[[], object]]:
        """The steps: functions that may be called again where an interrupt cuts them short. This changes nothing."""


def leave_in_steps(block: InSteps, *exception: object) -> None:
    """`__exit__` of a block, and what undoes an `__enter__` that fails: all steps are done, whatever is raised.

    A step that an interrupt cuts short is done again. Raises the first error or interrupt in the end.
    """
    raised: list[BaseException] = []
    for step in _whole(block.leaving, raised) or ():
        _whole(step, raised)
    if raised:
        raise raised.pop(0)


_MOST: Final = 100
"""Interrupts of a step after which it is given up: it may raise that itself."""


def _whole(step: Callable[[], T], raised: list[BaseException]) -> T | None:
    for _ in range(_MOST):
        try:
            return step()
        except BaseException as error:
            raised.append(error)
            if not _interrupted(error):
                break
    return None


def _interrupted(error: BaseException) -> bool:
    try:
        return not isinstance(error, Exception) or is_interrupt(error)
    except BaseException:  # by another one
        return True


def within(cache: Cache, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function while the cache is the current one; its trace goes on."""
    enter(cache)
    try:
        return function(*arguments)
    finally:
        leave(cache)


def enter(cache: Cache) -> None:
    """Make it the innermost one."""
    if _unentered:
        _unentered.pop(cache, None)
    inner = _inner()
    if inner is not None:
        inner.append(cache)
        return
    around = _entered.get()
    _change((*around, cache), around)


def leave(cache: Cache) -> None:
    """End the innermost block of this cache: a generator may have begun others inside of it, which go on."""
    inner = _inner()
    if inner is not None:
        if cache in inner:
            del inner[-1 - inner[::-1].index(cache)]
        else:
            _left[get_ident()] = [*_left.get(get_ident(), ()), cache]
        return
    around = _entered.get()
    if cache in around:  # else it was entered in another thread or task
        place = len(around) - 1 - around[::-1].index(cache)
        left = around[:place] + around[place + 1 :]
        _change(left, left)


def is_entered(cache: Cache) -> bool:
    """Whether a `with cache:` is around this."""
    return times_entered(cache) > 0


def times_entered(cache: Cache) -> int:
    """How many are."""
    return _entered.get().count(cache) + (_inner() or []).count(cache)


def _change(entered: tuple[Cache, ...], interrupted: tuple[Cache, ...]) -> None:
    """Or what is to be set if an interrupt strikes meanwhile: then no `with` follows, or it is over all the same."""
    try:
        _set(entered)
    except BaseException:
        _set(interrupted)
        raise


_setting: Final[dict[int, list[Cache]]] = {}
"""Threads in the middle of `ContextVar.set` -> the caches that a destructor has entered there.

In Python 3.11 the garbage collector may run there, and the interpreter crashes if a destructor sets the same variable.
"""


_left: Final[dict[int, list[Cache]]] = {}
"""Threads there -> the caches whose blocks a destructor has ended, by closing a generator: left afterwards."""


def _inner() -> list[Cache] | None:
    return _setting.get(get_ident()) if _setting else None


def _set(entered: tuple[Cache, ...]) -> None:
    mine = get_ident()
    try:
        _setting[mine] = []
        _entered.set(entered)
    finally:
        _setting.pop(mine, None)
        for cache in _left.pop(mine, ()):
            leave(cache)
