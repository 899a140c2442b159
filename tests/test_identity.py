"""THE property: under any budget, policy, search, release mode and fault a program gives what the identity gives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import recompute as rc
from lib.programs import Apply, Budget, Interpreter, Observation, Program, Source, difference, run
from lib.strategies import POLICIES, RELEASES, SEARCHES, programs, settings_of_caches
from recompute._engine.graph import Value
from recompute.testing import Identity, ManualClock, check_invariants

Settings = dict[str, Any]


def check(cache: rc.Cache) -> Any:
    def each_step(interpreter: Interpreter) -> None:
        check_invariants(cache, interpreter.roots)

    return each_step


def agree(program: Program, budget: Any, options: Settings) -> list[Observation]:
    """Run a program under a cache: it must agree with the identity, and leave nothing behind."""
    cache = rc.Cache(budget, clock=ManualClock(), **options)
    found = run(program, rc, cache, check=check(cache))
    wrong = difference(run(program, Identity), found)
    assert wrong is None, wrong
    if cache.release == "ignore":  # what nobody refers to stays until its room is needed
        if cache.policy.name == "none":
            return found
        while cache.release_memory():
            pass  # functions held handles, too
    check_invariants(cache)
    stats = cache.stats()
    assert stats.used == 0, f"{stats.used} bytes are left"
    assert all(not pool.candidates for pool in stats.pools)
    return found


def short(found: list[Observation]) -> bool:
    return any(seen[0] == "short" or (seen[0] == "together" and ("short",) in seen) for seen in found)


def peaks(program: Program, options: Settings) -> dict[str, int]:
    """Device -> the most bytes that a program uses without a budget."""
    cache = rc.Cache(clock=ManualClock(), **options)
    run(program, rc, cache)
    return {pool.device: max(1, pool.peak) for pool in cache.stats().pools}


@given(programs(), settings_of_caches())
def test_without_a_budget_nothing_runs_short(program: Program, options: Settings) -> None:
    """An unlimited cache gives what the identity gives, and never raises BudgetError."""
    assert not short(agree(program, None, options))


@settings(max_examples=settings().max_examples * 10)
@given(programs(), settings_of_caches(), st.integers(30, 600))
def test_any_budget(program: Program, options: Settings, budget: int) -> None:
    """Under any budget each observation is the identity's, a BudgetError or the fault that was asked for."""
    agree(program, budget, options)


@example(
    Program([Apply(function="add", arguments=(), fault=1, nbytes=8)]),
    {"policy": "needed", "search": "exact", "release": "eager", "verify": False},
)
@example(
    Program([Apply("itself", (), "nested"), Apply("itself", (0,), "nested")]),
    {"policy": "needed", "search": "exact", "release": "eager", "verify": False},
)
@example(
    Program([Source((0,)), Apply("add", (), "applied", peeks=(0,)), Apply("add", (), "applied")]),
    {"policy": "needed", "search": "exact", "release": "banish", "verify": False},
)
@example(
    Program([Apply("twins", (), "applied", nbytes=40)]),
    {"policy": "dtr", "search": "batch", "release": "ignore", "verify": True},
)
@given(programs(fickle=False), settings_of_caches())
def test_down_to_the_feasible_minimum(program: Program, options: Settings) -> None:
    """From the peak of an unlimited run down to the smallest budget that works, and below it, results are equal."""
    feasible = max(peaks(program, options).values(), default=1)
    shrinks = any(isinstance(step, Budget) for step in program)
    assert shrinks or not short(agree(program, feasible, options))
    infeasible = 0
    while feasible - infeasible > 1:
        middle = (feasible + infeasible) // 2
        if short(agree(program, middle, options)):
            infeasible = middle
        else:
            feasible = middle


@given(programs(), settings_of_caches(), st.integers(20, 300), st.integers(20, 300))
def test_a_budget_for_each_device(program: Program, options: Settings, cpu: int, gpu: int) -> None:
    """Two pools with budgets of their own are evicted each for itself."""
    agree(program, {"cpu": cpu, "gpu:0": gpu}, options)


@settings(max_examples=settings().max_examples // 2)
@given(programs(threads=True), settings_of_caches(), st.integers(30, 600))
def test_with_threads(program: Program, options: Settings, budget: int) -> None:
    """Values got by several threads at once are those got one after another."""
    agree(program, budget, options)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=max(5, settings().max_examples // 5))
@given(program=programs(), share=st.integers(20, 100))
def test_every_choice_of_policy_search_and_release(
    policy: str, search: str, release: str, program: Program, share: int
) -> None:
    """The whole table of choices, each with programs under a share of what they would use."""
    options = {"policy": policy, "search": search, "release": release}
    budget = {device: max(1, peak * share // 100) for device, peak in peaks(program, options).items()}
    agree(program, budget, options)


def test_nothing_outlives_its_program() -> None:
    """When handles and caches have gone, no part of any graph is left."""
    before = parts()

    @given(programs(), settings_of_caches(), st.integers(1, 300))
    def over(program: Program, options: Settings, budget: int) -> None:
        run(program, rc, rc.Cache(budget, clock=ManualClock(), **options))

    over()
    assert parts() <= before


def parts() -> int:
    gc.collect()
    return sum(type(tracked) is Value for tracked in gc.get_objects())
