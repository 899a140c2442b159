"""What the benchmarks share: measuring in turns or apart, the facts of the machine, tables, pages and targets."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

T = TypeVar("T")

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "docs" / "results"
MICRO: Final = 1e-6
NOT_INSTALLED: Final = "not installed"

Measure = Callable[[], float]
"""Runs once and returns seconds for one unit (an operation, a search)."""


# Measuring


def in_turns(measures: dict[str, Measure], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each measure, each `repetitions` times, one after the other in turns: noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repetitions):
        for name, measure in measures.items():
            gc.collect()
            seconds[name].append(measure())
    return seconds


def apart(work: Callable[..., T], *given: Any) -> T:
    """Do it in a fresh process, whose peak of memory is its own, too. Raises what it raises, or that it was killed."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def say(line: str) -> None:
    """Progress, on stderr, so that it does not mix with the result."""
    print(line, file=sys.stderr, flush=True)


def facts(*packages: str, **more: str) -> dict[str, str]:
    """The machine and the versions that the figures belong to."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "garbage collector": f"enabled, thresholds {gc.get_threshold()}, unless a line says otherwise",
    }
    if hasattr(os, "getloadavg"):
        found["load when it began"] = f"{os.getloadavg()[0]:.2f} runnable processes"
    for package in ("numpy", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found | more


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Pages


def arguments(
    about: str | None, *, into: Path | None = RESULTS, traces: bool = False, quick: bool = False
) -> argparse.ArgumentParser:
    """The options that most benchmarks have: where the page goes, the folder of traces, and a short run."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if traces:
        parser.add_argument("traces", metavar="FOLDER", type=Path, help="with unet.jsonl and the others")
    if quick:
        parser.add_argument("--quick", action="store_true", help="small and few, only to see that it runs")
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=into, help="of the page; default %(default)s")
    return parser


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table: the first and the last column to the left, the others to the right."""
    marks = ["---", *["---:"] * (len(header) - 2), "---"][: len(header)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [tuple(header), tuple(marks), *map(tuple, lines)])


def page(*parts: str, machine: Mapping[str, Any] | None = None) -> str:
    """The parts of a page, and at its end the machine, if figures depend on it."""
    about = [] if machine is None else ["## Machine", "\n".join(f"* {name}: {text}" for name, text in machine.items())]
    return "\n\n".join([part.strip("\n") for part in (*parts, *about) if part]) + "\n"


def write(into: Path | None, name: str, text: str, figures: Any = None) -> None:
    """Write a page into a folder, and its figures beside it as JSON. Without a folder nothing is written."""
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{name}.md").write_text(text, encoding="utf-8")
        if figures is not None:
            (into / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


# Reports, with targets


@dataclass(frozen=True)
class Row:
    """One measured thing, in `unit`s."""

    name: str
    median: float
    least: float
    unit: str = "us"
    note: str = ""


def row(name: str, seconds: Sequence[float]) -> Row:
    """Seconds as a row in microseconds."""
    return Row(name, median(seconds) / MICRO, min(seconds) / MICRO)


@dataclass(frozen=True)
class Target:
    """What a figure should be at most, and what it is."""

    name: str
    most: float
    value: float
    unit: str

    @property
    def verdict(self) -> str:
        share = abs(self.value / self.most - 1)
        about = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        return f"met, {about} below" if self.value <= self.most else f"missed by {about}"


@dataclass
class Report:
    """What one benchmark found."""

    title: str
    what: str
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def parts(self) -> list[str]:
        """For a page: targets first, then the figures that they come from."""
        targets = [
            (goal.name, f"{number(goal.most)} {goal.unit}", f"{number(goal.value)} {goal.unit}", goal.verdict)
            for goal in self.targets
        ]
        rows = [(row.name, number(row.least), number(row.median), row.unit, row.note) for row in self.rows]
        return [
            f"## {self.title}",
            self.what,
            markdown(("target", "at most", "measured", "verdict"), targets) if targets else "",
            markdown(("", "minimum", "median", "unit", "note"), rows),
        ]


def main(measure: Callable[[bool], Report], about: str | None) -> None:
    """The command line of a benchmark that prints a report."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions, to check that it runs")
    options = parser.parse_args()
    machine = facts()
    print(page(*measure(options.quick).parts(), machine=machine), end="")
