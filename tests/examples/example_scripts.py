"""The scripts in `docs/examples`: imported, with what they import from beside them, and run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"


def example(name: str) -> Any:
    """A module of that folder. Where the documentation is not beside the tests, the module that asks is skipped."""
    if not FOLDER.exists():
        pytest.skip("the documentation is not beside the tests", allow_module_level=True)
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, with one thread for matrix products."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | one, timeout=300)


def assert_refused(script: Any, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with status 2, before any work, and says why."""
    with pytest.raises(SystemExit) as left:
        script.main(options)
    assert left.value.code == 2
    assert "error" in capsys.readouterr().err
