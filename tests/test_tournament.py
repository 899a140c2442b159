"""Exact search is exact: the kinetic tournament against a scan, alone and inside a running cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, isclose
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute._engine.graph import Storage
from recompute._policy.formulas import POLICIES, Needed, policy_of
from recompute._policy.neighbourhoods import Component, evicted_neighbours
from recompute._policy.search import Candidates, Tournaments
from recompute._policy.tournament import Tournament
from recompute.testing import ManualClock
from recompute.testing._invariants import evicted_neighbourhood
from recompute.testing.programs import Program, run
from recompute.testing.strategies import programs

Lines = dict[int, tuple[float, float, float]]

numbers = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e6, allow_nan=False))
changes = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 15), numbers, numbers),
    st.tuples(st.just("clear"), st.integers(0, 15)),
    st.tuples(st.just("wait"), numbers),
)


def height(line: tuple[float, float, float], now: float) -> float:
    base, slope, origin = line
    return base + slope * (now - origin)


def check(tournament: Tournament, lines: Lines, now: float) -> None:
    winner = tournament.highest(now)
    if not lines:
        assert winner == -1
        return
    best = max(height(line, now) for line in lines.values())
    assert winner in lines
    assert isclose(height(lines[winner], now), best, rel_tol=1e-9, abs_tol=1e-12)


@settings(max_examples=settings().max_examples * 5)
@given(st.lists(changes, max_size=60))
def test_a_tournament_knows_the_highest_line(steps: list[Any]) -> None:
    """After any inserts, changes, removals and lapses of time the winner is as high as the best of a scan."""
    tournament, lines, now = Tournament(16), Lines(), 0.0
    for step in steps:
        match step:
            case "set", slot, base, slope:
                lines[slot] = (base, slope, now)
                tournament.set(slot, base, slope, now, now)
            case "clear", slot:
                if lines.pop(slot, None):
                    tournament.clear(slot, now)
            case "wait", seconds:
                now += seconds
        check(tournament, lines, now)


@given(st.lists(st.tuples(numbers, numbers), max_size=40), st.lists(numbers, max_size=10))
def test_a_tournament_built_at_once(rows: list[tuple[float, float]], waits: list[float]) -> None:
    """Lines entered together are played by `build`, and time does the rest."""
    tournament, lines, now = Tournament(len(rows) + 1), Lines(), 0.0
    for slot, (base, slope) in enumerate(rows):
        lines[slot] = (base, slope, 0.0)
        tournament.enter(slot, base, slope, 0.0)
    tournament.build(now)
    check(tournament, lines, now)
    for wait in waits:
        now += wait
        check(tournament, lines, now)


def test_of_equal_lines_the_later_wins() -> None:
    """Ties are broken by order, whatever the order of insertion: a policy is deterministic."""
    for slots in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        tournament = Tournament(5)
        for slot in slots:
            tournament.set(slot, 1.0, 1.0, 0.0, 0.0)
        won = []
        for _ in slots:
            won.append(tournament.highest(1.0))
            tournament.clear(won[-1], 1.0)
        assert won == [4, 3, 2, 1, 0]


def test_many_lines_over_a_long_time() -> None:
    """Two thousand lines with slopes over ten orders of magnitude, followed through a thousand moments."""
    draw = random.Random(7)
    tournament, lines, now = Tournament(2000), Lines(), 0.0
    for slot in range(2000):
        lines[slot] = (0.0, 10 ** draw.uniform(-5, 5), draw.uniform(0, 1))
        tournament.set(slot, *lines[slot], now)
    for _ in range(1000):
        now += 10 ** draw.uniform(-6, 1)
        slot = draw.randrange(2000)
        lines[slot] = (0.0, 10 ** draw.uniform(-5, 5), now)
        tournament.set(slot, *lines[slot], now)
        check(tournament, lines, now)


LINES = [name for name in POLICIES if policy_of(name).line(1.0, 1.0, 1) is not None and name not in ("none", "random")]


def spied(cache: rc.Cache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check every choice of the tournaments of `cache` against a scan by definition; counts the choices."""
    choose = Tournaments.choose
    choices = [0]

    monkeypatch.setattr("recompute._policy.needed._WALK", 10**6)  # no extrapolation: then every choice is exact

    def score(candidates: Candidates, storage: Storage, now: float) -> float:
        policy = candidates.policy.under(candidates.pressure)
        neighbours = 0.0
        if isinstance(policy, Needed):
            x, ancestors = policy.pressure, evicted_neighbourhood(storage, False)
            descendants = evicted_below(storage, needed)
            unneeded = [user for user in below(storage) if not user.resident and not needed(user)]
            costs = [sum(member.cost for member in group) for group in (ancestors, descendants, unneeded)]
            neighbours = (1 - x / 2) * (costs[0] + costs[1]) + (1 - x) * costs[2]
            if not needed(storage):
                return min(policy.score(storage.cost, neighbours, storage.size, now - storage.last_access), 1e9) / 1e99
        elif policy.neighbourhood == "components":
            roots = {near.nearby.root() for near in evicted_neighbours(storage) if isinstance(near.nearby, Component)}
            neighbours = sum(root.cost for root in roots)
        elif policy.neighbourhood != "none":
            around = evicted_neighbourhood(storage, policy.neighbourhood == "exact")
            neighbours = sum(neighbour.cost for neighbour in around)
        return policy.score(storage.cost, neighbours, storage.size, now - storage.last_access)

    def below(storage: Storage) -> set[Storage]:
        return set(storage.neighbours_down())

    def needed(storage: Storage) -> bool:
        """Whether somebody outside refers to it, or to what is made from it through evicted storages."""
        return any(user.needed_outside for user in {storage} | evicted_below(storage, lambda _: True))

    def evicted_below(storage: Storage, through: Callable[[Storage], bool]) -> set[Storage]:
        """What is made from it through evicted storages that fulfil a condition, as these do."""
        found: set[Storage] = set()
        stack = [storage]
        while stack:
            for user in below(stack.pop()) - found - {storage}:
                if not user.resident and through(user):
                    found.add(user)
                    stack.append(user)
        return found

    def choose_and_check(self: Tournaments, now: float) -> list[Storage]:
        chosen = choose(self, now)
        scores = {storage: score(self, storage, now) for storage in self if not storage.locks}
        assert len(chosen) == min(1, len(scores))
        for victim in chosen:
            choices[0] += 1
            best = min(scores.values())
            assert scores[victim] == best or (best < inf and isclose(scores[victim], best, rel_tol=1e-9)), (
                f"chose {victim.number} of score {scores[victim]}, but {best} is the least of {len(scores)}"
            )
        return chosen

    monkeypatch.setattr(Tournaments, "choose", choose_and_check)
    return choices


