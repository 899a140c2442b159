"""The library's own planner: never worse than the cache by itself, the same everywhere, and it keeps its plans."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_programs import programs

from recompute._plans.liveness import prune, schedule, settled
from recompute._plans.own import Effort, Meter, online, portfolio
from recompute._plans.problem import problem_of
from recompute._simulator.replay import Numbers, order_of_runs
from recompute._traces.chain import chain
from recompute._traces.program import Program, Step
from recompute.events import Accessed, Detached, Event, Performed
from recompute.planners import PlanError, ProgramPlan, ladder, least, peak, plan, verify
from recompute.simulator import baseline, simulate

LITTLE = 0.01


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs(operations=40))
def test_nothing_is_recomputed_in_the_memory_that_the_program_takes_by_itself(program: Program) -> None:
    """Sources that come and go included."""
    budget = sum(baseline(program).values())
    assert plan(program, max(1, budget), effort=LITTLE).overhead == 1.0


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs(operations=40), share=st.floats(0.0, 1.0))
def test_a_plan_is_never_dearer_than_the_cache_by_itself(program: Program, share: float) -> None:
    """Where the cache runs the program within a budget, there is a plan, and it costs no more."""
    most = sum(baseline(program).values())
    budget = max(1, least(program) + int(share * (most - least(program))))
    online = simulate(program, budget, limit=20.0, machine="library")
    if online.status == "ok" and online.overhead is not None:
        found = plan(program, budget, effort=LITTLE)
        assert found.overhead <= online.overhead * (1 + 1e-9)
        assert verify(program, found) == (found.peak, pytest.approx(found.overhead))


def uneven_chain(seed: int, length: int) -> Program:
    """There and back, with costs and sizes that differ widely."""
    draw = Random(seed)
    program = Program("uneven chain")

    def make(*arguments: int) -> int:
        storage = program.add_storage(draw.choice((1, draw.randint(1, 3000))))
        return program.add_call("f", arguments, (storage,), float(draw.choice((1, 20, 50))))[0]

    values = [program.add_source(2)]
    for _ in range(length):
        values.append(make(values[-1]))
    gradient = make(values[-1])
    for value in reversed(values[1:-1]):
        gradient = make(gradient, value)
    program.outputs = [gradient]
    return program


@pytest.mark.parametrize("seed", [12, 24, 33])
def test_a_plan_of_a_chain_is_never_dearer_either(seed: int) -> None:
    """Dynamic programming takes the effort for the first plans there, and rounds sizes up."""
    program = uneven_chain(seed, 20)
    budget = least(program) + (peak(program) - least(program)) // 50
    online = simulate(program, budget, limit=20.0, machine="library")
    assert online.overhead is not None
    assert plan(program, budget, effort=0.08, rounds=1).overhead <= online.overhead * (1 + 1e-9)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs(operations=40), shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4))
def test_more_memory_never_costs_more(program: Program, shares: list[float]) -> None:
    """Of a ladder of budgets each plan fits, and costs no more than one for a smaller budget, exactly."""
    most = sum(baseline(program).values())
    budgets = [max(1, least(program) + int(share * (most - least(program)))) for share in shares]
    found = dict(zip(budgets, ladder(program, budgets, effort=LITTLE), strict=True))
    best = inf
    for budget in sorted(found):
        planned = found[budget]
        if isinstance(planned, PlanError):
            assert best == inf  # what works with less memory works with more
            continue
        assert planned.overhead <= best
        assert planned.peak <= planned.budget == budget
        assert verify(program, planned) == (planned.peak, pytest.approx(planned.overhead))
        best = planned.overhead


def test_a_known_plan_is_a_candidate() -> None:
    """One that costs less than what is found is the result, unless it does not fit; a wrong one is refused."""
    program = chain(30)
    good, poor = plan(program, 9), plan(program, 9, effort=0.0)
    assert plan(program, 10, effort=0.0, known=[good]).overhead <= good.overhead
    assert plan(program, 8, effort=0.0, known=[plan(program, 20)]).peak <= 8
    assert good.overhead <= poor.overhead
    with pytest.raises(PlanError):
        plan(program, 10, known=[replace(good, steps=good.steps[1:])])
    with pytest.raises(ValueError, match="has no option 'known'"):
        plan(program, 10, "chen-sqrt", known=[good])


@given(program=programs(operations=25), share=st.floats(0.0, 1.0))
def test_the_runs_of_the_cache_are_a_plan_within_its_budget(program: Program, share: float) -> None:
    """Also where outputs run again after everything else."""
    most = sum(baseline(program).values())
    problem = problem_of(program, max(1, least(program) + int(share * (most - least(program)))))
    order = online(program, problem)
    if order is not None:
        assert order[-1] == problem.final
        assert schedule(problem, prune(problem, order))[1] <= problem.room + problem.constant


@given(program=programs(operations=25), share=st.floats(0.3, 1.0))
def test_the_runs_of_the_cache_are_those_that_its_events_tell(program: Program, share: float) -> None:
    """Every run, the first and the repeated ones, every `get` and every `detach`, in their order."""
    budget = max(1, int(share * sum(baseline(program).values())))
    numbers = Numbers(program)
    told: list[Step] = []

    def listen(event: Event) -> None:
        numbers.hear(event)
        if isinstance(event, Performed):
            told.append(("call", program.makers[numbers.values[event.results[0]]]))
        elif isinstance(event, Accessed):
            told.append(("get", numbers.values[event.value]))
        elif isinstance(event, Detached):
            told.append(("detach", numbers.values[event.value]))

    run = simulate(program, budget, limit=20.0, machine="library", listener=listen)
    assert order_of_runs(program, budget) == (told if run.status == "ok" else None)


@settings(max_examples=settings().max_examples // 5)
@given(program=programs(operations=40), share=st.floats(0.3, 0.9), seed=st.integers(0, 3))
def test_the_same_effort_and_seed_give_the_same_plan(program: Program, share: float, seed: int) -> None:
    """How fast the machine is does not matter."""

    def once() -> object:
        try:
            return plan(program, max(1, int(share * sum(baseline(program).values()))), seed=seed, effort=LITTLE)
        except PlanError as error:
            return str(error)

    assert once() == once()


@pytest.mark.parametrize("tier", [None, "1GB/s"])
def test_when_the_time_is_over_the_first_plan_is_the_plan(tier: str | None) -> None:
    """Of a time limit that the first plan takes up, nothing is left for others: it is what the cache does by itself."""
    program = uneven_chain(3, 40)
    told: list[float] = []
    found = plan(program, of_peak=0.5, time_limit=1e-9, progress=lambda *state: told.append(state[0]), tier=tier)
    budget = baseline(program)["cpu"] // 2
    problem = problem_of(program, budget)
    first = online(program, problem)
    assert first is not None
    assert found.steps == schedule(problem, settled(problem, prune(problem, first)))[0]
    assert found.fetches == 0
    assert told == []
    if tier is None:
        assert [start.member for start in portfolio(problem, Meter(Effort(time_limit=1e-9)), lambda _: first)] == [
            "online"
        ]


def recurrent(length: int) -> Program:
    """Training of a recurrent cell: every step needs the one before, and all need the same weights."""
    program = Program("recurrent")

    def make(name: str, *arguments: int, size: int = 1) -> int:
        return program.add_call(name, arguments, (program.add_storage(size),), 1.0)[0]

    weights = program.add_source(20)
    inputs = make("inputs", weights, size=4 * length)
    hidden = state = make("zeros", weights)
    saved = []
    for _ in range(length):
        gates = make("gates", hidden, weights, inputs, size=4)
        new = make("state", gates, state)
        saved.append((hidden, state, gates, new))
        hidden, state = make("hidden", gates, new), new
    gradient, late = make("loss", hidden), make("zeros", hidden)
    total = make("zeros", gradient, size=20)
    for hidden, state, gates, new in reversed(saved):
        back = make("gates, back", gradient, late, gates, state, new, size=4)
        late, gradient = make("state, back", late, back, gates, new), make("hidden, back", back, weights)
        total = make("weights, back", total, back, hidden, size=20)
    return program


def test_a_cache_that_thrashes_is_given_up_where_the_program_can_be_made_to_fit() -> None:
    """The cache by itself repeats all twenty times here, which takes a hundred times as long as to plan without it."""
    program = recurrent(100)
    budget = peak(program) // 2
    limits: list[float] = []
    starts = list(portfolio(problem_of(program, budget), Meter(Effort(0.02)), limits.append))
    assert limits == [2.0]
    assert starts
    assert order_of_runs(program, budget, 2.0) is None
    assert plan(program, budget, effort=0.02).overhead < 1.45


def stepping(layers: int, weights: int) -> Program:
    """Training with a gradient for each weight: a source that comes in the backward pass, and goes in the update."""
    program = Program("stepping")
    kept = [program.add_source(weights) for _ in range(layers)]
    value = program.add_source(1)
    forward = []
    for weight in kept:
        (value,) = program.add_call("f", (value, weight), (program.add_storage(4),), 1.0)
        forward.append(value)
    for weight, activation in zip(reversed(kept), reversed(forward), strict=True):
        gradient = program.add_source(weights)
        (new,) = program.add_call("update", (weight, gradient, activation), (program.add_storage(weights),), 1.0)
        program.steps += [("drop", value) for value in (activation, gradient, weight, new)]
    return program


def test_sources_count_while_they_are_alive() -> None:
    """All sources together are more than the budget; those alive at once are not."""
    program = stepping(10, 10)
    together = sum(size for value, size in enumerate(program.sizes) if program.makers[value] < 0)
    most = peak(program)
    assert together > most
    found = plan(program, most, effort=LITTLE)
    assert found.overhead == 1.0
    assert verify(program, found)[0] <= most
    tight = plan(program, most - 12, effort=LITTLE)
    assert 1.0 < tight.overhead < 1.5
    assert verify(program, tight)[0] <= most - 12


def test_a_plan_does_not_free_a_source_too_early() -> None:
    """The judge knows until when the program refers to it."""
    program = stepping(3, 10)
    found = plan(program, peak(program), effort=LITTLE)
    place = next(at for at, (kind, which) in enumerate(found.steps) if kind == "free" and which < 3)
    early = (found.steps[place], *found.steps[:place], *found.steps[place + 1 :])
    with pytest.raises(PlanError, match=r"step 0, free .* before the program drops it"):
        verify(program, ProgramPlan("p", "own", found.budget, early, found.peak, 1.0))


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    """As text; what is wrong with a file is said with its name and line."""
    found = plan(chain(30), 8, effort=LITTLE)
    path = tmp_path / "chain.plan"
    found.save(path)
    assert ProgramPlan.load(path) == found
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "nonsense", *lines[2:]]))
    with pytest.raises(PlanError, match=r"chain\.plan: line 2 is not a line of a plan"):
        ProgramPlan.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="is no text"):
        ProgramPlan.load(path)
    with pytest.raises(FileNotFoundError):
        ProgramPlan.load(tmp_path / "none")


@pytest.mark.parametrize("effort", [-1.0, float("nan"), float("inf")])
def test_an_effort_that_makes_no_sense_is_refused(effort: float) -> None:
    with pytest.raises(ValueError, match="effort is a number, 0 or more"):
        plan(chain(30), 8, effort=effort)
