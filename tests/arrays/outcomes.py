"""What a suite gives on two modules, test by test: where one does worse than the other, but for what is by design."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

BY_DESIGN: dict[str, str] = {}
"""Test -> why the wrapped namespace does worse there than NumPy, and shall."""


def outcomes(report: Path) -> dict[str, str]:
    """Test -> passed, failed or skipped, from what `pytest --junitxml` wrote. Expected failures count as skipped."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        tags = {element.tag for element in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found[name] = "failed" if found.get(name) == "failed" else outcome  # an error in the teardown is a case, too
    return found


def worse(plain: Mapping[str, str], wrapped: Mapping[str, str]) -> dict[str, str]:
    """What became of each test that the plain module passes and the wrapped one does not."""
    found = {test: wrapped.get(test, "not run") for test, outcome in plain.items() if outcome == "passed"}
    return {test: outcome for test, outcome in found.items() if outcome != "passed"}


def differences(plain: Mapping[str, str], wrapped: Mapping[str, str], by_design: Mapping[str, str]) -> list[str]:
    """A line for each test that only the plain module passes, and for each listed one that does not differ."""
    found = worse(plain, wrapped)
    lines = [f"{test}: {outcome}, but NumPy passes" for test, outcome in sorted(found.items()) if test not in by_design]
    return lines + [f"{test}: by design no more ({by_design[test]})" for test in sorted(by_design) if test not in found]