@pytest.mark.parametrize("policy", LINES)
def test_exact_search_chooses_the_least_score(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision by decision, over programs under pressure, the victim's score is the minimum of a plain scan."""
    cache = rc.Cache(1)
    choices = spied(cache, monkeypatch)

    @settings(max_examples=max(200, settings().max_examples * 2))  # with fewer, chance decides whether it chooses
    @given(programs(most=40, devices=("cpu",), faults=False), st.integers(30, 110))
    def over(program: Program, budget: int) -> None:
        found = run(program, rc, rc.Cache(budget, policy=policy, clock=ManualClock()))
        assert not [seen for seen in found if seen[:2] == ("error", "AssertionError")], found

    over()
    assert choices[0] > max(10, settings().max_examples // 10)


@pytest.mark.parametrize("policy", LINES)
def test_exact_search_over_a_long_run(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand random operations, of random costs and sizes, in a tight budget: every choice is the minimum."""
    clock = ManualClock()
    cache = rc.Cache(200, policy=policy, clock=clock)
    choices = spied(cache, monkeypatch)
    draw = random.Random(policy)

    def work(seconds: float, *arguments: Any) -> bytes:
        clock.advance(seconds)
        return b""

    with cache:
        alive = [rc.ap(work, 1.0, nbytes=1)]
        for _ in range(1000):
            arguments = draw.sample(alive, min(len(alive), draw.randrange(3)))
            seconds, size = draw.choice((0.1, 1.0, 3.0, 50.0)), draw.randrange(1, 12)
            alive.append(rc.ap(work, seconds, *arguments, nbytes=size))
            for value in draw.sample(alive, min(len(alive), 2)):
                value.get()
            if len(alive) > 60:
                del alive[draw.randrange(len(alive))]
    assert choices[0] > 300
