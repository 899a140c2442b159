"""The style of all pictures: colours that all eyes tell apart, one look for each name, units, axes, and saving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST: Final = "#0072B2"  # blue and vermilion of Okabe and Ito's palette: told apart by all eyes, and in grey
AGAIN: Final = "#D55E00"
FETCHED: Final = "#009E73"
MOVED: Final = "#CFCFCF"
INK: Final = "#333333"
_PALETTE: Final = 128  # colours of a PNG
FORMATS: Final = (".png", ".svg", ".pdf")

_COLOURS: Final = (FIRST, AGAIN, "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#777777", "#000000")
_FILLED: Final = "os^DvPXp"
_DASHES: Final = ((), (6, 1.5), (3, 1.5), (6, 1.5, 1.5, 1.5), (1, 1.2), (8, 1.5, 1.5, 1.5, 1.5, 1.5), (4, 4), (10, 2))
_POLICIES: Final = ("default", "dtr-eq", "dtr", "dtr-local", "msps", "lru", "size", "random")
_METHODS: Final = ("chen-sqrt", "chen-greedy", "revolve", "checkmate")
_ROUND: Final = ", round "
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


@dataclass(frozen=True)
class Style:
    """How the line of a policy or planner is drawn: colour, marker and dashes all tell it apart."""

    colour: str
    marker: str
    dashes: tuple[float, ...]
    hollow: bool = False
    wide: bool = False

    def line(self, under: int = 0) -> dict[str, Any]:
        """Arguments of `Axes.plot`. `under`: how many lines lie on top; markers grow with it, to be seen below them."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": (0, self.dashes) if self.dashes else "-",
            "linewidth": 2.2 if self.wide else 1.4,
            "markersize": (8 if self.marker == "*" else 5.0) + 0.7 * under,
            "markerfacecolor": "white" if self.hollow else self.colour,
            "markeredgecolor": self.colour,
        }


def looks(names: Iterable[str]) -> dict[str, Style]:
    """A look for each name: the same in all pictures for the names of the library, a free one for others.

    What stands in brackets after a name does not count. Policies have filled markers, the published planners hollow
    ones; the library's own are wide. A later round of a policy ("dtr, round 5") is hollow and dotted in its colour.
    """
    known_looks = {
        "default": Style(_COLOURS[0], "o", (), wide=True),
        "own": Style("#000000", "*", (), wide=True),
    }
    for number, name in enumerate(_POLICIES[1:], 1):
        known_looks[name] = Style(_COLOURS[number], _FILLED[number], _DASHES[number])
    for number, name in enumerate(_METHODS):
        known_looks[name] = Style(_COLOURS[(6, 7, 4, 5)[number]], "<>hd"[number], _DASHES[number + 1], hollow=True)
    names = list(dict.fromkeys(names))
    wanted = list(dict.fromkeys(_bare(name) for name in names))
    known = [name for name in _POLICIES if name in wanted]
    free = [at for at, name in enumerate(_POLICIES) if name not in known] or list(range(len(_COLOURS)))
    others = [name for name in wanted if name not in known_looks]
    for number, name in enumerate(others):
        at = free[number % len(free)]
        known_looks[name] = Style(_COLOURS[at], _FILLED[at], _DASHES[at], hollow=number >= len(free))
    return {name: _round(known_looks[_bare(name)]) if _ROUND in name else known_looks[_bare(name)] for name in names}


def _bare(name: str) -> str:
    return name.partition(" (")[0].partition(_ROUND)[0]


def _round(look: Style) -> Style:
    return replace(look, hollow=True, dashes=(1.5, 1.0))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches; without pyplot there is no window and no global state.

    Raises ImportError, with what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install '.[plot]' in a checkout") from error
    return Figure(figsize=(width, height), layout="constrained")


def panels(
    names: Sequence[str], *, width: float = 4.4, height: float = 3.3, legend: float = 0.5, columns: int = 2
) -> tuple[Figure, Any]:
    """A figure with one titled panel for each name, so many in a row, and room for a legend below; and the panels."""
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(max(6.4, width * columns), height * rows + legend)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, name in zip(grid, names, strict=False):
        tidy(axes)
        axes.set_title(short(name), fontsize="medium", fontweight="bold", color=INK)
    for axes in grid[len(names) :]:
        axes.remove()
    return figure, grid[: len(names)]


def tidy(axes: Any, grid: str | None = "y") -> None:
    """No frame, grey ink, a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    if grid:
        axes.grid(axis=grid, color="#E4E4E4", linewidth=0.7)
        axes.set_axisbelow(True)


def head(figure: Figure, title: str | None) -> None:
    """The title of the whole figure."""
    if title:
        figure.suptitle(title, fontsize="large", fontweight="bold", color=INK)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int = 4) -> None:
    """One legend for all panels, under them."""
    columns = min(columns, len(handles))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize="medium", handlelength=3.2
    )


def short(name: str) -> str:
    """The name of a trace without its endings."""
    for ending in (".gz", ".jsonl", ".json", ".recompute"):
        name = name.removesuffix(ending)
    return name


def time_unit(most: float) -> tuple[float, str]:
    """Seconds in the unit that suits a duration, and its name."""
    return next((unit for unit in _TIMES if most >= unit[0]), _TIMES[-1])


def size_unit(most: float) -> tuple[float, str]:
    """Bytes in the unit that suits a size, and its name."""
    return next((unit for unit in _SIZES if most >= unit[0]), _SIZES[-1])


def ceiling(most: float) -> float:
    """A limit of an axis: not zero, so that an axis can be drawn."""
    return most if most > 0 and math.isfinite(most) else 1e-12


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure; the ending of `path` says how: .png, .svg, .pdf. Returns the absolute path.

    The same figure makes the same file; PNG has a palette, which makes it small, and in SVG text stays text. Raises
    ValueError for another ending, OSError if the file cannot be written.
    """
    import matplotlib

    target = Path(path).absolute()
    ending = target.suffix.lower()
    if ending not in FORMATS:
        raise ValueError(f"the ending of {target.name!r} must be one of {', '.join(FORMATS)}")
    dates: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "recompute"}):
        if ending != ".png":
            figure.savefig(target, dpi=160, metadata=dates[ending])
            return target
        from PIL import Image  # comes with matplotlib

        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=160)
        Image.open(drawn).convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE).save(target, optimize=True)
    return target
