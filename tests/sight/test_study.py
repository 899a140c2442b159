"""A study says what replays say, at each budget; holes are where nothing works; what is left out is counted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched_programs import STEPS, Step, record

from recompute._budget import parse_budget
from recompute._pictures.overheads import Floor
from recompute._sight.look import COLUMNS, ROWS, Look, Subject, look_at
from recompute._sight.look import STEPS as PARTS
from recompute._sight.study import Mark, Study, by_device, exact, few_digits, grid, halving, study
from recompute._traces.chain import chain
from recompute.events import Event, Performed
from recompute.planners import verify
from recompute.simulator import simulate
from recompute.traces import Program, read


@given(st.integers(1, 10**14))
def test_budgets_can_be_written_down(size: int) -> None:
    """A budget has few digits, is not below what was asked for, and its text means the same number of bytes."""
    rounded = few_digits(size)
    assert size <= rounded <= size * 1.001 + 1
    assert parse_budget(exact(rounded)) == rounded
    assert parse_budget(exact(size)) == size


@given(whole=st.integers(1, 10**12), least=st.floats(0, 1), count=st.integers(2, 40))
def test_the_grid_goes_from_the_floor_to_the_peak(whole: int, least: float, count: int) -> None:
    """In order, each once, and the last one is enough for everything."""
    budgets = grid(whole, Floor(0, least), count)
    assert budgets == sorted(set(budgets))
    assert len(budgets) <= count
    assert budgets[0] >= min(least, 0.95) * whole
    assert whole <= budgets[-1] <= whole * 1.001 + 1


@given(st.integers(2, 60))
def test_halving_comes_to_each_once(count: int) -> None:
    """Both ends first."""
    order = halving(count)
    assert sorted(order) == list(range(count))
    assert set(order[:2]) == {0, count - 1}


SHARES = st.lists(
    st.tuples(st.integers(1, 1000), st.sampled_from(["ok", "ok", "oom", "thrash"])), unique_by=lambda one: one[0]
)


def study_of(looks: list[Look]) -> Study:
    return Study(Subject(chain(4)), Floor(0, 0), looks=looks)


@given(SHARES)
def test_holes_have_what_fails_and_nothing_that_works(marks: list[tuple[int, str]]) -> None:
    """They are in order and apart; every budget that fails is in one, with its reason, and none that works."""
    looks = [
        Look(share, share / 1000, status, 1.5 if status == "ok" else None, 0, 0, 0, 0.0)  # type: ignore[arg-type]
        for share, status in marks
    ]
    holes = study_of(looks).holes
    for one, other in pairwise(holes):
        assert one.start < one.stop <= other.start
    for share, status in sorted(marks):
        around = [hole for hole in holes if hole.start <= share / 1000 <= hole.stop]
        if status == "ok":
            assert all(share / 1000 - hole.start <= 0.002 or hole.stop - share / 1000 <= 0.002 for hole in around)
        else:
            assert status in {hole.why for hole in around}


@given(steps=STEPS, share=st.floats(0.4, 1.0))
def test_a_look_has_what_the_events_have(steps: list[Step], share: float) -> None:
    """Bytes of each part of the run, time spent on recomputation, stays and tables, against a sweep through events."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        record(steps, path, None)
        program = read(path)
    if not program.model_time:
        return
    subject = Subject(program)
    budget = {device: max(1, int(size * share)) for device, size in subject.peak.items()}
    events: list[Event] = []
    run = simulate(program, budget, listener=events.append, limit=9)
    look = look_at(subject, budget, limit=9)
    assert (look.status, look.overhead, look.evictions) == (run.status, run.overhead, run.evictions)
    if run.status != "ok":
        assert look.used == look.rows == []
        return
    end = events[-1].time
    for column in range(COLUMNS):
        start, stop = column / COLUMNS * end, (column + 1) / COLUMNS * end
        before = [event.used for event in events if event.time < start - 1e-9 * end]
        entered = [event.used for event in events if event.time <= start + 1e-9 * end]
        inside = [event.used for event in events if start + 1e-9 * end < event.time < stop - 1e-9 * end]
        near = [event.used for event in events if start - 1e-9 * end <= event.time <= stop + 1e-9 * end]
        assert max([*entered[-1:], *inside, 0]) <= look.used[column] <= max([*before[-1:], *near, 0])
    again = sum(event.cost for event in events if isinstance(event, Performed) and event.again)
    assert sum(look.again) / 100 / COLUMNS * end == pytest.approx(again, abs=0.006 * end)
    assert sum(seconds for _, _, _, seconds in look.repeated) == pytest.approx(again * program.unit)
    assert sum(times for _, _, times, _ in look.repeated) == look.rematerializations
    assert len(look.rows) == len(subject.shown) <= ROWS
    stays = [stay for row in look.rows for stay in zip(row[::3], row[1::3], row[2::3], strict=True)]
    assert all(0 <= start <= PARTS and 1 <= length <= PARTS and how in (0, 1) for start, length, how in stays)
    assert sum(size for _, _, size, _ in look.held) <= look.peak


