"""How to run the scans of a group within some memory: which steps keep their stacks, which run again in which blocks.

What is read last is left out first. While its readers run, the stacks of the other steps are gone already, so that its
blocks have their room. With d levels of blocks n steps need carries of the order of n^(1/(d+1)), and run d times again
(Griewank and Walther 2000, multi-level checkpointing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Final

from jax.extend.core import Var

from recompute_jax._control.groups import Group, Mode
from recompute_jax._program.jaxpr import short
from recompute_jax._program.segments import nbytes

_BISECTIONS: Final = 12
_WORTH: Final = 0.97  # of the bytes of a cheaper way: more are not worth the cost
_NAMED: Final = 4  # kinds of stacks, in a text


@dataclass(frozen=True)
class Part:
    """Steps in a row. One level: as they are. Several: blocks of blocks of ... of the last number of steps."""

    start: int
    stop: int
    levels: tuple[int, ...]
    mode: Mode


@dataclass(frozen=True)
class Shape:
    """All steps of a group in parts."""

    group: Group
    parts: tuple[Part, ...]
    peak: int
    """Bytes at the worst moment, about."""
    cost: float
    """Of what runs again."""

    @property
    def is_plain(self) -> bool:
        """The scans are left as they are."""
        return len(self.parts) == 1 and len(self.parts[0].levels) == 1

    def __str__(self) -> str:
        return "; ".join(_text(self.group, part) for part in self.parts)


@dataclass(frozen=True)
class _Way:
    """A mode, and how many levels of blocks."""

    mode: Mode
    depth: int
    alone: bool = False
    """Each block is one step."""


@dataclass(frozen=True)
class _Laid:
    """Steps in a way. Fewer than were given, if they do not fill the blocks."""

    way: _Way
    levels: tuple[int, ...]
    kept: int
    work: int

    @property
    def steps(self) -> int:
        return prod(self.levels)

    @property
    def cost(self) -> float:
        mode = self.way.mode
        return self.steps * (mode.alone if self.way.alone else mode.cost * self.way.depth)


def shape(group: Group, room: int) -> Shape:
    """The cheapest that fits in so many bytes, or else the smallest. O(modes squared) trials."""
    ways = _ways(group)
    shapes = [_parts(group, [_lay(group, ways[0], group.length)])]
    for less, more in combinations(reversed(ways), 2):
        low, high = 0, group.length  # so many steps in the way that needs less
        for _ in range(_BISECTIONS):
            made = _mixed(group, less, more, (low + high) // 2)
            shapes.append(made)
            if made.peak <= room:
                high = (low + high) // 2
            else:
                low = (low + high) // 2 + 1
            if low >= high:
                break
        shapes.append(_mixed(group, less, more, high))
    fitting = [made for made in shapes if made.peak <= room]
    if fitting:
        return min(fitting, key=lambda made: (made.cost, made.peak))
    return min(shapes, key=lambda made: made.peak)


def uniform(group: Group) -> list[Shape]:
    """Each step by itself, for each mode, as `jax.checkpoint` around the body does."""
    ways = [_Way(mode, 1, alone=True) for mode in group.modes[1:]]
    return [_parts(group, [_lay(group, way, group.length)]) for way in ways]


def smallest(group: Group) -> list[Shape]:
    """Shapes for little memory, by rising cost: blocks of one step, then of few levels, last the smallest.

    XLA has more copies of some than of others, which no count here foresees.
    """
    mode = group.modes[-1]
    ways = [_Way(mode, 1, alone=True), _Way(mode, 1), _Way(mode, 2)] if len(group.modes) > 1 else []
    shapes = [*(_parts(group, [_lay(group, way, group.length)]) for way in ways), shape(group, 0)]
    return list({made.parts: made for made in shapes}.values())


def _ways(group: Group) -> list[_Way]:
    """By falling bytes and rising costs, those worth it if all steps are run in that way."""
    ways = [_Way(mode, 1, alone) for mode in group.modes[1:] for alone in (True, False)]
    ways += [_Way(group.modes[-1], depth) for depth in range(2, group.length.bit_length()) if len(group.modes) > 1]
    shapes = [(_parts(group, [_lay(group, way, group.length)]), way) for way in ways]
    worth = [_Way(group.modes[0], 0)]
    least = float(group.size)
    for made, way in sorted(shapes, key=lambda pair: (pair[0].cost, pair[0].peak)):
        if made.peak <= _WORTH * least:
            least = made.peak
            worth.append(way)
    return worth


def _mixed(group: Group, less: _Way, more: _Way, steps: int) -> Shape:
    second = _lay(group, more, group.length - steps)
    first = _lay(group, less, steps, second.kept + second.work)
    return _parts(group, [first, _lay(group, more, group.length - first.steps)])


def _lay(group: Group, way: _Way, steps: int, slack: int = 0) -> _Laid:
    """Steps in blocks of the best size, if `slack` bytes are free by then, and what fills no block is stacked."""
    mode = way.mode
    if not steps or not way.depth:
        return _Laid(way, (steps,), steps * mode.stacked, 0)
    if way.alone:
        return _Laid(way, (steps, 1), steps * (mode.stacked + mode.entry), mode.work)
    best: tuple[int, tuple[int, ...], int, int] | None = None
    for size in _sizes(steps):
        counts = _even(steps // size, way.depth)
        used = prod(counts) * size
        work = sum(counts[1:]) * mode.entry + size * mode.work
        kept = used * mode.stacked + counts[0] * mode.entry
        score = kept + max(0, work - slack) + (steps - used) * group.modes[0].stacked
        if best is None or score <= best[0]:
            best = score, (*counts, size), kept, work
    assert best is not None, "blocks of one step are always possible"
    return _Laid(way, *best[1:])


def _sizes(steps: int) -> Iterator[int]:
    size = 1
    while size <= steps:
        yield size
        size = max(size + 1, size * 5 // 4)
    if steps > 1:
        yield steps // 2


@lru_cache(4096)  # few numbers, asked for hundreds of thousands of times
def _even(blocks: int, depth: int) -> tuple[int, ...]:
    """About equal numbers whose product is at most `blocks`."""
    counts: list[int] = []
    for left in range(depth, 0, -1):
        count = max(1, int(blocks ** (1 / left) + 1e-9))
        counts.append(count)
        blocks //= count
    return tuple(counts)


def _parts(group: Group, laid: list[_Laid]) -> Shape:
    """One after the other, and the steps that are left as they are."""
    left = group.length - sum(block.steps for block in laid)
    if left:
        laid = [*laid, _lay(group, _Way(group.modes[0], 0), left)]
    laid = [block for block in laid if block.steps]
    kept = peak = 0
    for block in laid:
        kept += block.kept
        peak = max(peak, kept + block.work)
    # Later parts are gone when an earlier one is read.
    if len(laid) > 1:
        peak += group.length * sum(nbytes(var.aval) for var in group.fixed)  # what others read is put together
    parts: list[Part] = []
    start = 0
    for block in laid:
        parts.append(Part(start, start + block.steps, block.levels, block.way.mode))
        start += block.steps
    if group.bodies[0].reverse:
        parts = [Part(group.length - part.stop, group.length - part.start, part.levels, part.mode) for part in parts]
        parts.reverse()
    cost = sum(block.cost for block in laid)
    return Shape(group, tuple(parts), peak, cost)


def _text(group: Group, part: Part) -> str:
    steps = part.stop - part.start
    if len(part.levels) == 1:
        return f"{steps:,} steps as they are"
    *counts, size = part.levels
    blocks = " of ".join(f"{count:,}" for count in counts)
    kept = [
        f"{short(var.aval)} of {_maker(group, var)}"
        for var in part.mode.real
        if nbytes(var.aval) and var not in group.results
    ]
    more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
    keeping = f"keeping {', '.join(sorted(kept)[:_NAMED])}{more}" if kept else "keeping carries"
    return f"{steps:,} steps run again in {blocks} blocks of {size:,}, {keeping}"


def _maker(group: Group, var: Var) -> str:
    for body in group.bodies:
        if var in body.maker:
            return str(body.flat.equations[body.maker[var]].primitive.name)
    return "a carry"
