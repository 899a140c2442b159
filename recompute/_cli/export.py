"""`recompute export`: a recorded run as a file for tools that people know."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from recompute._cli import arguments
from recompute._cli.output import CommandError, print_json
from recompute._terminal import is_terminal

NAME = "export"
HELP = "convert a recorded run for Perfetto, speedscope, PyTorch's memory page, pandas"

_FORMATS: Final = ("perfetto", "speedscope", "memory_viz", "csv", "arrow")

_EXAMPLES: Final = """\
examples:
  recompute export train.recompute.jsonl.gz --to perfetto -o train.json     open it at https://ui.perfetto.dev
  recompute export train.recompute.jsonl.gz --to speedscope -o train.speedscope.json
  recompute export train.recompute.jsonl.gz --to csv --budget 50% | column -ts,

perfetto    runs as slices by thread, bytes as counters, evictions, and the causes of recomputations
speedscope  where the compute went, by stacks of operations that needed each other
memory_viz  allocations with the lines that made them: torch.cuda._memory_viz reads it after json.load
csv, arrow  a row for each operation, recomputation and eviction

With --budget the run is replayed within that budget; without it, the run is exported as it was recorded. A trace in the
published format has no recorded run, so it is replayed without a budget. Without -o, the result goes to standard
output.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a recorded run in the format of another tool."
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("trace", metavar="RUN", help="a recorded program, plain or gzipped; -: standard input")
    add("--to", metavar="FORMAT", required=True, choices=_FORMATS, help=", ".join(_FORMATS))
    add("--budget", metavar="SHARE", help="replay it within a share of its peak (0.4 or 40%%) or bytes (512MB)")
    add("-o", "--output", metavar="FILE", help="default: standard output, which - is, too")
    add("--json", action="store_true", help="with -o: print what was written as a JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    from recompute._sight.exports import export
    from recompute._sight.recording import open_recording

    budget = arguments.one_budget(options.budget)
    if options.output == "-":
        options.output = None
    if options.json and options.output is None:
        raise CommandError("--json needs -o FILE: standard output is taken by the export itself")
    if options.output is None and sys.stdout is None:
        raise CommandError("standard output is closed: give -o FILE")
    with arguments.reading(options.trace):
        recording = open_recording(options.trace, budget)
    try:
        pieces = export(recording, options.to)
        if options.output is not None:
            size = write(Path(options.output), pieces)
            told = {"trace": recording.program.name, "format": options.to, "output": options.output, "bytes": size}
            if options.json:
                print_json(told)
            return 0
        if options.to == "arrow" and is_terminal(sys.stdout):
            raise CommandError("arrow is a binary format: give -o FILE")
        sys.stdout.flush()
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    except ImportError as error:
        raise CommandError(str(error), 1) from None
    return 0


def write(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file, all of it or nothing; its bytes. Raises CommandError, in one line, if that cannot be."""
    place = Path(os.path.realpath(path))  # a link stays one
    special = place.exists() and not place.is_file()  # a pipe or a device
    draft = place if special else place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with arguments.writing(path):
            with open(draft, "wb") as file:
                size = sum(map(file.write, pieces))
            if not special:
                draft.replace(place)
    finally:
        if not special:
            with suppress(OSError):
                draft.unlink()
    return size
