"""One real problem with each of the usual tools: memory, time, and how often a block is computed.

The problem is that of the demo (`recompute_demos.edits`): it fills a table of half a gigabyte, and
reads it back from the end. Each way runs in its own process, so that the peak of the process's memory is its own, too.

    python benchmarks/alternatives.py                the rows of docs/which_tool.md, as Markdown
    python benchmarks/alternatives.py --way joblib   one way, as JSON
"""

from __future__ import annotations

import argparse
import json
import ntpath
import posixpath
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import facts

import recompute as rc
from recompute_demos.edits import ADD, encode, rows, source, walk

BLOCKS = 384
TENTH = BLOCKS // 10
SEGMENT = 20  # blocks from checkpoint to checkpoint: about the square root
TEXT, OTHER = encode(source(posixpath)), encode(source(ntpath))
PARTS = np.array_split(TEXT, BLOCKS)
STARTS = np.cumsum([0, *map(len, PARTS)]).tolist()
FIRST = np.ones((1, len(OTHER)), np.int8)

computed = [0]


def block(above: Any, number: int) -> Any:
    """The block of this number, from the one above it."""
    computed[0] += 1
    return rows(above, STARTS[number], PARTS[number], OTHER)


def read_back(get: Callable[[int], Any]) -> str:
    """The edits, from the blocks in reverse order."""
    found: list[str] = []
    column = len(OTHER)
    for number in reversed(range(BLOCKS)):
        column = walk(get(number), PARTS[number], OTHER, column, found)
    return "".join(reversed(found + [ADD] * column))


def keep_all() -> str:
    """A list."""
    table = [FIRST]
    for number in range(BLOCKS):
        table.append(block(table[-1], number))
    return read_back(lambda number: table.pop())


def lru() -> str:
    """`functools.lru_cache` with room for a tenth."""

    @lru_cache(maxsize=TENTH)
    def get(number: int) -> Any:
        return block(get(number - 1) if number else FIRST, number)

    for number in range(BLOCKS):
        get(number)
    return read_back(get)


def joblib() -> str:
    """`joblib.Memory`: every result in a file."""
    from joblib import Memory

    with tempfile.TemporaryDirectory() as folder:
        cached = Memory(folder, verbose=0).cache(block)
        last = FIRST
        table: list[Any] = []
        for number in range(BLOCKS):
            reference = cached.call_and_shelve(last, number)
            table.append(reference)
            last = reference.get()
        found = read_back(lambda number: table.pop().get())
        disk[0] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return found


def checkpoints() -> str:
    """Every 20th block kept by hand, the others computed again a segment at a time (Chen et al., 2016)."""
    kept = {}
    last = FIRST
    for number in range(BLOCKS):
        if number % SEGMENT == 0:
            kept[number] = last
        last = block(last, number)
    segment: dict[int, Any] = {}

    def get(number: int) -> Any:
        if number not in segment:
            segment.clear()
            start = number - number % SEGMENT
            above = kept.pop(start)
            for column in range(start, number + 1):
                above = segment[column] = block(above, column)
        return segment.pop(number)

    return read_back(get)


def recomputed() -> str:
    """`rc.Cache` with a budget of a tenth."""
    whole = sum((1 + len(part)) * len(OTHER) for part in PARTS)
    with rc.Cache(whole // 10):
        table = [rc.pure(FIRST)]
        for number in range(BLOCKS):
            table.append(rc.ap(block, table[-1], number, nbytes=(1 + len(PARTS[number])) * len(OTHER)))
        return read_back(lambda number: table.pop().get())


WAYS: dict[str, tuple[str, Callable[[], str]]] = {
    "list": ("a list, everything kept", keep_all),
    "lru_cache": ("`functools.lru_cache`, a tenth of the blocks", lru),
    "joblib": ("`joblib.Memory`, every block in a file", joblib),
    "checkpoints": ("every 20th block kept by hand", checkpoints),
    "recompute": ("`rc.Cache`, a tenth of the bytes", recomputed),
}
disk = [0]


def measure(way: str) -> dict[str, Any]:
    """One way, in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    script = WAYS[way][1]()
    seconds = perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "memory": 1024 * (most - before),
        "disk": disk[0],
        "seconds": seconds,
        "computed": computed[0] / BLOCKS,
        "edits": sum(script.count(kind) for kind in "~-+"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help="one way, in this process")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way)))
        return
    command = [sys.executable, __file__, "--way"]
    found = {
        way: json.loads(subprocess.run([*command, way], stdout=subprocess.PIPE, check=True).stdout) for way in WAYS
    }
    assert len({figures["edits"] for figures in found.values()}) == 1
    plain = found["list"]["seconds"]
    print("| way | memory | on disk | blocks computed | time |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for way, figures in found.items():
        written = f"{figures['disk'] / 1e6:,.0f} MB" if figures["disk"] else ""
        print(
            f"| {WAYS[way][0]} | {figures['memory'] / 1e6:,.0f} MB | {written} | x {figures['computed']:.2f} | "
            f"x {figures['seconds'] / plain:.2f} |"
        )
    print(f"\n{plain:.1f} s with a list. {facts()}")


if __name__ == "__main__":
    main()
