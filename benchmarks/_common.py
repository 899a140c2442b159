"""What the benchmarks share: repetitions taken in turns, the facts of the machine, tables and targets."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Final

MICRO: Final = 1e-6
PEERS: Final = ("numpy", "dask", "cachey", "autograd")
NOT_INSTALLED: Final = "not installed"

Measure = Callable[[], float]
"""Runs once and returns seconds for one unit (an operation, a search)."""


@dataclass(frozen=True)
class Row:
    """One measured thing, in `unit`s."""

    name: str
    median: float
    least: float
    unit: str = "us"
    note: str = ""


@dataclass(frozen=True)
class Target:
    """What a figure should be at most, what it is, and one honest sentence about it."""

    name: str
    most: float
    value: float
    unit: str
    sentence: str

    @property
    def met(self) -> bool:
        return self.value <= self.most

    @property
    def verdict(self) -> str:
        share = abs(self.value / self.most - 1)
        about = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        return f"met, {about} below" if self.met else f"missed by {about}"


@dataclass
class Report:
    """What one benchmark found: ratios first, then the figures they come from."""

    title: str
    what: str
    ratios: list[tuple[str, float]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def ratio(self, name: str, this: str, to: str) -> None:
        """How many times `this` is `to`."""
        least = {row.name: row.least for row in self.rows}
        self.ratios.append((name, least[this] / least[to]))


def in_turns(measures: dict[str, Measure], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each measure, each `repetitions` times, one after the other in turns: noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repetitions):
        for name, measure in measures.items():
            gc.collect()
            seconds[name].append(measure())
    return seconds


def row(name: str, seconds: Sequence[float], note: str = "") -> Row:
    """Seconds as a row in microseconds."""
    return Row(name, median(seconds) / MICRO, min(seconds) / MICRO, "us", note)


def facts() -> dict[str, str]:
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
    for peer in PEERS:
        try:
            found[peer] = version(peer)
        except PackageNotFoundError:
            found[peer] = NOT_INSTALLED
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def plain(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, the others to the right."""
    cells = [tuple(header), *map(tuple, lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, len(header) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The same for a page."""
    marks = ["---", *["---:"] * (len(header) - 2), "---"]
    return "\n".join("| " + " | ".join(line) + " |" for line in [tuple(header), tuple(marks), *map(tuple, lines)])


def page(reports: Sequence[Report], machine: dict[str, str], table: Callable[..., str], heading: str) -> str:
    """Everything as text: targets, ratios, figures, machine."""
    parts: list[str] = []
    targets = [target for report in reports for target in report.targets]
    if targets:
        parts.append(f"{heading} Targets")
        parts.append(
            table(
                ("target", "at most", "measured", "verdict"),
                [
                    (goal.name, f"{number(goal.most)} {goal.unit}", f"{number(goal.value)} {goal.unit}", goal.verdict)
                    for goal in targets
                ],
            )
        )
        parts.append("\n".join(f"- {target.name}: {target.verdict}. {target.sentence}" for target in targets))
    for report in reports:
        parts.append(f"{heading} {report.title}: ratios")
        parts.append(report.what)
        parts.append(table(("", "times", ""), [(name, number(value), "") for name, value in report.ratios]))
    for report in reports:
        parts.append(f"{heading} {report.title}: figures")
        parts.append(
            table(
                ("", "minimum", "median", "unit", "note"),
                [(row.name, number(row.least), number(row.median), row.unit, row.note) for row in report.rows],
            )
        )
    parts.append(f"{heading} Machine")
    parts.append(table(("", "", ""), [(name, value, "") for name, value in machine.items()]))
    return "\n\n".join(parts) + "\n"


def as_json(reports: Sequence[Report], machine: dict[str, str]) -> str:
    """The same for a program."""
    found = {
        "machine": machine,
        "targets": [
            {**asdict(target), "met": target.met, "verdict": target.verdict}
            for report in reports
            for target in report.targets
        ],
        "reports": [
            {
                "title": report.title,
                "what": report.what,
                "ratios": dict(report.ratios),
                "rows": [asdict(row) for row in report.rows],
            }
            for report in reports
        ],
    }
    return json.dumps(found, indent=1) + "\n"


def say(line: str) -> None:
    """Progress, on stderr, so that it does not mix with the result."""
    print(line, file=sys.stderr, flush=True)


def main(measure: Callable[[bool], list[Report]], about: str | None) -> None:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions, to check that it runs")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the tables as a Markdown page")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    machine = facts()
    reports = measure(options.quick)
    if options.markdown:
        options.markdown.write_text(page(reports, machine, markdown, "##"), encoding="utf-8")
    if options.json:
        options.json.write_text(as_json(reports, machine), encoding="utf-8")
    print(page(reports, machine, plain, "##"), end="")
