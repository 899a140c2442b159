"""After a fork the child has one thread: what others were at is made good, and copies in tiers have two owners."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from recompute._engine.changes import after_fork

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

engines: Final[WeakSet[Engine]] = WeakSet()
"""All that there are."""


def _before() -> None:
    for engine in list(engines):
        if engine.memory.tiers is not None:
            engine.memory.tiers.before_fork()


def _in_parent() -> None:
    for engine in list(engines):
        if engine.memory.tiers is not None:
            engine.memory.tiers.after_fork(child=False)


def _in_child() -> None:
    after_fork()
    for engine in list(engines):
        engine.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
