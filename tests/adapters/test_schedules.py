"""Schedules in bytes: legal, never above their bytes, and as quick as can be, by search for few steps."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

checkpoint_schedules = pytest.importorskip("checkpoint_schedules", reason="the extra 'schedules' is not installed")

from checkpoint_schedules import Copy, EndForward, EndReverse, Forward, Move, StorageType  # noqa: E402
from checkpoint_schedules.mixed import optimal_steps_mixed  # noqa: E402
from checkpoint_schedules.multistage import optimal_steps_binomial  # noqa: E402
from schedule_rules import Follower, least_time  # noqa: E402

import recompute as rc  # noqa: E402
from recompute.testing import ManualClock  # noqa: E402
from recompute_schedules import Schedule  # noqa: E402
from recompute_schedules._costs import Prices, Sizes  # noqa: E402
from recompute_schedules._tables import EqualSteps, UnequalSteps  # noqa: E402

RAM, DISK, WORK = StorageType.RAM, StorageType.DISK, StorageType.WORK
LARGE = 10**9
"""Bytes of dependencies that are never stored."""
sizes = st.builds(
    dict,
    ram=st.integers(5, 60) | st.integers(60, 120),
    state_bytes=st.integers(1, 5),
    deps_bytes=st.integers(1, 9) | st.none() | st.just(LARGE),
    disk=st.none() | st.integers(1, 90),
)


def followed(steps: int, schedule: Schedule, *, complete: bool = False, sweeps: int = 1) -> Follower:
    """What was checked while the schedule was followed."""
    follower = Follower(steps, schedule.sizes, complete)
    for _ in range(sweeps):
        follower.sweep(schedule)
    return follower


@st.composite
def costs(draw: st.DrawFn, steps: int) -> dict[str, Any]:
    """What is said about steps and the disk."""
    seconds = draw(
        st.none() | st.floats(1e-3, 1e3) | st.lists(st.floats(0, 100), min_size=steps, max_size=steps).map(tuple)
    )
    return {"step_seconds": seconds, "overlap": draw(st.booleans())}


@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_one_checkpoint_and_blocks_of_two_steps(monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
    """Where whole blocks do not fit, their steps are reversed one by one, within the bytes."""
    monkeypatch.setattr("recompute_schedules._tables._MAX_ENTRIES", 20_000)
    schedule = Schedule(max_n=101, ram=5, state_bytes=3, step_seconds=(*[cost] * 100, 2.0))
    assert followed(101, schedule).ran >= 101
    assert schedule.is_exhausted


def test_blocks_whose_dependencies_are_planned_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go there, all of them, and leave RAM to the checkpoints that the plan has for it."""
    monkeypatch.setattr("recompute_schedules._tables._MAX_ENTRIES", 20_000)
    seconds = [float(step == 80) for step in range(85)]
    followed(85, Schedule(max_n=85, ram=14, disk=24, state_bytes=3, deps_bytes=4, step_seconds=seconds))


@pytest.mark.parametrize(("steps", "ram", "disk"), [(95, 4, 20), (109, 3, 10), (116, 5, 24)])
def test_later_sweeps_over_blocks_with_one_checkpoint_in_ram(
    monkeypatch: pytest.MonkeyPatch, steps: int, ram: int, disk: int
) -> None:
    """Restart data that stay for a later sweep leave the adjoint inside of a block."""
    monkeypatch.setattr("recompute_schedules._tables._MAX_ENTRIES", 60_000)
    for period in (3, 5, 7):
        seconds = [float(step % period == 0) for step in range(steps)]
        schedule = Schedule(max_n=steps, ram=ram, disk=disk, state_bytes=ram, step_seconds=seconds, sweeps=2)
        followed(steps, schedule, complete=True, sweeps=2)


@pytest.mark.parametrize("seconds", [None, 1.0, [1.0, 2.0, 3.0, 4.0]])
@pytest.mark.parametrize(("ram", "disk"), [(2, None), (3, None), (1, 2), (2, 1)])
def test_later_sweeps_where_only_one_restart_fits(ram: int, disk: int | None, seconds: Any) -> None:
    """Restart data that stay for a later sweep leave no room for others: the forward goes on to the last step."""
    schedule = Schedule(max_n=4, ram=ram, disk=disk, state_bytes=2, deps_bytes=1, step_seconds=seconds, sweeps=2)
    followed(4, schedule, complete=True, sweeps=2)


