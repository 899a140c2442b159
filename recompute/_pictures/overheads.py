"""Pictures over budgets, a panel for each trace: overheads, and candidates scored in search of victims.

Figures 2 and 12 of Kirisame et al., ICLR 2021. They are drawn from a point for each replay and each plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from recompute._pictures.style import INK, Style, head, legend_below, looks, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from recompute._simulator.run import Run
    from recompute._traces.program import Program


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
    """The least memory of any schedule, as shares of the peak without a budget."""

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


def points_of(figures: Iterable[Run | Point]) -> list[Point]:
    """Points, made from replays where they are not points yet.

    Of rounds (see `recompute.simulator.iterate`) the first one is a point of the policy, and the last one is of a name
    of its own, such as "default, round 5". Where an earlier one failed, so has the last.
    """
    points: list[Point] = []
    last: dict[tuple[str, str, float], Run] = {}
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


def overhead(
    points: Iterable[Run | Point],
    *,
    floors: Mapping[str, Floor] | None = None,
    title: str | None = None,
    most: float = 2.0,
) -> Figure:
    """A figure of the overhead of policies and planners over budgets, one panel for each trace.

    Parameters
    ----------
    points
        What `simulate` and `iterate` returned, and `Point`s. Of rounds the last one is a line of its own. A line ends,
        with a cross, at the last budget before one that failed.
    floors
        Trace -> what no schedule can do without: drawn as grey areas on the left.
    title
        Above the figure.
    most
        The overhead at the top.

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw.
    """
    drawn = points_of(points)
    if not drawn:
        raise ValueError("nothing to draw: there are no replays and no plans")
    traces = list(dict.fromkeys(point.trace for point in drawn))
    names = list(dict.fromkeys(point.name for point in sorted(drawn, key=lambda point: point.kind != "policy")))
    look = looks(names)
    figure, grid = panels(traces, legend=0.35 + 0.22 * -(-(len(names) + 1) // 4))
    floors = floors or {}
    widest = max(point.ratio for point in drawn)
    for axes, trace in zip(grid, traces, strict=True):
        own = [point for point in drawn if point.trace == trace]
        for under, name in reversed([*enumerate(names)]):  # the first one lies on top
            _draw_line(axes, [point for point in own if point.name == name], look[name], most, under)
        _draw_bounds(axes, own, most)
        axes.set(xlim=(0, max(1.0, widest)), ylim=(1 - 0.02 * (most - 1), most))
        axes.set(xlabel="budget [share of the peak without one]", ylabel="overhead [all compute / compute once]")
        if trace in floors:
            _draw_floor(axes, floors[trace])
    legend_below(figure, _handles(names, look, drawn, floors=bool(floors)))
    head(figure, title)
    return figure


def _draw_line(axes: Any, points: Iterable[Point], look: Style, most: float, under: int) -> None:
    """The points of one name, from the largest budget down; what failed is a gap."""
    ordered = sorted(points, key=lambda point: -point.ratio)
    heights = [float("nan") if point.overhead is None else point.overhead for point in ordered]
    axes.plot([point.ratio for point in ordered], heights, **look.line(under))
    for point, following in pairwise(ordered):
        if point.overhead is not None and following.overhead is None:
            _cross(axes, point.ratio, min(point.overhead, most), look)
    if ordered and ordered[0].overhead is None:
        _cross(axes, ordered[0].ratio, most, look)


def _cross(axes: Any, ratio: float, height: float, look: Style) -> None:
    axes.plot(
        [ratio],
        [height],
        marker="x",
        markersize=10,
        markeredgewidth=1.8,
        color=look.colour,
        linestyle="",
        clip_on=False,
    )


def _draw_bounds(axes: Any, points: Sequence[Point], most: float) -> None:
    """The best bound that was proved for each budget, as short bars."""
    best: dict[float, float] = {}
    for point in points:
        if point.bound is not None:
            best[point.ratio] = max(best.get(point.ratio, 1.0), point.bound)
    if best:
        axes.plot(
            list(best), list(best.values()), linestyle="", marker="_", markersize=13, markeredgewidth=1.5, color=INK
        )


def _draw_floor(axes: Any, floor: Floor) -> None:
    axes.axvspan(0, floor.operation, color="#D9D9D9", linewidth=0, zorder=0)
    axes.axvspan(0, floor.sources, color="#8C8C8C", linewidth=0, zorder=0)


def _handles(names: Sequence[str], look: Mapping[str, Style], points: Sequence[Point], *, floors: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Line2D([], [], label=name, **look[name].line()) for name in names]
    if any(point.overhead is None for point in points):
        handles.append(
            Line2D([], [], linestyle="", marker="x", color=INK, markersize=9, markeredgewidth=1.8, label="fails below")
        )
    if any(point.bound is not None for point in points):
        handles.append(
            Line2D(
                [], [], linestyle="", marker="_", markersize=13, markeredgewidth=1.5, color=INK, label="proved bound"
            )
        )
    if floors:
        handles.append(Patch(color="#8C8C8C", label="inputs and weights"))
        handles.append(Patch(color="#D9D9D9", label="+ largest operation"))
    return handles


def accesses(runs: Iterable[Run], *, title: str | None = None) -> Figure:
    """A figure of how many candidates each policy scored under each budget, one panel for each trace.

    `runs` are what `simulate` returned; a line is one policy with one search. Runs that failed are left out, and so are
    later rounds of a program that repeats.

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw.
    """
    first_runs = [run for run in runs if run.iteration == 1]
    if not any(run.overhead is not None for run in first_runs):
        raise ValueError("nothing to draw: no replay came to its end")
    traces = list(dict.fromkeys(run.trace for run in first_runs))
    one_search = len({run.search for run in first_runs}) == 1
    labels = {
        (run.policy, run.search): run.policy if one_search else f"{run.policy}, {run.search}" for run in first_runs
    }
    look = looks(labels.values())
    figure, grid = panels(traces, legend=0.35 + 0.22 * -(-len(labels) // 4))
    for axes, trace in zip(grid, traces, strict=True):
        least, most = math.inf, 10.0
        for under, ((policy, search), label) in reversed([*enumerate(labels.items())]):
            own = [
                (run.budget_ratio, max(1, run.candidates_scored))
                for run in first_runs
                if (run.trace, run.policy, run.search) == (trace, policy, search) and run.overhead is not None
            ]
            own.sort()
            axes.plot([ratio for ratio, _ in own], [count for _, count in own], **look[label].line(under))
            least = min([least, *[count for _, count in own]])
            most = max([most, *[count for _, count in own]])
        least = min(least, most / 10)
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(least)), 1.5 * most)
        axes.set(xlim=(0, 1), xlabel="budget [share of the peak without one]", ylabel="candidates scored")
    from matplotlib.lines import Line2D

    legend_below(figure, [Line2D([], [], label=label, **style.line()) for label, style in look.items()])
    head(figure, title)
    return figure
