"""Overhead against budget, a panel for each trace: figure 2 of Kirisame et al., ICLR 2021."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from recompute._pictures.points import Figures, Floor, Point, points_of
from recompute._pictures.style import INK, Look, head, legend_below, looks, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overhead(
    points: Iterable[Figures | Point],
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
    found = points_of(points)
    if not found:
        raise ValueError("nothing to draw: there are no replays and no plans")
    traces = list(dict.fromkeys(point.trace for point in found))
    names = list(dict.fromkeys(point.name for point in sorted(found, key=lambda point: point.kind != "policy")))
    look = looks(names)
    figure, grid = panels(traces, legend=0.35 + 0.22 * -(-(len(names) + 1) // 4))
    floors = floors or {}
    widest = max(point.ratio for point in found)
    for axes, trace in zip(grid, traces, strict=True):
        own = [point for point in found if point.trace == trace]
        for under, name in reversed([*enumerate(names)]):  # the first one lies on top
            _draw_line(axes, [point for point in own if point.name == name], look[name], most, under)
        _draw_bounds(axes, own, most)
        axes.set(xlim=(0, max(1.0, widest)), ylim=(1 - 0.02 * (most - 1), most))
        axes.set(xlabel="budget [share of the peak without one]", ylabel="overhead [all compute / compute once]")
        if trace in floors:
            _draw_floor(axes, floors[trace])
    legend_below(figure, _handles(names, look, found, bool(floors)))
    head(figure, title)
    return figure


def _draw_line(axes: Any, points: Iterable[Point], look: Look, most: float, under: int) -> None:
    """The points of one name, from the largest budget down; what failed is a gap."""
    ordered = sorted(points, key=lambda point: -point.ratio)
    heights = [float("nan") if point.overhead is None else point.overhead for point in ordered]
    axes.plot([point.ratio for point in ordered], heights, **look.line(under))
    for point, following in pairwise(ordered):
        if point.overhead is not None and following.overhead is None:
            _cross(axes, point.ratio, min(point.overhead, most), look)
    if ordered and ordered[0].overhead is None:
        _cross(axes, ordered[0].ratio, most, look)


def _cross(axes: Any, ratio: float, height: float, look: Look) -> None:
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


def _handles(names: Sequence[str], look: Mapping[str, Look], points: Sequence[Point], floors: bool) -> list[Any]:
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