@given(st.data(), st.integers(1, 300), sizes)
def test_known_lengths(data: st.DataObject, steps: int, given_sizes: dict[str, Any]) -> None:
    """Whatever the sizes and costs: each action is legal, bytes are never above, the adjoint reaches step 0."""
    options = data.draw(costs(steps))
    if given_sizes["disk"] and options["step_seconds"] is not None:
        options["disk_bandwidth"] = data.draw(st.none() | st.integers(1, 100))
    schedule = Schedule(max_n=steps, **given_sizes, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("recompute_schedules._tables._MAX_ENTRIES", 20_000)  # blocks, and seconds less
        follower = followed(steps, schedule)
    assert schedule.is_exhausted
    assert list(schedule) == []
    assert not follower.stored
    assert follower.ran >= steps


@given(st.data(), st.integers(1, 300), sizes)
def test_unknown_lengths(data: st.DataObject, steps: int, given_sizes: dict[str, Any]) -> None:
    """The same, if only `finalize` says how many steps there were."""
    options: dict[str, Any] = {}
    if given_sizes["disk"]:
        options = {"disk_bandwidth": data.draw(st.integers(1, 100)), "step_seconds": data.draw(st.floats(1e-3, 1e3))}
    follower = followed(steps, Schedule(**given_sizes, **options), complete=True)
    assert not follower.stored


@given(st.data(), st.integers(1, 60), sizes, st.booleans())
def test_several_sweeps(data: st.DataObject, steps: int, given_sizes: dict[str, Any], known: bool) -> None:
    """Each sweep is legal and reaches step 0, and then the schedule has ended, if it was not to go on for ever."""
    sweeps = data.draw(st.none() | st.integers(2, 4))
    options = data.draw(costs(steps)) if known else {}
    schedule = Schedule(max_n=steps if known else None, sweeps=sweeps, **given_sizes, **options)
    followed(steps, schedule, complete=True, sweeps=sweeps or 3)
    assert schedule.is_exhausted == (sweeps is not None)
    assert isinstance(next(schedule, None), type(None) if sweeps else Copy)


@given(st.integers(1, 60), st.integers(1, 12))
def test_one_size_is_maddisons_optimum(steps: int, slots: int) -> None:
    """Where restart data and dependencies have one size, the forward steps are those of the mixed optimum."""
    schedule = Schedule(ram=7 * slots, state_bytes=7, max_n=steps)
    assert followed(steps, schedule).ran == optimal_steps_mixed(steps, min(slots, steps - 1))


@given(st.integers(1, 60), st.integers(1, 12))
def test_restart_data_alone_are_revolve(steps: int, slots: int) -> None:
    """Where dependencies do not fit, the forward steps are those of the binomial optimum."""
    schedule = Schedule(ram=7 * slots, state_bytes=7, deps_bytes=LARGE, max_n=steps)
    assert followed(steps, schedule).ran == optimal_steps_binomial(steps, min(slots, steps - 1))


@settings(max_examples=15)
@given(
    st.integers(1, 12).flatmap(lambda steps: st.lists(st.sampled_from([1, 2, 5, 10]), min_size=steps, max_size=steps)),
    st.integers(1, 3),
    st.sampled_from([1, 100]),
    st.booleans(),
)
def test_nothing_takes_less_time(seconds: list[int], slots: int, deps: int, equal: bool) -> None:
    """Search through all sequences of steps, stores and drops finds nothing quicker, with equal steps and others."""
    if equal:
        seconds = [1] * len(seconds)
    schedule = Schedule(
        ram=slots, state_bytes=1, deps_bytes=deps, step_seconds=None if equal else seconds, max_n=len(seconds)
    )
    assert spent(schedule, seconds) == least_time(seconds, schedule.sizes, Prices())


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(2, 8))
def test_nothing_takes_less_time_with_two_sizes(steps: int, state: int, deps: int, ram: int) -> None:
    """Neither where restart data and dependencies differ in size."""
    assume(ram >= state)
    schedule = Schedule(ram=ram, state_bytes=state, deps_bytes=deps, max_n=steps)
    assert followed(steps, schedule).ran == least_time([1] * steps, schedule.sizes, Prices())


prices = st.builds(Prices, *[st.sampled_from([0.0, 0.5, 1.0, 3.0])] * 2)


@settings(max_examples=15)
@given(st.integers(1, 7), st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 100]), prices)
def test_nothing_takes_less_time_with_a_disk(steps: int, ram: int, disk: int, deps: int, price: Prices) -> None:
    """Neither where some checkpoints lie on a disk that takes time, with one table or the other."""
    price = Prices(price.write_state, price.read_state, price.write_state, price.read_state)
    given_sizes = Sizes(1, deps, ram, disk)
    least = least_time([1] * steps, given_sizes, price)
    equal = EqualSteps(steps, given_sizes, price)
    assert equal.time(steps, equal.levels.count - 1) == pytest.approx(least)
    unequal = UnequalSteps([1] * steps, given_sizes, price)
    assert unequal.time() == pytest.approx(least)


