"""Rounds of a program that repeats: what is learnt from one for the next costs nothing, and is free to be forgotten."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import random_traces
from hypothesis import assume, example, given
from hypothesis import strategies as st

from recompute._traces.chain import chain
from recompute._traces.program import Program
from recompute.simulator import Job, Replay, Run, baseline, iterate, simulate, simulate_many

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from varied import varied

ROUNDS = 4
EFFORT = 0.001
PATIENT = 50.0

programs = st.builds(
    lambda program: replace(program, published=False), random_traces.programs(most=15, drop_sources=True)
)
shares = st.sampled_from([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])


def rounds(program: Program, share: float, foresight: bool = True, effort: float = EFFORT) -> list[Run]:
    """All rounds of a program, up to the one that fails."""
    assume(sum(share * size for size in baseline(program).values()) >= 1)
    return list(iterate(program, of_peak=share, iterations=ROUNDS, foresight=foresight, effort=effort, limit=PATIENT))


def without_time(run: Run) -> Run:
    return replace(run, seconds=0.0)


def twins() -> Program:
    """Operations of two results, of which one is still there when the other is needed again."""
    program = Program("twins")
    a, b = program.add_source(0), program.add_source(2)
    c, d = program.add_call("f", [a, b], [program.add_storage(4), program.add_storage(4)], 1.0)
    program.steps.append(("drop", a))
    e = program.add_source(0)
    f, g = program.add_call("f", [b, c], [program.add_storage(4), program.add_storage(3)], 1.0)
    h, i = program.add_call("f", [d, d, d], [program.add_storage(4), program.add_storage(3)], 3.0)
    j, k = program.add_call("f", [i, f, f], [program.storages[i], program.add_storage(3)], 0.0)
    program.steps += [("get", d), ("drop", e)]
    (m,) = program.add_call("f", [h, h], [program.add_storage(0)], 0.0)
    program.steps.append(("get", c))
    program.add_call("f", [i, k], [program.add_storage(0)], 0.0)
    program.steps.append(("drop", b))
    program.add_call("f", [j, c], [program.storages[i]], 3.0)
    program.steps.append(("get", c))
    last = program.add_source(0)
    program.add_call("f", [m, g], [program.storages[m]], 0.0)
    program.steps += [("get", d), ("drop", last)]
    return program


@given(programs, shares, st.sampled_from([0.0001, EFFORT]))
@example(twins(), 0.8, 0.0001)
def test_later_rounds_are_no_worse(program: Program, share: float, effort: float) -> None:
    """Costs are exact here: no round is above those of the cache by itself, or if one is, it is the only one.

    Each ends as it would without foresight, and stays within the budget.
    """
    alone, learnt = rounds(program, share, foresight=False), rounds(program, share, effort=effort)
    assert [run.status for run in learnt] == [run.status for run in alone]
    assert all(run.peak_bytes <= run.budget_bytes for run in learnt)
    most = 1.005 * max([run.overhead for run in alone if run.overhead is not None], default=1.0)
    dear = [run.overhead is not None and run.overhead > most + 1e-9 for run in learnt]
    assert not any(first and second for first, second in pairwise(dear))


@given(programs, shares)
def test_the_first_round_is_a_replay(program: Program, share: float) -> None:
    """Nothing is known of the program in the first round: it is what `simulate` gives, with foresight and without."""
    first = [without_time(rounds(program, share, foresight)[0]) for foresight in (True, False)]
    assert first == [without_time(simulate(program, of_peak=share, limit=PATIENT))] * 2


@given(programs, shares, st.sampled_from(["dtr-eq", "lru"]))
def test_other_policies_do_not_learn(program: Program, share: float, policy: str) -> None:
    """Only the default policy knows what to do with a plan; rounds of the others are the same with and without."""
    assume(sum(share * size for size in baseline(program).values()) >= 1)
    found = [
        [
            without_time(run)
            for run in iterate(program, of_peak=share, iterations=3, policy=policy, foresight=foresight, effort=EFFORT)
        ]
        for foresight in (True, False)
    ]
    assert found[0] == found[1]


def enough(program: Program) -> int:
    """Bytes in which each operation has room beside all sources and outputs, whatever is evicted."""
    stays = {program.storages[value] for value in program.outputs}
    stays |= {program.storages[value] for value, maker in enumerate(program.makers) if maker < 0}
    needs = [{program.storages[value] for value in (*call.arguments, *call.results)} for call in program.calls]
    most = max(sum(program.sizes[storage] for storage in storages) for storages in needs)
    return most + sum(program.sizes[storage] for storage in stays)


@given(programs, shares, st.integers(0, 3), st.sampled_from([0.0, 0.3, 1.0]))
def test_rounds_that_differ_fit(program: Program, share: float, seed: int, inserted: float) -> None:
    """Whatever the rounds have in common: what fits without foresight fits with it, within the budget."""
    copies = [varied(program, seed + number, inserted=inserted) for number in range(3)]
    budget = max(1, int(share * sum(baseline(program).values())), *map(enough, copies))
    for effort in (None, 0.0001):
        replay = Replay(program, {"cpu": budget}, policy="default", limit=PATIENT, effort=effort)
        assert [replay.again(program=copy) for copy in copies] == ["ok"] * 3
        assert replay.cache.stats().peak <= budget


def uneven(steps: int = 24) -> Program:
    """A training loop whose steps differ in cost and size: the cache by itself is not at its best."""
    random = Random(0)
    program = Program("uneven")
    values = [program.add_source(1)]
    for _ in range(steps):
        home = program.add_storage(random.randint(1, 9))
        values += program.add_call("forward", values[-1:], [home], random.choice((1.0, 5.0, 30.0)))
    gradient = values.pop()
    while len(values) > 1:
        before = values.pop()
        (after,) = program.add_call("backward", [gradient, before, values[-1]], [program.add_storage(2)], 2.0)
        program.steps += [("drop", gradient), ("drop", before)]
        gradient = after
    program.outputs = [gradient]
    return program


def test_a_plan_is_followed() -> None:
    """From the second round on the plan of a program that repeats is followed, each time alike."""
    first, *later = iterate(uneven(), of_peak=0.5, iterations=4, effort=0.01)
    assert first.overhead is not None
    assert all(run.overhead is not None and run.overhead < first.overhead for run in later)
    assert len({run.overhead for run in later}) == 1


def test_a_round_above_the_limit_is_run_to_its_end() -> None:
    """So the next ones can be below it."""
    first, second = iterate(uneven(), of_peak=0.5, iterations=2, effort=0.01)
    assert first.overhead is not None
    assert second.overhead is not None
    limit = (first.overhead + second.overhead) / 2
    slow, learnt = iterate(uneven(), of_peak=0.5, iterations=2, effort=0.01, limit=limit)
    assert (slow.status, slow.overhead) == ("thrash", None)
    assert learnt.overhead == second.overhead


def test_a_round_that_does_not_fit_is_the_last_one() -> None:
    """There is nothing to be learnt from it."""
    (run,) = iterate(chain(32), 1, iterations=5)
    assert (run.status, run.iteration) == ("oom", 1)


def test_jobs_of_rounds_and_replays() -> None:
    """Runs come job by job, round by round, and the count of what is ready ends with all that were asked for."""
    programs, counts = [chain(16), chain(8)], list[int]()
    jobs = [
        Job(0, {"of_peak": 0.5, "effort": EFFORT}, iterations=3),
        Job(1, {"of_peak": 0.5}),
        Job(1, {"budget": 1, "foresight": False}, iterations=4),
        Job(1, {"of_peak": 0.5, "policy": "dtr"}, iterations=1),
    ]
    runs = list(simulate_many(programs, jobs, done=counts.append))
    assert [(run.trace, run.iteration) for run in runs] == [
        *[(programs[0].name, number) for number in (1, 2, 3)],
        *[(programs[1].name, 1)] * 3,
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 3 + 1 + 4 + 1
    assert [without_time(run) for run in runs[:3]] == [
        without_time(run) for run in iterate(programs[0], of_peak=0.5, iterations=3, effort=EFFORT)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations is a number of rounds, at least 1, not 0"),
        ({"iterations": 2, "effort": -1.0}, "effort is a number, 0 or more, not -1.0"),
        ({"iterations": 2, "effort": float("nan")}, "effort is a number, 0 or more, not nan"),
        ({"iterations": 2, "limit": 0.5}, "limit is an overhead, at least 1, not 0.5"),
    ],
)
def test_wrong_arguments(options: dict[str, float], message: str) -> None:
    """What makes no sense is a ValueError before anything runs."""
    with pytest.raises(ValueError, match=message):
        iterate(chain(8), of_peak=0.5, **options)  # type: ignore[arg-type]  # that is the point


@given(programs, st.integers(0, 9))
def test_a_copy_without_differences(program: Program, seed: int) -> None:
    """With no share of anything it is the program."""
    assert repr(varied(program, seed, costs=0.0)) == repr(program)
    copy = varied(program, seed, costs=0.0)
    for name in ("calls", "outputs", "marks", "published", "unit"):
        assert getattr(copy, name) == getattr(program, name)
    assert [kind for kind, _ in copy.steps] == [kind for kind, _ in program.steps]


@given(programs, st.integers(0, 9), st.sampled_from([0.0, 0.3, 1.0]))
def test_copies_differ_as_they_are_told(program: Program, seed: int, inserted: float) -> None:
    """Costs within their share; new operations whose results are dropped; else the program, and the same one again."""
    copy = varied(program, seed, costs=0.2, inserted=inserted)
    assert copy == varied(program, seed, costs=0.2, inserted=inserted)
    more = len(copy.calls) - len(program.calls)
    assert more == 0 if not inserted else more <= len(program.calls)
    assert len(copy.steps) - len(program.steps) == 2 * more
    assert [call.name for call in copy.calls if call.name != "f"] == []
    assert 0.8 * program.model_time - 1e-9 <= copy.model_time
    run = simulate(copy, 1 << 40)
    assert (run.status, run.overhead) == ("ok", 1.0)


@pytest.mark.parametrize("shares", [{"costs": -0.1}, {"costs": 1.5}, {"inserted": float("nan")}])
def test_copies_are_told_shares(shares: dict[str, float]) -> None:
    """Anything else is a ValueError that names the argument."""
    with pytest.raises(ValueError, match=f"{next(iter(shares))} is a share, from 0 to 1"):
        varied(chain(8), 0, **shares)
