"""One real problem with each of the usual tools: memory, time, and how often a block is computed.

The problem is that of the demo (`recompute_demos.edits`): it fills a table of half a gigabyte, and reads it back from
the end. Each way runs in its own process, so that the peak of the process's memory is its own, too.

    python benchmarks/alternatives.py     the rows of docs/which_tool.md, as Markdown
"""

from __future__ import annotations

import ntpath
import posixpath
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from _common import facts, markdown
from _ways import Chain, Taken, all_ways, counts, taken

from recompute_demos.edits import ADD, encode, rows, source, walk

BLOCKS = 384
TENTH = BLOCKS // 10
SEGMENT = 20  # blocks from checkpoint to checkpoint: about the square root
TEXT, OTHER = encode(source(posixpath)), encode(source(ntpath))
PARTS = np.array_split(TEXT, BLOCKS)
STARTS = np.cumsum([0, *map(len, PARTS)]).tolist()
SIZES = [(1 + len(part)) * len(OTHER) for part in PARTS]


def block(above: Any, number: int) -> Any:
    """The block of this number, from the one above it."""
    counts["computed"] += 1
    return rows(above, STARTS[number], PARTS[number], OTHER)


def read_back(get: Callable[[int], Any]) -> str:
    """The edits, from the blocks in reverse order."""
    found: list[str] = []
    column = len(OTHER)
    for number in reversed(range(BLOCKS)):
        column = walk(get(number), PARTS[number], OTHER, column, found)
    return "".join(reversed(found + [ADD] * column))


TABLE = Chain(np.ones((1, len(OTHER)), np.int8), BLOCKS, block, read_back)


def lru() -> str:
    """`functools.lru_cache` with room for a tenth."""

    @lru_cache(maxsize=TENTH)
    def get(number: int) -> Any:
        return block(get(number - 1) if number else TABLE.start, number)

    for number in range(BLOCKS):
        get(number)
    return read_back(get)


LIST = "a list, everything kept"
WAYS: dict[str, Callable[[], str]] = {
    LIST: TABLE.kept,
    "`functools.lru_cache`, a tenth of the blocks": lru,
    "`joblib.Memory`, every block in a file": TABLE.in_files,
    f"every {SEGMENT}th block kept by hand": lambda: TABLE.by_hand(SEGMENT),
    "`rc.Cache`, a tenth of the bytes": lambda: TABLE.cached(sum(SIZES) // 10, SIZES.__getitem__)[0],
}


def measure(way: str) -> Taken:
    def edits() -> int:
        script = WAYS[way]()
        return sum(script.count(kind) for kind in "~-+")

    return taken(edits)


def main() -> None:
    found = all_ways(WAYS, measure)
    plain = found[LIST].seconds
    lines = [
        (way, one.times[-1], one.written, f"x {one.computed / BLOCKS:.2f}", f"x {one.seconds / plain:.2f}")
        for way, one in found.items()
    ]
    print(markdown("way | memory | on disk | blocks computed | time", lines))
    print(f"\n{plain:.1f} s with a list. {facts()}")


if __name__ == "__main__":
    main()
