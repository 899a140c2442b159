"""What `recompute story` and `recompute export` do within so few bytes that a replay could go on for days."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_traces import training, write

from recompute._cli import main


def test_a_replay_that_takes_too_long_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The story ends there, with a warning, and no export is made."""
    path = write(tmp_path / "run.jsonl", training(300))
    assert main(["story", path, "--budget", "350"]) == 0
    told, warning = capsys.readouterr()
    assert "forward: " in told
    assert "the run ends early within this budget (thrash)" in warning
    assert main(["export", path, "--to", "csv", "--budget", "350"]) == 1
    assert "run.jsonl does not run in 350 bytes: more than 20 times the compute" in capsys.readouterr().err
