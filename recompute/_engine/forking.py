"""After a fork the child has one thread: what others were at is made good, and copies in tiers have two owners.

No lock is held across a fork: hooks that run after ours may wait for threads that use a cache. So other threads go on
until the fork itself, and other threads may fork meanwhile.
"""

from __future__ import annotations

import os
from threading import get_ident
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from recompute._engine import ahead
from recompute._engine.changes import shared
from recompute._engine.frames import running
from recompute._engine.randomness import turns
from recompute._tiers.tier import about_to_fork

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

engines: Final[WeakSet[Engine]] = WeakSet()
"""All that there are."""


def _all_engines() -> list[Engine]:
    while True:
        try:
            return list(engines)
        except RecursionError:
            raise
        except RuntimeError:  # another thread has just made one
            continue


def _before() -> None:
    about_to_fork[get_ident()] = object()  # first: an engine that is not seen below sees this
    try:
        _prepare()
    except BaseException:  # an interrupt: the fork comes all the same
        _prepare()
        raise


def _prepare() -> None:
    for engine in _all_engines():
        if engine.memory.tiers is not None:
            engine.memory.tiers.before_fork()


def _in_parent() -> None:
    about_to_fork.pop(get_ident(), None)
    for engine in _all_engines():
        if engine.memory.tiers is not None:
            engine.memory.tiers.after_fork(child=False)


def _in_child() -> None:
    shared.after_fork()
    running.after_fork()
    ahead.after_fork()
    turns.after_fork()
    for engine in _all_engines():
        engine.after_fork()
    about_to_fork.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
