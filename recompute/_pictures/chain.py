"""A picture of the cost of the uniform training chain as it grows, beside the optimum: the setting of DTR's proofs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from recompute._pictures.style import INK, head, legend_below, looks, panels
from recompute._plans.chains import optimum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REGIMES: Final[Mapping[str, Callable[[int], int]]] = {
    "2 √n": lambda n: math.ceil(2 * math.sqrt(n)),
    "3 log₂ n": lambda n: math.ceil(3 * math.log2(n)),
    "log₂ n + 2": lambda n: math.ceil(math.log2(n)) + 2,
}
"""How the budget grows with the chain, in values; as in the bounds that are known."""


@dataclass(frozen=True)
class ChainPoint:
    """One policy or planner on one chain."""

    name: str
    n: int
    regime: str
    """How the budget grows with n: a key of `REGIMES`, or any other text."""
    cost: float | None
    """Operations run, of 2 n without eviction. None: it failed."""


def chain_cost(points: Iterable[ChainPoint], *, title: str | None = None) -> Figure:
    """A figure of operations per step of the chain over its length, one panel for each regime of the budget.

    A line that rises at a constant slope is n log n; one that stays level is linear. Both axes are logarithmic.

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw.
    """
    from_points = list(points)
    if not any(point.cost is not None for point in from_points):
        raise ValueError("nothing to draw: no chain came to its end")
    regimes = list(dict.fromkeys(point.regime for point in from_points))
    names = list(dict.fromkeys(point.name for point in from_points))
    look = looks(names)
    figure, grid = panels([f"budget {regime} values" for regime in regimes], width=3.5, columns=3)
    most = max(point.cost / point.n for point in from_points if point.cost is not None)
    top = min(24.0, 1.15 * max(most, 4.0))
    for axes, regime in zip(grid, regimes, strict=True):
        sizes = sorted({point.n for point in from_points if point.regime == regime})
        _draw_bounds(axes, regime, sizes)
        for under, name in reversed([*enumerate(names)]):
            own = sorted(
                (point.n, math.nan if point.cost is None else point.cost / point.n)
                for point in from_points
                if (point.name, point.regime) == (name, regime)
            )
            axes.plot([n for n, _ in own], [cost for _, cost in own], **look[name].line(under))
        axes.set_ylabel("operations per step" if axes is grid[0] else "")
        _scale(axes, sizes, top)
    legend_below(figure, _handles(look), 5)
    head(figure, title)
    return figure


def _draw_bounds(axes: Any, regime: str, sizes: list[int]) -> None:
    grown = REGIMES.get(regime)
    if grown is not None:
        within = [n for n in sizes if n > 1 and grown(n) > 2]
        axes.plot(
            within,
            [optimum(n, min(n, grown(n))) / n for n in within],
            color=INK,
            linewidth=5,
            alpha=0.25,
        )
    axes.plot(sizes, [2.0 for _ in sizes], color=INK, linewidth=1, linestyle=":")
    axes.plot(sizes, [math.log2(n) for n in sizes], color=INK, linewidth=1, linestyle="-.")


def _scale(axes: Any, sizes: list[int], top: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(ylim=(1.8, top), xlabel="n, steps of the chain")
    heights = [height for height in (2, 3, 4, 6, 8, 12, 16, 24) if height <= top]
    for axis, ticks in ((axes.xaxis, sizes), (axes.yaxis, heights)):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:.0f}"))


def _handles(look: Mapping[str, Any]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **style.line()) for name, style in look.items()]
    return [
        *handles,
        Line2D([], [], color=INK, linewidth=5, alpha=0.25, label="optimum (Revolve)"),
        Line2D([], [], color=INK, linewidth=1, linestyle="-.", label="n log₂ n"),
        Line2D([], [], color=INK, linewidth=1, linestyle=":", label="2 n, all kept"),
    ]
