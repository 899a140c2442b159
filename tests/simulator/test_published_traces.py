"""On recorded training iterations the published policies give the published figures, and the default better ones."""

from __future__ import annotations

from functools import cache

import pytest
from published_figures import BUDGETS, FIGURES, TRACES

from recompute.simulator import Run, baseline, simulate
from recompute.traces import Program, read

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"the published traces are not part of the project, and not in {TRACES}"
)

_SLOW = {("transformer", "dtr"), ("transformer", "msps"), ("treelstm", "dtr"), ("treelstm", "msps")}
"""With exact neighbourhoods on the large traces only some budgets, to save a minute."""


@cache
def program(trace: str) -> tuple[Program, dict[str, int]]:
    found = read(TRACES / f"{trace}.jsonl")
    return found, baseline(found)


@cache
def run(trace: str, policy: str, budget: float) -> Run:
    found, peak = program(trace)
    return simulate(found, budget, policy=policy, peak=peak)


@pytest.mark.parametrize(("trace", "policy"), FIGURES)
def test_the_published_figures(trace: str, policy: str) -> None:
    """The overhead at every budget within 0.001, and the same budgets fail."""
    for budget, expected in list(zip(BUDGETS, FIGURES[trace, policy], strict=True))[
        :: 4 if (trace, policy) in _SLOW else 1
    ]:
        found = run(trace, policy, budget)
        assert (expected is None) == (found.status != "ok"), f"at {budget}: {found.status}"
        assert expected is None or found.overhead == pytest.approx(expected, abs=0.001), f"at {budget}"


@pytest.mark.parametrize("trace", sorted({trace for trace, _ in FIGURES}))
def test_the_default_is_as_good_as_the_best_known_one(trace: str) -> None:
    """Never more than 0.0015 above dtr-eq, better where memory is short, and alive wherever a published policy is."""
    better = 0
    for position, budget in enumerate(BUDGETS):
        published = {policy: figures[position] for (name, policy), figures in FIGURES.items() if name == trace}
        overhead, known = run(trace, "default", budget).overhead, published["dtr-eq"]
        if any(each is not None for each in published.values()):
            assert overhead is not None, f"fails at {budget}"
        if known is not None:
            assert overhead is not None
            assert overhead < known + 0.0015, f"at {budget}"
            better += overhead < known - 0.0015
        else:
            better += overhead is not None
    assert better >= 2
