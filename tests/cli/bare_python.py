"""A Python where nothing is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import recompute


def bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `recompute` in a Python that sees this folder and the standard library only."""
    (folder / "recompute").symlink_to(Path(recompute.__file__).parent, target_is_directory=True)
    return subprocess.run(
        [sys.executable, "-S", "-m", "recompute", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder,
        timeout=60,
        check=False,
    )
