"""`recompute simulate`: what it prints for scripts, how budgets and policies are named, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_traces import training, write

import recompute as rc
from recompute._cli import main
from recompute._policy.formulas import POLICIES

KEYS = [
    "trace", "policy", "search", "release", "budget_bytes", "budget_ratio", "status", "overhead", "model_time",
    "total_time", "peak_bytes", "baseline_peak_bytes", "evictions", "rematerializations", "candidates_scored",
    "seconds", "iteration", "moved_bytes", "fetched_bytes", "waited_time",
]  # fmt: skip
PEAK = 910  # ten bytes of input, and nine values


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    """The objects that a call with --json prints."""
    assert main(["simulate", *arguments, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


def test_keys_of_a_run(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One object a run, with these keys in this order, and figures that fit together."""
    (run,) = simulate(capsys, trace, "--budget", "0.5", "--policy", "dtr-eq")
    assert list(run) == KEYS
    assert (run["trace"], run["policy"], run["search"], run["release"]) == ("small.jsonl", "dtr-eq", "exact", "eager")
    assert (run["budget_bytes"], run["budget_ratio"], run["baseline_peak_bytes"]) == (PEAK // 2, 0.5, PEAK)
    assert run["status"] == "ok"
    assert run["overhead"] == pytest.approx(run["total_time"] / run["model_time"])
    assert run["model_time"] == pytest.approx(16e-6)
    assert 0 < run["peak_bytes"] <= run["budget_bytes"]
    assert run["rematerializations"] > 0
    assert run["evictions"] > 0
    assert run["candidates_scored"] > 0
    assert run["iteration"] == 1


def test_failures_have_no_overhead(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is oom, what recomputes too much is a thrash: asked for one budget, the status is 1."""
    (small,) = simulate(capsys, trace, "--budget", "150 B", status=1)
    assert (small["status"], small["overhead"]) == ("oom", None)
    (slow,) = simulate(capsys, trace, "--budget", "0.4", "--limit", "1.01", status=1)
    assert (slow["status"], slow["overhead"]) == ("thrash", None)
    simulate(capsys, trace, "--budget", "150 B, 0.9")


def test_a_ladder_without_a_budget(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which budget? A row for each from 90 to 5 %, up to an overhead of 20, with what is needed at least."""
    assert main(["simulate", trace]) == 0
    first, head, *rows = filter(None, capsys.readouterr().out.splitlines())
    assert first.startswith("small.jsonl: ")
    assert ", peak 910 B, needs at least 310 B, " in first
    assert head.split() == ["budget", "bytes", "overhead"]
    assert [row.split()[0] for row in rows] == [f"{share}%" for share in (*range(90, 9, -10), 5)]
    (run,) = simulate(capsys, trace, "--budget", "0.9")
    assert rows[0].split() == ["90%", "819", "B", f"{run['overhead']:.3f}"]
    assert rows[-1].endswith("does not fit")


def test_a_program_that_holds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is replayed under the budget that was asked for, all the same; a share of nothing is one byte, as ever."""
    published = write(tmp_path / "none.jsonl", [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}])
    with rc.Cache(trace=tmp_path / "own.jsonl"):
        pass
    for trace in (published, str(tmp_path / "own.jsonl")):
        runs = simulate(capsys, trace, "--budget", "10,50%", "--policy", "default,lru")
        assert [(run["budget_bytes"], run["overhead"]) for run in runs] == [(10, 1), (1, 1)] * 2


def test_the_end_of_a_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would cost more than the limit is said to do so; the exit status is 0 all the same."""
    assert main(["simulate", write(tmp_path / "small.jsonl", training()), "--limit", "1.1"]) == 0
    assert "> 1.1" in capsys.readouterr().out
    assert len(simulate(capsys, str(tmp_path / "small.jsonl"), "--policy", "dtr,lru")) == 20


def test_budgets_in_bytes_head_their_columns(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A column is named as its budget was asked for."""
    assert main(["simulate", trace, "--budget", "500,0.9"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["overhead", "500", "B", "90%"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["0.5"], [455]),
        (["50%"], [455]),
        (["500"], [500]),
        (["0.5 kB"], [500]),
        (["0.9,0.5"], [819, 455]),
        (["0.9, 0.5", "600"], [819, 455, 600]),
        (["1.0"], [910]),
        (["1"], [1]),
    ],
)
def test_budgets(given: list[str], expected: list[int], trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares, percentages and bytes; with commas and repeated, in the order given."""
    status = int(expected == [1])  # which is too small, and the only one
    runs = simulate(capsys, trace, *[part for text in given for part in ("--budget", text)], status=status)
    assert [run["budget_bytes"] for run in runs] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["default"]),
        (["default"], ["default"]),
        (["dtr", "lru"], ["dtr", "lru"]),
        (["dtr,lru", "dtr"], ["dtr", "lru"]),
        (["all"], list(POLICIES)),
        (["default,all"], ["default", *POLICIES]),
    ],
)
def test_policies(given: list[str], expected: list[str], trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names as they were asked for, each once; `all` stands for every one, and none for the default."""
    runs = simulate(capsys, trace, "--budget", "0.9", *[part for text in given for part in ("--policy", text)])
    assert [run["policy"] for run in runs] == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget", "50%", "small.jsonl", "-x.jsonl.gz"],
        ["small.jsonl", "--budget", "50%", "-x.jsonl.gz"],
        ["--budget", "50%", "--", "small.jsonl", "-x.jsonl.gz"],
    ],
)
def test_options_may_stand_anywhere(arguments: list[str], trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In front of traces, between them and behind them; behind `--` there are only traces."""
    write(Path("-x.jsonl.gz"), training(4))
    assert main(["simulate", *[name if "--" in arguments else name.replace("-x", "./-x") for name in arguments]]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if "operations" in line] == [
        Path(trace).name,
        "-x.jsonl.gz",
    ]


def test_several_traces_plain_and_gzip(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs come trace by trace, and a compressed trace is the same program."""
    other = write(tmp_path / "small.jsonl.gz", training())
    runs = simulate(capsys, trace, other, "--budget", "0.5,0.4", "--policy", "dtr")
    assert [run["trace"] for run in runs] == ["small.jsonl"] * 2 + ["small.jsonl.gz"] * 2
    assert [run["overhead"] for run in runs[:2]] == [run["overhead"] for run in runs[2:]]


def test_tables(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: one budget shows all about each run, several a row of overheads for each policy."""
    assert main(["simulate", trace, "--budget", "0.5", "--policy", "dtr"]) == 0
    one = capsys.readouterr().out
    assert one.startswith("small.jsonl: 16 operations, peak 910 B")
    assert "rematerializations" in one
    assert main(["simulate", trace, "--budget", "0.9,0.5,0.1", "--policy", "dtr,lru"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["overhead", "90%", "50%", "10%"]
    assert [line.split()[0] for line in lines[3:5]] == ["dtr", "lru"]
    assert lines[3].split()[-1] == "oom"


QUICK = ("--iterations", "3", "--effort", "0.001")


def test_rounds(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --iterations there is an object for each round of each replay, in order, and the default policy learns."""
    other = write(tmp_path / "skip.jsonl", training(skip=True))
    runs = simulate(capsys, trace, other, "--budget", "0.8,0.5", "--policy", "default,dtr", *QUICK)
    assert [list(run) for run in runs] == [KEYS] * 24
    assert [run["iteration"] for run in runs] == [1, 2, 3] * 8
    assert [run["trace"] for run in runs] == ["small.jsonl"] * 12 + ["skip.jsonl"] * 12
    assert [run["policy"] for run in runs] == (["default"] * 6 + ["dtr"] * 6) * 2
    assert [run["budget_ratio"] for run in runs] == ([0.8] * 3 + [0.5] * 3) * 4
    for first, *later in [runs[at : at + 3] for at in range(0, 24, 3)]:
        assert all(run["total_time"] == pytest.approx(run["overhead"] * run["model_time"]) for run in (first, *later))
        if first["policy"] == "default":
            assert all(run["overhead"] <= first["overhead"] for run in later)


def test_the_first_round_is_a_run(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is known of a round before it: it is the same run as without --iterations."""
    budget = ("--budget", "0.5", "--policy", "default,dtr-eq")
    (one, other), rounds = simulate(capsys, trace, *budget), simulate(capsys, trace, *budget, *QUICK)
    for run in (one, other, rounds[0], rounds[3]):
        run.pop("seconds")
    assert [rounds[0], rounds[3]] == [one, other]


def test_rounds_without_foresight(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --no-foresight no round knows of another: this program's are all the same."""
    runs = simulate(capsys, trace, "--budget", "0.4", "--iterations", "3", "--no-foresight", status=1)
    assert len({run["overhead"] for run in runs}) == 1


def test_rounds_after_a_failure(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is the last round; after one above the limit others follow, which may stay below."""
    (small,) = simulate(capsys, trace, "--budget", "150 B", *QUICK, status=1)
    assert (small["status"], small["iteration"]) == ("oom", 1)
    slow = simulate(capsys, trace, "--budget", "0.4", "--limit", "1.01", *QUICK, status=1)
    assert [(run["status"], run["overhead"]) for run in slow] == [("thrash", None)] * 3


def test_rounds_in_processes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Several processes give the rounds that one gives, in the same order."""
    arguments = (trace, "--budget", "0.8,0.5,0.1", "--iterations", "2", "--effort", "0.1", "--processes")
    alone, together = (simulate(capsys, *arguments, processes) for processes in ("1", "2"))
    for run in (*alone, *together):
        run.pop("seconds")
    assert together == alone
    assert [run["iteration"] for run in alone] == [1, 2, 1, 2, 1]


def test_table_of_rounds(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A column for each round, a row for each policy and budget, and nothing after a failure."""
    assert main(["simulate", trace, "--budget", "0.5,0.1", "--policy", "default,dtr", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["overhead", "budget", "round", "1", "2", "3"]
    rows = [line.split() for line in lines[3:7]]
    assert [row[:4] for row in rows] == [
        [policy, *budget] for policy in ("default", "dtr") for budget in (["455", "B", "(50%)"], ["91", "B", "(10%)"])
    ]
    assert [len(row[4:]) for row in rows] == [3, 1, 3, 1]
    assert [row[4] for row in rows[1::2]] == ["oom", "oom"]
    assert lines[7:] == [""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "lots"], "lots"),
        (["--budget", "0"], "at least one byte"),
        (["--budget=-5%"], "not a size"),
        (["--budget", "0.5,"], "not a size"),
        (["--budget", "nan"], "not a size"),
        (["--budget", "0.5", "--policy", "best"], "unknown policy 'best'"),
        (["--budget", "0.5", "--search", "blind"], "blind"),
        (["--budget", "0.5", "--limit", "0.5"], "--limit"),
        (["--budget", "0.5", "--release", "never"], "never"),
        (["--budget", "0.5", "--processes", "0"], "--processes"),
        (["--budget", "0.5", "--iterations", "0"], "--iterations must be a whole number, at least 1, not '0'"),
        (["--budget", "0.5", "--iterations", "some"], "--iterations"),
        (["--budget", "0.5", "--iterations", "2", "--effort", "-1"], "--effort"),
        (["--budget", "0.5", "--iterations", "2", "--effort", "inf"], "--effort"),
        (["--budget", "0.5", "--iterations", "2", "--effort", "much"], "--effort is a number, at least 0, not 'much'"),
        (["--budget", "0.5", "--effort", "1"], "--effort needs --iterations"),
        (["--budget", "0.5", "--no-foresight"], "--no-foresight needs --iterations"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names what is wrong, and status 2, before anything runs."""
    assert main(["simulate", trace, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recompute: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_no_such_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is one line with its name."""
    assert main(["simulate", str(tmp_path / "none.jsonl"), "--budget", "0.5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.jsonl cannot be read" in line


CONSTANT = '{"INSTRUCTION": "CONSTANT", "NAME": "x"}\n{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "1"}\n'


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (CONSTANT + "{oops\n", 3, "JSON"),
        (CONSTANT + "[1]\n", 3, "object"),
        (CONSTANT + '{"INSTRUCTION": "JUMP"}\n', 3, "JUMP"),
        (CONSTANT + '{"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["y"], "RESULT": [], "TIME": "1"}\n', 3, "'y'"),
        (
            '{"INSTRUCTION": "CONSTANT", "NAME": "x"}\n{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "-1"}\n',
            2,
            "neg",
        ),
        ('{"INSTRUCTION": "CONSTANT", "NAME": "x"}\n', 1, "truncated"),
        ("", 1, "empty"),
    ],
)
def test_malformed_traces(
    text: str, line: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with file, line number and what is wrong, and a non-zero status."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert main(["simulate", str(path), "--budget", "0.5"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"recompute: error: {path}:{line}: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_damaged_gzip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A compressed file that ends too early is one line, too."""
    path = Path(write(tmp_path / "cut.jsonl.gz", training()))
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["simulate", str(path), "--budget", "0.5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"recompute: error: {path}:")
    assert "truncated" in line


def test_a_tier(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a fast link what is dear to compute moves: less overhead than alone, and the name says with what."""
    (alone,) = simulate(capsys, trace, "--budget", "0.4", "--limit", "20")
    (both,) = simulate(capsys, trace, "--budget", "0.4", "--limit", "20", "--tier", "1TB/s")
    assert both["policy"] == "default, tier 1TB/s"
    assert both["moved_bytes"] > 0
    assert both["overhead"] < alone["overhead"]
    assert both["peak_bytes"] <= both["budget_bytes"]


@pytest.mark.parametrize("words", ["12GB", "12GB/s,soon", "/s"])
def test_a_tier_that_is_none(words: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, which names the option."""
    assert main(["simulate", trace, "--budget", "0.4", "--tier", words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--tier: " in err
