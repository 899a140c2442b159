"""Which values of each step of a scan to stack, so that the rest can be had from them without what is dear to run.

A vertex cut of least bytes between what is not to run again and what later scans read (Ford and Fulkerson 1956; the
cut nearest to the readers, which leaves least to run). Raising what counts as dear gives several such sets; so do the
policies of `jax.checkpoint`: products of matrices are dear, or those that have no batch dimensions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from math import inf
from typing import Final

from jax.extend.core import JaxprEqn, Var

from recompute_jax._program.costs import flops, kind, nbytes
from recompute_jax._scans.body import Body

_LEVELS: Final = 4  # ways to tell what is dear


def choices(body: Body, read: Sequence[Var], kept: Collection[Var], alone: bool = False) -> list[frozenset[Var]]:
    """Sets of values to stack beside those that are `kept` anyway; the empty set is not among them.

    `alone`: the carries at the beginning of each step are there.

    O(levels x stacked values x equations).
    """
    needs = body.needs(read, given=kept, alone=alone)
    heavy = [eqn for eqn in needs.equations if kind(eqn) == "heavy"]
    levels = sorted(set(map(_intensity, heavy)))
    step = max(1, -(-len(levels) // _LEVELS))
    dear = [frozenset(eqn.outvars[0] for eqn in heavy if _intensity(eqn) >= level) for level in levels[::step]]
    dear += [frozenset(eqn.outvars[0] for eqn in heavy if saves(eqn)) for saves in (is_dot, is_dot_without_batch)]
    found: dict[frozenset[Var], None] = {}
    for firm in dict.fromkeys(each for each in dear if each):
        found[frozenset(_cut(body, read, kept, firm, () if alone else needs.carries, alone))] = None
    return list(found)


def is_dot(eqn: JaxprEqn) -> bool:
    """Whether it is a product of matrices."""
    return eqn.primitive.name == "dot_general"


def is_dot_without_batch(eqn: JaxprEqn) -> bool:
    """Whether it is one, and not one for each of a batch."""
    return is_dot(eqn) and not any(eqn.params["dimension_numbers"][1])


def _intensity(eqn: JaxprEqn) -> float:
    """FLOPs for each byte that is made."""
    return flops(eqn) / max(1, sum(nbytes(var.aval) for var in eqn.outvars))


def _cut(
    body: Body, read: Sequence[Var], kept: Collection[Var], dear: Collection[Var], carries: Sequence[int], alone: bool
) -> set[Var]:
    """What makes `dear` values is not to run again, nor for these carries."""
    needs = body.needs(read, given=kept, alone=alone)
    sinks = {*read, *(after for at in carries if isinstance(after := body.next[at], Var))} - set(kept)
    made = [var for eqn in needs.equations for var in eqn.outvars if var not in kept]
    number = {var: at for at, var in enumerate(made)}
    start, end = 2 * len(made), 2 * len(made) + 1
    room: list[dict[int, float]] = [{} for _ in range(end + 1)]  # what can still flow from node to node

    def join(one: int, two: int, most: float) -> None:
        room[one][two] = room[one].get(two, 0.0) + most
        room[two].setdefault(one, 0.0)

    for eqn in needs.equations:
        firm = any(var in dear for var in eqn.outvars)
        for var in eqn.outvars:
            if var not in number:
                continue
            at = number[var]
            join(2 * at, 2 * at + 1, float(nbytes(var.aval)))
            if firm:
                join(start, 2 * at, inf)
            else:
                for other in eqn.invars:
                    if isinstance(other, Var) and other in number:
                        join(2 * number[other] + 1, 2 * at, inf)
            if var in sinks:
                join(2 * at + 1, end, inf)
    while (path := _path(room, start, end)) is not None:
        most = min(room[one][two] for one, two in path)
        for one, two in path:
            room[one][two] -= most
            room[two][one] += most
    near = _reaching(room, end)
    found = {var for var, at in number.items() if 2 * at not in near and 2 * at + 1 in near}
    if alone:
        return found
    left = body.needs(read, given={*kept, *found}).carries
    if len(left) == len(carries):
        return found
    fewer = _cut(body, read, kept, dear, left, alone)  # the others need not be had again
    return fewer if set(body.needs(read, given={*kept, *fewer}).carries) <= set(left) else found


def _path(room: list[dict[int, float]], start: int, end: int) -> list[tuple[int, int]] | None:
    """A shortest way along which more can flow."""
    came: dict[int, int] = {start: start}
    queue = deque([start])
    while queue and end not in came:
        one = queue.popleft()
        for two, most in room[one].items():
            if most > 0 and two not in came:
                came[two] = one
                queue.append(two)
    if end not in came:
        return None
    path: list[tuple[int, int]] = []
    two = end
    while two != start:
        path.append((came[two], two))
        two = came[two]
    return path


def _reaching(room: list[dict[int, float]], end: int) -> set[int]:
    """The nodes from which more could flow to the end."""
    found = {end}
    stack = [end]
    while stack:
        two = stack.pop()
        for one in room[two]:
            if one not in found and room[one][two] > 0:
                found.add(one)
                stack.append(one)
    return found
