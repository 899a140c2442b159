"""The plans that this process has made, by program: more memory never costs more, however well a search went.

A plan that fits a budget fits every larger one. So it is a candidate there; and what is chosen takes neither more time
nor more floating-point operations than any plan that was chosen for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Final

from recompute.traces import Program

_MOST: Final = 64
"""Plans, of all programs: some hundred kilobytes for some thousand operators."""


@dataclass(frozen=True)
class Found:
    """A plan that fits."""

    order: tuple[int, ...]
    peak: int
    """Bytes of what was emitted."""
    cost: float
    flops: float


_found: Final[dict[tuple[str, int, float], Found]] = {}
"""(program, bytes that were allowed, effort) -> what was chosen, oldest first."""


def identity(program: Program) -> str:
    """Programs are the same if nothing that a planner reads differs. O(program)."""
    calls = [(call.name, call.arguments, call.results, call.cost) for call in program.calls]
    return sha256(repr((calls, program.sizes, program.storages, program.steps, program.outputs)).encode()).hexdigest()


def chosen(program: str, budget: int, effort: float) -> Found | None:
    """What was chosen for the same question."""
    return _found.get((program, budget, effort))


def smaller(program: str, budget: int) -> list[Found]:
    """What was chosen for this budget or less. O(plans)."""
    return [plan for (of, _, _), plan in _found.items() if of == program and plan.peak <= budget]


def best(known: Sequence[Found], new: Sequence[Found]) -> Found:
    """The cheapest that takes no more time and operations than any known one; if there is none, the cheapest."""
    every = [*new, *known]
    cost, flops = min([plan.cost for plan in known], default=inf), min([plan.flops for plan in known], default=inf)
    good = [plan for plan in every if plan.cost <= cost and plan.flops <= flops]
    return min(good or every, key=lambda plan: (plan.cost, plan.flops))


def keep(program: str, budget: int, effort: float, found: Found) -> None:
    """For the next question."""
    _found[program, budget, effort] = found
    while len(_found) > _MOST:
        del _found[next(iter(_found))]
