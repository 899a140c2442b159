"""What the DTR authors' own simulator gives on five recorded training iterations, to three digits; None: it fails.

Overheads at budgets of 0.9, 0.8, ... 0.1 of the peak, with eager release and an exact search. Two of the iterations are
here, in `data`: what Kirisame and others recorded for their paper (ICLR 2021), with the names of values numbered anew.
`unet` is the smallest; parameters, constants and a COPY_FROM come and go in `unroll_gan`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import pytest

from recompute.simulator import baseline
from recompute.traces import Program, read

HERE: Final = Path(__file__).parent / "data"
TRACES: Final = Path(__file__).parents[2].parent / "shared" / "traces"
"""Where all traces lie, if they are there: the large ones are no part of the project."""


def recorded(trace: str) -> Program:
    """A recorded iteration; skips the test if it is neither here nor beside the project."""
    for path in (HERE / f"{trace}.jsonl.gz", TRACES / f"{trace}.jsonl"):
        if path.exists():
            return read(path)
    pytest.skip(f"the trace {trace} is too large for the project, and not in {TRACES}")


@cache
def program(trace: str) -> tuple[Program, dict[str, int]]:
    """The same with its baseline, once."""
    found = recorded(trace)
    return found, baseline(found)


BUDGETS: Final = tuple(tenth / 10 for tenth in range(9, 0, -1))

_TABLE: Final = """
unet        dtr-eq    1.033 1.058 1.085 1.149 1.159 X     X     X     X
unet        dtr       1.033 1.058 1.085 1.131 1.159 X     X     X     X
unet        dtr-local 1.028 1.056 1.091 1.137 1.847 X     X     X     X
unet        msps      1.016 1.033 1.049 1.088 1.132 1.241 1.585 X     X
unet        lru       1.039 1.062 1.104 1.225 X     X     X     X     X
unet        size      1.043 1.128 1.158 1.592 1.659 X     X     X     X
resnet32    dtr-eq    1.013 1.025 1.046 1.074 1.107 1.140 1.179 1.332 X
resnet32    dtr       1.013 1.025 1.046 1.074 1.107 1.140 1.178 1.371 X
resnet32    dtr-local 1.013 1.041 1.067 1.133 1.197 X     X     X     X
resnet32    msps      1.013 1.024 1.037 1.063 1.106 1.146 1.209 1.431 X
resnet32    lru       1.032 1.067 1.095 1.130 X     X     X     X     X
resnet32    size      1.030 1.065 1.092 1.234 1.452 1.738 X     X     X
transformer dtr-eq    1.009 1.020 1.031 1.044 1.058 1.091 1.124 1.545 X
transformer dtr       1.009 1.020 1.031 1.044 1.058 1.083 1.123 1.352 X
transformer dtr-local 1.010 1.022 1.037 1.060 1.112 1.161 1.505 1.642 X
transformer msps      1.009 1.018 1.035 1.048 1.067 1.089 1.113 1.333 X
transformer lru       1.033 1.065 1.098 1.134 X     X     X     X     X
transformer size      1.016 1.028 1.046 1.053 1.066 1.080 1.135 X     X
treelstm    dtr-eq    1.008 1.013 1.033 1.072 1.127 1.190 X     X     X
treelstm    dtr       1.008 1.013 1.034 1.075 1.123 1.173 1.401 1.530 X
treelstm    dtr-local 1.001 1.036 1.078 1.124 X     X     X     X     X
treelstm    msps      1.003 1.027 1.079 1.164 1.237 1.352 X     X     X
treelstm    lru       1.038 1.076 1.115 1.154 X     X     X     X     X
unroll_gan  dtr-eq    1.011 1.024 1.044 1.058 1.069 1.080 1.111 X
unroll_gan  dtr       1.011 1.025 1.044 1.056 1.067 1.079 1.206 X
unroll_gan  dtr-local 1.011 1.039 1.059 X
unroll_gan  msps      1.006 1.021 1.028 X
unroll_gan  lru       1.084 1.131 1.174 X
"""

PEAKS: Final = {
    "unet": 8_415_764_640,
    "resnet32": 10_061_179_152,
    "transformer": 9_864_405_000,
    "treelstm": 170_173_608,
    "unroll_gan": 252_677_418,
}
"""Bytes: what that simulator takes for 100 %."""

FIGURES: Final[dict[tuple[str, str], list[float | None]]] = {
    (trace, policy): [None if figure == "X" else float(figure) for figure in figures]
    for trace, policy, *figures in (line.split() for line in _TABLE.strip().splitlines())
}
"""(trace, policy) -> an overhead for each of `BUDGETS`, or for the first of them."""
