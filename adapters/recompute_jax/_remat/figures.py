"""What a plan comes to: the figures that its report and its file have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of the plan of a function for one signature of its arguments."""

    name: str
    budget: int
    """Bytes of compiled temporaries that are allowed."""
    share: float | None
    """The budget as a share of `baseline`, if it was given so."""
    baseline: int | None
    """Bytes of temporaries of the plain function under jit; None: there was no need to compile it."""
    predicted: int
    """Bytes of temporaries by the planner's count."""
    compiled: int
    """Bytes of temporaries by XLA's count (`memory_analysis().temp_size_in_bytes`)."""
    flops: float
    """Of the function, by its equations."""
    extra_flops: float = 0.0
    overhead: float = 1.0
    """The cost of all runs divided by that of the function as it is."""
    loops: tuple[str, ...] = ()
    """What becomes of scans."""
