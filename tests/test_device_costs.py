"""Costs that only the device knows, and later: operations there are timed without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import recompute as rc
from lib.vectors import Vector, VectorAdapter, vector
from recompute.testing import ManualClock, check_invariants
from recompute.testing.conformance import registered


class Device(VectorAdapter):
    """Vectors on a device whose work is done when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1.0  # of the next operation
        self.done = False

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        if device == "cpu":
            return None
        seconds = self.seconds
        return lambda: lambda: seconds if self.done else None


@pytest.fixture
def device() -> Iterator[Device]:
    adapter = Device()
    with registered(adapter, Vector):
        yield adapter


def double(x: Vector) -> Vector:
    return vector(*[2 * number for number in x.numbers], device=x.buffer.device)


def test_a_cost_is_learnt_when_the_device_knows_it(device: Device) -> None:
    """Until then it is what the launch took; nobody waits."""
    clock = ManualClock()
    with rc.Cache(clock=clock) as cache:
        x = rc.pure(vector(1, 2, device="gpu:0"))
        y = rc.ap(double, x)
        assert cache.stats().model_time == 0.0
        device.done = True
        assert cache.stats().model_time == 1.0
        assert y._node.storage.cost == 1.0
        assert cache._engine.meter.now == 1.0
        check_invariants(cache, [x, y])


def test_a_repeated_run_is_timed_on_the_device_too(device: Device) -> None:
    """A cheaper one is the cost from then on, a dearer one is not; both count as time spent again."""
    with rc.Cache(clock=ManualClock()) as cache:
        x = rc.pure(vector(1, 2, device="gpu:0"))
        y = rc.ap(double, x)
        device.done = True
        for seconds, cost in ((3.0, 1.0), (0.25, 0.25)):
            device.seconds = seconds
            y.evict()
            assert y.get() == vector(2, 4, device="gpu:0")
            assert cache.stats().remat_time == (3.0 if seconds == 3.0 else 3.25)
            assert y._node.storage.cost == cost
            check_invariants(cache, [x, y])


def test_costs_come_in_the_order_of_launch(device: Device) -> None:
    """An operation that has gone by then changes the clock alone."""
    with rc.Cache(clock=ManualClock()) as cache:
        x = rc.pure(vector(1, 2, device="gpu:0"))
        y = rc.ap(double, x)
        del y
        device.done = True
        z = rc.ap(double, x)
        assert cache.stats().model_time == 2.0
        check_invariants(cache, [x, z])


def test_other_devices_keep_the_clock_of_the_cache(device: Device) -> None:
    """What takes nothing from a device with a timer is timed as ever."""
    clock = ManualClock()

    def slow(x: Vector) -> Vector:
        clock.advance(5)
        return double(x)

    with rc.Cache(clock=clock) as cache:
        there = rc.pure(vector(1, device="gpu:0"))
        here = rc.ap(slow, rc.pure(vector(1)))
        device.done = True
        assert cache.stats().model_time == 5.0
        assert here._node.storage.cost == 5.0
        assert there.get().numbers == (1,)