def spent(schedule: Schedule, seconds: Any) -> float:
    """Seconds of all forward steps."""
    follower = Follower(len(seconds), schedule.sizes)
    total = 0.0
    for action in schedule:
        follower.do(action, schedule)
        if isinstance(action, Forward):
            total += sum(seconds[action.n0 : action.n1])
    return total


def test_long_chains_are_as_good_as_short_ones() -> None:
    """Beyond the lengths of which the table has each one, the binomial optimum is kept to 1 in 10,000."""
    for steps, slots in ((5_000, 5), (50_000, 20)):
        table = EqualSteps(steps, Sizes(1, LARGE, slots), Prices())
        rounds = next(rounds for rounds in range(steps) if comb(slots + rounds, slots) >= steps)
        least = steps + rounds * steps - comb(slots + rounds, slots + 1)
        assert least <= table.time(steps, table.levels.count - 1) <= 1.0001 * least


def test_blocks_of_steps_are_followed() -> None:
    """With so many unequal steps that the table takes blocks of them, the schedule is legal, and near the optimum."""
    steps = 600
    schedule = Schedule(ram=60, state_bytes=1, step_seconds=[1.0 + (step % 50 < 5) * 1e-6 for step in range(steps)])
    equal = Schedule(ram=60, state_bytes=1, max_n=steps)
    assert followed(steps, schedule).ran <= 1.02 * followed(steps, equal).ran


@pytest.mark.parametrize("deps", [1, LARGE])
@pytest.mark.parametrize("slots", [5, 20, 80])
def test_online_is_near_the_optimum(slots: int, deps: int) -> None:
    """Without knowing the length: at most 1.15 times the steps of the optimum that knows it."""
    table = EqualSteps(700, Sizes(1, deps, slots), Prices())
    for steps in (10, 14, 25, 81, 700):
        ran = followed(steps, Schedule(ram=slots, state_bytes=1, deps_bytes=deps), complete=True).ran
        assert ran <= 1.15 * table.time(steps, table.levels.count - 1)


def test_without_dependencies_nothing_is_dropped_that_was_not_stored() -> None:
    """With as much RAM as steps, an online schedule drops nothing and runs each step twice at most."""
    schedule = Schedule(ram=50, state_bytes=1, deps_bytes=LARGE)
    follower = Follower(40, schedule.sizes)
    actions = []
    for action in schedule:
        actions.append(action)
        follower.do(action, schedule)
    assert not [action for action in actions if isinstance(action, Move) and action.to_storage is StorageType.NONE]
    assert follower.ran == 80


def test_a_slow_disk_is_left_alone_and_a_quick_one_is_used() -> None:
    """Where reading takes longer than running again, nothing is written; where it is quick, everything fits there."""
    for bandwidth, expected in ((1, 0), (10**6, 99)):
        schedule = Schedule(
            ram=300, state_bytes=100, disk=10**5, max_n=100, step_seconds=0.01, disk_bandwidth=bandwidth
        )
        follower = Follower(100, schedule.sizes)
        written = 0
        for action in schedule:
            follower.do(action, schedule)
            written += isinstance(action, Forward) and action.storage is DISK
        assert written <= expected
        assert bool(written) == bool(expected)


def test_what_was_measured_plans_the_next_sweep() -> None:
    """The first sweep takes the steps as equal; the second knows each one, and takes as long as one that was told."""
    steps = 60
    seconds = [10.0 if step % 20 < 4 else 1.0 for step in range(steps)]
    clock = ManualClock()
    schedule = Schedule(
        ram=4, state_bytes=1, deps_bytes=LARGE, max_n=steps, step_seconds="measured", sweeps=2, clock=clock
    )
    follower = Follower(steps, schedule.sizes, complete=True)
    times = [0.0, 0.0]
    sweep = 0
    for action in schedule:
        follower.do(action, schedule)
        if isinstance(action, Forward):
            clock.advance(sum(seconds[action.n0 : action.n1]))
            times[sweep] += sum(seconds[action.n0 : action.n1])
        sweep += isinstance(action, EndReverse)
    assert schedule.measured == seconds
    told = Schedule(ram=4, state_bytes=1, deps_bytes=LARGE, step_seconds=seconds)
    assert times[1] == spent(told, seconds) < times[0]


