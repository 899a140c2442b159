"""Foresight is advice: results, budget and books are as without it, whatever the rounds of a program are."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from interrupts import Tracing, delivered, modules_in
from lib.programs import Interpreter, Observation, Program, difference
from lib.strategies import RELEASES, programs, steps
from recompute.extend import Settings
from recompute.testing import Identity, ManualClock, check_invariants

QUICK = Settings(effort=0.0005, waits=True)


def cache_of(budget: Any, **options: Any) -> rc.Cache:
    return rc.Cache(budget, clock=ManualClock(), settings=QUICK, **options)


@st.composite
def rounds(draw: st.DrawFn) -> list[Program]:
    """A program that repeats, almost repeats, or stops repeating: the programs of its rounds."""
    program = draw(programs(devices=("cpu",), fickle=False))
    found: list[Program] = []
    for _ in range(draw(st.integers(2, 6))):
        change = draw(st.sampled_from(("none", "none", "none", "insert", "leave out", "other")))
        if change == "insert":
            place = draw(st.integers(0, len(program)))
            found.append(Program((*program[:place], draw(steps(devices=("cpu",), fickle=False)), *program[place:])))
        elif change == "leave out":
            place = draw(st.integers(0, len(program)))
            found.append(Program((*program[:place], *program[place + 1 :])))
        else:
            if change == "other":
                program = draw(programs(devices=("cpu",), fickle=False))
            found.append(program)
    return found


def observe(interpreter: Interpreter, program: Program, cache: rc.Cache | None = None) -> list[Observation]:
    """What can be observed of a round, and of all that is left at its end."""
    found: list[Observation] = []
    for step in program:
        found.append(interpreter.do(step))
        if cache is not None:
            check_invariants(cache, interpreter.roots)
    return found


@pytest.mark.slow
@given(rounds(), st.integers(30, 400), st.sampled_from(RELEASES))
def test_any_rounds(rounds: list[Program], budget: int, release: Any) -> None:
    """Each observation is the identity's, a BudgetError, or the fault that was asked for; nothing is left behind."""
    cache = cache_of(budget, release=release)
    for program in rounds:
        cache.budget = budget
        interpreter = Interpreter(rc, cache)
        with cache.iteration():
            found = observe(interpreter, program, cache)
        cache.budget = None
        expected = Interpreter(Identity)
        wanted = [expected.do(step) for step in program] + expected.finish()
        found += interpreter.finish()
        wrong = difference(wanted, found)
        assert wrong is None, wrong
        del interpreter
        gc.collect()  # errors know the frames that they came through
        while cache.release_memory():
            pass  # what nobody refers to stays with "ignore", until its room is needed
        check_invariants(cache)
        assert cache.stats().used == 0


def chain(cache: rc.Cache, length: int, clock: ManualClock, extra: int = -1) -> int:
    """Forward through a chain of unlike operations and back: a round of training.

    `extra`: where an operation more is, if anywhere.
    """

    def forward(x: int) -> int:
        clock.advance(1.0)
        return x + 1

    def backward(gradient: int, x: int) -> int:
        clock.advance(1.0)
        return gradient + x

    def dear(x: int) -> int:
        clock.advance(4.0)
        return x + 1

    values = [rc.pure(1)]
    for number in range(length):
        values.append(rc.ap(dear if number % 7 == 3 else forward, values[-1], nbytes=40 + 40 * (number % 5)))
        if number == extra:
            rc.ap(forward, values[-2], nbytes=100)
    gradient = rc.ap(forward, values[-1], nbytes=100)
    while len(values) > 1:
        gradient = rc.ap(backward, gradient, values.pop(), nbytes=100)
    return gradient.get()


def overheads(
    rounds: int, *, budget: int = 1800, marked: bool = True, extras: dict[int, int] | None = None, **options: Any
) -> tuple[list[float], rc.Cache]:
    """The overhead of each round of training, checked against the right result."""
    clock = ManualClock()
    cache = rc.Cache(budget, clock=clock, settings=QUICK, **options)
    found: list[float] = []
    with cache:
        for number in range(rounds):
            before = cache.stats()
            extra = (extras or {}).get(number, -1)
            if marked:
                with cache.iteration():
                    result = chain(cache, 60, clock, extra)
            else:
                result = chain(cache, 60, clock, extra)
            assert result == 62 + sum(range(2, 62))
            after = cache.stats()
            model = after.model_time - before.model_time
            found.append(1 + (after.remat_time - before.remat_time) / model)
    check_invariants(cache)
    assert cache.stats().peak <= budget
    return found, cache


