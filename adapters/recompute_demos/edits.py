"""The fewest edits that turn one text into another: a table of half a billion cells in a tenth of its memory.

The edit distance of Levenshtein (1966) is the last cell of a table with a row for each letter of one text and a column
for each letter of the other (Wagner and Fischer, The string-to-string correction problem, 1974). Who wants the edits
too, not only their number, walks from the last cell back to the first, and so needs the whole table. Here it is cut
into blocks of rows, and each block is a recomputable value: within a budget the cache drops some blocks and recomputes
them when the walk arrives. Hirschberg (1975) found an algorithm that does so by hand; `edits` is the same few lines
with a budget and without.
"""

from __future__ import annotations

import inspect
import ntpath
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import recompute as rc
from recompute_demos._twice import Progress, check, megabytes, silent, twice

Letters = NDArray[np.uint8]
Steps = NDArray[np.int8]

KEEP, REPLACE, REMOVE, ADD = "=", "~", "-", "+"
_SHOWN: Final = 60  # letters of a passage


def source(module: ModuleType) -> str:
    """The text of a module; every character that is not ASCII is a question mark."""
    return inspect.getsource(module).encode("ascii", "replace").decode()


def encode(text: str) -> Letters:
    return np.frombuffer(text.encode("ascii"), np.uint8)


def rows(above: Steps, start: int, part: Letters, other: Letters) -> Steps:
    """A block of the table: the last row of the block above, then a row for each letter of `part`.

    A cell holds how much more the distance is than in the cell to its left: -1, 0 or 1, so that a byte is enough.
    `start` is the number of letters before `part`, which is also the distance in the first column.
    """
    steps = np.empty((1 + len(part), len(other)), np.int8)
    steps[0] = above[-1]
    columns = np.arange(1 + len(other), dtype=np.int32)
    last = np.empty(1 + len(other), np.int32)
    last[0] = start
    np.cumsum(steps[0], dtype=np.int32, out=last[1:])
    last[1:] += start
    row = np.empty_like(last)
    for number, letter in enumerate(part, start=1):
        row[0] = last[0] + 1
        np.add(last[:-1], other != letter, out=row[1:])  # keep or replace
        np.minimum(row[1:], last[1:] + 1, out=row[1:])  # or remove
        row -= columns
        np.minimum.accumulate(row, out=row)  # or add: one more for each column
        row += columns
        np.subtract(row[1:], row[:-1], out=steps[number], casting="unsafe")
        row, last = last, row
    return steps


def edits(text: Letters, other: Letters, *, blocks: int, progress: Progress = silent) -> str:
    """The fewest edits that turn `text` into `other`, one character each. The current cache decides what it keeps."""
    parts = np.array_split(text, blocks)
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    block: Any = np.ones((1, len(other)), np.int8)  # from no letter to each next one: one more to add
    table = []
    for number, part in enumerate(parts):
        progress(f"forwards, block {number + 1} of {blocks}", number / blocks / 2)
        block = rc.ap(rows, block, starts[number], part, other, nbytes=(1 + len(part)) * len(other))
        table.append(block)
    del block

    script: list[str] = []
    column = len(other)
    while table:
        progress(f"backwards, block {len(table)} of {blocks}", 1 - len(table) / blocks / 2)
        column = walk(table.pop().get(), parts.pop(), other, column, script)
    script += ADD * column
    return "".join(reversed(script))


def walk(steps: Steps, part: Letters, other: Letters, column: int, script: list[str]) -> int:
    """Walk back through a block from `column`, adding to `found`; the column in which the block above is reached."""
    row = len(part)
    while row:
        if column and part[row - 1] == other[column - 1]:
            script.append(KEEP)
            row, column = row - 1, column - 1
        elif column and steps[row, column - 1] == 1:
            script.append(ADD)
            column -= 1
        elif column and steps[row - 1, column - 1] >= 0:
            script.append(REPLACE)
            row, column = row - 1, column - 1
        else:
            script.append(REMOVE)
            row -= 1
    return column


def longest_kept(text: str, script: str) -> str:
    """The longest passage that both texts have and no edit touches."""
    start, stop = max((match.span() for match in re.finditer(f"{KEEP}+", script)), key=_length, default=(0, 0))
    before = start - script.count(ADD, 0, start)  # additions are no letters of `text`
    return text[before : before + stop - start]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def demo(
    *,
    budget: float = 0.1,
    blocks: int = 384,
    texts: tuple[ModuleType, ModuleType] = (posixpath, ntpath),
    picture: str | Path | None = "recompute-demo.png",
    echo: Callable[[str], None] = print,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Find the edits between two modules of Python without a budget, then within `budget` of that memory, and compare.

    Parameters
    ----------
    budget
        A fraction of the peak of the run without a budget; `rc.BudgetError` says so if it is too little.
    blocks
        Into how many values the table is cut.
    texts
        The modules; of more than 10,000 letters each, or there is little to save.
    picture
        Where to draw which block was in memory when; None: nowhere.
    echo
        Takes the report, line by line.
    progress
        Takes a few words on what is being done and the share of it that is done, at each block.

    Returns the figures as a dict that JSON can hold: bytes, seconds, counts.
    """
    check(budget, picture)
    text, other = map(source, texts)
    if not 2 <= blocks <= len(text):
        raise ValueError(f"blocks must be at least 2 and at most {len(text)}, the number of letters, not {blocks!r}")

    def program(progress: Progress, record: Callable[[], Any]) -> str:
        record()
        return edits(encode(text), encode(other), blocks=blocks, progress=progress)

    runs = twice(program, budget, progress)
    script = runs.tight
    figures: dict[str, Any] = {
        "texts": {f"{module.__name__}.py": len(letters) for module, letters in zip(texts, (text, other), strict=True)},
        "cells": len(text) * len(other),
        "blocks": blocks,
        "edits": len(script) - script.count(KEEP),
        "kept": script.count(KEEP),
        "replaced": script.count(REPLACE),
        "removed": script.count(REMOVE),
        "added": script.count(ADD),
        "longest_kept": longest_kept(text, script),
        "edits_equal": runs.free == script,
        **runs.figures,
    }
    lines = _report(figures)
    for line in [*lines[:-1], *runs.report(), lines[-1]]:
        echo(line)
    whole, limit = megabytes(figures["peak_bytes"]), megabytes(figures["budget_bytes"])
    title = f"{blocks} blocks, {whole} in all; never more than {limit} in memory"
    figures["picture"] = runs.draw(title, picture, echo)
    return figures


def _report(figures: dict[str, Any]) -> list[str]:
    """The figures as lines to read."""
    texts = " into ".join(f"{name} ({letters:,} letters)" for name, letters in figures["texts"].items())
    equal = "the same, edit for edit" if figures["edits_equal"] else "NOT THE SAME"
    passage = figures["longest_kept"].strip()
    shown = passage if len(passage) <= _SHOWN else f"{passage[:_SHOWN]}..."
    return [
        f"task                turn {texts} by the fewest edits",
        f"table               {figures['cells']:,} cells, in {figures['blocks']} blocks; read back from its end",
        f"edits               {figures['edits']:,}: {figures['replaced']:,} letters replaced, "
        f"{figures['removed']:,} removed, {figures['added']:,} added; {figures['kept']:,} kept",
        f"longest passage     {' '.join(shown.split())!r}, {len(figures['longest_kept'])} letters",
        f"result              {equal}, without a budget and within it",
        f"recomputed          {figures['rematerializations']:,} blocks; overhead (all compute / compute once) "
        f"{figures['overhead']:.2f}",
    ]
