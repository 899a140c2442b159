"""The residency chart of the DTR talk: a row for each value, a bar while it is in memory, recomputation marked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from recompute._pictures.bars import Bar, How, Moment, bars, large
from recompute._pictures.style import (
    AGAIN,
    FETCHED,
    FIRST,
    INK,
    MOVED,
    ceiling,
    head,
    new_figure,
    size_unit,
    tidy,
    time_unit,
)
from recompute.events import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 250  # values; more are drawn as an image, in which a pixel may stand for several
_BARS: Final = 4_000  # likewise
_PIXELS: Final = (560, 1150)  # rows and columns of that image
_HOW: Final[dict[How, tuple[str, str]]] = {
    "moved": (MOVED, "in a tier"),
    "first": (FIRST, "first computed"),
    "again": (AGAIN, "recomputed"),
    "fetched": (FETCHED, "fetched"),
}
"""Colour and label of a bar; what comes later lies on top."""

_TICKS: Final = 24  # labels that fit on the axis of values


def residency(
    events: Iterable[Event],
    *,
    labels: Mapping[int, str] | None = None,
    title: str | None = None,
    budget: int | None = None,
    storages: Collection[int] | None = None,
    least: float = 0.0,
    marks: Iterable[Moment] = (),
    unit: float | str = 1.0,
) -> Figure:
    """A figure of which value was in memory when, or in a tier, over the bytes used.

    Parameters
    ----------
    events
        What a cache told a listener, in order. One device: bytes of several would be mixed.
    labels
        Names of storages, by number, on the axis of values; as many as fit are shown.
    title
        Above the figure.
    budget
        Bytes; drawn as a line.
    storages
        Only these, by number.
    least
        Only storages of at least this share of the most bytes used.
    marks
        Times on the events' clock, each with a text: drawn as lines, such as for the start of the backward pass.
    unit
        Seconds in a unit of the events' clock, or the name of a unit that is not of time.

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw. Tens of
    thousands of bars take about a second.
    """
    figure = new_figure(9, 6)
    events = list(events)
    drawn = _large_bars(events, storages, least)

    first = min(bar.start for bar in drawn)
    last = max(max(bar.end for bar in drawn), first + 1e-12)
    rows = {storage: row for row, storage in enumerate(sorted({bar.storage for bar in drawn}))}
    divisor, name = time_axis(last - first, unit)
    ends = [(bar, (bar.start - first) / divisor, (bar.end - first) / divisor) for bar in drawn]

    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    above.set(xlim=(0, (last - first) / divisor), ylim=(-0.5, len(rows) - 0.5), ylabel=_what(least))
    (_draw_image if len(rows) > _ROWS or len(drawn) > _BARS else _draw_bars)(above, ends, rows)
    _name_rows(above, rows, labels)
    _draw_usage(below, events, first, divisor, budget)
    below.set_xlabel(name)
    tidy(above, None)
    tidy(below, None)
    draw_marks((above, below), [((time - first) / divisor, text) for time, text in marks])
    _draw_legend(above, drawn)
    figure.align_ylabels()
    head(figure, title)
    return figure


def _large_bars(events: Sequence[Event], storages: Collection[int] | None, least: float) -> list[Bar]:
    if least:
        big = large(events, least)
        storages = big if storages is None else big & set(storages)
    drawn = bars(events, storages)
    if not drawn:
        raise ValueError("nothing to draw: none of these events puts a value into memory")
    return drawn


def _what(least: float) -> str:
    return f"values of at least {100 * least:.3g}% of the peak" if least else "value, in order of creation"


def time_axis(duration: float, unit: float | str) -> tuple[float, str]:
    """The divisor of times, and the label of their axis."""
    if isinstance(unit, str):
        return 1.0, f"compute time [{unit}]"
    second, name = time_unit(duration * unit)
    return second / unit, f"compute time [{name}]"


def draw_marks(axes: Sequence[Any], marks: Iterable[Moment]) -> None:
    """Vertical lines through all of these axes, with their texts at the top of the first."""
    right = axes[0].get_xlim()[1]
    for time, text in marks:
        for panel in axes:
            panel.axvline(time, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        leftwards = time > 0.75 * right
        axes[0].annotate(
            "backward pass" if text == "BACKWARD" else text,
            (time, 1),
            (-4 if leftwards else 4, -1),
            ("data", "axes fraction"),
            "offset points",
            ha="right" if leftwards else "left",
            va="top",
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        )


def _draw_bars(axes: Any, ends: Sequence[tuple[Bar, float, float]], rows: Mapping[int, int]) -> None:
    """One collection a colour: shapes, which stay sharp in a vector file."""
    from matplotlib.collections import PolyCollection

    half = 0.4 if len(rows) < 100 else 0.5
    for how, (colour, _) in _HOW.items():
        boxes = [
            [(left, row - half), (left, row + half), (right, row + half), (right, row - half)]
            for bar, left, right in ends
            if bar.how == how
            for row in (rows[bar.storage],)
        ]
        if boxes:
            axes.add_collection(PolyCollection(boxes, facecolor=colour, edgecolor=colour, linewidth=0.3))


def _draw_image(axes: Any, ends: Sequence[tuple[Bar, float, float]], rows: Mapping[int, int]) -> None:
    """One image: a pixel is the stronger, the more of the values it stands for are in memory; none is left out."""
    from matplotlib.colors import to_rgb

    height, width = min(_PIXELS[0], len(rows)), _PIXELS[1]
    right_most = ceiling(axes.get_xlim()[1])
    values = [0] * height  # row of pixels -> the values that it stands for
    for row in range(len(rows)):
        values[row * height // len(rows)] += 1
    hows = list(_HOW)
    changes = [[[0] * (width + 1) for _ in hows] for _ in values]
    for bar, left, right in ends:
        start = min(width - 1, int(left / right_most * width))
        change = changes[rows[bar.storage] * height // len(rows)][hows.index(bar.how)]
        change[start] += 1
        change[max(start + 1, min(width, round(right / right_most * width)))] -= 1
    colours = [to_rgb(colour) for colour, _ in _HOW.values()]
    image: list[list[list[int]]] = []
    for count, change_of in zip(values, changes, strict=True):
        there = list(zip(*(accumulate(change[:width]) for change in change_of), strict=True))
        pixel = {there_now: _mixed([number / count for number in there_now], colours) for there_now in set(there)}
        image.append([pixel[there_now] for there_now in there])
    axes.imshow(
        image,
        extent=(0, right_most, -0.5, len(rows) - 0.5),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )


def _mixed(shares: Iterable[float], colours: Iterable[Sequence[float]]) -> list[int]:
    """White, with each colour in turn laid over it: the stronger, the greater its share."""
    channels = [1.0, 1.0, 1.0]
    for share, colour in zip(shares, colours, strict=True):
        strength = 0.35 + 0.65 * min(1.0, share) if share else 0.0
        channels = [below * (1 - strength) + ink * strength for below, ink in zip(channels, colour, strict=True)]
    return [round(255 * channel) for channel in channels]


def _draw_legend(axes: Any, drawn: Iterable[Bar]) -> None:
    from matplotlib.patches import Patch

    there = {bar.how for bar in drawn}
    handles = [Patch(color=colour, label=label) for how, (colour, label) in _HOW.items() if how in there]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(_HOW),
        frameon=False,
        handlelength=1.2,
        borderpad=0.2,
    )


def _name_rows(axes: Any, rows: dict[int, int], labels: Mapping[int, str] | None) -> None:
    if labels is None:
        axes.yaxis.get_major_locator().set_params(integer=True)
        return
    named = [(row, labels[storage]) for storage, row in rows.items() if storage in labels]
    shown = named[:: max(1, -(-len(named) // _TICKS))]
    axes.set_yticks([row for row, _ in shown], [name for _, name in shown])


def _draw_usage(axes: Any, events: list[Event], first: float, divisor: float, budget: int | None) -> None:
    """Bytes used, as steps, and the budget as a line. Room for a result is in use while its operation runs."""
    most = max([event.used for event in events] + [budget or 0])
    size, name = size_unit(most)
    times = [(event.time - first) / divisor for event in events]
    used = [event.used / size for event in events]
    many = len(used) > _BARS
    axes.fill_between(times, used, step="pre", color=INK, alpha=0.3, linewidth=0, rasterized=many)
    axes.set(ylim=(0, ceiling(1.25 * most / size)), ylabel=f"used [{name}]")
    if budget is not None:
        draw_budget(axes, budget / size)


def draw_budget(axes: Any, height: float, text: str = "budget") -> None:
    """A dashed line with its name."""
    axes.axhline(height, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        text,
        (1, height),
        (0, 2),
        ("axes fraction", "data"),
        "offset points",
        ha="right",
        va="bottom",
        fontsize="small",
        color=INK,
    )