def test_the_second_round_follows_a_plan() -> None:
    """It recomputes as little as if the future were known, and so do those that follow."""
    plain, _ = overheads(4, foresight=False)
    found, cache = overheads(4)
    assert found[0] == plain[0]
    assert found[1] < plain[1]
    assert found[1] == found[2] == found[3]
    assert cache.stats().foresight.startswith("following: a plan with an overhead of")


def test_rounds_without_marks_are_found() -> None:
    """The same functions on the same shapes in the same order are a round."""
    plain, _ = overheads(8, foresight=False, marked=False)
    found, cache = overheads(8, marked=False)
    assert found[-1] < plain[-1]
    assert cache.stats().foresight.startswith("following")


def test_a_round_that_differs_a_little_is_followed_all_the_same() -> None:
    """An operation more costs no more than itself and what it evicts; the next plan knows it."""
    plain, _ = overheads(6, foresight=False, extras={3: 30, 4: 30, 5: 30})
    found, cache = overheads(6, extras={3: 30, 4: 30, 5: 30})
    assert found[3] <= plain[3]
    assert found[5] < plain[5]
    assert cache.stats().foresight.startswith("following")


def test_another_program_is_learnt_anew() -> None:
    """A plan that fits no longer is given up within the round, and said to be lost; a new one follows."""
    clock = ManualClock()
    cache = rc.Cache(1200, clock=clock, settings=QUICK)
    states: list[str] = []

    def listen(event: rc.events.Event) -> None:
        if isinstance(event, rc.events.Foresaw):
            states.append(event.state)

    cache.subscribe(listen)

    def other(x: int) -> int:
        clock.advance(1.0)
        return x + 2

    def round_of_another_program() -> None:
        values = [rc.pure(1)]
        for _ in range(40):
            values.append(rc.ap(other, values[-1], nbytes=100))
        assert [value.get() for value in reversed(values)] == [*range(81, 0, -2)]

    with cache:
        for _ in range(3):
            with cache.iteration():
                chain(cache, 60, clock)
        for _ in range(5):
            with cache.iteration():
                round_of_another_program()
    assert states[:4] == ["recording", "planning", "following", "lost"]
    assert states[-1] == "following"


@pytest.mark.parametrize("marked", [True, False])
def test_what_is_known_does_not_grow(marked: bool) -> None:
    """After many rounds there are as many objects as after a few."""
    clock = ManualClock()
    cache = rc.Cache(1800, clock=clock, settings=QUICK)
    counts: list[int] = []
    with cache:
        for number in range(1, 41):
            with cache.iteration() if marked else nullcontext():
                chain(cache, 60, clock)
            if number in (10, 40):
                gc.collect()
                counts.append(len(gc.get_objects()))
    assert cache.stats().foresight.startswith("following")
    assert counts[1] <= counts[0] + 200, counts


def test_foresight_can_be_switched_off() -> None:
    """Then nothing is recorded, marks or no marks, and neither with another policy, which decides alone."""
    for options in ({"foresight": False}, {"policy": "lru"}):
        for marked in (True, False):
            _, cache = overheads(4, marked=marked, **options)
            assert cache.stats().foresight == ""


def test_a_round_that_fails_is_not_learnt_from() -> None:
    """Its exception passes through, and the next round is recorded."""
    clock = ManualClock()
    cache = rc.Cache(1200, clock=clock, settings=QUICK)
    with cache:
        with pytest.raises(ZeroDivisionError), cache.iteration():
            rc.ap(int.__floordiv__, chain(cache, 30, clock), 0)
        with cache.iteration():
            chain(cache, 60, clock)
        assert cache.stats().foresight == "planning"


