"""A trace that is given as `-` is read from standard input."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recompute._cli import main

COMMANDS = {
    "simulate": ["simulate", "-", "--budget", "50%", "--json"],
    "compare": ["compare", "-", "--budget", "50%", "--json"],
    "plan": ["plan", "-", "--budget", "50%", "--json"],
    "story": ["story", "-", "--budget", "50%"],
    "export": ["export", "-", "--to", "csv", "-o", "-"],
    "report": ["report", "-", "-o", "page.svg", "--budgets", "2", "--seconds", "0"],
}


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Let standard input be these bytes."""
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_it(
    command: str, zipped: bool, trace: str, piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain or gzipped, also where a command reads a trace twice."""
    content = Path(trace).read_bytes()
    piped(gzip.compress(content) if zipped else content)
    assert main(COMMANDS[command]) == 0
    assert capsys.readouterr().out != ""


def test_it_counts_once(trace: str, piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Beside files, and as often as it is named; its name says what it is."""
    piped(Path(trace).read_bytes())
    assert main(["simulate", "-", trace, "-", "--budget", "50%", "--json"]) == 0
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["trace"] == third["trace"] == "standard input"
    assert first["overhead"] == second["overhead"]


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "standard input:1: the trace is empty"), (b"PNG\n", "standard input:1: not JSON")]
)
def test_what_is_no_trace(
    content: bytes, says: str, piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, which names it."""
    piped(content)
    assert main(["simulate", "-"]) == 1
    assert says in capsys.readouterr().err


def test_a_closed_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, which says what to do."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["simulate", "-"]) == 2
    assert capsys.readouterr().err == "recompute: error: standard input is closed: give a file as the trace\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "run.jsonl", "-o", "-"],
        ["plan", "run.jsonl", "--budget", "50%", "--output", "-"],
        ["plot", "residency", "run.jsonl", "--output", "-"],
        ["run", "--trace", "-", "script.py"],
    ],
)
def test_files_that_cannot_go_to_standard_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says so, and no file of that name."""
    Path("script.py").touch()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "to standard output" in error or "to -: it is no file" in error
    assert [path.name for path in Path().iterdir()] == ["script.py"]
