"""Values that were computed elsewhere and entered with their recipe and their cost, as workers of a cluster do."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._traces.program import total
from recompute.events import Performed
from recompute.testing import EventLog, ManualClock, check_invariants


def adopt(cache: rc.Cache, payload: bytes, of: list[rc.Recomputable[bytes]], cost: float) -> rc.Recomputable[bytes]:
    nodes = [value._node for value in of]
    place = sys._getframe()
    return cache.extend.adopt(payload, lambda *_: payload, nodes, nodes, place, cost=cost, handle=rc.Recomputable)


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=10), st.integers(250, 2_000))
def test_what_they_cost_is_on_the_compute_clock(costs: list[float], budget: int) -> None:
    """As if they had been computed here: the clock has moved by their costs, and listeners are told of these."""
    with rc.Cache(budget, clock=ManualClock(), foresight=False) as cache:
        log = EventLog(cache)
        values: list[rc.Recomputable[bytes]] = []
        for cost in costs:
            values.append(adopt(cache, bytes(50), values[-1:], cost))
        assert cache.stats().model_time == total(costs)
        assert [event.cost for event in log.events if isinstance(event, Performed)] == costs
        check_invariants(cache)


def test_their_arguments_were_used_just_now() -> None:
    """So what was not used for longer is evicted first, where all else is equal."""
    with rc.Cache(350, policy="lru", clock=ManualClock(), foresight=False) as cache:
        first, second = (adopt(cache, bytes(67), [], 1.0) for _ in range(2))
        third = adopt(cache, bytes(67), [first], 1.0)
        fourth = adopt(cache, bytes(67), [], 1.0)
        assert (first.resident, second.resident, third.resident, fourth.resident) == (True, False, True, True)
