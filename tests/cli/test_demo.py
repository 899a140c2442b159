"""`recompute demo`: finds demos by entry point, hands them what they need, and explains what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bare_python import bare

from recompute._cli import main

DEMOS = """\
import recompute as rc

def demo(*, budget, picture, echo, progress, iterations=7):
    progress("working")
    echo(f"budget {budget}")
    return {"budget": budget, "picture": picture and str(picture), "iterations": iterations}

def slow(*, budget, picture, echo, progress):
    progress("started")
    progress("half done", 0.5)
    echo("done")
    return {}

def plain(*, budget, picture, echo, progress):
    return {}

def short(*, budget, picture, echo, progress):
    with rc.Cache(budget=10):
        rc.pure(bytes(1000))

def unwritable(*, budget, picture, echo, progress):
    open("no/such/folder", "w")

def needy(*, budget, picture, echo, progress):
    import no_such_package.part

def buggy(*, budget, picture, echo, progress):
    return 1 // 0

number = 5
"""

ENTRIES = """\
[recompute.demos]
trial = demos_on_trial:demo
plain = demos_on_trial:plain
slow = demos_on_trial:slow
short = demos_on_trial:short
unwritable = demos_on_trial:unwritable
needy = demos_on_trial:needy
buggy = demos_on_trial:buggy
number = demos_on_trial:number
absent = demos_on_trial:absent
"""


@pytest.fixture(autouse=True)
def demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with demos is installed."""
    write(tmp_path, DEMOS)
    monkeypatch.syspath_prepend(tmp_path)


def write(folder: Path, module: str) -> None:
    metadata = folder / "demos_on_trial-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: demos-on-trial\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    (folder / "demos_on_trial.py").write_text(module)


def test_demo_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    """What the demo says goes to stdout, and nothing to stderr where nobody watches."""
    assert main(["demo", "trial"]) == 0
    assert capsys.readouterr() == ("budget 0.1\n", "")


def test_progress_is_a_line_every_few_seconds_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redirected, the progress of a demo goes to stderr line by line, and what it says stays alone on stdout."""
    monkeypatch.setattr("recompute._cli.demo._EVERY", 0.0)
    assert main(["demo", "slow"]) == 0
    out, err = capsys.readouterr()
    assert out == "done\n"
    assert err.splitlines() == ["recompute demo: started", "recompute demo: [##########..........]  50% half done"]


@pytest.mark.parametrize(
    ("options", "figures"),
    [
        ([], {"budget": 0.1, "picture": "recompute-demo.png", "iterations": 7}),
        (["--budget", "50%"], {"budget": 0.5, "picture": "recompute-demo.png", "iterations": 7}),
        (["--budget", "0.25"], {"budget": 0.25, "picture": "recompute-demo.png", "iterations": 7}),
        (["--picture", "none", "--iterations", "3"], {"budget": 0.1, "picture": None, "iterations": 3}),
        (["--picture", "a.svg"], {"budget": 0.1, "picture": "a.svg", "iterations": 7}),
    ],
)
def test_json_is_all_there_is(
    capsys: pytest.CaptureFixture[str], options: list[str], figures: dict[str, object]
) -> None:
    """With --json stdout holds the figures and nothing else, and the options reach the demo."""
    assert main(["demo", "trial", "--json", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == figures
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["trial", "--budget", "5MB"], 2, "such as 5%, not '5MB'"),
        (["trial", "--budget", "0"], 2, "such as 5%, not '0'"),
        (["trial", "--budget", "500%"], 2, "such as 5%, not '500%'"),
        (["trial", "--budget", "nan"], 2, "such as 5%, not 'nan'"),
        (["trial", "--iterations", "0"], 2, "at least 1, not '0'"),
        (["trial", "--iterations", "few"], 2, "at least 1, not 'few'"),
        (["plain", "--iterations", "3"], 2, "the demo 'plain' has no iterations"),
        (["short"], 1, "is larger than the whole budget"),
        (["unwritable"], 1, "No such file or directory"),
        (["needy"], 1, "the demo 'needy' needs no_such_package: pip install no_such_package"),
        (["buggy"], 1, "ZeroDivisionError: "),
        (["number"], 1, "demos_on_trial:number is not a function"),
        (["absent"], 1, "the demo 'absent' cannot be loaded: AttributeError"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str) -> None:
    """Whatever goes wrong is one line on stderr and a status above zero."""
    assert main(["demo", *arguments]) == status
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("recompute: error: ")
    assert says in line


def test_unknown_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """A demo that is not there is one line."""
    assert main(["demo", "no such demo"]) > 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("recompute: error: ")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` names the demos and where they are."""
    assert main(["demo", "--list"]) == 0
    assert ["trial", "demos_on_trial:demo"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["demo", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["demos"]["trial"] == "demos_on_trial:demo"


def test_without_numpy(tmp_path: Path) -> None:
    """A demo that needs an extra is one line with the command that installs it."""
    folder = tmp_path / "bare"
    write(folder, "import numpy\n" + DEMOS)
    result = bare(folder, "demo", "trial")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == ("recompute: error: the demo 'trial' needs numpy: pip install '.[numpy]' in a checkout\n")


def test_without_metadata(tmp_path: Path) -> None:
    """Where the package is not installed, so that no demo can be found, one line says so."""
    folder = tmp_path / "bare"
    folder.mkdir()
    result = bare(folder, "demo")
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("recompute: error: recompute itself is not installed")
