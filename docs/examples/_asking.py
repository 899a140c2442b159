"""Outputs that are made and then asked for in random order: what that took, and what of them was in memory when."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np

import recompute as rc
from _budgets import POLICIES, Taken, counted
from recompute.events import Event
from recompute.pictures import residency


@dataclass(frozen=True, kw_only=True)
class Asked(Taken):
    """What one way of running it took, and what it gave. The seconds are those to make all, and to get all."""

    digests: dict[str, str]
    """Of each output."""
    asked: float = 0.0
    """When all was made, on the clock of the events."""


def shuffled(names: Iterable[str]) -> list[str]:
    """By chance, each time the same."""
    found: list[str] = np.random.default_rng(2).permutation(sorted(names)).tolist()
    return found


def timed(make: Callable[[], dict[str, Any]], get: Callable[[Any], object]) -> float:
    """Seconds to make all, and to get all. Looking at it would take longer, so here nobody does."""
    gc.collect()
    start = process_time()
    outputs = make()
    for name in shuffled(outputs):
        get(outputs[name])
    return process_time() - start


def answers(
    cache: rc.Cache, make: Callable[[], dict[str, Any]], ask: Callable[[dict[str, Any]], dict[str, str]]
) -> dict[str, Any]:
    """Of `Asked`, what the outputs and the cache know. `ask` gives a digest of each output."""
    outputs = make()
    made = cache.stats()
    digests = ask(outputs)
    return {"digests": digests, "asked": made.model_time + made.remat_time, **counted(cache.stats())}


def chart(runs: Sequence[Asked], events: Sequence[Event], what: str, share: float, *, least: float) -> Any:
    """What was in memory when: a figure of the events of the run within that share of the memory."""
    budget = int(share * runs[1].peak)
    watched = [run for run in runs if (run.budget, run.policy) == (budget, POLICIES[0])]
    marks = [(run.asked, "all is asked for") for run in watched]
    return residency(events, title=f"{what} in {share:.0%} of the memory", budget=budget, least=least, marks=marks)


def over(chart: Any, above: float, below: float) -> tuple[Any, Any]:
    """A figure with a chart in its lower part, and its upper part; the heights of both, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, above + below), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(above, below))
    chart.set_dpi(160)
    canvas: Any = FigureCanvasAgg(chart)
    canvas.draw()
    axes = parts[1].subplots()
    axes.imshow(np.asarray(canvas.buffer_rgba()))
    axes.axis("off")
    return figure, parts[0]
