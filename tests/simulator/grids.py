"""Grids of budgets: where a policy works, where it fails although less memory would do, and where less is cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log
from random import Random

from recompute.simulator import baseline, simulate
from recompute.traces import Program

NOISE = 1.67
"""The most by which noise multiplies or divides a cost."""


def grid(least: float = 0.05, most: float = 0.9, step: float = 0.004) -> list[float]:
    """Shares of the peak, the smallest first; `most` is the last."""
    return sorted(round(most - number * step, 6) for number in range(1 + int((most - least) / step + 1e-9)))


def noisy(program: Program, seed: int) -> Program:
    """The same program with every cost multiplied by a random number, as likely below one as above it."""
    draw = Random(seed)
    calls = [replace(call, cost=call.cost * exp(draw.uniform(-log(NOISE), log(NOISE)))) for call in program.calls]
    return replace(program, calls=calls)


@dataclass(frozen=True)
class Grid:
    """The overhead at each budget, the smallest budget first; None: it fails, or its overhead is above two."""

    overheads: Mapping[float, float | None]

    @property
    def least(self) -> float | None:
        """The smallest budget that works."""
        return next((budget for budget, overhead in self.overheads.items() if overhead is not None), None)

    @property
    def holes(self) -> list[float]:
        """Budgets that fail although a smaller one works."""
        least = self.least
        return [] if least is None else [at for at, overhead in self.overheads.items() if at > least and not overhead]

    @property
    def ratios(self) -> dict[float, float]:
        """The overhead at each budget that works, divided by the least at a smaller one."""
        found: dict[float, float] = {}
        best = inf
        for budget, overhead in self.overheads.items():
            if overhead is not None:
                if best < inf:
                    found[budget] = overhead / best
                best = min(best, overhead)
        return found

    @property
    def dearer(self) -> list[float]:
        """Budgets that cost over 3 % more than a smaller one."""
        return [budget for budget, ratio in self.ratios.items() if ratio > 1.03]

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=1.0)


def measure(program: Program, budgets: Iterable[float], policy: str = "default") -> Grid:
    """Replay a program under each budget."""
    peak = baseline(program)
    return Grid({at: simulate(program, of_peak=at, policy=policy, peak=peak).overhead for at in sorted(budgets)})