def test_a_disk_is_measured() -> None:
    """The bandwidth is found by a file that is written and read; the schedule is legal whatever it is."""
    schedule = Schedule(
        ram=3000, state_bytes=1000, disk="50kB", max_n=30, step_seconds="measured", disk_bandwidth="measured"
    )
    assert followed(30, schedule).ran >= 30
    assert schedule.measured is not None


def test_the_order_of_actions() -> None:
    """Three steps with room for one state: as the documentation of checkpoint_schedules orders them."""
    schedule = Schedule(ram=1, state_bytes=1, deps_bytes=LARGE, max_n=3)
    actions = [repr(action) for action in schedule]
    assert actions == [
        "Forward(0, 2, True, False, StorageType.RAM)",
        "Forward(2, 3, False, True, StorageType.WORK)",
        "EndForward()",
        "Reverse(3, 2, True)",
        "Copy(0, StorageType.RAM, StorageType.WORK)",
        "Forward(0, 1, False, False, StorageType.WORK)",
        "Forward(1, 2, False, True, StorageType.WORK)",
        "Reverse(2, 1, True)",
        "Move(0, StorageType.RAM, StorageType.WORK)",
        "Forward(0, 1, False, True, StorageType.WORK)",
        "Reverse(1, 0, True)",
        "EndReverse()",
    ]


def test_what_it_says_of_itself() -> None:
    """Bytes beside the checkpoints, bytes in use, storages that it uses, and where it is."""
    schedule = Schedule(ram="4kB", state_bytes="1kB", deps_bytes=3000, max_n=20)
    assert schedule.working_bytes == 4000
    assert schedule.uses_storage_type(RAM)
    assert not schedule.uses_storage_type(DISK)
    assert schedule.uses_storage_type(WORK)
    assert not schedule.uses_storage_type(StorageType.NONE)
    assert (schedule.n, schedule.r, schedule.max_n, schedule.is_exhausted) == (0, 0, 20, False)
    followed(20, schedule)
    assert (schedule.r, schedule.is_exhausted, schedule.used(RAM)) == (20, True, 0)
    assert 3000 <= schedule.peak(RAM) <= 4000
    assert Schedule(ram=1, state_bytes=1, disk=rc.Disk("1kB"), max_n=9).uses_storage_type(DISK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ram": 9}, "give at least ram=10"),
        ({"ram": 0}, "at least one byte"),
        ({"ram": -1}, "at least one byte"),
        ({"state_bytes": -10}, "state_bytes must be at least one byte"),
        ({"deps_bytes": 0}, "deps_bytes must be at least one byte"),
        ({"disk": "-1GB"}, "not a size|at least"),
        ({"max_n": 0}, "max_n must be a positive number"),
        ({"max_n": 2.5}, "max_n must be a positive number"),
        ({"sweeps": 0}, "sweeps must be a positive number"),
        ({"step_seconds": [1.0, 2.0]}, "has 2 steps, and max_n=5"),
        ({"step_seconds": [1.0, -2.0, 1.0, 1.0, 1.0]}, "none of them negative"),
        ({"step_seconds": 0}, "step_seconds must be positive"),
        ({"step_seconds": float("nan")}, "step_seconds must be positive"),
        ({"step_seconds": "guessed"}, 'or "measured"'),
        ({"disk_bandwidth": 1}, "give disk="),
        ({"disk": 100, "disk_bandwidth": 1}, "is compared with step_seconds"),
        ({"disk": 100, "disk_bandwidth": -1, "step_seconds": 1}, "disk_bandwidth must be at least"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    """They are refused with one error, which says what to give."""
    with pytest.raises((ValueError, TypeError), match=message):
        Schedule(**{"ram": 100, "state_bytes": 10, "max_n": 5, **options})


@pytest.mark.parametrize("length", [4, 6])
def test_another_length(length: int) -> None:
    """`finalize` refuses a length that is not the known one."""
    schedule = Schedule(ram=9, state_bytes=1, max_n=5)
    while not isinstance(next(schedule), EndForward):
        pass
    with pytest.raises(RuntimeError, match=f"cannot have ended after {length} steps: it has 5"):
        schedule.finalize(length)
    schedule.finalize(5)


def test_a_length_that_cannot_be() -> None:
    """`finalize` refuses a length that the forward has not reached, or had passed before."""
    schedule = Schedule(ram=9, state_bytes=1, deps_bytes=1)
    for _ in range(3):
        next(schedule)
    for length in (2, 4):
        with pytest.raises(RuntimeError, match="the latest advance is from step 2 to 3"):
            schedule.finalize(length)
    with pytest.raises(ValueError, match="at least one step"):
        schedule.finalize(0)
    schedule.finalize(3)
    assert schedule.max_n == 3
