"""The loops of a function within the budget: how much of it they get, and the function rewritten for that.

The rest of the function competes for the same bytes, so a few shares are tried: all that the rest leaves if nothing
of it is recomputed, and less, for which the rest has to recompute less. The planner says which is cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recompute_jax._program.jaxpr import Flat, flatten
from recompute_jax._scans.blocks import Part, Shape, shape, smallest, uniform
from recompute_jax._scans.groups import Group, groups_of
from recompute_jax._scans.rewrite import rewrite
from recompute_jax._scans.split import Split, splits

_NOTICED = 0.05  # of the budget: groups that stack less are left as they are
_SHARES = (0.6, 0.3)
_SAME = 1.001  # times a cost: no gain


@dataclass(frozen=True)
class Looped:
    """The function with its loops in some shape."""

    before: Flat
    flat: Flat
    shapes: tuple[Shape, ...]
    constants: tuple[Any, ...]
    """What it is called with before the arguments."""
    split: Split | None = None
    """What came first: `before` is what became of the function."""

    @property
    def cost(self) -> float:
        """Of what runs again."""
        return sum(each.cost for each in self.shapes) + (self.split.more if self.split else 0.0)

    @property
    def texts(self) -> tuple[str, ...]:
        """What becomes of each group that is changed."""
        return tuple([f"scans over {each.group.length:,} steps: {each}" for each in self.shapes if not each.is_plain])


_Known = dict[tuple[tuple[int, tuple[Part, ...]], ...], Looped]
"""What was made already, by groups and their parts."""


class Loops:
    """The groups of scans of a function, or those of them that matter."""

    def __init__(
        self,
        flat: Flat,
        groups: Sequence[Group] | None = None,
        known: _Known | None = None,
        split: Split | None = None,
    ) -> None:
        self.flat = flat
        self._split = split
        self.groups = [group for group in groups_of(flat) if len(group.modes) > 1] if groups is None else list(groups)
        self.size = sum(map(_size, self.groups))
        """Bytes of all their stacks."""
        self._known: _Known = {} if known is None else known

    def noticed(self, budget: int) -> Loops:
        """Those that stack a good part of the budget."""
        return Loops(self.flat, [each for each in self.groups if _size(each) > _NOTICED * budget], self._known)

    def rooms(self, given: int, predicted: int) -> list[int]:
        """Bytes that the loops might get of `given`, if the function needs `predicted` as it is."""
        rest = max(0, predicted - self.size)
        shares = _SHARES if self.groups and rest > _NOTICED * given else ()
        return [given - rest, *(int(share * given) for share in shares)]

    def as_they_are(self) -> Looped:
        """The function with no loop changed."""
        return Looped(self.flat, self.flat, (), tuple(self.flat.consts))

    def within(self, room: int) -> Looped:
        """The function with loops that take about so many bytes, or as few as they can."""
        return self._looped(tuple([shape(group, self._share(group, room)) for group in self.groups]))

    def smallest(self) -> Iterator[Looped]:
        """The function with loops in several shapes that take little; the last takes least by their own count."""
        shapes = [smallest(group) for group in self.groups]
        for place in range(max(map(len, shapes), default=1)):
            yield self._looped(tuple([each[max(0, place - max(map(len, shapes)) + len(each))] for each in shapes]))

    def uniform(self) -> Iterator[Looped]:
        """The function with each step of its loops run again by itself; all loops in the same mode, by its place.

        Then the same of the function with scans within scans in two, where that has less memory or cost.
        """
        known: list[tuple[float, int]] = []
        for loops in (self, *(Loops(each.flat, split=each) for each in splits(self.flat))):
            for shapes in loops._uniform():
                cost = sum(each.cost for each in shapes) + (loops._split.more if loops._split else 0.0)
                size = sum(each.peak for each in shapes)
                if loops is self or not any(one <= cost * _SAME and two <= size for one, two in known):
                    known.append((cost, size))
                    yield loops._looped(shapes)

    def _uniform(self) -> Iterator[tuple[Shape, ...]]:
        shapes = [uniform(group) for group in self.groups]
        for place in range(max(map(len, shapes), default=0)):
            yield tuple([each[min(place, len(each) - 1)] for each in shapes])

    def _looped(self, shapes: tuple[Shape, ...]) -> Looped:
        changed = [(each.group, each.parts) for each in shapes if not each.is_plain]
        if not changed:
            return self.as_they_are()
        key = tuple([(id(group), parts) for group, parts in changed])
        if key not in self._known:
            flat = flatten(rewrite(self.flat, changed), inline_custom=False)
            constants = (*flat.consts, *self.flat.consts)  # the old ones are arguments of the new function
            self._known[key] = Looped(self.flat, flat, shapes, constants, self._split)
        return self._known[key]

    def _share(self, group: Group, room: int) -> int:
        return max(0, room * _size(group) // max(1, self.size))


def _size(group: Group) -> int:
    return group.length * group.modes[0].stacked
