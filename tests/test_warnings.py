"""Which warnings fail the tests: those of our own modules and categories, and nobody else's deprecations."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import recompute

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "pyproject.toml"
pytestmark = pytest.mark.skipif(not SETTINGS.is_file(), reason="pyproject.toml is not beside the tests")

OTHERS = """
import warnings

def warn(category, level=1):
    warnings.warn("about this", category, stacklevel=level)
"""

OURS = """
import warnings
import others

def warn(category, level=1):
    warnings.warn("about this", category, stacklevel=level)

def call_what_is_deprecated():
    others.warn(DeprecationWarning, level=2)
"""

TESTS = """
import threading
import pytest
import recompute, others, recompute_ours

class InDestructor:
    def __del__(self):
        raise ValueError

def in_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

@pytest.mark.parametrize("act", [
    lambda: recompute_ours.warn(UserWarning),
    lambda: recompute_ours.warn(RuntimeWarning),
    lambda: recompute_ours.warn(UserWarning, level=2),
    lambda: others.warn(RuntimeWarning, level=2),
    lambda: others.warn(recompute.SizeWarning),
    InDestructor,
    in_thread,
])
def test_fails(act):
    act()

@pytest.mark.parametrize("act", [
    *[lambda kind=kind, level=level: others.warn(kind, level)
      for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning) for level in (1, 2)],
    lambda: others.warn(RuntimeWarning),
    lambda: others.warn(UserWarning),
    lambda: others.warn(recompute.ThrashWarning),
    recompute_ours.call_what_is_deprecated,
])
def test_passes(act):
    act()
"""


def test_ours_fail_and_those_of_others_do_not(tmp_path: Path) -> None:
    """Warnings of our modules, tests and categories, and what ends destructors and threads, fail; deprecations pass."""
    for name, text in {"others": OTHERS, "recompute_ours": OURS, "test_both": TESTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-c", str(SETTINGS), "--rootdir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_both.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = re.findall(r"^(PASSED|FAILED) \S*::test_(\w+)\[", run.stdout, flags=re.MULTILINE)
    assert outcomes.count(("FAILED", "fails")) == 7, run.stdout
    assert outcomes.count(("PASSED", "passes")) == 10, run.stdout
    assert len(outcomes) == 17


def test_every_category_of_ours_is_named() -> None:
    """A warning that the library exports is an error, but for the one that depends on the machine: that is shown."""
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    exported = [getattr(recompute, name) for name in recompute.__all__]
    warnings = [export for export in exported if isinstance(export, type) and issubclass(export, Warning)]
    ours = {
        f"{'default' if warning is recompute.ThrashWarning else 'error'}::recompute.{warning.__name__}"
        for warning in warnings
    }
    assert len(ours) > 1
    assert {filterwarning for filterwarning in settings["filterwarnings"] if "::recompute." in filterwarning} == ours
