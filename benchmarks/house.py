"""Draws the house, its folders and who imports whom: `python benchmarks/house.py docs/pictures`.

The picture is made from the imports themselves, those for annotations and in functions included. It measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

from _common import ROOT
from matplotlib import pyplot as plt

sys.path.insert(0, str(ROOT / "tests"))
from test_surface import HOUSE, LAYERS, TREES, imports, name_of  # where it is tested that imports run downwards

LOOSE: Final = {
    **dict.fromkeys(LAYERS["base"].split(), "base"),
    **dict.fromkeys("recompute __main__ planners simulator traces pictures".split(), "package"),
}
"""Files that lie in no folder, and what they belong to; all others are the surface."""


def room_of(module: str) -> str:
    """The folder of a module: `_engine` of `_engine.graph`."""
    name = module.partition(".")[0]
    return name if (HOUSE / name).is_dir() else LOOSE.get(name, "surface")


def survey() -> tuple[dict[str, tuple[int, int]], Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Room -> (files, lines); imports from room to room; those of them that are for annotations or in functions."""
    sizes: dict[str, tuple[int, int]] = {}
    edges: Counter[tuple[str, str]] = Counter()
    late: Counter[tuple[str, str]] = Counter()
    for path in sorted(HOUSE.rglob("*.py")):
        room = room_of(name_of(path))
        files, lines = sizes.get(room, (0, 0))
        sizes[room] = files + 1, lines + path.read_text(encoding="utf-8").count("\n")
        for other, when in imports(TREES[name_of(path)]):
            target = "surface" if other == "recompute" else room_of(other)  # what the package gives is the surface
            if target != room:
                edges[room, target] += 1
                late[room, target] += when != "import"
    return sizes, edges, late


def floors(sizes: dict[str, tuple[int, int]], edges: Counter[tuple[str, str]]) -> dict[str, int]:
    """Each room above all that it imports more from than these import from it."""
    below = defaultdict(set)
    for (room, target), count in edges.items():
        if count > edges[target, room]:
            below[room].add(target)
    levels: dict[str, int] = {}

    def level(room: str, above: frozenset[str]) -> int:
        if room not in levels:
            levels[room] = 1 + max([level(other, above | {room}) for other in below[room] - above], default=-1)
        return levels[room]

    for room in sizes:
        level(room, frozenset({room}))
    return levels


def draw(into: Path) -> None:
    sizes, edges, late = survey()
    levels = floors(sizes, edges)
    rows: dict[int, list[str]] = defaultdict(list)
    for room in sorted(sizes, key=lambda room: -sizes[room][1]):
        rows[levels[room]].append(room)
    places = {
        room: ((column + 0.5) / len(row), float(floor))
        for floor, row in rows.items()
        for column, room in enumerate(row)
    }
    figure, axes = plt.subplots(figsize=(9, 7.5), layout="constrained")
    for (room, target), count in edges.items():
        (x, y), (u, v) = places[room], places[target]
        upwards = v >= y
        axes.annotate(
            "",
            xy=(u, v + (-0.2 if upwards else 0.2)),
            xytext=(x, y + (0.2 if upwards else -0.2)),
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#d55e00" if upwards else "#0072b2",
                "linestyle": ":" if late[room, target] == count else "-",
                "connectionstyle": f"arc3,rad={0.25 if upwards else 0}",
                "linewidth": 1.2 if upwards else 0.5 + count**0.5 / 4,
                "alpha": 1 if upwards else 0.55,
                "zorder": 2 if upwards else 1,
            },
        )
    for room, (x, y) in places.items():
        files, lines = sizes[room]
        axes.text(
            *(x, y, f"{room}\n{files} files, {lines:,} lines"),
            ha="center",
            va="center",
            zorder=3,
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "#555555"},
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, max(rows) + 0.5)
    axes.axis("off")
    axes.set_title("Folders of recompute/ and who imports whom: dotted for annotations or in functions, red upwards")
    figure.savefig(into / "house.svg")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("into", metavar="FOLDER", type=Path, help="where the picture goes")
    draw(parser.parse_args().into)


if __name__ == "__main__":
    main()
