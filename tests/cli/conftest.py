"""What the tests of commands start from: an empty current directory, and in some a small trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_traces import training, write


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in an empty current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path / "small.jsonl", training())
