"""With tiers, too, a program gives what the identity gives, and leaves nothing behind, in memory or below it."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from given_tiers import GivenTier
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import recompute as rc
from lib.programs import (
    Apply,
    Detach,
    Drop,
    Get,
    Hold,
    Injected,
    Interpreter,
    Observation,
    Program,
    ReleaseMemory,
    Source,
    difference,
    run,
)
from lib.strategies import DEVICES, POLICIES, RELEASES, SEARCHES, programs, settings_of_caches
from recompute.extend import Tier
from recompute.testing import Identity, ManualClock, check_invariants

pytestmark = pytest.mark.filterwarnings("ignore:a value could not be:RuntimeWarning")  # not all can be pickled

Tiers = dict[str, list[Tier]]


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where disks have their folders; what was there before need not be collected again and again."""
    place = tmp_path_factory.mktemp("tiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(place))
        patch.setattr(tempfile, "tempdir", None)
        gc.collect()
        gc.freeze()
        yield place
        gc.unfreeze()


@dataclass(frozen=True)
class FailsAt:
    """The n-th transfers that fail."""

    numbers: tuple[int, ...]
    error: type[Exception]

    def __call__(self, number: int) -> Exception | None:
        return self.error(f"transfer {number}") if number in self.numbers else None


def one_tier() -> SearchStrategy[Tier]:
    """Tiers of all kinds: most are soon full."""
    limit = st.one_of(st.none(), st.integers(1, 400))
    always = st.booleans()
    numbers = st.lists(st.integers(1, 12), max_size=3).map(tuple)
    return st.one_of(
        st.builds(rc.Disk, limit, always, ahead=st.booleans()),
        st.builds(rc.Host, limit, always, ahead=st.booleans()),
        st.builds(
            GivenTier,
            limit,
            always,
            latency=st.sampled_from((0.0, 0.1, 1.0, 3.0)),
            bandwidth=st.sampled_from((1e9, 100.0, 20.0)),
            fail_write=st.builds(FailsAt, numbers, st.sampled_from((OSError, Injected))),
            fail_read=st.builds(FailsAt, numbers, st.just(Injected)),
        ),
    )


def tiers() -> SearchStrategy[Tiers]:
    """For each device none, one or several."""
    return st.fixed_dictionaries({device: st.lists(one_tier(), max_size=2) for device in DEVICES})


def cache_with(tiers: Tiers, budget: Any, options: dict[str, Any]) -> rc.Cache:
    """All clocks are one."""
    clock = ManualClock()
    given = {
        device: [replace(tier, clock=clock) if isinstance(tier, GivenTier) else tier for tier in below]
        for device, below in tiers.items()
    }
    return rc.Cache(budget, clock=clock, tiers=given, **options)


def agree(program: Program, budget: Any, options: dict[str, Any], tiers: Tiers) -> list[Observation]:
    """Run a program under a cache with tiers: it must agree with the identity, and leave nothing behind."""
    cache = cache_with(tiers, budget, options)

    def check(interpreter: Interpreter) -> None:
        check_invariants(cache, interpreter.roots)
        for pool in cache.stats().pools if isinstance(cache.budget, int) else ():
            assert pool.peak <= 2 * budget + pool.overshoot  # no step gives more than twice the budget

    found = run(program, rc, cache, check=check)
    wrong = difference(run(program, Identity), found)
    assert wrong is None, wrong
    if cache.release == "ignore":  # what nobody refers to stays until its room is needed
        if cache.policy.name == "none":
            return found
        while cache.release_memory():
            pass  # functions held handles, too
    check_invariants(cache)  # waits for what is on its way out
    stats = cache.stats()
    assert stats.used == 0, f"{stats.used} bytes are left"
    assert not cache._engine.memory.storages
    assert [tier.used for tier in stats.tiers] == [0] * len(stats.tiers)
    for _, store in cache._engine.memory.tiers.all() if cache._engine.memory.tiers else ():
        assert left_in(store) == []
    return found


@pytest.mark.parametrize("tier", [rc.Disk, rc.Host])
def test_what_shared_the_memory_of_a_copy_that_goes_is_dropped(tier: type[Tier]) -> None:
    """A tier has a copy of one value, which nothing needs any more: another one on its memory has its recipe alone."""
    steps = [
        *(Source((0, 0, 0, 0, 0)), Source(()), Source(()), Apply("add", (0,)), Hold(-1), Apply("restless", (0,))),
        *(Source((0,)), Apply("add", (-2,)), Get(0), Drop(4)),
    ]
    options = {"policy": "dtr", "release": "ignore", "search": "ignore small"}
    agree(Program(steps), 120, options, {"cpu": [tier()], "gpu:0": []})


def left_in(store: Any) -> Sequence[Any]:
    """The copies that a store has."""
    if hasattr(store, "_folder"):
        return [name for name in os.listdir(store._folder.path) if name != "lock"]
    return list(getattr(store, "kept", ()))


@settings(max_examples=settings().max_examples * 5)
@given(programs(), settings_of_caches(), st.integers(30, 600), tiers())
def test_any_budget_and_any_tiers(program: Program, options: dict[str, Any], budget: int, tiers: Tiers) -> None:
    """Under any budget, and with any tiers below it, each observation is the identity's, a BudgetError or a fault."""
    agree(program, budget, options, tiers)


@given(programs(), settings_of_caches(), st.integers(20, 300), st.integers(20, 300), tiers())
def test_a_budget_for_each_device(program: Program, options: dict[str, Any], cpu: int, gpu: int, tiers: Tiers) -> None:
    """Two pools with budgets and tiers of their own are evicted each for itself."""
    agree(program, {"cpu": cpu, "gpu:0": gpu}, options, tiers)


@settings(max_examples=settings().max_examples // 2)
@given(programs(threads=True), settings_of_caches(), st.integers(30, 600), tiers())
def test_with_threads(program: Program, options: dict[str, Any], budget: int, tiers: Tiers) -> None:
    """Values got by several threads at once are those got one after another."""
    agree(program, budget, options, tiers)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=max(2, settings().max_examples // 10))
@given(program=programs(), budget=st.integers(30, 300), tiers=tiers())
def test_every_choice_of_policy_search_and_release(
    policy: str, search: str, release: str, program: Program, budget: int, tiers: Tiers
) -> None:
    """The whole table of choices, each with tiers of all kinds."""
    agree(program, budget, {"policy": policy, "search": search, "release": release}, tiers)


def test_a_source_keeps_its_copy_while_only_a_view_of_it_is_in_memory() -> None:
    """The view was held outside, came back from there, and was detached; then another source needs room in the tier."""
    program = Program(
        [
            Source((3, 1, 4, 1)),
            Source((9,)),
            Apply("windows", (-3, -3, 5), inside="evict"),
            Apply("scale", (-1, 1, 3), fault=3, inside="apply", nbytes=40),
            Source((4, 3, 1, 6, 7), "gpu:0"),
            Hold(-3),
            Apply("head", (0, 5, 0), inside="evict", nbytes=8, cost=0),
            Apply("restless", (5, 6), how="applied", inside="apply", nbytes=40, cost=10),
            Detach(3),
            ReleaseMemory(59),
        ]
    )
    tier = GivenTier(59, latency=0.0, bandwidth=100.0, fail_write=FailsAt((3,), Injected))
    agree(program, 130, {"policy": "dtr", "release": "banish"}, {"cpu": [tier], "gpu:0": []})


def test_a_source_that_comes_back_while_a_view_of_it_is_a_source() -> None:
    """It has memory of its own then, which counts as that of a source."""
    program = Program(
        [
            Source(()),
            Source((0,)),
            Source(()),
            Apply("tail", (1,)),
            Source((0, 0, 0, 0, 0)),
            Hold(-2),
            Apply("add", (-1,)),
            Detach(3),
        ]
    )
    agree(program, 40, {"policy": "dtr", "release": "banish"}, {"cpu": [rc.Disk()], "gpu:0": []})


def test_no_folder_outlives_its_cache(folder: Path) -> None:
    """When caches have gone, so have the folders of their disks."""
    gc.unfreeze()  # what tests before this one have made, too
    gc.collect()
    assert os.listdir(folder) == []
