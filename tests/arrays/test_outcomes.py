"""Comparing a suite's outcomes on two modules, by recorded ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from outcomes import differences, outcomes

SUITE = """
import os, pytest
BROKEN = os.environ["BROKEN"].split()

@pytest.mark.parametrize("name", ["add", "sort", "take", "view"])
def test_function(name):
    if name == "take":
        pytest.skip("not there")
    assert name not in BROKEN

@pytest.mark.xfail(strict=False)
def test_expected():
    assert False

@pytest.fixture
def ends_badly():
    yield
    assert "teardown" not in BROKEN

def test_teardown(ends_badly):
    pass
"""

RESULTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["passed", "failed", "skipped"]))


def run(folder: Path, broken: str) -> dict[str, str]:
    """The outcomes of a small suite in which some tests fail."""
    (folder / "test_suite.py").write_text(SUITE)
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-c", "none.ini", f"--junitxml={report}"]
    (folder / "none.ini").write_text("[pytest]\n")
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_suite.py"],
        cwd=folder,
        env={"BROKEN": broken, "PATH": ""},
        capture_output=True,
        check=False,
    )
    return outcomes(report)


def test_each_test_has_its_outcome(tmp_path: Path) -> None:
    """Failures, errors of fixtures, skips and expected failures are told apart, by the name of the test."""
    assert run(tmp_path, "sort teardown") == {
        "test_suite::test_function[add]": "passed",
        "test_suite::test_function[sort]": "failed",
        "test_suite::test_function[take]": "skipped",
        "test_suite::test_function[view]": "passed",
        "test_suite::test_expected": "skipped",
        "test_suite::test_teardown": "failed",
    }


def test_what_both_fail_is_no_difference(tmp_path: Path) -> None:
    """NumPy's own failures, which change with its version, do not count; those that it does not have do."""
    plain, wrapped = run(tmp_path, "sort"), run(tmp_path, "sort view")
    assert differences(plain, plain, {}) == []
    assert differences(plain, wrapped, {}) == ["test_suite::test_function[view]: failed, but NumPy passes"]
    assert differences(wrapped, plain, {}) == []


def test_what_is_by_design_is_named(tmp_path: Path) -> None:
    """A difference that is listed with its reason is none; one that is listed and gone is an error."""
    plain, wrapped = run(tmp_path, ""), run(tmp_path, "view")
    assert differences(plain, wrapped, {"test_suite::test_function[view]": "copies"}) == []
    assert differences(plain, plain, {"test_suite::test_function[view]": "copies"}) == [
        "test_suite::test_function[view]: by design no more (copies)"
    ]


@given(RESULTS, RESULTS, st.dictionaries(st.sampled_from("abcdef"), st.just("so")))
def test_a_difference_is_worse_or_stale(plain: dict[str, str], wrapped: dict[str, str], listed: dict[str, str]) -> None:
    """There is a line for a test if it passes with NumPy alone and is not listed, or is listed and does not differ."""
    worse = {test for test in plain if plain[test] == "passed" and wrapped.get(test) != "passed"}
    named = {line.split(":")[0] for line in differences(plain, wrapped, listed)}
    assert named == worse ^ set(listed)
