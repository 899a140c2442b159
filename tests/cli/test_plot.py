"""`recompute plot`: each kind makes its picture, and what cannot be drawn is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from recompute._cli import main

pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")


KINDS = [
    ("residency", ["small.jsonl"]),
    ("residency", ["small.jsonl", "--method", "own", "--budget", "40%"]),
    ("memory", ["--policy", "default,lru", "small.jsonl", "--budget", "600"]),
    ("memory", ["small.jsonl", "--policy", "dtr", "--method", "own,chen-greedy", "--budget", "60%"]),
    ("overhead", ["small.jsonl", "small.jsonl", "--budget", "0.9,0.5", "--method", "own", "--policy", "dtr"]),
    ("overhead", ["small.jsonl", "--budget", "0.9,0.5", "--iterations", "2", "--effort", "0.001"]),
    ("accesses", ["small.jsonl", "--policy", "dtr,lru", "--search", "exact,sample", "--budget", "0.8,0.5"]),
    ("chain", ["--sizes", "4,8,16", "--policy", "dtr-eq,lru"]),
]


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
@pytest.mark.usefixtures("trace")
def test_kinds(kind: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A picture is written to KIND.png, and its path is all that is printed."""
    assert main(["plot", kind, *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == f"{Path(f'{kind}.png').absolute()}\n"
    assert Path(f"{kind}.png").read_bytes()[:4] == b"\x89PNG"


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the kind and the path of the picture are one object on stdout."""
    assert main(["plot", "memory", trace, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kind": "memory", "picture": str(Path("memory.png").absolute())}


def test_text_in_vectors(trace: str) -> None:
    """In an SVG text is text: the trace, the share of memory, the policy with its overhead, the backward pass."""
    assert main(["plot", "residency", trace, "--policy", "dtr", "--budget", "50%", "--output", "a.svg"]) == 0
    text = Path("a.svg").read_text()
    for expected in ("small in 455 B, 50% of its peak", "dtr (overhead 1.", "backward pass", "recomputed", "budget"):
        assert expected in text


def test_rounds_are_lines(trace: str) -> None:
    """With --iterations the last round of the default policy is a line of its own, and the others have one each."""
    arguments = ["--policy", "default,dtr", "--budget", "0.8,0.5", "--iterations", "3", "--effort", "0.001"]
    assert main(["plot", "overhead", trace, *arguments, "--output", "a.svg"]) == 0
    text = Path("a.svg").read_text()
    assert [name for name in ("default", "default, round 3", "dtr", "dtr, round 3") if f">{name}</text>" in text] == [
        "default",
        "default, round 3",
        "dtr",
    ]


def test_small_values_are_left_out(trace: str) -> None:
    """`--least` draws only values of at least that share of the peak, and says so."""
    assert main(["plot", "residency", trace, "--least", "20%", "--output", "a.svg"]) == 0
    assert "values of at least 20% of the peak" in Path("a.svg").read_text()
    assert main(["plot", "residency", trace, "--least", "0", "--output", "b.svg"]) == 0
    assert "value, in order of creation" in Path("b.svg").read_text()


def test_what_fails_is_drawn_as_far_as_it_went(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that does not finish is drawn, with a warning."""
    assert main(["plot", "memory", trace, "--budget", "250", "--policy", "lru", "--output", "a.svg"]) == 0
    assert "warning: lru does not finish (oom)" in capsys.readouterr().err
    assert "lru (oom)" in Path("a.svg").read_text()


def test_planners_without_a_plan_are_left_out(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside others, a planner that has no plan is a warning."""
    arguments = ["--budget", "0.5", "--method", "own,chen-sqrt", "--output", "a.svg"]
    assert main(["plot", "memory", trace, *arguments]) == 0
    assert "warning: chen-sqrt is left out: infeasible" in capsys.readouterr().err
    assert "own (overhead" in Path("a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cake", "small.jsonl"], "unknown kind 'cake'; choose from residency, memory, overhead, accesses, chain"),
        (["residency"], "residency needs a trace"),
        (["chain", "small.jsonl"], "chain needs no trace"),
        (["residency", "small.jsonl", "small.jsonl"], "one trace"),
        (["residency", "small.jsonl", "--policy", "dtr,lru"], "one policy"),
        (["memory", "small.jsonl", "--budget", "0.5,0.4"], "one budget"),
        (["memory", "small.jsonl", "--budget", "much"], "much"),
        (["residency", "small.jsonl", "--least", "2"], "--least"),
        (["overhead", "small.jsonl", "--search", "blind"], "blind"),
        (["overhead", "small.jsonl", "--search", "exact,sample"], "one search"),
        (["overhead", "small.jsonl", "--iterations", "0"], "--iterations"),
        (["overhead", "small.jsonl", "--effort", "1"], "--effort needs --iterations"),
        (["memory", "small.jsonl", "--iterations", "2"], "--iterations is for overhead, not for memory"),
        (["accesses", "small.jsonl", "--method", "own"], "--method is for residency, memory, overhead, not for"),
        (["chain", "--budget", "3%"], "--budget is for residency, memory, overhead, accesses, not for chain"),
        (["memory", "small.jsonl", "--operations", "9"], "--operations is for the method checkmate"),
        (["memory", "small.jsonl", "--time-limit", "9"], "--time-limit is for the methods own and checkmate"),
        (["accesses", "small.jsonl", "--time-limit", "9"], "--time-limit is for residency, memory, overhead"),
        (["memory", "small.jsonl", "--sizes", "3"], "--sizes is for chain, not for memory"),
        (["overhead", "small.jsonl", "--least", "5%"], "--least is for residency, not for overhead"),
        (["chain", "--sizes", "1,2"], "--sizes"),
        (["chain", "--sizes", "2"], "at least 3"),
        (["chain", "--sizes", "many"], "--sizes"),
        (["chain", "--output", "a.gif"], "must be one of .png, .svg, .pdf"),
        (["chain", "--output", "nowhere/a.png"], "no directory"),
    ],
)
@pytest.mark.usefixtures("trace")
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names what is wrong, status 2, and no picture."""
    assert main(["plot", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(Path().glob("*.png")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["residency", "none.jsonl"], "none.jsonl cannot be read"),
        (["residency", "bad.jsonl"], "bad.jsonl:1: unknown INSTRUCTION 'JUMP'"),
        (["residency", "small.jsonl", "--least", "99%"], "nothing to draw"),
        (["accesses", "small.jsonl", "--budget", "5%"], "nothing to draw"),
        (["memory", "small.jsonl", "--method", "own", "--budget", "5%"], "own: infeasible"),
    ],
)
@pytest.mark.usefixtures("trace")
def test_what_cannot_be_drawn(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing and malformed traces, and pictures without content, are one line and status 1."""
    Path("bad.jsonl").write_text('{"INSTRUCTION": "JUMP"}\n')
    assert main(["plot", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("trace")
def test_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, before the work is done."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "residency", "small.jsonl"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "recompute: error: pictures need matplotlib: pip install '.[plot]' in a checkout"
