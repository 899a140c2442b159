"""The example scripts as they are run: what they print, write and draw, and how they explain themselves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from example_scripts import example, run

for package in ("numpy", "autograd", "scipy", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("name", "more"), [("inference", "--library"), ("newton", "--hidden"), ("training", "--largest")]
)
def test_a_script_explains_itself(name: str, more: str) -> None:
    """`--help` names the options."""
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert {"--budget", "--table", "--json", "--picture", more} <= {*re.findall(r"--[a-z]+", done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "says", "gives"),
    [
        ("inference", "--crop 40 --budget 0.4", "58 outputs", "digests"),
        ("newton", "--hidden 16 16 --samples 100 --iterations 2 --budget 0.6", "iteration  2: loss", "iterates"),
    ],
)
def test_a_script_by_itself(tmp_path: Path, name: str, options: str, says: str, gives: str) -> None:
    """Prints what it found, writes the figures, draws a picture."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture, figures = tmp_path / "picture.png", tmp_path / "figures.json"
    done = run(name, *options.split(), "--repeats", "1", "--picture", str(picture), "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "WRONG" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain, free, within = json.loads(figures.read_text())["runs"]
    assert plain[gives] == free[gives] == within[gives]
    assert within["recomputed"] > free["recomputed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "options"),
    [
        ("inference", 0.5, "--crop 32"),
        ("newton", 0.7, "--hidden 16 16 --samples 100 --iterations 1 --patience 1000"),
    ],
)
def test_the_table(
    name: str, share: float, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each policy and budget, without rich, too; a budget that is too small is said to be."""
    for module in ("rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, module, None)
    script = example(name)
    monkeypatch.setattr(script, "BUDGETS", (share, 0.01))
    assert script.main([*options.split(), "--table", "--budget", str(share), "--repeats", "1"]) == 0
    printed = capsys.readouterr()
    lines = [line.split()[:2] for line in printed.out.splitlines()[-4:]]
    budget = f"{share:.0%}"
    assert lines == [["not", "wrapped"], ["needed", "none"], ["needed", budget], ["lru", budget]]
    assert "needed, 1%" in printed.err
