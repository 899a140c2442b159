"""On recorded training iterations the published policies give the published figures, and the default better ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from published_figures import BUDGETS, FIGURES, HERE, PEAKS, TRACES, program

from recompute.simulator import Run, simulate
from recompute.traces import read

_EVERY = {
    ("unroll_gan", "dtr"): 3,
    **{(trace, policy): 4 for trace in ("transformer", "treelstm") for policy in ("dtr", "msps")},
}
"""With exact neighbourhoods on the large traces only every third or fourth budget, to save a minute."""


@cache
def run(trace: str, policy: str, budget: float) -> Run:
    found, peak = program(trace)
    return simulate(found, of_peak=budget, policy=policy, peak=peak)


_CASES = [pytest.param(*case, marks=pytest.mark.slow) if case[1] in ("dtr", "msps") else case for case in FIGURES]
"""Those that walk through what is evicted take longest."""


@pytest.mark.parametrize(("trace", "policy"), _CASES)
def test_the_published_figures(trace: str, policy: str) -> None:
    """The overhead at every budget within 0.001, and the same budgets fail."""
    points = list(zip(BUDGETS, FIGURES[trace, policy], strict=False))
    for budget, expected in points[:: _EVERY.get((trace, policy), 1)]:
        found = run(trace, policy, budget)
        assert (expected is None) == (found.status != "ok"), f"at {budget}: {found.status}"
        assert expected is None or found.overhead == pytest.approx(expected, abs=0.001), f"at {budget}"


@pytest.mark.parametrize("trace", PEAKS)
def test_the_published_whole(trace: str) -> None:
    """What is taken for 100 % of memory is right to the byte."""
    assert program(trace)[1] == {"cpu": PEAKS[trace]}


@pytest.mark.slow
@pytest.mark.parametrize("trace", sorted({trace for trace, _ in FIGURES}))
def test_the_default_is_as_good_as_the_best_known_one(trace: str) -> None:
    """Never more than 0.0015 above dtr-eq, better where memory is short, and alive wherever a published policy is."""
    better = 0
    for position, budget in enumerate(BUDGETS):
        at = {policy: figures[position : position + 1] for (name, policy), figures in FIGURES.items() if name == trace}
        overhead, known = run(trace, "default", budget).overhead, next(iter(at["dtr-eq"]), None)
        if any(figure is not None for figures in at.values() for figure in figures):
            assert overhead is not None, f"fails at {budget}"
        if known is not None:
            assert overhead is not None
            assert overhead < known + 0.0015, f"at {budget}"
            better += overhead < known - 0.0015
        else:
            better += overhead is not None
    assert better >= 2


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the traces as they were published are not in {TRACES}")
@pytest.mark.parametrize("trace", [path.name.removesuffix(".jsonl.gz") for path in sorted(HERE.iterdir())])
def test_what_is_here_is_what_was_published(trace: str) -> None:
    """But for the names of values, the traces in the project are those that were published."""
    published = read(TRACES / f"{trace}.jsonl")
    assert replace(program(trace)[0], name=published.name) == published
