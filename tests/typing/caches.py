"""What checkers know of caches, planned functions, and the public modules, of which only `recompute` is imported."""

from __future__ import annotations

from typing import assert_type

import recompute as rc


def double(number: rc.Recomputable[int]) -> rc.Recomputable[int]:
    return number.map(lambda held: 2 * held)


def both(number: rc.Recomputable[int]) -> tuple[rc.Recomputable[int], rc.Recomputable[str]]:
    return number, number.map(str)


def several(number: rc.Recomputable[int]) -> list[rc.Recomputable[int]]:
    return [double(number)]


def named(number: rc.Recomputable[int]) -> dict[str, rc.Recomputable[int]]:
    return {"double": double(number)}


with rc.Cache("512MB", policy="dtr", search="sample", release="eager") as cache:
    assert_type(cache, rc.Cache)
    assert_type(cache.stats(), rc.Stats)
    assert_type(cache.stats().overhead, float)
    assert_type(rc.current_cache(), rc.Cache)

# A planned function takes and returns plain values.
assert_type(rc.planned(double, "1MB")(4), int)
rc.planned(both, "1MB")(4)
rc.planned(several, of_peak=0.5)(4)
rc.planned(named, of_peak=0.5, method="own")(4)
rc.planned(budget="1MB", method="own")(named)(4)
assert_type(rc.stage(double, of_peak=0.5).plan, rc.planners.ProgramPlan)


def show(event: rc.events.Event) -> None:
    if isinstance(event, rc.events.Performed):
        assert_type(event.cost, float)


stop = rc.Cache(policy=rc.policies.Random(seed=3), clock=rc.testing.ManualClock()).subscribe(show)
program = rc.traces.read("steps.trace")
assert_type(program, rc.traces.Program)
assert_type(rc.simulator.simulate(program, of_peak="40%").overhead, float | None)
assert_type(rc.planners.plan(program, of_peak=0.4).peak, int)
assert_type(rc.testing.Identity(3).get(), int)
node: rc.extend.Value = rc.extend.node_of(rc.pure(3))
cache.extend.bring(node)
floor = rc.pictures.Floor
