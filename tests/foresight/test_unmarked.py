"""Programs that repeat, without marks: their rounds are found, and a plan that does not fit costs next to nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute._foresight.repetition import Repetition
from recompute.extend import Settings
from recompute.testing import ManualClock, check_invariants

QUICK = Settings(effort=0.0005, waits=True)

PLAN = 1.1
"""Times the compute without foresight, at most, of a program of many rounds."""


class Bench:
    """A cache with its clock, operations of one second, and the overhead of each round."""

    def __init__(self, budget: int, *, foresight: bool = True) -> None:
        self.clock = clock = ManualClock()
        self.cache = rc.Cache(budget, clock=clock, settings=QUICK, foresight=foresight)
        self.states: list[str] = []
        self.overheads: list[float] = []
        self.results: list[int] = []
        self.cache.subscribe(self._hear)

        def step(x: int) -> int:
            clock.advance(1.0)
            return x + 1

        def add(x: int, y: int) -> int:
            clock.advance(1.0)
            return x + y

        self.step, self.add = step, add

    def _hear(self, event: rc.events.Event) -> None:
        if isinstance(event, rc.events.Foresaw):
            self.states.append(event.state)

    def rounds(self, rounds: int, body: Callable[[Bench, int], None]) -> Bench:
        """So many rounds of `body(self, number)`."""
        with self.cache:
            for number in range(rounds):
                before = self.cache.stats()
                body(self, number)
                after = self.cache.stats()
                model = after.model_time - before.model_time
                self.overheads.append(1 + (after.remat_time - before.remat_time) / model)
        check_invariants(self.cache)
        return self


def there_and_back(length: int, size: int = 100) -> Callable[[Bench, int], None]:
    """A chain whose values are all got, the last one first."""

    def body(bench: Bench, number: int) -> None:
        values = [rc.pure(1)]
        for _ in range(length):
            values.append(rc.ap(bench.step, values[-1], nbytes=size))
        while values:
            bench.results.append(values.pop().get())

    return body


def trained(length: int, size: int = 100) -> Callable[[Bench, int], None]:
    """A chain, and operations that take its values, the last one first."""

    def body(bench: Bench, number: int) -> None:
        values = [rc.pure(1)]
        for _ in range(length):
            values.append(rc.ap(bench.step, values[-1], nbytes=size))
        gradient = rc.ap(bench.step, values[-1], nbytes=size)
        while values:
            gradient = rc.ap(bench.add, gradient, values.pop(), nbytes=size)
        bench.results.append(gradient.get())

    return body


def both(budget: int, rounds: int, body: Callable[[Bench, int], None]) -> tuple[Bench, Bench]:
    """The program without foresight and with it; the results are the same."""
    plain = Bench(budget, foresight=False).rounds(rounds, body)
    bench = Bench(budget).rounds(rounds, body)
    assert bench.results == plain.results
    assert bench.cache.stats().peak <= budget
    return plain, bench


@pytest.mark.parametrize(("length", "size"), [(60, 1_000_000), (120, 4_000), (30, 100)])
def test_a_chain_there_and_back_is_found_within_three_rounds(length: int, size: int) -> None:
    """The gets are part of the round: it is planned, followed from then on, at no round's cost, and no more is said."""
    plain, bench = both(6 * size, 60, there_and_back(length, size))
    assert bench.overheads[:3] == plain.overheads[:3]
    assert bench.states == ["recording", "planning", "following"]
    assert all(after <= before for before, after in zip(plain.overheads[3:], bench.overheads[3:], strict=True))
    assert bench.overheads[-1] < plain.overheads[-1]


@pytest.mark.parametrize("length", [45, 60])
def test_training_is_found_within_three_rounds(length: int) -> None:
    """Forward and back, where memory is short in the first round already."""
    plain, bench = both(700, 12, trained(length))
    assert bench.states == ["recording", "planning", "following"]
    assert all(after < before for before, after in zip(plain.overheads[3:], bench.overheads[3:], strict=True))


def test_growing_sequences() -> None:
    """Each round is one operation longer: never more compute than without foresight by more than a tenth."""

    def body(bench: Bench, number: int) -> None:
        there_and_back(60 + number)(bench, number)

    plain, bench = both(600, 30, body)
    assert sum(bench.overheads) <= PLAN * sum(plain.overheads)


