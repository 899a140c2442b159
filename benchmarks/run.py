"""Runs every benchmark of the machinery and writes docs/results/machinery.md and machinery.json."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import operations
import victims
from _common import as_json, facts, markdown, page, plain

RESULTS: Final = Path(__file__).resolve().parent.parent / "docs" / "results"

HEAD: Final = """# The cost of the machinery

What the library adds to the functions that it tracks, measured by `python benchmarks/run.py`. Times depend on the
machine, named at the end of the page; ratios, which come from one run, carry over better. Each figure is the minimum of
several repetitions, next to their median. Whatever is compared was measured in turns.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions; writes nothing by default")
    parser.add_argument("--into", metavar="FOLDER", type=Path, help=f"where the results go, {RESULTS} by default")
    options = parser.parse_args()
    machine = facts()
    reports = [*operations.measure(options.quick), *victims.measure(options.quick)]
    print(page(reports, machine, plain, "##"), end="")
    folder = options.into or (None if options.quick else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "machinery.md").write_text(HEAD + page(reports, machine, markdown, "##"), encoding="utf-8")
        (folder / "machinery.json").write_text(as_json(reports, machine), encoding="utf-8")


if __name__ == "__main__":
    main()
