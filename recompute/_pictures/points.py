"""What the pictures over budgets are drawn from: a point for each replay and each plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from recompute._traces.program import Program


class Figures(Protocol):
    """What a point is made from, such as a `recompute.simulator.Run`."""

    @property
    def trace(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def search(self) -> str: ...
    @property
    def budget_ratio(self) -> float: ...
    @property
    def overhead(self) -> float | None: ...
    @property
    def candidates_scored(self) -> int: ...
    @property
    def iteration(self) -> int: ...


@dataclass(frozen=True)
class Point:
    """One policy or planner under one budget."""

    trace: str
    name: str
    """Of the policy or planner."""
    ratio: float
    """The budget as a share of the peak without one."""
    overhead: float | None
    """None: it failed."""
    kind: Literal["policy", "planner"] = "policy"
    bound: float | None = None
    """No schedule has less overhead."""


@dataclass(frozen=True)
class Floor:
    """What no schedule can do without, as shares of the peak without a budget."""

    sources: float
    """The values that are not computed."""
    operation: float
    """The sources, and the arguments and results of the operation that needs most."""

    @classmethod
    def of(cls, program: Program, peak: int) -> Floor:
        """The floor of a program whose peak without a budget is known. O(program)."""
        sizes, storages = program.sizes, program.storages
        constant = {storages[value] for value, maker in enumerate(program.makers) if maker < 0}
        most = 0
        for call in program.calls:
            needed = {storages[value] for value in (*call.arguments, *call.results)} - constant
            most = max(most, sum(sizes[storage] for storage in needed))
        sources = sum(sizes[storage] for storage in constant)
        return cls(sources / max(1, peak), (sources + most) / max(1, peak))


def points_of(figures: Iterable[Figures | Point]) -> list[Point]:
    """Points, made from replays where they are not points yet.

    Of rounds (see `recompute.simulator.iterate`) the first one is a point of the policy, and the last one is of a name
    of its own, such as "default, round 5". Where an earlier one failed, so has the last.
    """
    points: list[Point] = []
    last: dict[tuple[str, str, float], Figures] = {}
    rounds: dict[str, int] = {}  # policy -> how many
    for figure in figures:
        if isinstance(figure, Point):
            points.append(figure)
            continue
        if figure.iteration == 1:
            points.append(Point(figure.trace, figure.policy, figure.budget_ratio, figure.overhead))
        last[figure.trace, figure.policy, figure.budget_ratio] = figure
        rounds[figure.policy] = max(figure.iteration, rounds.get(figure.policy, 1))
    for (trace, policy, ratio), run in last.items():
        number = rounds[policy]
        if number > 1:
            overhead = run.overhead if run.iteration == number else None
            points.append(Point(trace, f"{policy}, round {number}", ratio, overhead))
    return points
