"""Pictures of a run: what was in memory when, what was computed again, and how full the budget was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recompute._events import Added, Event, Evicted, Forgotten, Performed, TakenBack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST: Final = "#0072B2"  # blue and vermilion of Okabe and Ito's palette: told apart by all eyes, and in grey
_AGAIN: Final = "#D55E00"
_INK: Final = "#333333"
_MANY: Final = 3_000  # bars; more are drawn as pixels in a vector file
_TICKS: Final = 24  # labels that fit on the axis of values
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


@dataclass(frozen=True, slots=True)
class Bar:
    """A storage was in memory from `start` to `end` (seconds on the compute clock). `again`: it had been recomputed."""

    storage: int
    start: float
    end: float
    again: bool


def bars(events: Iterable[Event], storages: Collection[int] | None = None) -> list[Bar]:
    """When each storage was in memory, by the end of its stay; what is still there stays until the last event.

    A stay begins with the operation that computes the value. `storages` limits them to some. O(events).
    """
    found: list[Bar] = []
    here: dict[int, tuple[float, bool]] = {}
    now = 0.0

    def arrive(storage: int, start: float, again: bool) -> None:
        if storages is None or storage in storages:
            here.setdefault(storage, (start, again))

    def leave(storage: int) -> None:
        if storage in here:
            start, again = here.pop(storage)
            found.append(Bar(storage, start, now, again))

    for event in events:
        now = event.time
        match event:
            case Added():
                arrive(event.storage, now, False)
            case Performed():
                for storage in event.storages:
                    arrive(storage, now - event.cost, event.again)
            case TakenBack():
                arrive(event.storage, now, False)
            case Evicted() | Forgotten():
                leave(event.storage)
    for storage in list(here):
        leave(storage)
    return found


def residency(
    events: Iterable[Event],
    *,
    labels: Mapping[int, str] | None = None,
    title: str | None = None,
    budget: int | None = None,
    storages: Collection[int] | None = None,
) -> Figure:
    """A figure of which value was in memory when, over the bytes used.

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

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw. Tens of
    thousands of bars take about a second.
    """
    figure_class, patches = _matplotlib()
    events = list(events)
    drawn = bars(events, storages)
    if not drawn:
        raise ValueError("nothing to draw: none of these events puts a value into memory")

    first = min(bar.start for bar in drawn)
    last = max(max(bar.end for bar in drawn), first + 1e-12)
    rows = {storage: row for row, storage in enumerate(sorted({bar.storage for bar in drawn}))}
    second, unit = next((each for each in _TIMES if last - first >= each[0]), _TIMES[-1])

    figure: Figure = figure_class(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for again, colour, label in ((False, _FIRST, "first computed"), (True, _AGAIN, "recomputed")):
        boxes = [
            _box((bar.start - first) / second, (bar.end - first) / second, rows[bar.storage], len(rows))
            for bar in drawn
            if bar.again is again
        ]
        if boxes:
            above.add_collection(
                patches(
                    boxes, facecolor=colour, edgecolor=colour, linewidth=0.3, rasterized=len(drawn) > _MANY, label=label
                )
            )
    above.set(xlim=(0, (last - first) / second), ylim=(-0.5, len(rows) - 0.5), ylabel="value, in order of creation")
    _name_rows(above, rows, labels)
    above.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, handlelength=1.2, borderpad=0.2)
    _draw_usage(below, events, first, second, budget)
    below.set_xlabel(f"compute time [{unit}]")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)
    figure.align_ylabels()
    if title:
        figure.suptitle(title, fontsize="large", fontweight="bold", color=_INK)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure; the ending of `path` says how: .png, .svg, .pdf. Returns the absolute path.

    Raises ValueError for another ending, OSError if the file cannot be written.
    """
    target = Path(path).absolute()
    figure.savefig(target, dpi=160)
    return target


def _matplotlib() -> tuple[Any, Any]:
    """Figure and PolyCollection, without pyplot: no window and no global state."""
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'recompute-cache[plot]'") from error
    return Figure, PolyCollection


def _box(left: float, right: float, row: int, rows: int) -> list[tuple[float, float]]:
    half = 0.4 if rows < 100 else 0.5
    return [(left, row - half), (left, row + half), (right, row + half), (right, row - half)]


def _name_rows(axes: Any, rows: dict[int, int], labels: Mapping[int, str] | None) -> None:
    if labels is None:
        axes.yaxis.get_major_locator().set_params(integer=True)
        return
    named = [(row, labels[storage]) for storage, row in rows.items() if storage in labels]
    shown = named[:: max(1, -(-len(named) // _TICKS))]
    axes.set_yticks([row for row, _ in shown], [name for _, name in shown])


def _draw_usage(axes: Any, events: list[Event], first: float, second: float, budget: int | None) -> None:
    """Bytes used, as steps, and the budget as a line. Room for a result is in use while its operation runs."""
    most = max([event.used for event in events] + [budget or 0])
    size, unit = next((each for each in _SIZES if most >= each[0]), _SIZES[-1])
    times = [(event.time - first) / second for event in events]
    used = [event.used / size for event in events]
    axes.fill_between(times, used, step="pre", color=_INK, alpha=0.3, linewidth=0, rasterized=len(used) > _MANY)
    axes.set(ylim=(0, max(1.25 * most / size, 1e-12)), ylabel=f"used [{unit}]")
    if budget is not None:
        axes.axhline(budget / size, color=_INK, linestyle="--", linewidth=1)
        axes.annotate(
            "budget",
            (1, budget / size),
            (0, 2),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            va="bottom",
            fontsize="small",
            color=_INK,
        )
