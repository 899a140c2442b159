"""Schedules followed with plain functions, and by pyadjoint: the same gradient to the last bit, within the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("checkpoint_schedules", reason="the extra 'schedules' is not installed")
np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_schedules import Schedule, run  # noqa: E402

WEIGHTS = np.random.default_rng(0).normal(size=(20, 20)) / 5
START = np.random.default_rng(1).normal(size=20)
STATE = START.nbytes


def forward(step: int, state: Any) -> Any:
    return np.tanh(WEIGHTS @ state + step)


def reverse(step: int, state: Any, adjoint: Any) -> Any:
    return WEIGHTS.T @ ((1 - np.tanh(WEIGHTS @ state + step) ** 2) * adjoint)


def gradient(steps: int) -> Any:
    """With all states in memory."""
    states = [START]
    for step in range(steps):
        states.append(forward(step, states[-1]))
    adjoint = 2 * states[-1]
    for step in reversed(range(steps)):
        adjoint = reverse(step, states[step], adjoint)
    return adjoint


def last(state: Any) -> Any:
    return 2 * state


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 9), st.booleans(), st.booleans())
def test_gradients_are_equal_to_the_last_bit(steps: int, ram: int, disk: int, overlap: bool, known: bool) -> None:
    """With any bytes in RAM and on the disk, of known and unknown length; and the bytes held are within them."""
    schedule = Schedule(
        ram=ram * STATE,
        disk=disk * STATE or None,
        state_bytes=STATE,
        max_n=steps if known else None,
        overlap=overlap,
    )
    result = run(schedule, forward, reverse, START, adjoint=last, until=lambda step, state: step == steps)
    assert result.adjoint.tobytes() == gradient(steps).tobytes()
    assert result.ram_peak <= ram * STATE
    assert result.disk_peak <= disk * STATE
    assert result.forward_steps >= steps


def test_sweeps_that_follow() -> None:
    """Each call is a sweep of its own, from its own state, until the schedule has ended."""
    schedule = Schedule(ram=5 * STATE, state_bytes=STATE, max_n=30, sweeps=2, step_seconds="measured")
    for _ in range(2):
        result = run(schedule, forward, reverse, START, adjoint=last)
        assert result.adjoint.tobytes() == gradient(30).tobytes()
        assert result.ram_peak <= 5 * STATE
    with pytest.raises(ValueError, match="the schedule has ended"):
        run(schedule, forward, reverse, START, adjoint=last)


def test_dependencies_of_their_own() -> None:
    """`record` says what the adjoint needs of a step; `progress` hears of each action."""
    calls = []

    def record(step: int, state: Any) -> tuple[Any, Any]:
        after = forward(step, state)
        return after, 1 - after**2

    schedule = Schedule(ram=7 * STATE, state_bytes=STATE, deps_bytes=STATE, max_n=40)
    result = run(
        schedule,
        forward,
        lambda step, slope, adjoint: WEIGHTS.T @ (slope * adjoint),
        START,
        adjoint=last,
        record=record,
        progress=lambda ran, reversed_: calls.append((ran, reversed_)),
    )
    assert result.adjoint.tobytes() == gradient(40).tobytes()
    assert calls == sorted(calls)
    assert calls[-1] == (result.forward_steps, 40)


def test_what_it_refuses() -> None:
    """States that are larger than the schedule was told; an unknown length without `until`."""
    with pytest.raises(ValueError, match=f"give state_bytes={STATE}"):
        run(Schedule(ram=999, state_bytes=8, deps_bytes=9999, max_n=9), forward, reverse, START, adjoint=last)
    with pytest.raises(ValueError, match="give until="):
        run(Schedule(ram=999, state_bytes=STATE), forward, reverse, START, adjoint=last)


def test_an_error_of_the_forward_leaves_no_files(tmp_path: Any) -> None:
    """It passes through unchanged."""
    import recompute as rc

    def failing(step: int, state: Any) -> Any:
        if step == 25:
            raise ZeroDivisionError
        return forward(step, state)

    disk = rc.Disk(100 * STATE, folder=tmp_path)
    schedule = Schedule(ram=STATE, state_bytes=STATE, disk=disk, max_n=30, overlap=True)
    with pytest.raises(ZeroDivisionError):
        run(schedule, failing, reverse, START, adjoint=last)
    assert not [path for folder in tmp_path.iterdir() for path in folder.glob("[0-9]*")]


def tape_gradient(schedule: Schedule | None, steps: int) -> Any:
    """By pyadjoint, with a tape of NumPy arrays whose first entry at the end is differentiated."""
    pyadjoint = pytest.importorskip("pyadjoint", reason="pyadjoint-ad is not installed")
    pytest.importorskip("numpy_adjoint", reason="pyadjoint-ad is not installed")
    from pyadjoint.overloaded_type import create_overloaded_object

    class Step(pyadjoint.Block):  # type: ignore[name-defined,misc]  # pyadjoint has no types
        def __init__(self, step: int, state: Any) -> None:
            super().__init__()
            self.step = step
            self.add_dependency(state)

        def recompute_component(self, inputs: Any, *others: Any) -> Any:
            return create_overloaded_object(forward(self.step, np.asarray(inputs[0])))

        def evaluate_adj_component(self, inputs: Any, adjoints: Any, *others: Any, **options: Any) -> Any:
            return reverse(self.step, np.asarray(inputs[0]), np.asarray(adjoints[0]))

    tape = pyadjoint.Tape()
    pyadjoint.set_working_tape(tape)
    pyadjoint.continue_annotation()
    try:
        if schedule is not None:
            TAPES[id(schedule)] = tape
            tape.enable_checkpointing(schedule)
        start = state = create_overloaded_object(START.copy())
        for step in tape.timestepper(iter(range(steps))):
            block = Step(step, state)
            with pyadjoint.stop_annotating():
                state = create_overloaded_object(forward(step, np.asarray(state)))
            block.add_output(state.create_block_variable())
            tape.add_block(block)
            if step == steps - 1:
                value = state[0]
        return np.asarray(pyadjoint.ReducedFunctional(value, pyadjoint.Control(start)).derivative())
    finally:
        pyadjoint.pause_annotation()


TAPES: dict[int, Any] = {}


@pytest.mark.parametrize("slots", [2, 5, 12])
def test_pyadjoint(slots: int) -> None:
    """Its tape of arrays follows a schedule: the same gradient to the last bit, and what it stores is within `ram`."""
    held = [0]

    def look() -> float:
        for tape in TAPES.values():
            held.append(sum(value.nbytes for step in tape.timesteps for value in step._checkpoint.values()))
        return 0.0

    schedule = Schedule(ram=slots * STATE, state_bytes=STATE, deps_bytes=2 * STATE, max_n=20, clock=look)
    try:
        bounded = tape_gradient(schedule, 20)
    finally:
        TAPES.clear()
    assert bounded.tobytes() == tape_gradient(None, 20).tobytes()
    assert 0 < max(held) <= slots * STATE
