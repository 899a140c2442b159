"""Which versions of torch this part is made for: its joint graphs and partitioners are not a public interface."""

from __future__ import annotations

from typing import Final

import torch

OLDEST: Final = "2.13"
"""The first version that the tests pass with."""
NEWEST: Final = "2.13"
"""The last one that they were run with."""


def check(version: str) -> None:
    """Raises ImportError, with the cure, for a version that nobody has tried."""
    if not _numbers(OLDEST) <= _numbers(version) <= _numbers(NEWEST):
        between = OLDEST if OLDEST == NEWEST else f"{OLDEST} to {NEWEST}"
        raise ImportError(
            f"compiling with a budget works with torch {between}, and {version} is installed: it uses the graphs of "
            f"torch.compile, which change with every version; pip install 'torch>={OLDEST},<={NEWEST}.*', a newer "
            "recompute-cache, or train in a block `with rt.budget(...)`, which works with any torch"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple([int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()])


check(torch.__version__)
