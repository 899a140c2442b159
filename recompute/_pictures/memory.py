"""Memory over time against the budget, for one or several policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from recompute._pictures.bars import Moment
from recompute._pictures.residency import draw_budget, draw_marks, time_axis
from recompute._pictures.style import Style, ceiling, head, looks, new_figure, size_unit, tidy
from recompute.events import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS: Final = 500  # what is told apart from left to right


def memory(
    tracks: Mapping[str, Iterable[Event]],
    *,
    budget: int | None = None,
    whole: Iterable[Event] = (),
    title: str | None = None,
    marks: Mapping[str, Sequence[Moment]] | None = None,
    unit: float | str = 1.0,
) -> Figure:
    """A figure of the bytes used over compute time, a line for each policy or plan.

    Parameters
    ----------
    tracks
        Name -> the events of a cache, or `plan_events`. The most of each moment is drawn.
    budget
        Bytes; drawn as a line.
    whole
        The events of a run without a budget: a grey area behind the lines.
    title
        Above the figure.
    marks
        Name -> times on the events' clock, each with a text: such as when the backward pass starts. A line stands where
        it starts first, and a triangle in the colour of the track where it does for that track.
    unit
        Seconds in a unit of the events' clock, or the name of a unit that is not of time.

    Raises ImportError, with what to install, without matplotlib; ValueError if there is nothing to draw.
    """
    steps = {name: _steps(events) for name, events in tracks.items()}
    steps = {name: line for name, line in steps.items() if line}
    if not steps:
        raise ValueError("nothing to draw: there are no events")
    behind = _steps(whole)
    everything = [step for line in [behind, *steps.values()] for step in line]
    most = max([used for _, used in everything] + [budget or 0])
    last = max(max(time for time, _ in everything), 1e-12)
    divisor, name = time_axis(last, unit)
    size, bytes_name = size_unit(most)

    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    look = looks(steps)
    _draw_steps(axes, behind, look, steps, last, (divisor, size))
    axes.set(
        xlim=(0, last / divisor),
        ylim=(0, ceiling(1.12 * most / size)),
        xlabel=name,
        ylabel=f"memory used [{bytes_name}]",
    )
    if budget is not None:
        draw_budget(axes, budget / size)
    _draw_marks(axes, look, marks or {}, divisor)
    tidy(axes)
    _draw_legend(axes, len(steps))
    head(figure, title)
    return figure


def _draw_steps(
    axes: Any,
    behind: Sequence[tuple[float, int]],
    look: Mapping[str, Style],
    steps: Mapping[str, Sequence[tuple[float, int]]],
    last: float,
    units: tuple[float, float],
) -> None:
    """An area for what lies behind, and a line for each track. `units`: of time and of bytes, on the axes."""

    def scaled(line: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
        times, used = _peaks(line, last, _COLUMNS)
        return [time / units[0] for time in times], [nbytes / units[1] for nbytes in used]

    if behind:
        axes.fill_between(*scaled(behind), step="post", color="#DDDDDD", linewidth=0, label="without a budget")
    for label, style in [*look.items()][::-1]:  # the first one lies on top
        axes.plot(
            *scaled(steps[label]),
            color=style.colour,
            linestyle=(0, style.dashes) if style.dashes else "-",
            linewidth=1.6 if style.wide else 1.2,
            drawstyle="steps-post",
            label=label,
        )


def _draw_legend(axes: Any, tracks: int) -> None:
    """The tracks, which were drawn last first, in their own order."""
    handles, _ = axes.get_legend_handles_labels()
    front = len(handles) - tracks
    axes.legend(
        handles=handles[:front] + handles[front:][::-1],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        handlelength=2.4,
        borderpad=0.2,
        fontsize="medium",
    )


def _draw_marks(axes: Any, look: Mapping[str, Style], marks: Mapping[str, Sequence[Moment]], divisor: float) -> None:
    """A line for each mark where it comes first, and a tick in the colour of each track on the axis of time."""
    earliest: dict[str, float] = {}
    for name, own in look.items():
        for time, text in marks.get(name, ()):
            earliest[text] = min(earliest.get(text, time), time)
            axes.plot(
                [time / divisor], [0], marker="^", markersize=7, color=own.colour, linestyle="", clip_on=False, zorder=5
            )
    draw_marks((axes,), [(time / divisor, text) for text, time in earliest.items()])


def _steps(events: Iterable[Event]) -> list[tuple[float, int]]:
    """(time, bytes used from then on), in order; one for each moment, the most of it."""
    steps: list[tuple[float, int]] = []
    for event in events:
        if steps and steps[-1][0] == event.time:
            if event.used > steps[-1][1]:
                steps[-1] = (event.time, event.used)
        else:
            steps.append((event.time, event.used))
    return steps


def _peaks(steps: Sequence[tuple[float, int]], last: float, columns: int) -> tuple[list[float], list[int]]:
    """At most so many steps: the most bytes of each interval of time."""
    width = last / columns
    if len(steps) <= columns:
        return [time for time, _ in steps], [used for _, used in steps]
    peaks = [-1] * (columns + 1)
    for time, used in steps:
        column = min(columns, int(time / width))
        peaks[column] = max(peaks[column], used)
    pairs: list[tuple[float, int]] = []
    for column, peak in enumerate(peaks[: int(steps[-1][0] / width) + 1]):
        if peak >= 0 or pairs:
            pairs.append((column * width, peak if peak >= 0 else pairs[-1][1]))
    return [time for time, _ in pairs], [used for _, used in pairs]
