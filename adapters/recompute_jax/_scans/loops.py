"""The loops of a function within the budget: how much of it they get, and the function rewritten for that.

The rest of the function competes for the same bytes, so a few shares are tried: all that the rest leaves if nothing
of it is recomputed, and less, for which the rest has to recompute less. The planner says which is cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recompute_jax._program.jaxpr import Flat, flatten
from recompute_jax._scans.blocks import Shape, shape, smallest, uniform
from recompute_jax._scans.groups import Group, groups_of
from recompute_jax._scans.rewrite import rewrite

_NOTICED = 0.05  # of the budget: groups that stack less are left as they are
_SHARES = (0.6, 0.3)


@dataclass(frozen=True)
class Looped:
    """The function with its loops in some shape."""

    flat: Flat
    shapes: tuple[Shape, ...]
    constants: tuple[Any, ...]
    """What it is called with before the arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What becomes of each group that is changed."""
        return tuple([f"scans over {each.group.length:,} steps: {each}" for each in self.shapes if not each.is_plain])


class Loops:
    """The groups of scans that matter."""

    def __init__(self, flat: Flat, budget: int) -> None:
        self.flat = flat
        sizes = [(group, group.length * group.modes[0].stacked) for group in groups_of(flat)]
        self.groups: list[Group] = [group for group, size in sizes if len(group.modes) > 1 and size > _NOTICED * budget]
        self.size = sum(size for group, size in sizes if group in self.groups)
        """Bytes of all their stacks."""

    def rooms(self, given: int, predicted: int) -> list[int]:
        """Bytes that the loops might get of `given`, if the function needs `predicted` as it is."""
        rest = max(0, predicted - self.size)
        shares = _SHARES if self.groups and rest > _NOTICED * given else ()
        return [given - rest, *(int(share * given) for share in shares)]

    def within(self, room: int) -> Looped:
        """The function with loops that take about so many bytes, or as few as they can."""
        return self._looped(tuple([shape(group, self._share(group, room)) for group in self.groups]))

    def smallest(self) -> Iterator[Looped]:
        """The function with loops in several shapes that take little; the last takes least by their own count."""
        shapes = [smallest(group) for group in self.groups]
        for place in range(max(map(len, shapes), default=1)):
            yield self._looped(tuple([each[max(0, place - max(map(len, shapes)) + len(each))] for each in shapes]))

    def uniform(self) -> Iterator[Looped]:
        """The function with each step of its loops run again by itself; all loops in the same mode, by its place."""
        shapes = [uniform(group) for group in self.groups]
        for place in range(max(map(len, shapes), default=0)):
            yield self._looped(tuple([each[min(place, len(each) - 1)] for each in shapes]))

    def _looped(self, shapes: tuple[Shape, ...]) -> Looped:
        changed = [(each.group, each.parts) for each in shapes if not each.is_plain]
        if not changed:
            return Looped(self.flat, shapes, tuple(self.flat.consts))
        flat = flatten(rewrite(self.flat, changed), inline_custom=False)
        return Looped(flat, shapes, (*flat.consts, *self.flat.consts))  # the old ones are arguments of the new function

    def _share(self, group: Group, room: int) -> int:
        return max(0, room * group.length * group.modes[0].stacked // max(1, self.size))
