"""`recompute compare`: policies and planners in one table, one picture, and one stream of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_traces import training, write

from recompute._cli import main
from recompute._cli.arguments import COMPARED


def test_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each policy, then for each planner; a column for each budget; what failed says how."""
    arguments = ["--budget", "0.9,0.5,0.2", "--policy", "dtr,lru", "--method", "own,chen-sqrt", "--output", "none"]
    assert main(["compare", trace, *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1] == ["90%", "50%", "20%"]
    assert [line[0] for line in lines[2:]] == ["dtr", "lru", "own", "chen-sqrt"]
    assert [line[-1] for line in lines[2:]] == ["oom", "oom", "infeasible", "infeasible"]
    assert float(lines[4][2]) <= float(lines[2][2])
    assert list(Path().glob("*.png")) == []


def test_defaults(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine budgets, the published policies beside the default, the planners that apply, and a picture."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    pytest.importorskip("scipy", reason="checkmate needs scipy")
    assert main(["compare", trace, "--time-limit", "5"]) == 0
    *table, path = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in table if line]
    assert rows[1] == [f"{share}%" for share in range(90, 0, -10)]
    planners = ["own", "chen-sqrt", "chen-greedy", "revolve", "checkmate"]
    assert [row[0] for row in rows[2:]] == [*COMPARED.split(","), *planners]
    assert path == str(Path("compare.png").absolute())
    assert Path(path).read_bytes()[:4] == b"\x89PNG"


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Replays as of `simulate`, then plans as of `plan`; the picture's path is not in between."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    arguments = ["--budget", "0.5", "--policy", "dtr", "--method", "own", "--output", "a.svg", "--json"]
    assert main(["compare", trace, *arguments]) == 0
    out, err = capsys.readouterr()
    run, plan = [json.loads(line) for line in out.splitlines()]
    assert (run["policy"], plan["method"]) == ("dtr", "own")
    assert run["budget_bytes"] == plan["budget_bytes"] == 455
    assert err == f"{Path('a.svg').absolute()}\n"


def test_several_traces(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table each, and the planners that apply to each: Revolve is for the chain alone."""
    other = write(tmp_path / "skip.jsonl", training(20, skip=True))
    arguments = ["--budget", "0.6", "--policy", "dtr", "--time-limit", "0.5", "--output", "none"]
    assert main(["compare", trace, other, *arguments]) == 0
    first, second = capsys.readouterr().out.split("skip.jsonl: ")
    assert "revolve" in first
    assert "revolve" not in second
    assert "chen-sqrt" in second


def test_policies_alone(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--method none` leaves the planners out."""
    assert main(["compare", trace, "--budget", "0.5", "--method", "none", "--output", "none", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["policy"] for line in lines] == COMPARED.split(",")


def test_traces_of_one_name(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files of one name are told apart by a number."""
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other" / "small.jsonl", training(4))
    arguments = ["--budget", "0.6", "--policy", "dtr", "--method", "none", "--output", "none", "--json"]
    assert main(["compare", trace, other, *arguments]) == 0
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["trace"] for run in runs] == ["small.jsonl", "small.jsonl (2)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "much"], "much"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--method", "magic"], "unknown method 'magic'"),
        (["--output", "a.gif"], "must be one of .png, .svg, .pdf"),
        (["--output", "nowhere/a.png"], "no directory"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--method", "own", "--operations", "9"], "--operations is for the method checkmate"),
        (["--method", "none", "--time-limit", "9"], "--time-limit is for the methods own and checkmate"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names what is wrong, and status 2, before anything runs."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    assert main(["compare", trace, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_without_matplotlib(trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra at once; `--output none` needs none."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["compare", trace]) == 1
    assert "pip install '.[plot]' in a checkout" in capsys.readouterr().err
    arguments = ["--budget", "0.5", "--policy", "dtr", "--method", "chen-sqrt", "--output", "none"]
    assert main(["compare", trace, *arguments]) == 0


def test_a_tier_is_a_line_of_its_own(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the policies alone, under the default policy."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    monkeypatch.chdir(tmp_path)
    options = [
        "--policy",
        "default,lru",
        "--budget",
        ".6,.4",
        "--method",
        "none",
        "--tier",
        "1TB/s",
        "--output",
        "t.svg",
    ]
    assert main(["compare", trace, *options]) == 0
    rows = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [row for row in rows if row.strip()] == ["default", "lru", "default, tier 1TB/s"]
    assert "tier 1TB/s" in (tmp_path / "t.svg").read_text()
