"""`recompute doctor`: installed versions, adapters that load, and the devices that each can see."""

from __future__ import annotations

import argparse
import platform
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.metadata import EntryPoint
from typing import Final, Literal

from recompute import __version__, _form
from recompute._adapters.adapter import GROUP
from recompute._budget import format_bytes, free_memory
from recompute._cli.output import complain, flush, print_json, print_list, print_pairs, print_text, warn
from recompute._cli.plugins import (
    DISTRIBUTION,
    NOT_INSTALLED,
    TOOLS,
    how_to_get,
    is_installed,
    missing_package,
    plugins,
    version_of,
    version_of_package,
)
from recompute.adapters import Adapter

NAME = "doctor"
HELP = "show what is installed, which adapters load, and which devices each sees"

_EXAMPLES: Final = """\
examples:
  recompute doctor
  recompute doctor --json | python -m json.tool

The exit status is 1 if an adapter is broken; a missing extra is not an error.
"""


@dataclass
class Examined:
    """One adapter. `state`: "missing" when the framework that it serves is not installed."""

    name: str
    module: str
    distribution: str | None
    version: str | None
    state: Literal["ok", "missing", "broken"] = "ok"
    error: str | None = None
    serves: str | None = None
    """The version of the framework; None: unknown."""
    devices: dict[str, int | None] = field(default_factory=dict)
    """Device -> free bytes; None: unknown."""
    remark: str = ""
    """A remark of the adapter about itself."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what is installed, which adapters load, and which devices each sees."
    parser.epilog = _EXAMPLES
    parser.add_argument("--json", action="store_true", help="print a JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    points = plugins(GROUP)
    with redirect_stdout(sys.stderr):  # an adapter that prints must not spoil the JSON
        adapters = [_examine(point, points) for point in points]
    installed = version_of(DISTRIBUTION)
    extras = {package: version_of(package) for package in TOOLS}
    warnings = _duplicates(points)
    if installed is None:
        warnings.append(NOT_INSTALLED)
    elif installed != __version__:
        warnings.append(f"the installed metadata says {installed}, the code says {__version__}: install it again")
    broken = [adapter for adapter in adapters if adapter.state == "broken"]
    if options.json:
        print_json(
            {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "recompute": __version__,
                "installed": installed,
                "form": _form.described(),
                "extras": extras,
                "adapters": [asdict(adapter) for adapter in adapters],
                "warnings": warnings,
            }
        )
    else:
        _show(installed, extras, adapters)
        flush(sys.stdout)
        for warning in warnings:
            warn(warning)
        for adapter in broken:
            complain(f"the adapter {adapter.name!r} ({adapter.module}) is broken: {adapter.error}", 1)
    return 1 if broken else 0


def _examine(point: EntryPoint, points: list[EntryPoint]) -> Examined:
    """Load one adapter and ask it what it sees; whatever goes wrong is part of the answer."""
    report = Examined(
        point.name,
        point.value,
        None if point.dist is None else point.dist.name,
        None if point.dist is None else point.dist.version,
    )
    try:
        adapter = point.load()
        if not isinstance(adapter, Adapter):
            raise TypeError(f"{adapter!r} is not an instance of recompute.adapters.Adapter")
        report.serves = version_of_package(point.name)
        if not is_installed(point.name):
            report.state = "missing"
            return report
        report.remark = adapter.remark()
        for device in adapter.devices():
            free = adapter.free_memory(device)
            report.devices[device] = _free_here() if free is None and device == "cpu" else free
    except (Exception, SystemExit) as error:
        report.error = " ".join(f"{type(error).__name__}: {error}".split())
        served = {
            other.name for other in points if other.value == point.value
        }  # one framework may come in two packages
        report.state = "missing" if missing_package(error) in served else "broken"
    return report


def _free_here() -> int | None:
    """Free bytes of this machine, for adapters that leave that to the core; None without psutil."""
    try:
        return free_memory()()
    except ImportError:
        return None


def _duplicates(points: list[EntryPoint]) -> list[str]:
    """A warning for each adapter that another one of the same name keeps from serving."""
    first: dict[str, EntryPoint] = {}
    return [
        f"two adapters are installed for {point.name!r}: {first[point.name].value} is used, {point.value} is not; "
        "uninstall one of them"
        for point in points
        if first.setdefault(point.name, point) is not point
    ]


def _show(installed: str | None, extras: dict[str, str | None], adapters: list[Examined]) -> None:
    out = sys.stdout
    pairs = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("recompute", __version__ + ("" if installed else " (not installed)")),
        ("form", _form.described()),
    ]
    pairs += [(package, version or f"missing: {how_to_get(package)}") for package, version in extras.items()]
    print_pairs("recompute doctor", pairs, out)
    if not adapters:
        print(file=out)
        print_text("no adapters were found: every value is treated as a plain Python object", out)
        return
    rows: dict[tuple[str, ...], list[str]] = {}  # what is said of an adapter -> the packages that it serves
    for adapter in adapters:
        sees = ", ".join(
            device if free is None else f"{device} ({format_bytes(free)} free)"
            for device, free in adapter.devices.items()
        )
        state = {"ok": sees or "no device", "missing": "not installed", "broken": "broken"}[adapter.state]
        module = (
            f"{adapter.module} of {adapter.distribution} {adapter.version}" if adapter.distribution else adapter.module
        )
        rows.setdefault((adapter.serves or "", state, module), []).append(adapter.name)
    lines = []
    for (serves, state, module), names in rows.items():
        cure = f": {how_to_get(names[0])}" if state == "not installed" else ""
        lines.append((", ".join(names), serves, state + cure, module))
    print_list(["serves", "version", "sees", "adapter"], lines, out)
    for remark in dict.fromkeys(f"{adapter.name}: {adapter.remark}" for adapter in adapters if adapter.remark):
        print_text(remark, out)
