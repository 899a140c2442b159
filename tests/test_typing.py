"""Types, as users see them: programs of users are checked by mypy and by pyright, as strictly as both can.

Each file in typing/ is a program that is checked and never run. What is wrong on purpose is marked `# wrong`: a checker
must complain about those lines, and about no other.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import recompute

HOUSE = Path(recompute.__file__).parent.parent
PROGRAMS = sorted((Path(__file__).parent / "typing").glob("*.py"))

Complaints = dict[str, dict[int, str]]
"""Of a checker: by the name of a file, by line."""


def run_mypy(folder: Path) -> Complaints:
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    options = ["--strict", "--config-file=", f"--cache-dir={folder}", "--follow-imports=silent", "--no-error-summary"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, PROGRAMS)],
        cwd=HOUSE,
        capture_output=True,
        text=True,
    )
    assert checked.returncode in (0, 1), checked.stdout + checked.stderr
    complaints: Complaints = {}
    for line in checked.stdout.splitlines():
        if found := re.fullmatch(r"(.+?):(\d+): error: (.*)", line):
            complaints.setdefault(Path(found[1]).name, {})[int(found[2])] = found[3]
    return complaints


def run_pyright(folder: Path) -> Complaints:
    command = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    if command is None:
        pytest.skip("pyright is not installed")
    settings = {"extraPaths": [str(HOUSE)], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    for program in PROGRAMS:  # it reads settings, and checks what lies beside them
        shutil.copy(program, folder)
    checked = subprocess.run(
        [command, "--outputjson", "--pythonpath", sys.executable, "--project", str(folder)],
        capture_output=True,
        text=True,
    )
    if not checked.stdout.lstrip().startswith("{"):
        pytest.skip(f"pyright does not start here (it fetches itself once): {checked.stderr.strip()[-200:]}")
    complaints: Complaints = {}
    report = json.loads(checked.stdout)
    assert report["summary"]["filesAnalyzed"] == len(PROGRAMS), report
    for told in report["generalDiagnostics"]:
        if told["severity"] == "error":
            line = told["range"]["start"]["line"] + 1
            complaints.setdefault(Path(told["file"]).name, {})[line] = told["message"]
    return complaints


@pytest.fixture(scope="module", params=[run_mypy, run_pyright])
def complaints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Complaints:
    run: Callable[[Path], Complaints] = request.param
    return run(tmp_path_factory.mktemp(run.__name__))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_of_users(program: Path, complaints: Complaints) -> None:
    """What is right is accepted, with the types that it asserts; what is wrong is refused where it is wrong."""
    if program.stem == "arrays":
        pytest.importorskip("numpy")
    lines = enumerate(program.read_text().splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    told = complaints.get(program.name, {})
    assert set(told) == wrong, {number: told.get(number, "accepted") for number in sorted(wrong ^ set(told))}