def test_a_study_is_what_replays_say() -> None:
    """Each point of the curve is a replay; the floor is under all that works; plans and segments are real schedules."""
    program = chain(16)
    result = study(program, budgets=8, seconds=0.5)
    assert result.complete
    assert len(result.looks) == len(result.budgets)
    peak = result.subject.peak
    for mark in result.curve:
        run = simulate(program, mark.budget, limit=result.limit, peak=peak)
        assert mark.overhead == run.overhead
        assert mark.share == pytest.approx(mark.budget / sum(peak.values()))
        if mark.overhead is not None:
            assert mark.share >= result.floor.operation
    assert result.looks[-1].overhead == 1.0
    assert result.segments is not None
    assert result.segments.overhead is not None
    assert 0 < result.segments.share < 1
    assert [mark.budget for mark in result.planned if mark.overhead is not None]
    assert result.holes[0].start == 0
    least = next(mark.share for mark in result.curve if mark.overhead is not None)
    assert least - result.holes[0].stop <= 0.005 + 1 / sum(peak.values())


def test_segments_are_a_schedule_that_was_verified() -> None:
    """The dot is where a plan of that method lies whose steps go through the verifier."""
    from recompute.planners import plan

    program = chain(16)
    result = study(program, budgets=2, seconds=0)
    made = plan(program, 4 * result.subject.whole, "chen-sqrt")
    assert result.segments is not None
    assert verify(program, made) == (result.segments.budget, result.segments.overhead)


def test_a_tier_is_a_curve_of_its_own() -> None:
    """As `simulate` has it."""
    program = chain(16)
    result = study(program, budgets=4, seconds=0, tier="12GB/s")
    assert len(result.curve_with_tier) == len(result.budgets)
    for mark in result.curve_with_tier:
        assert (
            mark.overhead
            == simulate(program, mark.budget, tier="12GB/s", limit=result.limit, machine="library").overhead
        )


def test_several_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the work does not matter."""
    monkeypatch.setattr("recompute._sight.study._WORTH_A_PROCESS", 1)
    program = chain(16)
    one, two = (study(program, budgets=6, seconds=0, processes=count) for count in (1, 2))
    assert one.looks == two.looks
    assert one.holes == two.holes


def test_what_is_ready_when_it_is_interrupted() -> None:
    """The study that `so_far` got has the budgets that were done, and says that it is not complete."""
    begun: list[Study] = []

    def stop(done: int, of: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(chain(16), seconds=0, progress=stop, so_far=begun.append)
    assert len(begun[0].looks) == 3
    assert not begun[0].complete
    assert begun[0].looks[-1].overhead == 1.0


@pytest.mark.parametrize("devices", [1, 2])
def test_a_budget_is_shared_by_devices(devices: int) -> None:
    """In proportion to their peaks; one device has all of it."""
    program = Program("two")
    for number in range(devices):
        source = program.add_source(100 * (number + 1), f"gpu:{number}")
        program.add_call("f", [source], [program.add_storage(100, f"gpu:{number}")], 1.0)
    shared = by_device(Subject(program), 100)
    assert sum(shared.values()) == 100
    assert len(shared) == devices


def test_what_cannot_be_studied() -> None:
    """Wrong numbers, and a program that makes nothing, are errors that say so."""
    program = chain(4)
    for wrong in ({"budgets": 1}, {"budgets": 51}, {"seconds": -1.0}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match="at least"):
            study(program, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tier"):
        study(program, tier="fast")
    with pytest.raises(ValueError, match="nothing to show"):
        study(Program("empty"))
    sources = Program("sources")
    sources.add_source(8)
    with pytest.raises(ValueError, match="nothing to show"):
        study(sources)
    assert Mark(1, 0.1, None).why == ""
