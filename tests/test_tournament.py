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
from lib.programs import Program, run
from lib.strategies import programs
from recompute._engine.graph import EVICTED, Operation, Storage
from recompute._engine.needed import Needs
from recompute._engine.neighbours import Component, evicted_neighbours
from recompute._policy.formulas import POLICIES, Needed, policy_of
from recompute._policy.search import _SHARE, _TRIES, Tournaments
from recompute._policy.tournament import Tournament
from recompute.testing import ManualClock
from recompute.testing._invariants import evicted_neighbourhood

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
    tournament.build(len(rows), now)
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


class Checked(Tournaments):
    """Checks every choice against a scan by definition; counts the choices."""

    choices = 0
    passed = 0
    before = -1.0  # when it chose before

    def choose(self, now: float) -> list[Storage]:
        chosen: list[Storage] = super().choose(now)
        scores = {storage: self.score(storage, now) for storage in self if not storage.locks}
        assert len(chosen) == min(1, len(scores))
        for victim in chosen:
            Checked.choices += 1
            score = scores[victim]
            better = [one for one in scores if scores[one] < score and not isclose(scores[one], score, rel_tol=1e-9)]
            if not self.policy.bounds_need:
                assert not better, f"chose {victim.number} of score {score}, but {better} have less"
            else:
                self.check_needs(victim, better, scores, now)
        self.before = now
        return chosen

    def check_needs(self, victim: Storage, better: list[Storage], scores: dict[Storage, float], now: float) -> None:
        """Those of less score would lock too much to come back; of the first eight that do, the least need goes."""
        most = _SHARE * self.around.room(self.pool)
        for other in better:
            Checked.passed += 1
            assert needed(other)
            assert need(other) > most, f"chose {victim.number}, though {other.number} has less score and comes back"
        assert len(better) < _TRIES or now == self.before
        if not needed(victim) or need(victim) <= most or now == self.before:
            return  # later at the same time so many may have been passed over that the score alone decides
        eighth = sorted(scores.values())[:_TRIES][-1]
        assert scores[victim] <= eighth or isclose(scores[victim], eighth, rel_tol=1e-9)
        first = [one for one in scores if scores[one] < eighth and not isclose(scores[one], eighth, rel_tol=1e-9)]
        assert all(needed(one) and need(one) > most for one in first)
        assert need(victim) <= min([need(one) for one in first], default=inf)

    def score(self, storage: Storage, now: float) -> float:
        policy = self.policy.under(self.pressure)
        neighbours = 0.0
        if isinstance(policy, Needed):
            x, ancestors = policy.pressure, evicted_neighbourhood(storage, descendants=False)
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
            around = evicted_neighbourhood(storage, descendants=policy.neighbourhood == "exact")
            neighbours = sum(neighbour.cost for neighbour in around)
        return policy.score(storage.cost, neighbours, storage.size, now - storage.last_access)


def need(storage: Storage) -> int:
    """The most bytes locked at once while it, or a needed evicted storage made from it, comes back: by definition."""
    known: dict[Operation, int] = {}

    def of(operation: Operation) -> int:
        if operation not in known:
            there: set[Storage] = set()
            missing: dict[Storage, int] = {}
            for argument in operation.arguments:
                home = argument.storage
                if argument.operation is None:
                    continue
                if argument.payload is EVICTED or home is storage:
                    missing[home] = max(missing.get(home, 0), of(argument.operation) - home.size)
                else:
                    there.add(home)
            kept = sum(home.size for home in there)
            most = 0
            for home, beyond in sorted(missing.items(), key=lambda item: -item[1]):
                kept += home.size
                most = max(most, kept + beyond)
            arguments = {argument.storage for argument in operation.arguments}
            made = {output.storage for output in operation.outputs if output is not None} - arguments
            known[operation] = max(most, kept + sum(home.size for home in made))
        return known[operation]

    homes = {storage} | evicted_below(storage, needed)
    return max([of(value.operation) for home in homes for value in home.values if value.operation], default=0)


def below(storage: Storage) -> set[Storage]:
    outputs = [output for value in storage.values for user in value.each_user() for output in user.outputs]
    return {output.storage for output in outputs if output is not None} - {storage}


def needed(storage: Storage) -> bool:
    """Whether somebody outside refers to it, or to what is made from it through evicted storages."""
    return any(user.needed_outside() for user in {storage} | evicted_below(storage, lambda _: True))


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


def checked(budget: int, policy: str, clock: ManualClock) -> rc.Cache:
    """A cache of which every choice is checked."""
    cache = rc.Cache(budget, policy=policy, clock=clock)
    neighbourhood = cache._engine.memory.neighbourhood
    if isinstance(neighbourhood, Needs):
        neighbourhood.reach = 10**6  # no extrapolation: then every choice is exact
    pool = cache._engine.memory.pool("cpu")
    pool.candidates = Checked(cache.policy, neighbourhood)
    pool.candidates.pool = pool
    return cache


@pytest.mark.parametrize("policy", LINES)
def test_exact_search_chooses_the_least_score(policy: str) -> None:
    """Decision by decision, over programs under pressure: the least score of those that may go, by a plain scan.

    The default policy passes over what would lock too much while it comes back.
    """
    before = Checked.choices

    @settings(max_examples=max(200, settings().max_examples * 2))  # with fewer, chance decides whether it chooses
    @given(programs(most=40, devices=("cpu",), faults=False), st.integers(30, 110))
    def over(program: Program, budget: int) -> None:
        found = run(program, rc, checked(budget, policy, ManualClock()))
        assert not [seen for seen in found if seen[:2] == ("error", "AssertionError")], found

    over()
    assert Checked.choices - before > max(10, settings().max_examples // 10)


@pytest.mark.filterwarnings("ignore::recompute.ThrashWarning")  # it thrashes, so that there are many choices
@pytest.mark.parametrize("policy", LINES)
def test_exact_search_over_a_long_run(policy: str) -> None:
    """A thousand random operations, of random costs and sizes, in a tight budget: every choice is by definition."""
    clock = ManualClock()
    cache = checked(200, policy, clock)
    before = Checked.choices
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
    assert Checked.choices - before > 300


def test_what_would_lock_too_much_is_passed_over() -> None:
    """In long chains read from their ends victims are passed over, and every choice is by definition."""
    clock = ManualClock()
    cache = checked(12, "needed", clock)
    before = Checked.passed

    def work(*arguments: Any) -> bytes:
        clock.advance(1.0)
        return b""

    with cache:
        rows = [[rc.ap(work, nbytes=1)] for _ in range(4)]
        for step in range(20):
            for row in rows:
                others = [other[-1] for other in rows if other is not row][: step % 3 + 1]
                row.append(rc.ap(work, row[-1], *others, nbytes=1))
        for row in rows:
            row[-1].get()
    assert Checked.passed - before > 10
