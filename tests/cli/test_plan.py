"""`recompute plan`: verified plans as a table or as JSON, reasons where there is none, and the plan as a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_traces import training, write

from recompute._cli import main, points
from recompute._cli.points import Planned, monotone
from recompute._traces.read import read
from recompute.planners import METHODS, PlanError, ProgramPlan, verify

KEYS = [
    "trace", "method", "status", "budget_bytes", "budget_ratio", "overhead", "peak_bytes", "bound", "computes", "frees",
    "fetches", "seconds",
]  # fmt: skip


@pytest.fixture
def skipping(tmp_path: Path) -> str:
    """Not a uniform chain."""
    return write(tmp_path / "skip.jsonl", training(skip=True))


def plans(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The objects that a successful call with --json prints."""
    assert main(["plan", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


def test_keys_of_a_plan(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One object a plan, with these keys in this order; on a uniform chain the optimum is proved."""
    (found,) = plans(capsys, trace, "--budget", "50%")
    assert list(found) == KEYS
    assert (found["trace"], found["method"], found["status"]) == ("small.jsonl", "own", "ok")
    assert (found["budget_bytes"], found["budget_ratio"]) == (455, 0.5)
    assert found["overhead"] == found["bound"] == found["computes"] / 16
    assert 0 < found["peak_bytes"] <= 455
    assert found["computes"] > 16


def test_a_tier(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where transfers take nothing to speak of, results are fetched, and that is said."""
    ((without,), (found,)) = (
        plans(capsys, trace, "--budget", "50%"),
        plans(capsys, trace, "--budget", "50%", "--tier", "1000GB/s"),
    )
    assert found["overhead"] < without["overhead"]
    assert found["fetches"] > without["fetches"] == 0
    assert main(["plan", trace, "--budget", "50%", "--tier", "1000GB/s"]) == 0
    assert f"own, 50%: {found['fetches']} fetches from a tier of 1000GB/s" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["12GB/s,overlap", "12GB/s,1GB"])
def test_a_tier_that_no_plan_can_hold_to(words: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused with the cure."""
    assert main(["plan", trace, "--budget", "50%", "--tier", words]) == 2
    assert "such as --tier 12GB/s" in capsys.readouterr().err


def test_several_budgets_and_methods(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for each method and budget, in the order given; commas and repetition are alike."""
    found = plans(capsys, trace, "--budget", "0.9,0.5", "--method", "own,revolve", "--method", "chen-greedy")
    assert [(plan["method"], plan["budget_ratio"]) for plan in found] == [
        (method, budget) for method in ("own", "revolve", "chen-greedy") for budget in (0.9, 0.5)
    ]
    assert found[0]["overhead"] == found[2]["overhead"]


def test_what_cannot_be_planned_is_a_row(skipping: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Infeasible is a status with its reason below the table; the other methods are shown all the same."""
    arguments = ["plan", skipping, "--budget", "0.9", "--method", "revolve,chen-greedy"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert "infeasible" in rows["revolve"]
    assert "revolve, 90%: revolve is for uniform training chains" in out
    assert main([*arguments, "--json"]) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(first) == KEYS
    assert (first["status"], first["overhead"], first["computes"]) == ("infeasible", None, None)
    assert second["status"] == "ok"


def test_nothing_but_failures_is_a_failure(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The status is 1 if no method has a plan, but the rows are printed."""
    assert main(["plan", trace, "--budget", "20%", "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["status"] == "infeasible"


def test_all_methods(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`all` stands for every method, and none beats a proved bound."""
    pytest.importorskip("scipy", reason="checkmate needs scipy")
    found = plans(capsys, trace, "--budget", "0.6", "--method", "all")
    assert [plan["method"] for plan in found] == list(METHODS)
    costs = [plan["overhead"] for plan in found if plan["overhead"] is not None]
    assert min(costs) == pytest.approx(max(plan["bound"] or 1.0 for plan in found))


def test_the_file_is_the_plan(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--output` writes the best plan; read again, it passes the verifier with the figures that were shown."""
    path = tmp_path / "plan.jsonl"
    assert main(["plan", trace, "--budget", "0.5", "--method", "chen-sqrt,own", "--output", str(path)]) == 0
    assert f"the plan of own, {len(path.read_text().splitlines()) - 1} steps, is in {path}" in capsys.readouterr().out
    plan = ProgramPlan.from_lines(path.read_text().splitlines())
    assert verify(read(trace), plan) == (plan.peak, plan.overhead)


def test_a_wrong_plan_is_not_shown(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a planner's plan does not pass the verifier, that is an error."""

    def wrong(*arguments: Any, **options: Any) -> ProgramPlan:
        return ProgramPlan("small.jsonl", "own", 455, (("compute", 3),), 0, 1.0)

    monkeypatch.setattr(points, "plan", wrong)
    assert main(["plan", trace, "--budget", "0.5"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recompute: error: the plan of own for small.jsonl is wrong: step 0, compute 3")


def test_out_of_time_is_a_status(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A solver that found nothing in time is told from one that proved that there is nothing."""

    def slow(*arguments: Any, **options: Any) -> ProgramPlan:
        raise PlanError("the solver found no schedule within 1 s; give it a longer time_limit")

    monkeypatch.setattr(points, "plan", slow)
    assert main(["plan", trace, "--budget", "0.5", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "timeout"


def test_without_the_solver(trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SciPy, checkmate is one line that says what is missing."""
    for name in ("scipy", "scipy.optimize", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["plan", trace, "--budget", "0.5", "--method", "checkmate"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("recompute: error: checkmate: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "much"], "much"),
        ([], "--budget"),
        (["--budget", "0.5", "--method", "magic"], "unknown method 'magic'"),
        (["--budget", "0.5", "--method", "none"], "no method"),
        (["--budget", "0.5", "--operations", "9"], "--operations is for the method checkmate"),
        (["--budget", "0.5", "--method", "chen-sqrt", "--tier", "1GB/s"], "--tier is for the method own"),
        (
            ["--budget", "0.5", "--method", "chen-greedy,revolve", "--time-limit", "9"],
            "--time-limit is for the methods own and checkmate: ask for one with --method own",
        ),
        (["--budget", "0.5", "--time-limit", "0"], "--time-limit must be"),
        (["--budget", "0.5", "--time-limit", "soon"], "--time-limit must be"),
        (["--budget", "0.5", "--operations", "few"], "--operations"),
        (["--budget", "0.5,0.4", "--output", "plan.jsonl"], "one budget"),
        (["--budget", "0.5", "--output", "nowhere/plan.jsonl"], "no directory"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names what is wrong, and status 2."""
    assert main(["plan", trace, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_malformed_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File and line, and a non-zero status."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"INSTRUCTION": "JUMP"}\n')
    assert main(["plan", str(path), "--budget", "0.5"]) == 1
    assert capsys.readouterr().err.startswith(f"recompute: error: {path}:1: ")


def test_traces_of_one_name_have_plans_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for another program is no candidate, though its file has the same name."""
    (tmp_path / "long").mkdir()
    traces = [
        write(tmp_path / "long" / "small.jsonl", training(30)),
        write(tmp_path / "small.jsonl", training(8)),
    ]
    (long,) = plans(capsys, traces[0], "--budget", "700")
    found = plans(capsys, *traces, "--budget", "500,700")
    assert (found[1]["overhead"], found[1]["computes"]) == (long["overhead"], long["computes"])


def test_more_memory_never_costs_more() -> None:
    """Of several budgets the plan for a smaller one is taken where it costs less; other methods are as they are."""

    def planned(budget: int, overhead: float | None, method: str = "own") -> Planned:
        made = None if overhead is None else ProgramPlan("p", method, budget, (), budget, overhead)
        return Planned("p", method, budget, budget / 10, 0.5, made)

    plans = [planned(4, 1.3), planned(2, 1.4), planned(3, 1.6), planned(5, None), planned(6, 1.9, "chen-sqrt")]
    found = monotone([*plans, planned(1, None)])
    assert [plan.overhead for plan in found] == [1.3, 1.4, 1.4, 1.3, 1.9, None]
    assert [plan.budget_bytes for plan in found] == [4, 2, 3, 5, 6, 1]
    assert "for 2 B" in found[2].reason
    assert found[3].plan is not None
    assert (found[3].status, found[3].plan.budget) == ("ok", 5)
