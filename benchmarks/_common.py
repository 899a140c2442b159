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


def markdown(header: str | Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, its columns named one by one or in one text, with bars between: the first and the last to the left."""
    names = [name.strip() for name in header.split("|")] if isinstance(header, str) else header
    marks = ["---", *["---:"] * (len(names) - 2), "---"][: len(names)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [names, marks, *lines])


def page(title: str, about: str | None, *parts: str, machine: Mapping[str, Any] | None = None) -> str:
    """A page: what it is about, in the words of its program, its parts, and the machine, if figures depend on it."""
    end = [] if machine is None else ["## Machine", "\n".join(f"* {name}: {text}" for name, text in machine.items())]
    return "\n\n".join([part.strip("\n") for part in (f"# {title}", about or "", *parts, *end) if part]) + "\n"


def section(title: str, prose: str, header: str | Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A part of a page: a table, and what it has."""
    return "\n\n".join([part for part in (f"## {title}", prose, markdown(header, lines)) if part])


def write(into: Path | None, name: str, text: str, figures: Any = None) -> None:
    """Write a page into a folder, and its figures beside it as JSON. Without a folder nothing is written."""
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{name}.md").write_text(text, encoding="utf-8")
        if figures is not None:
            (into / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def publish(into: Path | None, name: str, text: str, figures: Any = None) -> None:
    """Print a page, and write it."""
    print(text, end="")
    write(into, name, text, figures)


def number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


# Reports, with targets


@dataclass
class Report:
    """What one benchmark found, and what it should be."""

    title: str
    what: str
    rows: list[tuple[str, ...]] = field(default_factory=list)
    targets: list[tuple[str, ...]] = field(default_factory=list)

    def row(self, name: str, values: Sequence[float], unit: str = "us", note: str = "") -> None:
        """One measured thing, in `unit`s: the least and the median."""
        self.rows.append((name, number(min(values)), number(median(values)), unit, note))

    def target(self, name: str, most: float, value: float, unit: str) -> None:
        """What a figure should be at most, and what it is."""
        share = abs(value / most - 1)
        about = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        verdict = f"met, {about} below" if value <= most else f"missed by {about}"
        self.targets.append((name, f"{number(most)} {unit}", f"{number(value)} {unit}", verdict))

    def text(self, machine: Mapping[str, Any]) -> str:
        """The page: targets first, then the figures that they come from."""
        targets = markdown(("target", "at most", "measured", "verdict"), self.targets) if self.targets else ""
        rows = markdown(("", "minimum", "median", "unit", "note"), self.rows)
        return page(self.title, self.what, targets, rows, machine=machine)


def main(measure: Callable[[bool], Report], about: str | None) -> None:
    """The command line of a benchmark that prints a report."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions, to check that it runs")
    options = parser.parse_args()
    machine = facts()
    print(measure(options.quick).text(machine), end="")
