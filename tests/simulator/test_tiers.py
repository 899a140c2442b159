"""Replays with a tier: virtual transfers cost what their words say, and help where computing again is dearer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import random_traces
from hypothesis import assume, given
from hypothesis import strategies as st

from recompute._simulator.tier import SimulatedTier
from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.simulator import Replay, Run, baseline, iterate, simulate

programs = st.builds(
    lambda program: replace(program, published=False), random_traces.programs(most=15, drop_sources=True)
)
shares = st.sampled_from([0.9, 0.7, 0.5, 0.4, 0.3])
LIMIT = 50.0


def run(program: Program, share: float, tier: str | None, policy: str = "default") -> Run:
    assume(sum(share * size for size in baseline(program).values()) >= 1)
    return simulate(program, of_peak=share, tier=tier, policy=policy, limit=LIMIT)


@given(programs, shares, st.sampled_from(["10B/s", "1kB/s", "1GB/s,1ms", "1GB/s,always"]))
def test_transfers_that_block_are_overhead(program: Program, share: float, tier: str) -> None:
    """All time is compute, repeated compute, or what the bytes that moved take over the link."""
    found = run(program, share, tier)
    if found.status == "ok":
        words = SimulatedTier.read(tier)
        moved = (found.moved_bytes + found.fetched_bytes) / words.bandwidth
        assert found.waited_time >= moved * (1 - 1e-9)
        assert found.waited_time == pytest.approx(moved) or words.latency
        assert found.total_time >= found.model_time + found.waited_time - 1e-9 * found.total_time


@given(programs, shares)
def test_a_link_of_no_use(program: Program, share: float) -> None:
    """What fits without a tier costs the same beside one that is too slow to be used."""
    alone, beside = run(program, share, None), run(program, share, "1B/s,100000000s")
    if alone.status == "ok" and beside.status == "ok" and not beside.moved_bytes:
        assert beside.overhead == alone.overhead


@given(programs, shares, st.sampled_from(["default", "lru", "dtr-eq", "msps", "dtr"]))
def test_what_fits_fits_with_a_tier(program: Program, share: float, policy: str) -> None:
    """Where computing again comes to its end, so does a run that may move as well; and moving needs no compute."""
    alone = run(program, share, None, policy)
    moving = run(program, share, "1TB/s,always", policy)
    if alone.status == "ok":
        assert moving.status == "ok"


@given(programs, shares)
def test_transfers_that_overlap(program: Program, share: float) -> None:
    """They take no longer than those that stop the compute, and at least as long as the link is busy."""
    found = run(program, share, "1kB/s,overlap,always")
    if found.status == "ok":
        busy = (found.moved_bytes + found.fetched_bytes) / 1e3
        assert found.total_time >= busy * (1 - 1e-9)
        assert found.total_time <= found.model_time * found.total_time + found.total_time  # it has an end


def test_a_chain_moves_instead_of_being_computed_again() -> None:
    """Dear operations of small results: with a fast link nearly nothing is computed twice, within the same budget."""
    program = chain(64)
    alone, both = simulate(program, 12, limit=LIMIT), simulate(program, 12, limit=LIMIT, tier="1GB/s")
    assert alone.overhead is not None and both.overhead is not None  # noqa: PT018  # both at once
    assert alone.overhead > 1.4
    assert both.overhead < 1.01
    assert both.moved_bytes > 0
    assert both.peak_bytes <= 12


def test_the_least_budget_is_smaller() -> None:
    """Sources move, too: a program fits where its sources alone do not."""
    program = Program("sources")
    sources = [program.add_source(10) for _ in range(20)]
    for source in sources:
        program.add_call("use", [source], [program.add_storage(10)], 1.0)
    assert simulate(program, 60).status == "oom"
    assert simulate(program, 60, tier="1GB/s").status == "ok"


def test_rounds_with_a_tier() -> None:
    """Foresight and tiers go together: later rounds of a program are no dearer than the first."""
    program = chain(48)
    runs = list(iterate(program, 10, iterations=4, effort=0.01, limit=LIMIT, tier="1B/s"))
    overheads = [run.overhead for run in runs]
    assert None not in overheads
    assert overheads[-1] <= 1.05 * overheads[0]  # type: ignore[operator]  # none is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "is not a size"),
        ("50GB", "needs a bandwidth"),
        ("12GB/s,quickly", "is not a size"),
        ("0GB/s", "at least one byte"),
        ("12GB/s,overlap,5 parsecs", "is not a size"),
        ("12GB/s,1ms,2ms", "says it twice"),
        ("12GB/s,3GB/s", "says it twice"),
    ],
)
def test_words_that_are_no_tier(words: str, message: str) -> None:
    """One error, which says what is wrong with which word."""
    with pytest.raises(ValueError, match=message):
        SimulatedTier.read(words)


def test_words() -> None:
    """Bandwidth, latency, limit and two switches, in any order."""
    assert SimulatedTier.read("overlap, 1ms,12GB/s") == SimulatedTier(bandwidth=12e9, latency=1e-3, overlap=True)
    assert SimulatedTier.read("always,50GB,5e5B/s") == SimulatedTier(limit=50 * 10**9, bandwidth=5e5, always=True)


def test_a_replay_is_free_of_its_tier() -> None:
    """What was moved goes with the replay: nothing is kept by the tier itself."""
    replay = Replay(chain(16), {"cpu": 4}, policy="default", limit=LIMIT, tier=SimulatedTier())
    assert replay.run() == "ok"
    (tier,) = replay.cache.stats().tiers
    assert tier.used > 0
    replay._start(replay.program)
    assert replay.cache.stats().tiers[0].used == 0
