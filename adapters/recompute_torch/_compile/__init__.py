"""torch.compile with a budget: a joint graph as a program, priced, planned, and emitted again in the planned order.

program      reads the joint graph
costs        what operators and steps take: measured, watched or estimated
emit         writes a graph in the planned order
report       what was planned and what came of it; what is said where no plan fits
partition    asks the core's planner, has torch split what was emitted, and compiles that operator by operator
kernels      a graph as inductor runs it: what it fuses
peak         what memory its kernels take, before they are compiled
inductor     torch's own split or a plan, compiled as kernels
backend      what torch calls, and plans without a run
knapsack     the plan for torch's own partitioner

The joint graphs and partitioners of torch are not a public interface: which versions this is made for is checked first.
"""

from __future__ import annotations

from typing import Final

import torch

OLDEST: Final = "2.13"
"""The first version of torch that the tests pass with."""
NEWEST: Final = "2.15"
"""The last one that they were run with."""


def check_version(version: str) -> None:
    """Raises ImportError, with the cure, for a version that was not tried."""
    if not _numbers(OLDEST) <= _numbers(version) <= _numbers(NEWEST):
        raise ImportError(
            f"compiling with a budget works with torch {OLDEST} to {NEWEST}, and {version} is installed: it uses the "
            "graphs of torch.compile, which change with every version; pip install "
            f"'torch>={OLDEST},<={NEWEST}.*', a newer recompute-cache, or train in a block `with rt.budget(...)`, "
            "which works with any torch"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple([int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()])


check_version(torch.__version__)