def test_what_a_failed_operation_took_is_not_kept() -> None:
    """Not even until the end of the round that is recorded: memory may be short because of it."""
    cache = cache_of(100)
    taken = {1, 2}
    known = ref(taken)
    with cache, cache.iteration():
        with pytest.raises(TypeError):
            rc.ap(lambda numbers: len(numbers) + "", taken)
        del taken
        assert known() is None


def test_an_iteration_inside_another_is_refused() -> None:
    """And leaves the outer one as it was."""
    cache = rc.Cache(1000)
    with cache.iteration(), pytest.raises(RuntimeError, match="in an iteration already"), cache.iteration():
        pass
    with cache.iteration():
        pass


def test_without_a_budget_nothing_is_recorded() -> None:
    """Memory permitting, the cache only watches."""
    cache = rc.Cache()
    with cache, cache.iteration():
        rc.ap(int, 3)
    assert cache.stats().foresight == ""


def test_the_background_thread_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting, the plan is taken up by a round that begins after it was made."""
    clock = ManualClock()
    cache = rc.Cache(1200, clock=clock, settings=Settings(effort=0.0005))
    with cache:
        with cache.iteration():
            chain(cache, 60, clock)
        for _ in range(10_000):
            with cache.iteration():
                chain(cache, 60, clock)
            if cache.stats().foresight.startswith("following"):
                break
        assert cache.stats().foresight.startswith("following")


def test_a_round_with_fewer_outputs() -> None:
    """An operation that has another number of outputs than in the round before is still got right."""
    clock = ManualClock()
    cache = rc.Cache(700, clock=clock, settings=QUICK)

    def split(x: int, parts: int) -> tuple[int, ...]:
        clock.advance(1.0)
        return tuple(range(x, x + parts))

    with cache:
        for parts in (3, 3, 3, 1, 2, 3):
            with cache.iteration():
                first = rc.ap(split, 5, parts=parts, nout=parts, nbytes=(100,) * parts)
                made = list(first) if parts > 1 else [first]
                chain(cache, 20, clock)
                assert [value.get() for value in reversed(made)] == ([5, 6, 7][:parts][::-1] if parts > 1 else [(5,)])
    check_invariants(cache)


def test_each_item_is_a_round() -> None:
    """`iterations` marks rounds as `iteration` does; what is left in the middle ends its round, and is no lesson."""
    clock = ManualClock()
    cache = rc.Cache(1800, clock=clock, settings=QUICK)
    by_item = []
    with cache:
        for number in cache.iterations(range(6)):
            before = cache.stats()
            assert chain(cache, 60, clock, -1) == 62 + sum(range(2, 62))
            after = cache.stats()
            by_item.append(1 + (after.remat_time - before.remat_time) / (after.model_time - before.model_time))
            if number == 3:
                break
        state = cache.stats().foresight
        with cache.iteration(), pytest.raises(RuntimeError, match="in an iteration already"):
            next(cache.iterations(range(6)))
    marked, _ = overheads(4)
    assert by_item == marked
    assert state.startswith("following")
    check_invariants(cache)


@pytest.mark.parametrize("marked", [True, False])
def test_foresight_goes_on_after_an_interrupt(marked: bool) -> None:
    """Wherever it strikes, results stay right, and a plan is soon followed again."""
    modules = modules_in("recompute._foresight.rounds")

    def interrupted(at: int) -> Tracing:
        clock = ManualClock()
        cache = rc.Cache(1800, clock=clock, settings=QUICK)
        tracing = Tracing(modules)
        tracing.arm(at)

        def one() -> None:
            with cache, cache.iteration() if marked else nullcontext():
                assert chain(cache, 60, clock) == 62 + sum(range(2, 62))

        try:
            with tracing.on():
                for _ in range(5):
                    one()
        except KeyboardInterrupt:
            assert at
        delivered(cache)  # it may have struck in a destructor
        for _ in range(24):
            one()
            if cache.stats().foresight.startswith("following"):
                break
        else:
            raise AssertionError(f"{tracing.where}: {cache.stats().foresight}")
        assert cache.stats().peak <= 1800
        check_invariants(cache)
        return tracing

    places = interrupted(0).crossings
    assert places > 500
    for at in range(1, places, places // 20):
        interrupted(at)