@pytest.mark.parametrize("size", [50, 150])
def test_a_batch_of_another_size_now_and_then(size: int) -> None:
    """It costs the plan of its own round, and the next round follows the plan again."""

    def body(bench: Bench, number: int) -> None:
        trained(60, size if number % 10 == 9 else 100)(bench, number)

    plain, bench = both(700, 40, body)
    pairs = list(zip(plain.overheads, bench.overheads, strict=True))
    assert all(after < before for number, (before, after) in enumerate(pairs) if number > 3 and number % 10 != 9)
    assert sum(bench.overheads) < sum(plain.overheads)


def test_an_evaluation_now_and_then() -> None:
    """The round behind it follows the plan as the ones before."""

    def body(bench: Bench, number: int) -> None:
        if number % 10 == 9:
            for _ in range(30):
                value = rc.pure(1)
                for _ in range(3):
                    value = rc.ap(bench.step, value, nbytes=90)
                bench.results.append(value.get())
        else:
            trained(60)(bench, number)

    plain, bench = both(700, 40, body)
    pairs = list(zip(plain.overheads, bench.overheads, strict=True))
    assert all(after < before for number, (before, after) in enumerate(pairs) if number > 10 and number % 10 != 9)


def test_a_loss_that_is_printed_now_and_then() -> None:
    """A get more does not end the rounds."""

    def body(bench: Bench, number: int) -> None:
        trained(60)(bench, number)
        if number % 5 == 4:
            bench.results.append(rc.pure(3).get())

    _, bench = both(700, 40, body)
    assert bench.states[-1] == "following"
    assert "lost" not in bench.states


def test_nested_loops() -> None:
    """The outer loop is the round, though the inner one alone repeats long enough to be one."""

    def body(bench: Bench, number: int) -> None:
        for _ in range(30):
            value = rc.pure(1)
            for _ in range(4):
                value = rc.ap(bench.step, value, nbytes=110)
            bench.results.append(value.get())
        trained(60)(bench, number)

    plain, bench = both(700, 30, body)
    assert all(after < before for before, after in zip(plain.overheads[8:], bench.overheads[8:], strict=True))
    assert sum(bench.overheads) < sum(plain.overheads)


def test_other_threads() -> None:
    """What another thread runs in the same cache is let pass."""

    def body(bench: Bench, number: int) -> None:
        def other() -> None:
            with bench.cache:
                value = rc.pure(1)
                for _ in range(3 + number % 4):
                    value = rc.ap(bench.step, value, nbytes=10)
                bench.results.append(value.get())

        trained(60)(bench, number)
        thread = Thread(target=other)
        thread.start()
        thread.join()

    plain, bench = both(800, 16, body)
    assert bench.cache.stats().foresight.startswith("following")
    assert bench.overheads[-1] < plain.overheads[-1]


@pytest.mark.parametrize("budget", [350, 500])
def test_a_loop_of_one_operation_is_found(budget: int) -> None:
    """A window over a chain, of which the oldest value is got: found, and no dearer than without foresight."""

    def program(bench: Bench, number: int) -> None:
        window = [rc.pure(1)]
        for _ in range(2_000):
            window.append(rc.ap(bench.step, window[-1], nbytes=100))
            if len(window) > 5:
                bench.results.append(window.pop(0).get())

    plain, bench = both(budget, 1, program)
    assert bench.states
    assert bench.overheads[0] <= PLAN * plain.overheads[0]


def test_a_loop_that_is_no_round_once_it_is_planned() -> None:
    """A loop of one operation becomes a chain that is needed later: the plan is left before it costs a tenth."""

    def program(bench: Bench, number: int) -> None:
        window = [rc.pure(1)]
        for _ in range(300):
            window.append(rc.ap(bench.step, window[-1], nbytes=100))
            if len(window) > 5:
                bench.results.append(window.pop(0).get())
        there_and_back(200)(bench, number)

    plain, bench = both(500, 10, program)
    assert sum(bench.overheads) <= PLAN * sum(plain.overheads)


def test_watching_takes_no_more_memory_for_ever() -> None:
    """What is remembered grows up to 131,072 operations: 200,000 more that never repeat take nothing."""
    draw = Random(0)
    tracemalloc.start()
    try:
        repetition = Repetition(None, None)
        begun, _ = tracemalloc.get_traced_memory()
        found = {repetition.see(draw.randrange(1000), 0, draw.randrange(1000)) for _ in range(1 << 17)}
        before, _ = tracemalloc.get_traced_memory()
        found |= {repetition.see(draw.randrange(1000), 0, draw.randrange(1000)) for _ in range(200_000)}
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == {0}
    assert begun < 100_000
    assert before < 5_000_000
    assert after < before + 100_000


