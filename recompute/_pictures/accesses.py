"""What looking for victims takes: candidates scored over budgets, figure 12 of Kirisame et al., ICLR 2021."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from recompute._pictures.points import Figures
from recompute._pictures.style import head, legend_below, looks, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def accesses(runs: Iterable[Figures], *, title: str | None = None) -> Figure:
    """A figure of how many candidates each policy scored under each budget, one panel for each trace.

    `runs` are what `simulate` returned; a line is one policy with one search. Runs that failed are left out, and so are
    later rounds of a program that repeats.

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw.
    """
    found = [run for run in runs if run.iteration == 1]
    if not any(run.overhead is not None for run in found):
        raise ValueError("nothing to draw: no replay came to its end")
    traces = list(dict.fromkeys(run.trace for run in found))
    one_search = len({run.search for run in found}) == 1
    labels = {(run.policy, run.search): run.policy if one_search else f"{run.policy}, {run.search}" for run in found}
    look = looks(labels.values())
    figure, grid = panels(traces, legend=0.35 + 0.22 * -(-len(labels) // 4))
    for axes, trace in zip(grid, traces, strict=True):
        least, most = math.inf, 10.0
        for under, ((policy, search), label) in reversed([*enumerate(labels.items())]):
            own = [
                (run.budget_ratio, max(1, run.candidates_scored))
                for run in found
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
