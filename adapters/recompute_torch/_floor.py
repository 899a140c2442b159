"""The floor of a training: what must be in memory together at its tightest operator, whatever is evicted around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import recompute as rc
from recompute import text
from recompute.extend import Pool, Value
from recompute.text import format_bytes
from recompute_torch._holders import KINDS, Holders, Parts

if TYPE_CHECKING:
    from recompute_torch._tracker import Tracker

_CURE: Final = "rt.least(step) says before a training what it needs"


class Floor:
    """The tightest operator on each device, of those that it is told about."""

    def __init__(self, holders: Holders, storages: Callable[[], list[Any]]) -> None:
        self._holders = holders
        self._storages = storages
        self.parts: dict[str, Parts] = {}

    def note(self, function: Any, nodes: Sequence[Value], made: Sequence[Value]) -> None:
        """An operator has run: what it took and made was in memory together, beside what stays."""
        if made and made[0].storage.values:  # mostly it is none of the tightest, which is seen at once
            pool = made[0].storage.pool
            known = self.parts.get(pool.device)
            most = sum([each.storage.size for each in nodes]) + sum([each.storage.size for each in made])
            if known is not None and pool.sources + most <= known.total:
                return
        self._note(function, nodes, made)

    def _note(self, function: Any, nodes: Sequence[Value], made: Sequence[Value]) -> None:
        pool: Pool | None = None
        size = 0
        for storage in {each.storage for each in (*nodes, *made) if each.storage.values}:
            pool = pool or storage.pool
            if storage.pool is pool and not any(each.stays for each in storage.values):
                size += storage.size
        if pool is not None:
            known = self.parts.get(pool.device)
            if known is None or pool.sources + size > known.total:
                self.parts[pool.device] = self.now(pool, size, function.__name__)

    def now(self, pool: Pool, operator: int, name: str) -> Parts:
        """What stays on a device now, and an operator beside it."""
        sizes = self._holders.sizes(self._staying(pool))
        parameters, gradients, optimizer = [sizes[kind].here for kind in KINDS[:3]]
        others = max(0, pool.sources - parameters - gradients - optimizer)
        return Parts(parameters, gradients, optimizer, others, operator, name)

    def _staying(self, pool: Pool) -> list[Any]:
        found = [(each, each._recompute.node.storage) for each in self._storages()]
        return [each for each, node in found if node.pool is pool and any(value.stays for value in node.values)]


class FloorWarning(UserWarning):
    """The next step needs more than the budget, if it is like the first one: what the optimizer remembers is new."""


def warn_of(floor: Floor, pools: Mapping[str, Pool]) -> None:
    """After the first step: warn if the next one, in which there is what the optimizer remembers, cannot work."""
    for device, seen in floor.parts.items():
        pool = pools[device]
        now = floor.now(pool, 0, "")
        needed = replace(seen, optimizer=max(seen.optimizer, now.optimizer))
        if needed.total > pool.limit:
            text.warn(
                f"the next step needs at least {format_bytes(needed.total)} ({needed.total} bytes) on {device}, if it "
                f"is like this one: {needed}; the budget is {format_bytes(pool.limit)}. What the optimizer remembers "
                "is there from now on. Raise it, or take smaller batches; rt.least(step) says what a step needs",
                FloorWarning,
                stacklevel=text.outside("torch"),
            )


def explain(error: rc.BudgetError, tracker: Tracker) -> None:
    """Say in the words of a training what the operator that found no room would have needed."""
    pool = tracker.cache.extend.pools().get(error.device or "")
    if pool is None or _CURE in str(error):  # nested operators: it has been said
        return
    floor = tracker.floor or Floor(tracker.holders, tracker.known)
    found = floor.now(pool, max(0, error.needed - pool.sources), error.operation or "a tensor")
    later = "" if found.optimizer else "; what an optimizer remembers comes on top, from the second step on"
    error.args = (
        f"{error}. It needs at least {format_bytes(found.total)} ({found.total} bytes) on {pool.device}: "
        f"{found}{later}. {_CURE}",
    )