Body = list[tuple[str, int]]


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Of one round: steps of a chain that are kept, values that are used or got, and some that are dropped."""
    kinds = ("keep", "keep", "keep", "use", "get", "drop", "get all", "use all")
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 12)), min_size=1, max_size=6))


def run_body(bench: Bench, body: Body, kept: list[Any]) -> None:
    for kind, count in body:
        if kind == "keep":
            for _ in range(count):
                kept.append(rc.ap(bench.step, kept[-1], nbytes=100))
        elif kind == "use":
            kept.append(rc.ap(bench.add, kept[-1], kept[-1 - count % len(kept)], nbytes=50))
        elif kind == "get":
            bench.results.append(kept[-1 - count % len(kept)].get())
        elif kind == "drop":
            del kept[1 : max(1, len(kept) - count)]
        elif kind == "get all":
            while len(kept) > 1:
                bench.results.append(kept.pop().get())
        else:
            gradient = kept[-1]
            while len(kept) > 1:
                gradient = rc.ap(bench.add, gradient, kept.pop(), nbytes=100)
            bench.results.append(gradient.get())


Part = tuple[Body, int]
"""What is run, and how often."""


def compute(parts: list[Part], budget: int) -> tuple[float, float] | None:
    """Seconds of a program without foresight and with it, whose results are the same; None: too little memory."""

    def program(bench: Bench, number: int) -> None:
        kept: list[Any] = [rc.pure(1)]
        for body, times in parts:
            for _ in range(times):
                run_body(bench, body, kept)
                del kept[1:-40]

    seconds: list[float] = []
    results: list[list[int]] = []
    for foresight in (False, True):
        bench = Bench(budget, foresight=foresight)
        try:
            bench.rounds(1, program)
        except (rc.BudgetError, ZeroDivisionError):
            return None
        stats = bench.cache.stats()
        seconds.append(stats.model_time + stats.remat_time)
        results.append(bench.results)
    without, with_foresight = seconds
    assert results[0] == results[1]
    return without, with_foresight


@settings(max_examples=40)
@given(st.lists(st.tuples(bodies(), st.integers(1, 30)), min_size=1, max_size=3), st.integers(350, 2000))
def test_results_are_those_without_foresight(parts: list[Part], budget: int) -> None:
    """Whatever repeats, and however often."""
    compute(parts, budget)


def drawn(seed: int) -> tuple[list[Part], int]:
    """A program and its budget."""
    draw = Random(seed)
    kinds = ("keep", "keep", "keep", "use", "get", "drop", "get all", "use all")
    parts = []
    for _ in range(draw.randint(1, 3)):
        body = [(draw.choice(kinds), draw.randint(1, 12)) for _ in range(draw.randint(1, 6))]
        parts.append((body, draw.randint(1, 30)))
    return parts, draw.choice([350, 400, 500, 700, 1000, draw.randint(350, 2000)])


@pytest.mark.slow
def test_unmarked_programs_gain() -> None:
    """Of a hundred random programs more become cheaper than dearer, and none takes more than 5/3 of the compute.

    That is a sample and no bound: a round is a third of what has run, at most, when it is found; a plan that goes wrong
    is left before it has cost a tenth of its round, and given up when it has done so twice; but then the cache is in a
    state that it would not have come to by itself, and what follows may cost more from there.
    """
    ratios = [seconds[1] / seconds[0] for seed in range(100) if (seconds := compute(*drawn(seed))) is not None]
    assert len(ratios) > 80
    assert sum(ratio < 0.99 for ratio in ratios) > 3 * sum(ratio > 1.01 for ratio in ratios)
    assert sum(ratios) < len(ratios)
    assert max(ratios) < 5 / 3


def test_what_is_held_beyond_its_last_use_may_be_needed_after_all() -> None:
    """A loop makes values that it never takes: the plan keeps a few to start from when the loop is over."""
    without, with_foresight = compute([([("keep", 5), ("drop", 1)], 15), ([("use", 3)], 1)], 350) or (0.0, 0.0)
    assert 0 < with_foresight <= without
