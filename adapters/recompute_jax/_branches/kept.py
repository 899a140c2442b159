"""What the branches of a group keep for later ones: what the planner keeps of the whole of a branch within some bytes.

The equations of the conditionals are one program to it, with an operation in between for the rest of the function,
which takes what an earlier conditional makes for others, and makes what a later one reads of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from jax.extend.core import JaxprEqn, Primitive, Var

from recompute import planners
from recompute.planners import PlanError
from recompute_jax._branches.groups import Branch, Group
from recompute_jax._program.jaxpr import Atom, Flat
from recompute_jax._program.segments import Segment, Segments, peak, segment

Kept = list[list[int]]
"""Of each branch the numbers of the values that are kept, in the order of the group's equations."""

_rest: Final = Primitive("recompute_rest")
_rest.multiple_results = True
_PARTS: Final = (0, 1, 2, 4)  # eighths of the way from the least to the most, where no plan was found for less


_HARDER: Final = 10
"""Times the effort of a whole function's plan: a branch is small, and its order is where a plan begins."""


def nothing(group: Group) -> Kept:
    """Everything runs again."""
    return [[] for _ in group.branches]


def kept(group: Group, room: int, effort: float, seed: int, price: Callable[[Segment], float] | None) -> Kept:
    """What to keep if a branch has so many bytes, or as few as it can do with."""
    found: Kept = []
    for branch in group.branches:
        segments = segment(_together(group, branch), "branch", price)
        order = _order(_with_dear_rest(segments), room, _HARDER * effort / len(group.branches), seed)
        crossing = _crossing(segments, order, branch)
        found.append([at for at, var in enumerate(branch.values) if var in crossing])
    return found


def _together(group: Group, branch: Branch) -> Flat:
    """The branch as one function of what its conditionals read; its results are what others read of them."""
    equations: list[JaxprEqn] = []
    known: set[Var] = set()
    sources: list[Var] = []
    results: list[Var] = []
    for at, own in enumerate(branch.equations):
        wanted = [each for each in group.wanted(branch, at) if isinstance(each, Var)]
        read = dict.fromkeys(each for eqn in own for each in eqn.invars if isinstance(each, Var))
        read.update(dict.fromkeys(wanted))
        fresh = [var for var in read if var not in branch.maker and var not in branch.consts and var not in known]
        known.update(fresh)
        made: list[Atom] = [var for var in dict.fromkeys(results) if var in branch.maker]
        if at and fresh and made:
            like = own[0] if own else equations[0]
            equations.append(like.replace(primitive=_rest, params={}, invars=made, outvars=fresh, effects=set()))
        else:
            sources += fresh
        equations += own
        results += wanted
    inner: list[Atom] = list(dict.fromkeys(var for var in results if var in branch.maker))
    return Flat(list(branch.consts), list(branch.consts.values()), sources, inner, equations)


def _with_dear_rest(segments: Segments) -> Segments:
    """The rest of the function runs once."""
    total = segments.program.model_time
    for part, call in zip(segments.segments, segments.program.calls, strict=True):
        if part.equations[-1].primitive is _rest:
            call.cost = total
    return segments


def _order(segments: Segments, room: int, effort: float, seed: int) -> list[int]:
    """Numbers of segments."""
    most = peak(segments)
    if most <= room:
        return list(range(len(segments.segments)))
    low, order = planners.least(segments.program), list(range(len(segments.segments)))
    for budget in (room, *(low + (most - low) * part // 8 for part in _PARTS)):
        with suppress(PlanError):
            plan = planners.replan(segments.program, max(2, budget), order, effort, seed)
            if plan is not None:
                return plan.order
    return order


def _crossing(segments: Segments, order: Sequence[int], branch: Branch) -> set[Var]:
    """What is made before the rest of the function, and read after it."""
    parts = [segments.segments[number] for number in order]
    found: set[Var] = set()
    for place, rest in enumerate(parts):
        if rest.equations[-1].primitive is not _rest:
            continue
        anew: set[Var] = set()
        for part in parts[place + 1 :]:
            found.update(var for var in part.inputs if var in branch.maker and var not in anew)
            anew.update(part.outputs)
    return found
