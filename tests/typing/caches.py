"""What checkers know of caches, staged functions, and the public modules, of which only `recompute` is imported."""

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

# A staged function takes and returns plain values.
assert_type(rc.stage(double, 3, budget="1MB")(4), int)
assert_type(rc.stage(both, 3, budget="1MB")(4), tuple[int, str])
assert_type(rc.stage(several, 3, budget=0.5)(4), list[int])
assert_type(rc.stage(named, 3, budget=0.5, method="own")(4), dict[str, int])
assert_type(rc.stage(double, 3, budget=0.5).plan, rc.planners.ProgramPlan)


def show(event: rc.events.Event) -> None:
    if isinstance(event, rc.events.Performed):
        assert_type(event.cost, float)


stop = rc.Cache(policy=rc.policies.Random(seed=3), clock=rc.testing.ManualClock()).subscribe(show)
program = rc.traces.read("steps.trace")
assert_type(program, rc.traces.Program)
assert_type(rc.simulator.simulate(program, "40%").overhead, float | None)
assert_type(rc.planners.plan(program, 0.4).peak, int)
assert_type(rc.testing.Identity(3).get(), int)
node: rc.extend.Value = rc.pure(3).node
cache.extend.bring(node)
floor = rc.pictures.Floor
