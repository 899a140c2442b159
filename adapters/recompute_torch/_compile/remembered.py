"""The plans that were made, by program: more memory never costs more, and the next process need not plan again.

A plan that fits a budget fits every larger one. So it is a candidate there; and what is chosen takes neither more time
nor more floating-point operations than any plan that was chosen for less in this process. What inductor has compiled is
kept beside its own cache, for the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

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


@dataclass(frozen=True)
class Scheduled:
    """A plan as inductor has scheduled it, for kernels that fuse within a span."""

    budget: int
    effort: float
    order: tuple[int, ...]
    span: int
    peak: int
    """Bytes at the worst kernel."""


def scheduled(program: Program, folder: str) -> list[Scheduled]:
    """What was kept of a program, whatever its operators cost: they are timed anew in each process. Oldest first."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # none, or none that this version reads
        text = _file(program, folder).read_text(encoding="utf-8")
        return [Scheduled(**{**plan, "order": tuple(plan["order"])}) for plan in json.loads(text)]
    return []


def keep_scheduled(program: Program, folder: str, plan: Scheduled) -> None:
    """For the next question, in this process or another. Where the folder cannot be written to, nothing is kept."""
    plans = [old for old in scheduled(program, folder) if (old.budget, old.effort) != (plan.budget, plan.effort)]
    with suppress(OSError):
        file = _file(program, folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent, prefix=file.stem) as work:  # so that half a file is never seen
            new = Path(work, file.name)
            new.write_text(json.dumps([asdict(one) for one in [*plans, plan][-_MOST:]]), encoding="utf-8")
            os.replace(new, file)


def _file(program: Program, folder: str) -> Path:
    calls = [(call.name, call.arguments, call.results) for call in program.calls]
    read = (torch.__version__, calls, program.sizes, program.storages, program.steps, program.outputs)
    return Path(folder, "recompute", sha256(repr(read).encode()).hexdigest() + ".json")
