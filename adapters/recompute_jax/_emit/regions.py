"""A sequence of segments cut into regions: XLA orders what is in one as it likes, and one comes after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from jax.extend.core import Var

from recompute.planners import last_uses
from recompute_jax._program.costs import kind
from recompute_jax._program.segments import Segments

LENGTH: Final = 16  # segments in a region: XLA orders what is in one


@dataclass
class Region:
    """Consecutive runs behind one gate. No segment is in it twice."""

    runs: list[int]
    """Numbers of segments."""
    inputs: list[Var]
    outputs: list[Var]
    """What later regions need of it."""
    is_open: bool = False
    """Behind no gate."""


def regions(segments: Segments, sequence: Sequence[int], room: int, length: int = LENGTH) -> list[Region]:
    """The sequence cut into regions that XLA may order as it likes: their inputs, what passes by, and all that
    is made inside are at most `room` bytes together, or it is a single run. O(runs).
    """
    parts = segments.segments
    runs = [(parts[number].outputs, parts[number].inputs) for number in sequence]
    dying = last_uses(runs, [*segments.outputs, *segments.sources])
    sizes = {var: segments.builder.nbytes(var) for var in segments.builder.values}
    cuts = [0]
    alive: set[Var] = set()  # made before the region
    before = 0
    inside: set[Var] = set()
    used = 0
    for place, number in enumerate(sequence):
        outputs = parts[number].outputs
        made = sum(sizes[var] for var in outputs)
        start = cuts[-1]
        if place > start and (
            before + used + made > room
            or place - start >= length
            or number in sequence[start:place]
            or not alive.isdisjoint(outputs)
        ):
            cuts.append(place)
            gone = {var for each in dying[start:place] for var in each}
            alive = (alive | inside) - gone
            before = sum(sizes[var] for var in alive)
            inside = set()
            used = 0
        inside.update(outputs)
        used += made
    cuts.append(len(sequence))
    if length == LENGTH:  # nothing runs again in what comes first: there is nothing that XLA could merge or put off
        last = {number: place for place, number in enumerate(reversed(sequence))}  # its first run, from the end
        firsts = {len(sequence) - 1 - place for place in last.values()}
        again = next((place for place in range(len(sequence)) if place not in firsts), len(sequence))
        cuts = [0, *(cut for cut in cuts if cut > again - length), len(sequence)]
    return regions_of(segments, [list(sequence[one:two]) for one, two in pairwise(cuts) if one < two])


def updates_apart(segments: Segments, steps: Sequence[Region]) -> list[Region]:
    """What makes nothing but results, by elementwise equations, comes out of its region, behind no gate.

    A result that takes the memory of a donated argument would be copied out of a branch. O(runs).
    """
    updates = _updates(segments)
    once = Counter(number for region in steps for number in region.runs)
    groups: list[list[int]] = []
    are_open: list[bool] = []
    for region in steps:
        apart = [number for number in region.runs if number in updates and once[number] == 1]
        within = [number for number in region.runs if number not in apart]
        for runs, is_open in ((within, False), (apart, True)):
            if runs:
                groups.append(runs)
                are_open.append(is_open)
    found = regions_of(segments, groups)
    for region, is_open in zip(found, are_open, strict=True):
        region.is_open = is_open
    return found


def _updates(segments: Segments) -> set[int]:
    """The elementwise segments that only results are made of. O(segments)."""
    results = set(segments.outputs)
    read_elsewhere: set[Var] = set()
    found: set[int] = set()
    for number in reversed(range(len(segments.segments))):
        part = segments.segments[number]
        fused = all(kind(eqn) != "heavy" for eqn in part.equations)
        if fused and results.issuperset(part.outputs) and read_elsewhere.isdisjoint(part.outputs):
            found.add(number)
        else:
            read_elsewhere.update(part.inputs)
    return found


def regions_of(segments: Segments, groups: list[list[int]]) -> list[Region]:
    """These groups of runs, with what goes in and out of each. O(runs)."""
    parts = segments.segments
    found: list[Region] = []
    for runs in groups:
        inside: set[Var] = set()
        reads: dict[Var, None] = {}
        for number in runs:
            reads.update(dict.fromkeys(var for var in parts[number].inputs if var not in inside))
            inside.update(parts[number].outputs)
        found.append(Region(runs, list(reads), []))
    needed: set[Var] = set(segments.outputs)
    for region in reversed(found):
        made = [var for number in region.runs for var in parts[number].outputs]
        region.outputs = [var for var in dict.fromkeys(made) if var in needed]
        needed.difference_update(made)
        needed.update(region.inputs)
    return found
